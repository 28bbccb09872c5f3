"""Every bank against one FFN per expert, forward and gradient; on one device and over meshes."""

import dataclasses
import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import leaf_spec, make_mesh, path_name
from moe_jax.experts import BankConfig, BaseCodes, FFNConfig, Mixed, hidden_rows, make_bank, set_strategy
from moe_jax.experts import strategy as module
from moe_jax.experts.devices import Platform, current_chip, spec_on_mesh
from moe_jax.experts.forms import Quantized
from moe_jax.experts.forms.optional import costs_by_strategy
from moe_jax.experts.forms.sparse import to_csr
from moe_jax.experts.shapes import Load, ffn_matrices
from moe_jax.experts.strategy import choose_strategy, strategy_costs, strategy_on
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.functional.sparse.by_entry import entry_rows
from tests.support.numerics import assert_close, from_csr, made_at_once, randomised
from tests.support.references import experts_reference
from tests.support.tiers import EVERY, examples, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

PARTS = (Quantized(bits=2, group_size=8), Quantized(bits=4, down_bits=8, group_size=8))
KINDS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=3),
    "sparse": BankConfig(kind="sparse", rate=0.8),
    "quantized-2": BankConfig(kind="quantized", bits=2, group_size=8),
    "quantized-1": BankConfig(kind="quantized", bits=1),
    "joint-low-rank": BankConfig(kind="joint-low-rank", rank=3),
    "bitmap": BankConfig(kind="sparse", rate=0.7, entries=(40, 36, 30), encoding="bitmap"),
    "coo-4": BankConfig(kind="sparse", rate=0.9, encoding="coo", bits=4, group_size=8),
    "bitmap-3-alone": BankConfig(kind="sparse", base="none", rate=0.7, encoding="bitmap", bits=3),
    "joint-low-rank-alone": BankConfig(kind="joint-low-rank", base="none", rank=3),
    "bases": BankConfig(kind="mixture-of-bases", base="none", rank=3, bases=2),
    "quantized-3-alone": BankConfig(kind="quantized", base="none", bits=3, group_size=8),
    "mixed": BankConfig(Mixed(parts=PARTS, part_of=(1, 0, 1, 1))),
    "mixed-alone": BankConfig(Mixed(parts=PARTS, part_of=(0, 1, 1, 0)), base="none"),
    "mixed-over-codes": BankConfig(
        Mixed(parts=PARTS, part_of=(1, 0, 0, 1)), base_codes=BaseCodes(code="4", group_size=8)
    ),
}
STRATEGIES = [
    ("full", "auto"),
    ("low-rank", "factored-side-by-side"),
    ("low-rank", "factored-grouped"),
    ("low-rank", "synthesised"),
    ("sparse", "factored-grouped"),
    ("sparse", "factored-entrywise"),
    ("sparse", "synthesised"),
    ("quantized-2", "factored-grouped"),
    ("quantized-2", "synthesised"),
    ("quantized-1", "synthesised"),
]
# What ResMoE and its baselines store, each with one kind of FFN: the ways of applying it are those from above.
COMPRESSED = [
    ("joint-low-rank", "factored-side-by-side", "plain-biases"),
    ("bitmap", "synthesised", "gated-biases"),
    ("coo-4", "factored-entrywise", "plain-biases"),
    ("bitmap-3-alone", "synthesised", "plain-biases"),
    ("joint-low-rank-alone", "factored-grouped", "gated-biases"),
    ("joint-low-rank-alone", "factored-side-by-side", "plain-biases"),
    ("quantized-3-alone", "synthesised", "plain-biases"),
    ("bases", "factored-grouped", "gated-biases"),
    ("bases", "synthesised", "gated-biases"),
    ("mixed", "factored-grouped", "gated-biases"),
    ("mixed", "synthesised", "plain-biases"),
    ("mixed-alone", "synthesised", "gated-biases"),
    ("mixed-over-codes", "factored-grouped", "plain-biases"),
    ("mixed-over-codes", "synthesised", "gated-biases"),
]
CLAMPED = [
    (kind, strategy, "clamped-biases")
    for kind, strategy in [*STRATEGIES, ("quantized-3-alone", "synthesised"), ("bases", "synthesised")]
]
FFNS = {
    "gated": FFNConfig(dim=16),
    "plain-biases": FFNConfig(dim=16, gated=False, activation="gelu", bias=True),
    "gated-biases": FFNConfig(dim=16, bias=True),
    "clamped-biases": FFNConfig(dim=16, activation="swiglu_clamped", bias=True),
}
D_MODEL, EXPERTS = 8, 4
SHAPES = {
    "gated-biases": [(9, 2)],
    "clamped-biases": [(9, 2)],
    "plain-biases": [(9, EXPERTS), (1, 1)][: 2 if EVERY else 1],
}  # tokens, k


