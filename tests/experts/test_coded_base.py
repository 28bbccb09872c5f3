"""Banks whose base is in codes, against the same banks over the kernels that the codes stand for."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.compression.coding.coder import LeastError
from moe_jax.core.code_options import CODES
from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import leaf_spec, make_mesh, path_name
from moe_jax.experts import BankConfig, BaseCodes, FFNConfig, LoRAConfig, make_bank, set_strategy
from moe_jax.experts.devices import Platform
from moe_jax.experts.forms.coding import Residual
from moe_jax.experts.forms.optional import costs_of
from moe_jax.experts.linear import Linear
from moe_jax.experts.on_host import base_kernel, base_leaves, expert_kernels, leaves_from_dense
from moe_jax.experts.shapes import Load, Matrix, ffn_matrices
from moe_jax.experts.strategy import strategy_costs, strategy_on
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.models import MoEConfig
from tests.support.numerics import assert_close, normal, randomised
from tests.support.tiers import examples, long, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

EXPERTS, D_MODEL, FFN = 4, 16, FFNConfig(dim=24)
DELTAS = {"low-rank": {"rank": 3}, "quantized": {"bits": 2, "group_size": 8, "up_bits": 3}, "sparse": {"rate": 0.8}}
STORED = {
    "4 bits": BaseCodes(code="4", group_size=8),
    "3 bits": BaseCodes(code="3", group_size=16, down_bits=2),  # 16 does not divide the 24 neurons
    "3 bits, fitted": BaseCodes(code="3", group_size=16, up_bits=8, table=True, scale_bits=8),
    "nf4": BaseCodes(code="nf4"),
    "none of down": BaseCodes(code="4", group_size=8, down_bits=0),
    "of gate alone": BaseCodes(code="3", group_size=8, up_bits=0, down_bits=0),
}


def bank_of(kind, codes, expert=FFN, **options):
    return BankConfig(kind=kind, base_codes=codes, **DELTAS[kind], **options), expert


def made(config, expert=FFN):
    return make_bank(config, expert, EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))


def random_bank(config, expert=FFN):
    """Every parameter random and float32: scales too, of either sign."""
    return randomised(lambda: made(config, expert))


def plain(config, params, rest, expert=FFN):
    """The bank with a base of kernels, the numbers that the codes of another stand for, and the same experts.

    The kernel of a matrix that has no base is 0.
    """
    coded = nnx.merge(random_bank(config, expert)[0], params, rest)

    @nnx.jit
    def whole(coded):
        bank = made(dataclasses.replace(config, base_codes=None), expert)
        for name in ffn_matrices(expert, D_MODEL):
            kernel = bank.base[name].kernel
            kernel[...] = coded.base[name].materialise() if name in coded.base else jnp.zeros_like(kernel[...])
        return bank

    bank = whole(coded)
    bank.delta = coded.delta
    return bank


def draw(tokens, top_k=2, seed=0):
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.choice(EXPERTS, top_k, replace=False) for _ in range(tokens)]).astype(np.int32)
    return normal(seed, tokens, D_MODEL), jnp.asarray(rng.random((tokens, top_k)), jnp.float32), jnp.asarray(experts)


def encoded(form, kernel, matrix):
    """Leaves and what they stand for. Compression is not held to strict promotion."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return form.encode(Residual(kernel, np.dtype(np.float32)), matrix, LeastError())


def gradients(graphdef, strategy):
    """`(params, rest, x, weights, experts, target)` -> gradients of parameters, tokens and weights, and the output."""

    def value(params, rest, x, weights, experts, target):
        bank = nnx.merge(graphdef, params, rest)
        set_strategy(bank, strategy)
        y = bank(x, Routing(experts, weights))
        return jnp.sum(y * target), y

    return jax.jit(jax.grad(value, argnums=(0, 2, 3), has_aux=True))


@settings(max_examples=examples(8), deadline=None)
@given(st.sampled_from(CODES), st.integers(1, 70), st.integers(1, 9), st.sampled_from([8, 16, 64]))
def test_what_is_encoded_is_what_is_read(code, rows, columns, group_size):
    """Odd widths, and groups that do not divide them; on the host and in a linear map."""
    codes = BaseCodes(code=code, group_size=None if code == "nf4" else group_size)
    matrix = Matrix("up", (rows, columns))
    kernel = np.random.default_rng(rows).standard_normal(matrix.shape).astype(np.float32)
    leaves, approximation = encoded(codes.form, kernel, matrix)
    specs = jax.eval_shape(lambda: codes.form.fresh(nnx.Rngs(0), matrix, (), jnp.dtype("float32")))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in specs.items()
    }
    config = BankConfig(kind="low-rank", rank=1, base_codes=codes)
    stored = {f"bank/{path}": leaves[name] for name, path in base_leaves(config, matrix).items()}
    np.testing.assert_array_equal(base_kernel(stored.__getitem__, config, "bank", matrix), approximation)
    # Half a step of the coarsest grid, for normal numbers: the rest is what `LeastError` is tested for.
    assert np.max(np.abs(approximation - kernel)) < 2.5
    x = np.random.default_rng(1).standard_normal((3, rows)).astype(np.float32)
    y = jax.jit(lambda x, leaves: codes.form.apply(x, leaves, matrix, None))(x, leaves)
    np.testing.assert_allclose(y, x @ approximation, atol=1e-4)


