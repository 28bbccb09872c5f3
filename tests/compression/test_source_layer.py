"""Experts as methods read them, against their leaves."""

import ml_dtypes
import numpy as np
import pytest

from moe_jax.compression import source_layer
from moe_jax.compression.methods.narrower import routed_biases, routed_kernels, write_universal
from moe_jax.compression.source_layer import (
    LARGEST_WEIGHT,
    SourceLayer,
    aligned_biases,
    aligned_experts,
    aligned_kernels,
    check_weights,
    design_matrices,
    mean_kernel,
    unaligned,
)
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig
from tests.support.dense_models import write_model
from tests.support.moe_models import memory_moe

D, F, E = 16, 24, 3
SHAPES = {"gated": {"d_model": D, "dim": F}, "plain": {"d_model": D, "dim": F, "gated": False, "bias": True}}


def layer_of(shape: str, bank: BankConfig | None = None, **how) -> SourceLayer:
    source = memory_moe(bank or BankConfig(), noise=1.0, shape=SHAPES[shape], num_experts=E, **how)
    random = np.random.default_rng(0)
    for path, leaf in source.leaves.items():
        if path.endswith("/bias"):
            source.leaves[path] = random.standard_normal(leaf.shape).astype(leaf.dtype)
    return SourceLayer(source, 0)


def leaves_of(layer: SourceLayer) -> dict[str, np.ndarray]:
    return {path.removeprefix("experts/"): layer.leaf(path) for path in layer.leaves if path.startswith("experts/")}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_design_matrix_has_a_row_for_every_neuron(shape, monkeypatch):
    monkeypatch.setattr(source_layer, "_SQUARE", 5)  # several squares, the last ones not whole
    layer = layer_of(shape)
    leaves, designs = leaves_of(layer), design_matrices(layer)
    assert len(designs) == E
    for e, design in enumerate(designs):
        if shape == "gated":
            columns = [leaves["gate/kernel"][e].T, leaves["up/kernel"][e].T, leaves["down/kernel"][e]]
        else:
            columns = [leaves["up/kernel"][e].T, leaves["up/bias"][e][:, None], leaves["down/kernel"][e]]
        np.testing.assert_array_equal(design, np.concatenate(columns, axis=1))


def test_neurons_take_their_biases_with_them():
    layer, random = layer_of("plain"), np.random.default_rng(1)
    orders, leaves = np.stack([random.permutation(F) for _ in range(E)]), leaves_of(layer)
    up, down = (list(aligned_kernels(layer, name, orders)) for name in ("up", "down"))
    for e, (order, both) in enumerate(zip(orders, aligned_experts(layer, orders), strict=True)):
        np.testing.assert_array_equal(up[e], leaves["up/kernel"][e][:, order])
        np.testing.assert_array_equal(down[e], leaves["down/kernel"][e][order])
        assert np.array_equal(both["up"], up[e]) and np.array_equal(both["down"], down[e])
        np.testing.assert_array_equal(aligned_biases(layer, "up", orders)[e], leaves["up/bias"][e][order])
    # An output bias belongs to no neuron; and without orders everything is where it was.
    np.testing.assert_array_equal(aligned_biases(layer, "down", orders), leaves["down/bias"])
    np.testing.assert_array_equal(aligned_biases(layer, "up", None), leaves["up/bias"])
    assert aligned_biases(layer_of("gated"), "up", orders) is None
    assert unaligned(layer).tolist() == [[*range(F)]] * E


def test_the_mean_is_added_up_in_float32():
    kernels = [
        np.full((2, 3), value, ml_dtypes.bfloat16) for value in (256, 1, 1)
    ]  # where bfloat16 would lose the ones
    found = mean_kernel(iter(kernels))
    assert found.dtype == np.float32 and np.all(found == np.float32(86))
    assert np.all(kernels[0] == 256)


def test_weights_are_not_so_large_that_sums_of_their_squares_are_none():
    """Of 10^8 of them, in float32."""
    assert LARGEST_WEIGHT**2 * 1e8 < np.finfo(np.float32).max
    largest = np.float32([[1, -LARGEST_WEIGHT]])
    assert check_weights("it", largest) is largest
    for wrong, said in (
        (np.nextafter(np.float32(LARGEST_WEIGHT), np.float32(np.inf)), "too large"),
        (np.nan, "finite"),
    ):
        with pytest.raises(InputError, match=f"^it: .*{said}"):
            check_weights("it", np.float32([[1, -wrong]]))


def test_a_leaf_is_kept_until_the_next_one_is_read(monkeypatch):
    layer, read = layer_of("gated"), []
    whole = layer._source.read
    monkeypatch.setattr(layer._source, "read", lambda path: read.append(path) or whole(path))
    for _ in range(2):
        assert len([*layer.kernels("up")]) == E
    assert len(read) == 1
    assert len([*layer.kernels("down")]) == E and len([*layer.kernels("up")]) == E
    assert len(read) == 3
    layer.forget()
    assert len([*layer.kernels("up")]) == E and len(read) == 4


@pytest.mark.parametrize("shape", SHAPES)
def test_an_ffn_for_all_tokens_is_the_last_expert_of_the_bank_and_is_written_on_its_own(shape):
    layer = layer_of(shape, bank=BankConfig(kind="low-rank", rank=2), universal="med", extended=True)
    written: dict[str, np.ndarray] = {}
    write_universal(layer, written.__setitem__)
    kinds = ["kernel", "bias"] if shape == "plain" else ["kernel"]
    assert written.keys() == {f"universal/{name}/{kind}" for name in layer.shapes for kind in kinds}
    for name in layer.shapes:
        whole, kernels = [*layer.kernels(name)], [*routed_kernels(layer, name)]
        assert len(whole) == E + 1 and len(kernels) == E
        np.testing.assert_array_equal(written[f"universal/{name}/kernel"], whole[-1])
        np.testing.assert_array_equal(kernels, whole[:-1])
        if shape == "plain":
            np.testing.assert_array_equal(written[f"universal/{name}/bias"], layer.biases(name)[-1])
            np.testing.assert_array_equal(routed_biases(layer, name), layer.biases(name)[:-1])
    alone = layer_of(shape)
    write_universal(alone, written.__delitem__)  # which would fail
    assert len([*routed_kernels(alone, "up")]) == E


def test_kernels_of_a_large_leaf_are_read_one_after_another(tmp_path, monkeypatch):
    """From a model on the disk, and the leaf is not read as a whole."""
    memory = memory_moe(BankConfig(), noise=1.0, shape=SHAPES["gated"], num_experts=E)
    source, whole = ModelDirectory(write_model(tmp_path / "moe", memory.config, memory.leaves)), []
    monkeypatch.setattr(source_layer, "LARGE_LEAF", 1)
    monkeypatch.setattr(ModelDirectory, "read", lambda self, path: whole.append(path))
    kernels = list(SourceLayer(source, 0).kernels("down"))
    np.testing.assert_array_equal(np.stack(kernels), memory.leaves["layers/0/mlp/experts/down/kernel"])
    assert not whole