def make_fresh(kind, ffn_kind):
    return make_bank(KINDS[kind], FFNS[ffn_kind], EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)


def fresh_bank(kind, ffn_kind):
    return made_at_once(lambda: make_fresh(kind, ffn_kind))


@functools.cache
def random_bank(kind, ffn_kind):
    """A bank whose every parameter is random, deltas and biases included."""
    graphdef, params, rest = randomised(lambda: make_fresh(kind, ffn_kind))
    rng = np.random.default_rng(2)

    def random_codes(path, leaf):
        if path_name(path).endswith("codes"):
            return jnp.asarray(rng.integers(0, 256, leaf.shape), jnp.uint8)
        return leaf

    rest = jax.tree_util.tree_map_with_path(random_codes, rest)
    return graphdef, params, rest


@functools.cache
def gradients_and_output(kind, ffn_kind, reference, strategy="auto"):
    graphdef, _, rest = random_bank(kind, ffn_kind)

    def value(params, x, weights, experts, target):
        bank = nnx.merge(graphdef, params, rest)
        routing = Routing(experts, weights)
        set_strategy(bank, strategy)
        y = experts_reference(bank, x, routing) if reference else bank(x, routing)
        return jnp.sum(y * target), y

    # The output itself is compared, and not only the sum, in which large terms cancel.
    gradient = jax.grad(value, argnums=(0, 1, 2), has_aux=True)
    return jax.jit(gradient)


def draw(rng, tokens, top_k, concentration):
    """Random tokens and routing; a small concentration leaves experts empty. Some choices are of no expert."""
    shares = rng.dirichlet(np.full(EXPERTS, concentration)) + 1e-9
    experts = np.stack([rng.choice(EXPERTS, top_k, replace=False, p=shares / shares.sum()) for _ in range(tokens)])
    experts[rng.random(experts.shape) < 0.1] = rng.choice([-1, EXPERTS])
    arrays = rng.standard_normal((tokens, D_MODEL)), rng.random((tokens, top_k)), rng.standard_normal((tokens, D_MODEL))
    x, weights, target = (jnp.asarray(a, jnp.float32) for a in arrays)
    return x, weights, jnp.asarray(experts, jnp.int32), target


@one_in(17, first=2)
@pytest.mark.parametrize(
    ("kind", "strategy", "ffn_kind"),
    [(*way, ffn_kind) for way in STRATEGIES for ffn_kind in ("gated-biases", "plain-biases")] + COMPRESSED + CLAMPED,
)
def test_bank_equals_one_ffn_per_expert(kind, strategy, ffn_kind):
    # The shapes are few, so that programs are compiled once; routing, which is data, is drawn freely.
    @settings(max_examples=examples(12), deadline=None)
    @given(st.sampled_from(SHAPES[ffn_kind]), st.sampled_from([0.05, 5.0]), st.integers(0, 999))
    def check(shape, concentration, seed):
        data = draw(np.random.default_rng(seed), *shape, concentration)
        params = random_bank(kind, ffn_kind)[1]
        got = gradients_and_output(kind, ffn_kind, False, strategy)(params, *data)
        expected = gradients_and_output(kind, ffn_kind, True)(params, *data)
        assert_close(got, expected)

    check()