@one_in(34, first=3)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("low-rank", "factored-side-by-side"),
        ("low-rank", "synthesised"),
        ("quantized", "factored-grouped"),
        ("quantized", "synthesised"),
        ("sparse", "synthesised"),
    ],
)
def test_a_bank_equals_that_over_the_kernels_its_codes_stand_for(kind, strategy, stored):
    """Output, and gradients of tokens, weights, the experts' own leaves, and through the kernels those of scales."""
    config, _ = bank_of(kind, STORED[stored])
    graphdef, params, rest = random_bank(config)
    data, target = draw(9), normal(3, 9, D_MODEL)
    (of_params, *others), y = gradients(graphdef, strategy)(params, rest, *data, target)

    reference = plain(config, params, rest)
    expected_def, expected_params, expected_rest = nnx.split(reference, nnx.Param, ...)
    (of_plain, *expected), expected_y = gradients(expected_def, "synthesised")(
        expected_params, expected_rest, *data, target
    )
    assert_close((y, others, of_params["delta"]), (expected_y, expected, of_plain["delta"]))
    if stored == "nf4":
        assert "base" not in of_params
        return
    bases = {name: matrix for name, matrix in ffn_matrices(FFN, D_MODEL).items() if config.has_base_of(name)}
    assert of_params["base"].keys() == bases.keys()
    for name, matrix in bases.items():
        form = config.base_codes.form.of_matrix(matrix)
        arrays = nnx.merge(graphdef, params, rest).base[name].arrays()
        trained = {path: array for path, array in arrays.items() if form.is_trained(path, array)}

        @jax.jit
        def through(trained, cotangent, form=form, arrays=arrays, matrix=matrix):
            return jax.vjp(lambda own: form.materialise(None, arrays | own, matrix), trained)[1](cotangent)[0]

        got = {path: of_params["base"][name]["coded"][path.removeprefix("coded/")][...] for path in trained}
        assert_close(got, through(trained, of_plain["base"][name]["kernel"][...]))


