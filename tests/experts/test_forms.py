"""What every form answers, and that nothing outside `experts/` asks which form it is."""

import ast
import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.draws import stream
from moe_jax.core.errors import InputError
from moe_jax.core.form_options import check_keep, delta_options
from moe_jax.distributed.sharding import leaf_spec, path_name
from moe_jax.experts import AdapterConfig, AdapterExperts, BankConfig, BaseCodes, FFNConfig, Mixed, make_bank
from moe_jax.experts.devices import Platform
from moe_jax.experts.forms import (
    Full,
    JointLowRank,
    KernelForm,
    LowRank,
    MixtureOfBases,
    Quantized,
    Sparse,
    ffn_matrices,
)
from moe_jax.experts.forms.coding import CodedJointly, experts_with
from moe_jax.experts.forms.kernel_of_codes import NF4
from moe_jax.experts.forms.protocol import form_of_option, option_of_form, register, registered
from moe_jax.experts.forms.sparse import check_addressable
from moe_jax.experts.forms.whole import WithLoRA
from moe_jax.experts.mixed_bank import MAX_PARTS
from moe_jax.experts.on_host import expert_kernels, leaves_from_dense
from moe_jax.experts.shapes import Load, LoRAConfig, Matrix, Window, normal_kernel, shapes_of, uniform_factor
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig, config_from_json, config_to_json
from moe_jax.upcycling.spec import UpcycleSpec
from tests.support.environment import ROOT
from tests.support.numerics import normal
from tests.support.tiers import one_in

EXPERTS, D_MODEL = 3, 16
FFNS = {"gated": FFNConfig(dim=24), "plain": FFNConfig(dim=24, gated=False, bias=True)}
FORMS = [
    Full(),
    LowRank(rank=2),
    JointLowRank(rank=2),
    Sparse(rate=0.8),
    Sparse(rate=0.8, encoding="coo", bits=4, group_size=8),
    Sparse(rate=0.5, encoding="bitmap"),
    Quantized(bits=2, group_size=8),
    Quantized(bits=3),
    Quantized(bits=2, group_size=8, table=True),
    Quantized(bits=3, group_size=8, scale_bits=8),
    Quantized(bits=8, group_size=8, zero_points=True),
    Quantized(bits=1, group_size=8, row_scales=True),
    Mixed(parts=(Quantized(bits=2, group_size=8), Quantized(bits=4, down_bits=3, group_size=8)), part_of=(1, 0, 1)),
]
BANKS = [BankConfig(form) for form in FORMS]
BANKS += [BankConfig(form, base="none") for form in FORMS[1:]]
BANKS += [BankConfig(MixtureOfBases(rank=2, bases=2), base="none")]
BANKS += [BankConfig(LowRank(rank=2), base_codes=BaseCodes(code="3", group_size=8))]
BANKS += [BankConfig(LowRank(rank=2), base_codes=BaseCodes(code="3", group_size=8, table=True, scale_bits=8))]
BANKS += [BankConfig(Sparse(rate=0.8), base_codes=BaseCodes(code="nf4"))]
BANKS += [BankConfig(AdapterExperts(adapter=AdapterConfig(rank=2, activation="gelu")), train_base=False)]


def describe(value):
    if not isinstance(value, BankConfig):
        return str(value)
    return f"{value.form.describe()}, {value.base if value.base_codes is None else value.base_codes.describe()}"


def test_all_registered_forms_are_tried():
    assert {type(bank.form) for bank in BANKS} == set(registered())


@pytest.mark.parametrize("bank", BANKS, ids=describe)
def test_a_config_is_written_flat_and_read_back(bank):
    moe = MoEConfig(expert=FFNS["gated"], num_experts=EXPERTS, top_k=2, bank=bank)
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    layers = (LayerConfig(attention=attention, mlp=moe),)
    config = ModelConfig(family="llama", vocab_size=40, d_model=D_MODEL, max_positions=32, layers=layers)
    written = json.loads(json.dumps(config_to_json(config)))
    fields = written["segments"][0]["pattern"][0]["moe"]["bank"]
    assert fields["kind"] == bank.form.kind and "form" not in fields
    assert {field.name for field in dataclasses.fields(bank.form)} <= fields.keys()
    assert config_from_json(written) == config
    # A file of an earlier version names all options of all forms; positions were called places.
    fields |= {name: None for name in ("rank", "rate", "entries", "bits", "adapter") if name not in fields}
    fields["places"] = fields.pop("encoding", "csr")
    assert config_from_json(written) == config
    fields["rnk"] = 3
    with pytest.raises(InputError, match="unknown key .*rnk"):
        config_from_json(written)


