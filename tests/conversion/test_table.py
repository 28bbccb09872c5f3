"""Tables: true-size names and shapes, and that every transform reads both ways."""

import itertools
import json
import math
import pathlib
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.conversion import read_hf_config
from moe_jax.conversion.families import FAMILIES
from moe_jax.conversion.table import FUSED, LAYOUTS, PER_EXPERT, Heads, Row, apply_table, detect_layout, linear
from moe_jax.conversion.tensors import copy_transposed
from moe_jax.core.errors import InputError
from tests.support.hf_checkpoints import CONFIGS, DTYPES, expected_tensors

TEMPLATES = {
    "01-ai__Yi-34B": "derived",
    "Qwen__Qwen3-30B-A3B": "derived",
    "allenai__OLMoE-1B-7B-0924": "derived",
    "deepseek-ai__deepseek-coder-1.3b-base": "derived",
    "meta-llama__Llama-2-13b-hf": "as_found",
    "meta-llama__Llama-2-7b-hf": "as_found",
    "mistralai__Mixtral-8x7B-v0.1": "as_found",
    "stabilityai__stablelm-2-1_6b": "derived",
}


@pytest.mark.parametrize(("name", "folder"), TEMPLATES.items())
def test_names_and_shapes_of_true_checkpoints(data_dir: pathlib.Path, name: str, folder: str):
    config = json.loads((data_dir / "configs" / folder / f"{name}.json").read_text())
    template = json.loads((data_dir / "configs" / "weight_names_derived" / f"{name}.json").read_text())
    expected = {}
    for tensor in template["tensors"]:
        ranges = {letter: range(*bounds) for letter, bounds in tensor["ranges"].items()}
        for numbers in itertools.product(*ranges.values()):
            expected[tensor["name"].format(**dict(zip(ranges, numbers, strict=True)))] = tuple(tensor["shape"])
    assert len(expected) == template["num_tensors"]
    assert expected_tensors(config) == expected
    assert sum(map(math.prod, expected.values())) == template["total_parameters"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_of_tensors_and_leaves_is_covered_once(name: str, layout: str):
    from moe_jax.model_io.loading import leaf_specs

    config = read_hf_config(CONFIGS[name])
    leaves = leaf_specs(config)
    mapped = apply_table(
        FAMILIES[config.family].table,
        leaves,
        config.num_layers,
        layout,
        config.family,
        num_encoder_layers=config.num_encoder_layers,
    )
    assert mapped.pieces.keys() == leaves.keys()
    covered = {tensor: np.zeros(math.prod(shape), int) for tensor, shape in mapped.tensors.items()}
    for leaf, pieces in mapped.pieces.items():
        assert sum(math.prod(piece.shape) for piece in pieces) == math.prod(leaves[leaf].shape)
        assert [piece.expert for piece in pieces] == ([None] if pieces[0].expert is None else list(range(len(pieces))))
        for piece in pieces:
            # Of n leaves that take turns, each has every n-th element.
            first, step = (piece.turns.index(leaf), len(piece.turns)) if piece.turns else (0, 1)
            run = slice(piece.offset + first, piece.offset + step * math.prod(piece.shape), step)
            covered[piece.tensor][run] += 1
    assert all((count == 1).all() for count in covered.values())


def test_fused_experts_have_the_shapes_of_transformers_5():
    tensors = expected_tensors(CONFIGS["mixtral"], FUSED)
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"] == (4, 2 * 48, 32)
    assert tensors["model.layers.1.mlp.experts.down_proj"] == (4, 32, 48)
    assert tensors["model.layers.1.mlp.gate.weight"] == (4, 32)
    assert not any("block_sparse_moe" in name for name in tensors)


def test_tensors_come_layer_by_layer():
    layers = [int(name.split(".")[2]) for name in expected_tensors(CONFIGS["mixtral"]) if "layers" in name]
    assert layers == sorted(layers)


class Shape:
    def __init__(self, *shape: int):
        self.shape = shape


def test_a_leaf_without_a_tensor_is_an_error():
    with pytest.raises(InputError, match="'toy' cannot hold"):
        apply_table(linear("x", "b"), {"a/bias": Shape(3)}, 1, PER_EXPERT, "toy", num_encoder_layers=0)


def test_a_layout_is_told_from_the_names():
    table = FAMILIES["mixtral"].table
    assert detect_layout(table, expected_tensors(CONFIGS["mixtral"], PER_EXPERT)) == PER_EXPERT
    assert detect_layout(table, expected_tensors(CONFIGS["mixtral"], FUSED)) == FUSED
    assert detect_layout(table, []) == PER_EXPERT
    assert detect_layout(FAMILIES["llama"].table, expected_tensors(CONFIGS["llama"])) == PER_EXPERT
    both = [*expected_tensors(CONFIGS["mixtral"], PER_EXPERT), *expected_tensors(CONFIGS["mixtral"], FUSED)]
    with pytest.raises(InputError, match="mixes two layouts"):
        detect_layout(table, both)


def gathered(mapped, leaves: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Leaves from tensors, as the pieces say, written as plainly as possible."""
    out = {path: np.zeros(leaf.shape, int) for path, leaf in leaves.items()}
    for path, pieces in mapped.pieces.items():
        for piece in pieces:
            run = tensors[piece.tensor].reshape(-1)[piece.offset : piece.offset + math.prod(piece.shape)]
            run = run.reshape(piece.shape)
            run = run.swapaxes(-1, -2) if piece.transpose else run
            out[path][... if piece.expert is None else piece.expert] = run
    return out


@settings(deadline=None, max_examples=60)
@given(
    experts=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    width=st.integers(1, 5),
    transpose=st.booleans(),
    per_expert=st.booleans(),
)
def test_rename_transpose_stack_and_join_are_what_numpy_says(
    experts: int, sizes: list[int], width: int, transpose: bool, per_expert: bool
):
    """Leaves of several row counts joined into one tensor, stacked over experts or not."""
    rng = np.random.default_rng(0)
    foreign = [rng.integers(0, 1000, (experts, size, width)) for size in sizes]  # as [E, rows, columns]
    ours = [part.swapaxes(1, 2) if transpose else part for part in foreign]
    leaves = {f"layers/0/mlp/experts/{i}/kernel": Shape(*leaf.shape) for i, leaf in enumerate(ours)}
    row = Row(
        "t.{i}.{e}" if per_expert else "t.{i}", tuple(path.replace("/0/", "/{i}/", 1) for path in leaves), transpose
    )
    joined = np.concatenate(foreign, axis=1)
    tensors = {f"t.0.{e}": joined[e] for e in range(experts)} if per_expert else {"t.0": joined}
    mapped = apply_table((row,), leaves, 1, PER_EXPERT, "toy", num_encoder_layers=0)
    assert mapped.tensors == {name: tensor.shape for name, tensor in tensors.items()}
    for leaf, expected in zip(gathered(mapped, leaves, tensors).values(), ours, strict=True):
        assert np.array_equal(leaf, expected)


@given(
    heads=st.integers(1, 4), first=st.integers(1, 4), second=st.integers(1, 4), rows=st.integers(1, 4),
    transpose=st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_columns_of_every_head_are_stacked(
    heads: int, first: int, second: int, rows: int, transpose: tuple[bool, bool]
):
    """A leaf in two tensors, which have the first and the last columns of its heads."""
    leaf = np.arange(rows * heads * (first + second)).reshape(rows, heads, first + second)
    parts = {"t.0.a": leaf[..., :first], "t.0.b": leaf[..., first:]}
    tensors = {
        name: part.transpose(1, 2, 0) if turned else part.swapaxes(0, 1)
        for (name, part), turned in zip(parts.items(), transpose, strict=True)
    }
    ends = ((0, first), (first, first + second))
    table = tuple(
        Row(name.replace("0", "{i}"), "layers/{i}/w", turned, heads=Heads(heads, first + second, *end))
        for name, turned, end in zip(parts, transpose, ends, strict=True)
    )
    leaves = {"layers/0/w": Shape(rows, heads * (first + second))}
    mapped = apply_table(table, leaves, 1, PER_EXPERT, "toy", num_encoder_layers=0)
    assert mapped.tensors == {name: tensor.shape for name, tensor in tensors.items()}
    filled = np.full(leaves["layers/0/w"].shape, -1)
    for piece in mapped.pieces["layers/0/w"]:
        run = tensors[piece.tensor].reshape(-1)[piece.offset :][: math.prod(piece.shape)].reshape(piece.shape)
        assert piece.columns is not None
        filled[:, slice(*piece.columns)] = run.T if piece.transpose else run
    assert np.array_equal(filled, leaf.reshape(rows, -1))


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 600),
    m=st.integers(1, 600),
    dtype=st.sampled_from(sorted(DTYPES)),
    strided=st.booleans(),
)
def test_copy_transposed_is_a_transpose(n: int, m: int, dtype: str, strided: bool):
    bits = np.random.default_rng(n * 601 + m).integers(0, 256, (n, m, np.dtype(DTYPES[dtype]).itemsize), np.uint8)
    source = bits.view(DTYPES[dtype])[..., 0]
    out = np.zeros((m, 2 * n), DTYPES[dtype])[:, :n] if strided else np.zeros((m, n), DTYPES[dtype])
    copy_transposed(source, out)
    assert out.tobytes() == np.ascontiguousarray(source.T).tobytes()  # NaNs keep their bits


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.classifier is not None])
def test_the_table_of_a_classifier_has_all_but_the_language_models_head(name):
    family = FAMILIES[name]
    assert family.classifier is not None
    table = family.table_of(types.SimpleNamespace(num_classes=3))
    rows = {str(row.leaves): row.tensor for row in table if isinstance(row, Row)}
    heads = {str(row.leaves) for row in family.classifier.head if isinstance(row, Row)}
    prefix = family.classifier.prefix
    expected = {
        str(row.leaves): prefix + row.tensor
        for row in family.table
        if isinstance(row, Row) and "lm_head" not in str(row.leaves)
    }
    assert expected and heads and {leaf: rows[leaf] for leaf in expected} == expected
    assert rows.keys() == expected.keys() | heads