@one_in(16)
@pytest.mark.parametrize("stored", ["4 bits", "nf4", "none of down", "of gate alone"])
@pytest.mark.parametrize("strategy", ["factored-grouped", "synthesised"])
@pytest.mark.parametrize(
    ("axes", "tokens"), [({"data": 2, "fsdp": 2, "tensor": 2}, 24), ({"expert": 4, "tensor": 2}, 5)], ids=str
)
@long
def test_over_a_mesh_as_on_one_device(strategy, stored, axes, tokens, monkeypatch):
    monkeypatch.setattr("moe_jax.experts.strategy._MOST_OF_BASE", 10**9)  # deltas of so small kernels are not small
    strategy_on.cache_clear()
    expert = FFNConfig(dim=32)
    config, _ = bank_of("quantized", STORED[stored])
    graphdef, params, rest = random_bank(config, expert)
    data, target = draw(tokens), normal(3, tokens, D_MODEL)
    expected = gradients(graphdef, "factored-grouped")(params, rest, *data, target)
    mesh = make_mesh(axes)

    def put(path, leaf):
        return jax.device_put(leaf, NamedSharding(mesh, leaf_spec(f"experts/{path_name(path)}")))

    params, rest = (jax.tree_util.tree_map_with_path(put, state) for state in (params, rest))
    with jax.set_mesh(mesh):
        program = gradients(graphdef, strategy).lower(params, rest, *data, target).compile()
        got = program(params, rest, *data, target)
    assert_close(got, expected)
    # No part of a float kernel travels, which would be one of these shapes; codes and rows do.
    wide = {f"{rows},{columns}" for rows, columns in ((D_MODEL, 32), (32, D_MODEL), (D_MODEL, 16), (16, D_MODEL))}
    sent = re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:all-gather|collective-permute|all-to-all)\(", program.as_text())
    assert not [shape for dtype, shape in sent if dtype == "f32" and shape in wide], sent
    # What `fsdp` divides is gathered as codes. (Elsewhere those of residuals may travel.)
    assert "fsdp" not in axes or "u8" in {dtype for dtype, _ in sent}


def test_some_matrices_may_have_no_base():
    """Leaves, what the host reads, bytes and costs are those of the matrices that have one."""
    config, _ = bank_of("quantized", STORED["none of down"])
    whole, _ = bank_of("quantized", STORED["4 bits"])
    bank, matrices = nnx.eval_shape(lambda: made(config)), ffn_matrices(FFN, D_MODEL)
    assert bank.base.keys() == {"gate", "up"} and "(down none)" in config.describe()
    assert base_leaves(config, matrices["down"]) == {}
    assert not base_kernel({}.__getitem__, config, "bank", matrices["down"]).any()
    entries = [
        bank_of("low-rank", STORED[name])[0].multiplied_entries(FFN, D_MODEL, 2) for name in ("none of down", "4 bits")
    ]
    assert entries[1] - entries[0] == matrices["down"].size
    platform, load = Platform.of(CHIPS["v5p"], 2), Load(EXPERTS, 64, 2)
    costs = (strategy_costs(one, FFN, D_MODEL, load, platform) for one in (config, whole))
    assert all(less.total < more.total for less, more in zip(*(cost.values() for cost in costs), strict=True))
    with pytest.raises(InputError, match="matrix at all"):
        nothing = BaseCodes(code="4", gate_bits=0, up_bits=0, down_bits=0)
        bank_of("quantized", nothing)[0].check_fits(FFN, D_MODEL)
    with pytest.raises(InputError, match="none; use PERFT"):
        MoEConfig(
            num_experts=4,
            top_k=2,
            expert=dataclasses.replace(FFN, lora=LoRAConfig(rank=2, targets=("up",))),
            bank=config,
        )


@pytest.mark.parametrize("split", ["in", "out"])
def test_a_linear_map_of_codes_over_a_mesh(split):
    """Groups of 16 that shards begin inside, and only codes and scales travel."""
    matrix, codes = Matrix("", (96, 40), split), BaseCodes(code="3", group_size=64).form
    kernel = np.random.default_rng(0).standard_normal(matrix.shape).astype(np.float32)
    leaves, approximation = encoded(codes, kernel, matrix)
    x, target = normal(1, 8, 3, 96), normal(2, 8, 3, 40)
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    spec = P("tensor", "fsdp") if split == "in" else P("fsdp", "tensor")
    leaves["coded/codes"] = jax.device_put(leaves["coded/codes"], NamedSharding(mesh, spec))

    def value(x, leaves, target):
        y = codes.apply(x, leaves, matrix, None)
        return jnp.sum(y * target), y

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(value, has_aux=True)).lower(x, leaves, target).compile()
        dx, y = program(x, leaves, target)
    np.testing.assert_allclose(y, x @ approximation, atol=1e-4)
    np.testing.assert_allclose(dx, target @ approximation.T, atol=1e-4)
    gathered = re.findall(r"= (\w+)\[[\d,]+\]\S* (?:all-gather|collective-permute)\(", program.as_text())
    assert set(gathered) <= {"u8"}, gathered


@one_in(2, first=1)
@pytest.mark.parametrize("strategy", ["factored-side-by-side", "synthesised"])
def test_no_kernel_is_kept_for_the_gradient(strategy):
    config, expert = bank_of("low-rank", STORED["4 bits"], FFNConfig(dim=40))
    graphdef, params, rest = random_bank(config, expert)
    x, weights, experts = draw(5)

    def apply(params, x):
        bank = nnx.merge(graphdef, params, rest)
        set_strategy(bank, strategy)
        return bank(x, Routing(experts, weights))

    y, back = jax.jit(lambda params, x: jax.vjp(apply, params, x))(params, x)
    kept = [leaf for leaf in jax.tree.leaves(back) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert kept and max(leaf.size for leaf in kept) < D_MODEL * 40
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(lambda back, y: back(y))(back, y)))


@one_in(8)
@pytest.mark.parametrize("stored", STORED)
def test_lora_beside_a_base_in_codes(stored):
    lora = LoRAConfig(rank=2, targets=("up", "down"))
    config, expert = bank_of("low-rank", STORED[stored], dataclasses.replace(FFN, lora=lora))
    graphdef, params, rest = random_bank(config, expert)
    bank, reference = nnx.merge(graphdef, params, rest), plain(config, params, rest, expert)
    for name in lora.targets:  # merged already
        reference.base[name].lora.b[...] = jnp.zeros_like(reference.base[name].lora.b[...])
    x, weights, experts = draw(6)
    apply = nnx.jit(lambda bank: bank(x, Routing(experts, weights)))
    assert_close(apply(bank), apply(reference))