@one_in(2, first=1)  # every bank
@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("bank", BANKS, ids=describe)
def test_every_leaf_has_a_place_on_a_mesh_and_the_kind_it_says(bank, ffn):
    made = nnx.eval_shape(
        lambda: make_bank(bank, FFNS[ffn], EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.dtype("bfloat16"))
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(made)):
        assert len(leaf_spec(f"layers/0/mlp/experts/{path_name(path)}")) <= len(leaf.shape), path_name(path)
    if not isinstance(bank.form, KernelForm):
        return
    params = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(made, nnx.Param))}
    folder = "delta/" if bank.form.over_base else ""
    for name, matrix in ffn_matrices(FFNS[ffn], D_MODEL).items():
        form = bank.form.of_matrix(matrix)
        fresh = nnx.eval_shape(
            lambda form=form, matrix=matrix: form.fresh(nnx.Rngs(0), matrix, (EXPERTS,), jnp.float32)
        )
        assert tuple(fresh) == form.leaf_names(matrix) and fresh.keys() <= bank.form.stored_specs("in").keys()
        for leaf, array in fresh.items():
            assert (f"{folder}{name}/{leaf}" in params) == form.is_trained(leaf, array)
            assert leaf in form.common_leaves or array.shape[0] == len(np.arange(EXPERTS)[experts_with(form, leaf)])
        shared = {}
        if isinstance(bank.form, CodedJointly):
            shared = nnx.eval_shape(lambda: bank.form.fresh_shared(FFNS[ffn], (EXPERTS,), jnp.float32))
        assert tuple(shared) == bank.form.shared_leaves
        combined = jax.eval_shape(partial(form.combine, matrix), fresh, shared)
        for split in ("in", "out"):
            specs = form.specs(split)
            assert specs.keys() == combined.keys()
            assert all(len(specs[leaf]) == len(array.shape) for leaf, array in combined.items())


@pytest.mark.parametrize("bank", BANKS, ids=describe)
def test_a_bank_whose_shapes_alone_are_wanted_is_that_which_is_drawn(bank):
    def make(rngs):
        return make_bank(bank, FFNS["gated"], EXPERTS, D_MODEL, rngs=rngs, dtype=jnp.dtype("bfloat16"))

    assert nnx.split(shapes_of(make)) == nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


@one_in(10)
@pytest.mark.parametrize(("ffn", "dtype"), [("gated", "float32"), ("plain", "bfloat16")])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_made_from_a_dense_ffn_are_that_ffn(form, ffn, dtype):
    random, bank = np.random.default_rng(0), BankConfig(form)
    matrices = ffn_matrices(FFNS[ffn], D_MODEL)
    kernels = {name: random.standard_normal(matrix.shape).astype(dtype) for name, matrix in matrices.items()}

    def streams(name, purpose, expert):
        return stream(0, purpose, matrices[name].index, expert)

    leaves = dict(leaves_from_dense(bank, FFNS[ffn], EXPERTS, kernels, streams))
    made = nnx.eval_shape(
        lambda: make_bank(bank, FFNS[ffn], EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
    )
    expected = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(made))}
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in expected.items() if not path.endswith("bias")
    }
    for name, matrix in matrices.items():
        for kernel in expert_kernels(lambda path: leaves[path.removeprefix("bank/")], bank, "bank", matrix):
            np.testing.assert_array_equal(kernel, kernels[name])


def test_what_is_no_dense_ffn_is_refused():
    kernels = {"up": np.zeros((16, 24)), "down": np.zeros((24, 16)), "gate": np.zeros((16, 24))}
    for bank in (BANKS[-1], BankConfig(LowRank(rank=2), base="none")):
        with pytest.raises(InputError, match="from a dense FFN"):
            dict(leaves_from_dense(bank, FFNS["gated"], EXPERTS, kernels, lambda *_: np.random.default_rng(0)))