@one_in(48, first=2)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((kind, "auto") for kind in ("full", "low-rank", "sparse", "quantized-2", "bitmap-3-alone", "joint-low-rank")),
        *((kind, "auto") for kind in ("mixed", "mixed-alone", "mixed-over-codes")),
        ("low-rank", "factored-grouped"),
        ("joint-low-rank-alone", "factored-grouped"),
        ("bases", "factored-grouped"),
        ("bases", "synthesised"),
        ("sparse", "factored-entrywise"),
        ("sparse", "factored-grouped"),
        ("quantized-2", "factored-grouped"),
    ],
)
@pytest.mark.parametrize(
    ("axes", "tokens"),
    [({"data": 2, "fsdp": 2, "expert": 2}, 16), ({"expert": 4, "tensor": 2}, 16), ({"expert": 4, "tensor": 2}, 5)],
    ids=str,
)
def test_bank_over_a_mesh_equals_one_device(kind, strategy, axes, tokens, monkeypatch):
    if strategy != "auto":
        monkeypatch.setattr("moe_jax.experts.strategy._MOST_OF_BASE", 10**9)  # deltas of so small kernels are not small
        strategy_on.cache_clear()
    ffn_kind = "gated-biases"
    graphdef, params, rest = random_bank(kind, ffn_kind)
    data = draw(np.random.default_rng(0), tokens, 2, 1.0)
    expected = gradients_and_output(kind, ffn_kind, False)(params, *data)
    mesh = make_mesh(axes)

    def put(path, leaf):
        spec = spec_on_mesh(leaf_spec(f"experts/{path_name(path)}"), leaf.shape, mesh.shape)
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

    params, rest = (jax.tree_util.tree_map_with_path(put, state) for state in (params, rest))

    def value(params, rest, x, weights, experts, target):
        bank = nnx.merge(graphdef, params, rest)
        set_strategy(bank, strategy)
        y = bank(x, Routing(experts, weights))
        return jnp.sum(y * target), y

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(value, argnums=(0, 2, 3), has_aux=True))(params, rest, *data)
    assert_close(got, expected)


@one_in(16, first=4)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_within_its_rounding(kind):
    graphdef, params, rest = random_bank(kind, "gated")
    x, weights, experts, _ = draw(np.random.default_rng(0), 32, 2, 1.0)
    apply = jax.jit(lambda x, routing: nnx.merge(graphdef, params, rest)(x, routing))
    exact = apply(x, Routing(experts, weights))
    got = apply(x.astype(jnp.bfloat16), Routing(experts, weights))
    assert got.dtype == jnp.bfloat16
    error = jnp.linalg.norm(got.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert 0 < error < 0.03


@one_in(4, first=3)
@pytest.mark.parametrize(("kind", "strategy"), [pair for pair in STRATEGIES if pair[0] != "full"])
def test_no_strategy_holds_a_kernel_per_expert(kind, strategy):
    d_model, hidden, experts = 128, 1024, 32
    config = BankConfig(kind="sparse", rate=0.98) if kind == "sparse" else KINDS[kind]
    ffn_config = FFNConfig(dim=hidden)
    bank = nnx.eval_shape(lambda: make_bank(config, ffn_config, experts, d_model, rngs=nnx.Rngs(0), dtype=jnp.float32))
    graphdef, params, rest = nnx.split(bank, nnx.Param, ...)
    x, routing = jnp.ones((16, d_model)), Routing(jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2)))

    def loss(params, rest):
        bank = nnx.merge(graphdef, params, rest)
        set_strategy(bank, strategy)
        return jnp.sum(bank(x, routing))

    compiled = jax.jit(jax.grad(loss)).lower(params, rest).compile()
    kernels = experts * d_model * hidden * 4
    # One kernel, its gradient and the base's are allowed for each matrix; all experts of one matrix are not.
    assert compiled.memory_analysis().temp_size_in_bytes < kernels


def test_cost_model_chooses_and_says_so_once(caplog):
    def chosen(config, tokens, experts=8):
        return choose_strategy(config, FFNConfig(dim=2816), 1024, Load(experts, tokens, 2))

    strategy_on.cache_clear()
    with caplog.at_level("INFO", "moe_jax.experts.strategy"):
        assert chosen(BankConfig(kind="low-rank", rank=4), 4096) == "factored-side-by-side"
        assert chosen(BankConfig(kind="low-rank", rank=4), 4096) == "factored-side-by-side"
    (record,) = caplog.records
    said = "low-rank experts, 4096 tokens, top-2, on cpu: factored-side-by-side .microseconds: "
    assert re.match(said, record.getMessage())
    assert chosen(BankConfig(kind="low-rank", rank=256), 4096, experts=64) == "factored-grouped"
    assert chosen(BankConfig(kind="sparse", rate=0.9), 4096) == "synthesised"
    assert chosen(BankConfig(kind="sparse", rate=0.9999), 4096) == "factored-entrywise"
    assert chosen(BankConfig(kind="quantized", bits=2, group_size=128), 4096) == "synthesised"
    # A few tokens: reading the base once is what counts.
    assert chosen(BankConfig(kind="quantized", bits=2, group_size=128), 8) == "factored-grouped"