def test_counts_bytes_and_what_is_frozen():
    matrices = 3 * D_MODEL * 24
    config, _ = bank_of("quantized", BaseCodes(code="4", group_size=8), train_base=False)
    bank = nnx.eval_shape(lambda: made(config))
    scales = 2 * (D_MODEL // 8) * 24 + (24 // 8) * D_MODEL
    of_deltas = EXPERTS * ((matrices * 2 + matrices // 3) // 8 + 2 * scales)  # one of three in 3 bits
    assert bank.num_parameters() == (1 + EXPERTS) * scales  # codes are none
    assert bank.num_bytes() == matrices // 2 + 2 * scales + of_deltas
    assert bank.frozen_leaves().search("base/up/coded/scales")
    assert config.given()["base"] == "4-bit codes in groups of 8"
    nf4 = nnx.eval_shape(lambda: made(bank_of("quantized", BaseCodes(code="nf4"))[0]))
    assert nf4.num_parameters() == EXPERTS * scales


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_a_base_that_is_made_costs_what_is_read_and_written_for_it(name):
    """Less is read of codes; a synthesised kernel needs the base written in float32 and read again."""
    expert, load = FFNConfig(dim=2048), Load(8, 64, 2)
    codes = BaseCodes(code="4")
    costs = {
        stored: strategy_costs(BankConfig(kind="low-rank", rank=8, base_codes=stored), expert, 1024, load,
                               Platform.of(CHIPS[name], 2))
        for stored in (codes, None)
    }  # fmt: skip
    coded, whole = costs[codes], costs[None]
    assert coded.keys() == whole.keys()
    assert coded["factored-side-by-side"].reading < whole["factored-side-by-side"].reading
    assert coded["synthesised"].reading > whole["synthesised"].reading
    unpacked = costs_of(codes.form).making(tuple(ffn_matrices(expert, 1024).values()), Platform.of(CHIPS[name], 2))
    for strategy, cost in coded.items():
        assert (
            cost.making == pytest.approx(whole[strategy].making + unpacked)
            and cost.products == whole[strategy].products
        )


def test_experts_on_the_host_are_those_of_the_bank():
    config, _ = bank_of("low-rank", STORED["3 bits"])
    bank = nnx.merge(*random_bank(config))
    stored = {f"bank/{path_name(path)}": np.asarray(leaf)
              for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(bank))}  # fmt: skip
    of_bank = nnx.jit(lambda bank: bank.kernels(1))(bank)
    for name, matrix in ffn_matrices(FFN, D_MODEL).items():
        kernels = list(expert_kernels(stored.__getitem__, config, "bank", matrix))
        assert kernels[1].dtype == np.float32
        np.testing.assert_allclose(kernels[1], of_bank[name], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BaseCodes(code="5"), "of a base '5'"),
        (lambda: BaseCodes(code="4", group_size=12), "group_size=12 must be a multiple of 8"),
        (lambda: BaseCodes(code="4", down_bits=5), "of a base '5'"),
        (lambda: BaseCodes(code="nf4", up_bits=4), "a base in NF4 codes has no matrices of 4 bits"),
        (lambda: BaseCodes(code="8", table=True), "codes '8' has no table"),
        (lambda: BaseCodes(code="nf4", scale_bits=8), "scale_bits=8 does not go with an NF4 base"),
        (lambda: BaseCodes(code="nf4", table=True), "codes 'nf4' has no table"),
        (lambda: BaseCodes(code="nf4", group_size=64), "group_size=64 does not go with an NF4 base"),
        (lambda: BankConfig(base_codes=STORED["nf4"]), "base_codes go with a"),
        (
            lambda: BankConfig(kind="low-rank", rank=1, base="none", base_codes=STORED["nf4"]),
            "which low-rank experts with base 'none' do not have",
        ),
        (
            lambda: MoEConfig(
                expert=FFNConfig(dim=8, nf4=True), num_experts=2, top_k=1, bank=bank_of("low-rank", STORED["nf4"])[0]
            ),
            "nf4 does not go",
        ),
        (
            lambda: next(leaves_from_dense(bank_of("low-rank", STORED["nf4"])[0], FFN, 2, {"up": np.eye(4)}, print)),
            "equal a dense FFN",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(InputError) as caught:
        make()
    assert said in str(caught.value)


def test_a_base_in_the_models_dtype_is_written_as_before():
    assert "base_codes" not in BankConfig(kind="low-rank", rank=1).to_json()
    assert Linear((4, 8), rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")).arrays().keys() == {"kernel"}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fresh_codes_stand_for_kernels_as_wide_as_others(bits):
    matrix, form = Matrix("", (64, 96), "out"), BaseCodes(code=str(bits)).form
    leaves = form.fresh(nnx.Rngs(0), matrix, (), jnp.float32)
    kernel = form.of_matrix(matrix).apply(jnp.eye(64), leaves, matrix, None)
    assert np.std(kernel) == pytest.approx(0.02, rel=0.05)