def test_delta_options_are_those_that_the_command_shows():
    shown = next(option.shown.metavar for option in UpcycleSpec.list_options() if option.name == "delta")
    assert shown.split("|") == list(delta_options().values())
    for option in delta_options().values():
        kind, _, number = option.partition(":")
        form = form_of_option(f"{kind}:{0.5 if number == 'RATE' else 2}" if number else kind)
        assert form.kind == kind


@pytest.mark.parametrize(
    ("form", "option"),
    [(Full(), "full"), (LowRank(rank=16), "low-rank:16"), (Sparse(rate=0.9), "sparse:0.9"), ("sparse:.9", "sparse:.9")],
)
def test_a_form_may_stand_where_its_option_may(form, option):
    assert option_of_form(form) == option
    assert form_of_option(option) == form_of_option(option_of_form(form_of_option(option)))


@pytest.mark.parametrize("form", [Quantized(bits=4), 16, Sparse(rate=0.5, encoding="bitmap")])
def test_a_form_that_no_option_means_is_refused(form):
    with pytest.raises(InputError, match="delta="):
        option_of_form(form)


def test_a_form_or_its_kind():
    assert BankConfig(LowRank(rank=4)) == BankConfig(kind="low-rank", rank=4, rate=None)
    assert BankConfig() == BankConfig(Full())
    for arguments, options in (((LowRank(rank=4),), {"rank": 4}), ((Full(),), {"kind": "full"})):
        with pytest.raises(InputError, match="not both"):
            BankConfig(*arguments, **options)
    with pytest.raises(InputError, match="bank kind 'lowrank' .did you mean 'low-rank'"):
        BankConfig(kind="lowrank")


# ---- nobody else asks ----------------------------------------------------------------------------------------------


def questions(source: str) -> list[str]:
    """Where a program asks which form a bank has: by its kind, by a table of kinds, or by its class."""
    kinds, classes = {form.kind for form in registered()}, {form.__name__ for form in registered()}
    tree, shown, found = ast.parse(source), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue):  # a message may name the kind
            shown |= {id(child) for child in ast.walk(node)}
        if isinstance(node, ast.Assert):  # which says what is known, and chooses nothing
            shown |= {id(child) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in shown:
            continue
        if isinstance(node, ast.Attribute) and node.attr == "kind":
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner.rstrip("s") in ("bank", "form"):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if len(keys & kinds) > 1:
                found.append(f"{node.lineno}: a table of {', '.join(sorted(keys & kinds))}")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            names = {getattr(name, "id", getattr(name, "attr", "")) for name in ast.walk(node.args[1])}
            if names & classes and re.search("bank|form", ast.unparse(node.args[0])):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_nothing_outside_experts_asks_which_form_it_is():
    found = []
    for folder in ("moe_jax", "train", "convert"):
        for file in (ROOT / folder).rglob("*.py"):
            if "experts" not in file.relative_to(ROOT).parts:
                found += [f"{file.relative_to(ROOT)}:{question}" for question in questions(file.read_text())]
    assert not found, "a named property of the form or the bank says it better (moe_jax/experts/forms/protocol.py)"


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("if moe.bank.kind == 'sparse': pass", True),
        ("kind = layer.mlp.bank.form.kind", True),
        ("f'{bank.kind} experts'", False),
        ("MAKERS = {'low-rank': 1, 'sparse': 2}", True),
        ("MAKERS = {'up': 1, 'quantized': 2}", False),
        ("isinstance(bank.form, Sparse)", True),
        ("assert isinstance(form, Sparse)", False),
        ("self.kind == 'layer'", False),
        ("rest.kind != 'full'", False),
    ],
)
def test_what_counts_as_asking(source, asks):
    assert bool(questions(source)) == asks


def test_bytes_of_experts_of_mixed_bases_are_those_of_two_thin_kernels_and_a_whole_one():
    matrices = list(ffn_matrices(FFNConfig(dim=48), 32).values())
    assert MixtureOfBases(rank=4, bases=2).own_bytes(matrices, 4) == 4 * (2 * 4 * (32 + 48) + 48 * 32)