def test_a_mesh_of_one_device_is_none():
    """Over several devices, each would have the deltas of all experts, unless these are small."""
    arguments = BankConfig(kind="low-rank", rank=256), FFNConfig(dim=2816), 1024, Load(64, 4096, 2)
    small = BankConfig(kind="low-rank", rank=8), *arguments[1:]
    for devices, expected in ((1, "factored-grouped"), (2, "synthesised")):
        with jax.set_mesh(make_mesh({"fsdp": devices}, jax.devices()[:devices])):
            assert choose_strategy(*arguments) == expected
            assert choose_strategy(*small).startswith("factored")


def test_entries_are_not_multiplied_one_by_one_on_gpu():
    """What `entrywise` does there is what `grouped` does."""
    form = BankConfig(kind="sparse", rate=0.9999).form
    matrices = tuple(ffn_matrices(FFNConfig(dim=2816), 1024).values())
    load = Load(8, 4096, 2)
    ways = {name: form.delta_costs(matrices, load, Platform.of(chip, 2)) for name, chip in CHIPS.items()}
    assert {CHIPS[name].platform for name, costs in ways.items() if "entrywise" in costs} == {"cpu", "tpu"}


def test_costs_belong_to_the_platform():
    config, expert = BankConfig(kind="quantized", bits=2, group_size=128), FFNConfig(dim=2816)
    matrices = tuple(ffn_matrices(expert, 1024).values())
    platforms = {name: Platform.of(chip, 2) for name, chip in CHIPS.items()}
    costs = [
        costs_by_strategy(config.form, matrices, Load(8, 64, 2), platform, based=matrices)
        for platform in platforms.values()
    ]
    assert len({cost["synthesised"] for cost in costs}) == len(CHIPS)
    # Bytes are dearer beside operations on an accelerator, so that more tokens are needed to outweigh reading them.
    reading = {name: platform.operations_per_byte for name, platform in platforms.items()}
    assert reading["cpu"] < reading["v5e"] < reading["h100"] < reading["v6e"]


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v5", "tpu", "v5p"),
        ("TPU v6 lite", "tpu", "v6e"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "a100"),
        ("TPU of tomorrow", "tpu", "v5e"),
        ("a GPU that nobody knows", "gpu", "h100"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_the_chip_is_that_of_the_mesh(kind, platform, expected):
    """A program that is lowered for an absent accelerator is made for that."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device)):
        assert current_chip().name == expected
    assert current_chip().name == "cpu"


def test_the_choice_differs_with_the_generation():
    """The same layer and batch: where products are dearer beside bytes, fewer of them are worth more bytes."""
    config, load = BankConfig(kind="low-rank", rank=16), Load(8, 8192, 2)
    costs = {
        name: strategy_costs(config, FFNConfig(dim=11008), 4096, load, Platform.of(CHIPS[name], 2))
        for name in ("v5e", "v6e")
    }
    ratios = {name: of["factored-grouped"].total / of["factored-side-by-side"].total for name, of in costs.items()}
    assert ratios["v5e"] < ratios["v6e"]


def test_a_compiled_step_follows_the_strategy(monkeypatch):
    """The strategy is part of the graphdef, and so of what a program is compiled for."""
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(graphdef, state, x, routing):
        bank = nnx.merge(graphdef, state)
        traced.append(bank.strategy)
        return bank(x, routing)

    bank = fresh_bank("low-rank", "gated")
    routing = Routing(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
    for strategy in ("auto", "synthesised", "factored", "auto", "synthesised"):
        set_strategy(bank, strategy)
        step.trace(*nnx.split(bank), jnp.ones((4, D_MODEL)), routing)
    assert traced == ["auto", "synthesised", "factored"]
    # The variable is read when a bank is made, and changing it later is not pretended to have an effect.
    monkeypatch.setenv("MOE_JAX_STRATEGY", "factored-grouped")
    assert bank.strategy == "synthesised"
    made = fresh_bank("low-rank", "gated")
    step.trace(*nnx.split(made), jnp.ones((4, D_MODEL)), routing)
    assert traced[-1] == "factored-grouped"


def test_strategies_are_honoured_or_refused(monkeypatch):
    arguments = BankConfig(kind="low-rank", rank=4), FFNConfig(dim=16), 8, Load(4, 8, 2)
    assert choose_strategy(*arguments, asked="synthesised") == "synthesised"
    assert choose_strategy(*arguments, asked="factored-grouped") == "factored-grouped"
    # A strategy that the form does not support is ignored.
    assert choose_strategy(*arguments, asked="factored-entrywise") == choose_strategy(*arguments)
    bank = fresh_bank("low-rank", "gated")
    with pytest.raises(InputError, match="strategy.*synthesised"):
        set_strategy(bank, "synthesized")
    monkeypatch.setenv("MOE_JAX_STRATEGY", "synthesized")
    with pytest.raises(InputError, match="MOE_JAX_STRATEGY.*synthesised"):
        make_bank(KINDS["low-rank"], FFNS["gated"], 4, 8, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.mark.parametrize("strategy", ["factored-side-by-side", "factored-grouped", "synthesised"])
@pytest.mark.parametrize("through", ["delta", "bias"])
def test_router_weights_are_not_rounded(through, strategy):
    """Every number but the weights is 0 or 1, so that bfloat16 rounds nothing else before the sum."""
    experts, d_model, top_k = 16, 8, 15
    config, ffn_config = BankConfig(kind="low-rank", rank=1, base="none"), FFNConfig(dim=4, gated=False, bias=True)
    ffn_config = dataclasses.replace(ffn_config, activation="relu")

    @jax.jit
    def applied(weights):
        bank = make_bank(config, ffn_config, experts, d_model, rngs=nnx.Rngs(0), dtype=jnp.float32)
        set_strategy(bank, strategy)
        for factors in (bank.delta.up, bank.delta.down):
            factors.a[...] = jnp.zeros_like(factors.a[...]).at[:, 0, 0].set(1.0)
            factors.b[...] = jnp.full_like(factors.b[...], float(through == "delta"))
        bank.down.bias[...] = jnp.full((experts, d_model), float(through == "bias"))
        return bank(jnp.ones((1, d_model), jnp.bfloat16), Routing(jnp.arange(top_k, dtype=jnp.int32)[None], weights))

    # bfloat16 would round each weight down to 1/8, and their sum to 1.875.
    weights = jnp.full((1, top_k), (1 + 0.45 / 128) / 8)
    got = applied(weights)
    np.testing.assert_array_equal(got, jnp.full((1, d_model), jnp.sum(weights), jnp.bfloat16))


@pytest.mark.parametrize("kind, options", [("low-rank", {"rank": 2}), ("sparse", {"rate": 0.99})])
def test_over_a_mesh_tokens_do_not_travel_to_small_deltas(kind, options):
    config, expert = BankConfig(kind=kind, **options), FFNConfig(dim=256)
    numbers = set()
    for chip, tokens in itertools.product(("h100", "v5e"), (16, 65536)):
        platform, load = Platform.of(CHIPS[chip], 2), Load(2, tokens, 1)
        costs = strategy_costs(config, expert, 64, load, platform, alone=False)
        others = {name: cost.total for name, cost in costs.items() if name != "synthesised"}
        assert strategy_on(platform, config, expert, 64, load, alone=False) == min(others, key=others.__getitem__)
        assert strategy_on(platform, config, expert, 64, load, "synthesised", alone=False) == "synthesised"
        numbers.add(len(costs))
    assert numbers == ({2, 3} if kind == "sparse" else {3})


def test_counts_bytes_and_frozen_leaves():
    def shapes_of(config, ffn_kind, dtype=jnp.float32):
        return nnx.eval_shape(lambda: make_bank(config, FFNS[ffn_kind], 4, 8, rngs=nnx.Rngs(0), dtype=dtype))

    sparse = shapes_of(BankConfig(kind="sparse", rate=0.5, train_base=False), "gated", jnp.bfloat16)
    assert sparse.num_parameters() == 3 * 8 * 16 + 4 * 3 * 64  # base and values
    positions = 4 * (3 * 64 * 2 + (8 + 8 + 16) * 4)  # uint16 columns and int32 ends of rows
    assert sparse.num_bytes() == 2 * sparse.num_parameters() + positions
    assert sparse.frozen_leaves().search("base/gate/kernel")
    assert not sparse.frozen_leaves().search("delta/gate/values")
    full = shapes_of(KINDS["full"], "plain-biases")
    assert full.num_parameters() == 4 * (2 * 8 * 16 + 16 + 8)
    assert not full.frozen_leaves().search("gate/kernel")
    quantized = shapes_of(KINDS["quantized-2"], "gated")
    codes, scales = 4 * 3 * 8 * 16 * 2 // 8, 2 * 4 * (16 + 16 + 2 * 8)
    assert quantized.num_bytes() == 4 * 3 * 8 * 16 + codes + scales


@one_in(3)
# Experts of mixed bases are no deltas: their down projection is whole, and drawn. A base in codes has no kernel to
# compare with; `test_coded_base.py` has what it stands for.
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("full", "quantized-1", "bases", "mixed-over-codes")]
)
def test_a_fresh_delta_changes_nothing(kind):
    bank = fresh_bank(kind, "gated")
    for name, kernel in nnx.jit(lambda bank: bank.kernels(2))(bank).items():
        base = bank.base[name].kernel[...] if KINDS[kind].has_base else np.zeros(kernel.shape)
        np.testing.assert_array_equal(kernel, base)


def test_sparse_positions_are_distinct_and_differ_between_experts():
    bank = fresh_bank("sparse", "gated")
    columns, row_ends = (np.asarray(bank.delta.arrays()[f"up/{name}"]) for name in ("columns", "row_ends"))
    assert columns.dtype == np.uint16 and columns.shape == (4, round(8 * 16 * 0.2))
    positions = [from_csr(columns[e], row_ends[e], (8, 16)) for e in range(4)]
    assert all(np.all(np.diff(one) > 0) and one.min() >= 0 and one.max() < 128 for one in positions)
    assert len({tuple(one) for one in positions}) == 4


@settings(max_examples=examples(12))
@given(st.integers(1, 7), st.integers(1, 9), st.floats(0, 1), st.integers(0, 99))
def test_csr_gives_the_positions_back(rows, columns, share, seed):
    count = max(1, round(share * rows * columns))
    positions = np.sort(np.random.default_rng(seed).choice(rows * columns, count, replace=False))
    packed = to_csr(positions, (rows, columns))
    np.testing.assert_array_equal(from_csr(*packed, (rows, columns)), positions)
    np.testing.assert_array_equal(entry_rows(jnp.asarray(packed[1]), count), positions // columns)


@pytest.mark.parametrize(
    ("bank", "num_experts", "d_model", "complaint"),
    [
        (BankConfig(), 0, 8, "num_experts=0"),
        (BankConfig(), 4, 8.0, "d_model=8.0"),
        (BankConfig(kind="low-rank", rank=9), 4, 8, "rank 9 is above"),
    ],
)
def test_a_bank_that_does_not_fit_is_not_made(bank, num_experts, d_model, complaint):
    with pytest.raises(InputError, match=complaint):
        make_bank(bank, FFNConfig(dim=16), num_experts, d_model, rngs=nnx.Rngs(0))


def test_where_kernels_have_one_way_over_a_mesh_it_is_taken(monkeypatch):
    monkeypatch.setattr(module, "_is_small", lambda *_: True)
    monkeypatch.setattr(module, "strategy_costs", lambda *_, **__: {"synthesised": types.SimpleNamespace(total=1.0)})
    strategy_on.cache_clear()
    config, platform = BankConfig(kind="quantized", bits=2, group_size=8), Platform.of(CHIPS["h100"], 2)
    assert strategy_on(platform, config, FFNConfig(dim=40), 24, Load(2, 16, 1), alone=False) == "synthesised"
    strategy_on.cache_clear()


@pytest.mark.parametrize("ffn_kind, fused", [("gated", True), ("biased", False)])
def test_gate_and_up_are_one_product_where_neither_has_a_bias(ffn_kind, fused, monkeypatch):
    made = []
    product = hidden_rows.gated_product
    monkeypatch.setattr(hidden_rows, "gated_product", lambda *args: made.append(args) or product(*args))
    expert = FFNConfig(dim=40, bias=ffn_kind == "biased")
    config = BankConfig(kind="low-rank", rank=2)
    bank = nnx.eval_shape(lambda: make_bank(config, expert, 4, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")))
    set_strategy(bank, "synthesised")
    graphdef, state = nnx.split(bank)
    routing = Routing(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
    jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x, routing), state, jnp.ones((4, D_MODEL)))
    assert bool(made) == fused
