"""gpt-oss's FFN, with biases and clamps, in every form of experts and every way to apply it, against its formula.

The formula is written here once more, in float64, and for gradients for JAX to differentiate; of a bank only the whole
kernels of its experts are taken. Inputs are so large that many factors reach their clamps.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import AdapterConfig, AdapterExperts, BankConfig, BaseCodes, FFNConfig, Mixed, make_bank
from moe_jax.experts.devices import Platform
from moe_jax.experts.forms import Full, JointLowRank, LowRank, MixtureOfBases, Quantized, Sparse
from moe_jax.experts.forms.protocol import registered
from moe_jax.experts.shapes import Load, LoRAConfig
from moe_jax.experts.strategy import strategy_costs
from moe_jax.functional import gated, synthesis
from moe_jax.functional.routing.token_choices import Routing
from tests.support.numerics import randomised
from tests.support.tiers import examples, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

EXPERTS, D_MODEL, TOKENS, TOP_K = 4, 16, 9, 2
LIMIT, ALPHA = 7.0, 1.702  # of the published models
CLAMPED = FFNConfig(dim=24, activation="swiglu_clamped", bias=True)
LORA = LoRAConfig(rank=2, targets=("gate", "up", "down"))
PARTS = (Quantized(bits=2, group_size=8), Quantized(bits=4, down_bits=8, group_size=8))
OVER_BASE = {
    "low-rank": LowRank(rank=2),
    "joint-low-rank": JointLowRank(rank=2),
    "sparse": Sparse(rate=0.8),
    "coo": Sparse(rate=0.8, encoding="coo", bits=4, group_size=8),
    "bitmap": Sparse(rate=0.5, encoding="bitmap"),
    "2-bits": Quantized(bits=2, group_size=8),
    "1-bit": Quantized(bits=1, group_size=8, row_scales=True),
    "8-bits": Quantized(bits=8, group_size=8, zero_points=True),
    "3-bits-of-scales": Quantized(bits=3, group_size=8, scale_bits=8),
    "table": Quantized(bits=4, group_size=8, scale_bits=32, table=True),
    "mixed": Mixed(parts=PARTS, part_of=(1, 0, 1, 0)),
}
BANKS = {name: BankConfig(form) for name, form in OVER_BASE.items()}
BANKS |= {f"{name}-alone": BankConfig(form, base="none") for name, form in OVER_BASE.items()}
BANKS |= {
    "full": BankConfig(Full()),
    "bases": BankConfig(MixtureOfBases(rank=2, bases=2), base="none"),
    "frozen-base": BankConfig(LowRank(rank=2), train_base=False),
    "over-3-bits": BankConfig(LowRank(rank=2), base_codes=BaseCodes(code="3", group_size=8)),
    "over-nf4": BankConfig(Sparse(rate=0.8), base_codes=BaseCodes(code="nf4")),
    "over-a-table": BankConfig(Quantized(bits=2), base_codes=BaseCodes(code="4", group_size=8, table=True)),
}
# Interpreted kernels take long, and biases and clamps are the same beside all of them.
INTERPRETED = {
    "low-rank": ("synthesised in Pallas",),
    "2-bits": ("synthesised in Triton", "synthesised in Pallas"),
    "table-alone": ("synthesised in Triton",),
}
FFNS = {
    "": CLAMPED,
    "no-bias": dataclasses.replace(CLAMPED, bias=False),
    "nf4": dataclasses.replace(CLAMPED, nf4=True),
    "lora": dataclasses.replace(CLAMPED, lora=LORA),
    "nf4-lora": dataclasses.replace(CLAMPED, nf4=True, lora=LORA),
}
SHAPES = [("full", ffn) for ffn in FFNS] + [("low-rank", ffn) for ffn in FFNS]
SHAPES += [(bank, ffn) for bank in BANKS for ffn in ("", "no-bias") if bank not in ("full", "low-rank")]


def ways_of(bank: str, ffn: str) -> list[str]:
    """The strategies that a bank has, and of some banks the kernels of accelerators that make experts' kernels."""
    load, platform = Load(EXPERTS, TOKENS, TOP_K), Platform.of(CHIPS["cpu"], 4)
    costs = strategy_costs(BANKS[bank], FFNS[ffn], D_MODEL, load, platform)
    ways = [name for name in costs if name != "grouped"] or ["auto"]
    return [*ways, *INTERPRETED.get(bank, ())] if FFNS[ffn] is CLAMPED else ways


WAYS = [(*shape, way) for shape in SHAPES for way in ways_of(*shape)]


def test_every_form_is_tried():
    assert {type(bank.form) for bank in BANKS.values()} | {AdapterExperts} == set(registered())


def interpreted(tiles, dtype, out, *, loops, tpu, gpu, on):
    """In the place of `synthesis._choose`: kernels of accelerators in interpret mode."""
    if on == "Triton":
        return partial(gpu, tiles=tiles, capability=None, interpret=True)
    tile = tiles.fused()
    assert not isinstance(tile, str), tile
    return partial(tpu, tile=tile, shape=tiles.shape, interpret=True)