def test_experts_of_mixed_bases_begin_with_zero_and_can_learn():
    bank = BankConfig(kind="mixture-of-bases", rank=4, bases=3, base="none")
    made = make_bank(bank, FFNS["gated"], EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
    graphdef, state = nnx.split(made)

    def total(state):
        return sum(jnp.sum(kernel) for kernel in nnx.merge(graphdef, state).kernels(1).values())

    assert not any(made.kernels(1)[name].any() for name in ("gate", "up")) and made.kernels(1)["down"].any()
    found = jax.tree_util.tree_leaves_with_path(jax.grad(total)(state))
    moved = {path_name(path).removeprefix("delta/") for path, leaf in found if leaf.any()}
    assert moved == {"down/kernel", "gate/a", "up/a"}


def test_a_bank_of_one_expert_of_width_one_is_a_bank():
    made = make_bank(BankConfig(), FFNConfig(dim=1), 1, 1, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
    assert made.kernels(0)["up"].shape == (1, 1)


def test_codes_of_nf4_are_split_like_the_kernel():
    for split, axes in (("in", ("expert", "tensor", "fsdp")), ("out", ("expert", "fsdp", "tensor"))):
        specs = NF4.stored_specs(split)
        assert [tuple(spec) for path, spec in specs.items() if path.endswith("/codes")] == [axes]


def test_every_expert_mixes_the_bases_by_its_own_logits():
    form = MixtureOfBases(rank=2, bases=3)
    bases, logits = normal(0, 3, 4, 2), normal(1, 5, 3)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    mixed = np.einsum("em,mxy->exy", shares, bases)
    np.testing.assert_allclose(form.mix(bases, logits), mixed / (1 + np.exp(-mixed)), rtol=1e-5, atol=1e-6)


def test_a_share_that_stays_is_a_share():
    for keep in (None, 0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(InputError, match="keep"):
            check_keep(keep)
    check_keep(1e-6), check_keep(1.0)


def test_experts_of_several_forms_cost_what_they_cost_on_average():
    expert, platform = FFNConfig(dim=48), Platform.of(CHIPS["v5e"], 2)
    matrices = tuple(ffn_matrices(expert, 32).values())
    one, other = LowRank(rank=2), LowRank(rank=8)
    mixed = Mixed(parts=(one, other), part_of=(0, 1, 1, 1))
    for cost in (lambda form: form.own_bytes(matrices, 2), lambda form: form.making(matrices, platform)):
        assert cost(mixed) == pytest.approx((cost(one) + 3 * cost(other)) / 4)
    assert one.own_bytes(matrices, 2) < other.own_bytes(matrices, 2)


def test_thin_products_cost_their_multiplications_and_their_factors_bytes():
    expert, platform, rank = FFNConfig(dim=48), Platform.of(CHIPS["v5e"], 2), 3
    form, load = LowRank(rank=rank), Load(num_experts=5, tokens=10, top_k=2)
    matrices = tuple(ffn_matrices(expert, 32).values())
    assert [matrix.shape for matrix in matrices] == [(32, 48), (32, 48), (48, 32)]
    into, out, chip = 32 + 32 + 48, 48 + 48 + 32, CHIPS["v5e"]
    costs = form.delta_costs(matrices, load, platform)
    assert costs.keys() == {"side-by-side", "grouped"}
    # Each row goes through two thin kernels of its own expert, and is sorted before and after.
    assert costs["grouped"].products == pytest.approx(2 * 20 * rank * (into + out) / chip.bfloat16)
    assert costs["grouped"].reading == pytest.approx(4 * 2 * 20 * (into + out) / chip.bandwidth)
    # Or each token through the first kernels of all experts at once, and each row through all of the second ones.
    assert costs["side-by-side"].products == pytest.approx(2 * 5 * rank * (10 * into + 20 * out) / chip.bfloat16)
    assert costs["side-by-side"].reading == 0
    leaves = nnx.eval_shape(lambda: [form.fresh(nnx.Rngs(0), matrix, (), jnp.float32) for matrix in matrices])
    entries = sum(leaf.size for own in leaves for leaf in own.values())
    assert form.own_bytes(matrices, 2) == 2 * entries and form.multiplied_entries(expert, 32) == entries
    # The product of its factors, of so many operations, is what makes a kernel.
    assert form.making(matrices, platform) == pytest.approx(2 * rank * 3 * 32 * 48 / chip.bfloat16)


def test_lora_beside_the_kernels_of_experts_has_its_scale_in_every_product():
    matrix, sizes = Matrix("up", (8, 12)), (3, 0, 4)
    form = WithLoRA(kernel=Full(), lora=LoRAConfig(rank=2, targets=("up",), scale=0.25))
    shapes = {"kernel": (3, 8, 12), "lora/a": (3, 8, 2), "lora/b": (3, 2, 12)}
    arrays = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    kernel, a, b = (np.asarray(array) for array in arrays.values())
    kernels, rows, of_rows = kernel + 0.25 * a @ b, normal(9, 7, 8), np.repeat(np.arange(3), sizes)

    @jax.jit
    def three_ways(rows, arrays):
        own = {name: array[2] for name, array in arrays.items()}
        grouped = form.grouped(rows, arrays, jnp.array(sizes, jnp.int32), matrix)
        return grouped, form.apply(rows, own, matrix, None), form.tile(None, own, Window.all(matrix.shape))

    grouped, alone, made = three_ways(rows, arrays)
    np.testing.assert_allclose(grouped, np.einsum("ri,rio->ro", rows, kernels[of_rows]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(alone, rows @ kernels[2], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made, kernels[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", range(1, 10))
def test_kept_values_have_as_many_bits_as_there_are_formats_for(bits):
    if bits in (2, 3, 4, 8):
        assert Sparse(rate=0.5, bits=bits).bits == bits
    else:
        with pytest.raises(InputError, match="bits"):
            Sparse(rate=0.5, bits=bits)


@pytest.mark.parametrize("form", [LowRank, JointLowRank])
@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_is_above_0(form, rank):
    with pytest.raises(InputError, match="rank"):
        form(rank=rank)


def test_kernels_begin_as_small_as_they_are_said_to():
    """Against quantiles of their distributions; whatever the dtype, they are drawn in float32."""
    rngs = nnx.Rngs(0)
    kernel = np.asarray(normal_kernel(rngs, (2, 64, 96), jnp.dtype("bfloat16")), np.float32)
    quantiles = np.quantile(kernel, [0.023, 0.159, 0.5, 0.841, 0.977])
    np.testing.assert_allclose(quantiles, [-0.04, -0.02, 0, 0.02, 0.04], atol=1.5e-3)
    factor = np.asarray(uniform_factor(rngs, (2,), 64, 96, jnp.dtype("bfloat16")), np.float32)
    assert kernel.shape == (2, 64, 96) == factor.shape and np.abs(factor).max() <= 1 / 8
    np.testing.assert_allclose(np.quantile(factor, [0, 0.25, 0.5, 0.75, 1]) * 8, [-1, -0.5, 0, 0.5, 1], atol=0.03)
    for drawn in (kernel, factor):  # of every expert anew
        assert abs(np.corrcoef(drawn.reshape(2, -1))[0, 1]) < 0.05


def test_parts_of_experts_are_those_that_there_are():
    two = (Quantized(bits=2, group_size=8), Quantized(bits=4, group_size=8))
    for parts, part_of, said in (
        ((), (), "1 to 4 parts, not 0"),
        (two * 3, (0, 1, 2, 3, 4, 5), "parts, not 6"),
        (two, (0, 0), "must name"),
        (two, (0, 1, 2), "must name"),
    ):
        with pytest.raises(InputError, match=said.replace("4", str(MAX_PARTS))):
            Mixed(parts=parts, part_of=part_of)
    mixed = Mixed(parts=two, part_of=(1, 0, 1))
    with pytest.raises(InputError, match="of 3 experts, .* 4"):
        mixed.check_count(4)
    mixed.check_count(3)
    assert [mixed.of_expert(expert).form for expert in range(3)] == [two[1], two[0], two[1]]
    assert [mixed.of_expert(expert)[-1] for expert in range(3)] == [0, 0, 1]
    assert [mixed.experts_of(part) for part in (0, 1)] == [[1], [0, 2]]


def test_positions_that_are_no_int32_are_refused():
    check_addressable((2**16, 2**15 - 1))
    with pytest.raises(InputError, match="2147483648 entries"):
        check_addressable((2**16, 2**15))


def test_a_joint_factor_is_multiplied_once_for_each_matrix():
    form, expert = JointLowRank(rank=3), FFNConfig(dim=48)
    # One factor [r, f] of the neurons, and one [d, r] of each of three matrices.
    assert form.multiplied_entries(expert, 32) == 3 * (48 + 3 * 32)


def test_a_name_stands_for_one_form():
    with pytest.raises(ValueError, match="'full' is registered"):
        register("full")(Full)