def made(bank: str, ffn: str):
    """A bank whose every parameter is random, and codes are; a table has levels of its own."""

    def make():
        return make_bank(BANKS[bank], FFNS[ffn], EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)

    graphdef, params, rest = randomised(make)
    rng = np.random.default_rng(2)

    def random_codes(path, leaf):
        is_codes = path_name(path).endswith("codes") and leaf.dtype == jnp.uint8
        return jnp.asarray(rng.integers(0, 256, leaf.shape), jnp.uint8) if is_codes else leaf

    return graphdef, params, jax.tree_util.tree_map_with_path(random_codes, rest)


def formula(x, weights, experts, kernels, biases, module):
    """The layer of gpt-oss with whole kernels [E, i, o]: every expert of every token, and only the chosen ones count.

    Returns the layer's output, and the factors before they are clamped, of the chosen experts.
    """

    def project(name, rows):
        y = module.einsum("ti,eio->teo" if rows.ndim == 2 else "tei,eio->teo", rows, kernels[name])
        return y + biases[name][None] if biases else y

    gate, up = project("gate", x), project("up", x)
    clamped, shifted = module.minimum(gate, LIMIT), module.clip(up, -LIMIT, LIMIT) + 1.0
    sigmoid = 0.5 + 0.5 * module.tanh(0.5 * ALPHA * clamped)  # without an overflow
    out = project("down", shifted * clamped * sigmoid)
    chosen = experts[:, :, None] == np.arange(EXPERTS, dtype=np.int32)[None, None]
    share = module.sum(module.where(chosen, weights[:, :, None], 0.0), axis=1)
    own = share[:, :, None] != 0
    return module.sum(share[:, :, None] * out, axis=1), (gate, up, own)


def wide(tree):
    return jax.tree.map(lambda array: np.asarray(array, np.float64), tree)


@one_in(len(WAYS), first=WAYS.index(("low-rank", "", "factored-grouped")))
@pytest.mark.parametrize(("bank", "ffn", "way"), WAYS)
def test_a_layer_is_the_formula(bank, ffn, way, monkeypatch):
    strategy, _, on = way.partition(" in ")
    if on:
        monkeypatch.setattr(synthesis, "_choose", partial(interpreted, on=on))
        if on == "Pallas":
            monkeypatch.setattr(gated, "_choose", lambda *_, tpu: partial(tpu, interpret=True))
    graphdef, params, rest = made(bank, ffn)

    def whole(params):
        own = nnx.merge(graphdef, params, rest)
        kernels = jax.tree.map(lambda *each: jnp.stack(each), *(own.kernels(e) for e in range(EXPERTS)))
        return kernels, own.stacked_biases()

    def applied(params, x, weights, experts):
        own = nnx.merge(graphdef, params, rest)
        own.strategy = strategy
        return own(x, Routing(experts, weights))

    def expected(params, x, weights, experts):
        return formula(x, weights, experts, *whole(params), jnp)[0]

    def gradients(layer):
        def value(params, x, weights, experts, target):
            y = layer(params, x, weights, experts)
            return jnp.sum(y * target), y

        return jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))

    ours, theirs, stacked = gradients(applied), gradients(expected), wide(jax.jit(whole)(params))
    # Kernels of one form are larger than those of another; products are to be about as large as the clamps.
    size = np.float32(LIMIT / np.sqrt(D_MODEL * np.mean(np.square(stacked[0]["up"]))))

    @settings(max_examples=examples(6), deadline=None)
    @given(st.integers(0, 9999))
    def check(seed):
        rng = np.random.default_rng(seed)
        experts = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
        x, weights = size * rng.standard_normal((TOKENS, D_MODEL), np.float32), rng.random((TOKENS, TOP_K), np.float32)
        target = rng.standard_normal((TOKENS, D_MODEL), np.float32)
        exact, (gate, up, own) = formula(*wide((x, weights)), experts, *stacked, np)
        gate, up = (factor[np.broadcast_to(own, factor.shape)] for factor in (gate, up))
        # At a clamp the gradient jumps.
        assume(min(np.abs(gate - LIMIT).min(), np.abs(np.abs(up) - LIMIT).min()) > 1e-4)
        assert (gate > LIMIT).any() and (up > LIMIT).any() and (up < -LIMIT).any() and (np.abs(up) < LIMIT).any()
        got, y = ours(params, *map(jnp.asarray, (x, weights, experts, target)))
        assert np.abs(np.asarray(y) - exact).max() <= 1e-5 * np.abs(exact).max()
        of_formula = theirs(params, *map(jnp.asarray, (x, weights, experts, target)))[0]
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(of_formula), strict=True):
            assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max()

    check()


def test_what_has_no_such_ffn_is_refused():
    with pytest.raises(InputError, match="swiglu_clamped"):
        FFNConfig(dim=8, gated=False, activation="swiglu_clamped")
    with pytest.raises(InputError, match="swiglu_clamped"):
        AdapterExperts(adapter=AdapterConfig(rank=2, activation="swiglu_clamped"))
    adapters = BankConfig(AdapterExperts(adapter=AdapterConfig(rank=2)), train_base=False)
    made = make_bank(adapters, CLAMPED, EXPERTS, D_MODEL, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="no kernels"):
        made.kernels(0)
