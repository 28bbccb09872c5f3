"""Sparse deltas: which entries are kept, and that the rescaled ones are right on average."""

import math

import numpy as np
import pytest

from moe_jax.compression.methods.deltas import Sparsify
from moe_jax.compression.methods.interface import Base
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.models import BankConfig
from tests.support.moe_models import EXPERTS, memory_moe
from tests.support.numerics import from_csr

SHAPE = {"d_model": 16, "dim": 24}
SIZE = SHAPE["d_model"] * SHAPE["dim"]
PLACES = ("mask", "rows", "columns", "row_ends")


def compressed(source, method, index=0):
    """Leaves of a compressed layer, its config and figures, and kernels and base of the `up` matrix."""
    layer = SourceLayer(source, index)
    target = method.plan([layer], {})[index]
    leaves = {}
    base = Base(layer, None)
    figures = method.compress(layer, base, target, leaves.__setitem__, {})
    return leaves, target, figures, np.stack(list(layer.kernels("up"))), base.kernel("up")


def deltas(leaves, name="up") -> np.ndarray:
    """Dense deltas [E, in, out] from the leaves of a sparse bank."""
    base, at = leaves[f"experts/base/{name}/kernel"], f"experts/delta/{name}"
    values = leaves[f"{at}/values"]
    dense = np.zeros((len(values), base.size), np.float32)
    for e in range(len(values)):
        positions = positions_of({leaf: leaves[f"{at}/{leaf}"][e] for leaf in PLACES if f"{at}/{leaf}" in leaves}, base)
        assert (np.diff(positions) > 0).all()  # distinct and sorted
        dense[e, positions] = values[e]
    return dense.reshape(-1, *base.shape)


def positions_of(places, kernel) -> np.ndarray:
    """Flat positions of the entries of one expert."""
    if "mask" in places:
        return np.flatnonzero(np.unpackbits(places["mask"], axis=1, count=kernel.shape[1], bitorder="little"))
    if "rows" in places:
        return places["rows"].astype(int) * kernel.shape[1] + places["columns"]
    return from_csr(places["columns"], places["row_ends"], kernel.shape)


@pytest.fixture(scope="module")
def source():
    return memory_moe(BankConfig(), shape=SHAPE)


def test_exact_counts(source):
    for drop in (0.0, 0.3, 0.9):
        leaves, target, _, kernels, base = compressed(source, Sparsify(drop=drop, keep="exact"))
        assert target.bank == BankConfig(kind="sparse", rate=drop, encoding="bitmap")
        count = round(SIZE * (1 - drop))
        for name in ("gate", "up", "down"):
            assert leaves[f"experts/delta/{name}/values"].shape == (EXPERTS, count)
            assert leaves[f"experts/delta/{name}/mask"].dtype == np.uint8
        kept = deltas(leaves)
        assert (np.count_nonzero(kept, axis=(1, 2)) == count).all()
        np.testing.assert_allclose(kept[kept != 0], ((kernels - base) * SIZE / count)[kept != 0], rtol=1e-6)


@pytest.mark.parametrize("keep", ["random", "exact", "magnitude"])
@pytest.mark.parametrize(
    ("drop", "places", "leaves_of_places"),
    [(0.5, "bitmap", {"mask"}), (0.97, "csr", {"columns", "row_ends"}), (0.999, "coo", {"columns", "rows"})],
)
def test_places_take_the_fewest_bytes(keep, drop, places, leaves_of_places):
    """A bit for every entry, a column for every kept one, or its row, too: by how many are kept."""
    wide = memory_moe(BankConfig(), shape={"d_model": 256, "dim": 256})
    leaves, target, _, kernels, base = compressed(wide, Sparsify(drop=drop, keep=keep))
    assert target.bank.form.encoding == places
    at = "experts/delta/up/"
    assert {path.removeprefix(at) for path in leaves if path.startswith(at)} == {"values", *leaves_of_places}
    stored = sum(leaf.nbytes for path, leaf in leaves.items() if path.split("/")[-1] in PLACES)
    count = leaves[f"{at}values"].shape[1]
    sizes = {
        "bitmap": 3 * 256 * 256 // 8,
        "csr": 3 * (2 * count + 4 * 256),
        "coo": 3 * 4 * count,
    }
    assert stored == EXPERTS * sizes[places] == EXPERTS * min(sizes.values())
    kept, factor = deltas(leaves), {"random": 1 / (1 - drop), "exact": base.size / count, "magnitude": 1}[keep]
    np.testing.assert_allclose(kept[kept != 0], ((kernels - base) * factor)[kept != 0], rtol=1e-5)


def test_magnitude_keeps_the_largest_as_they_are(source):
    leaves, _, figures, kernels, base = compressed(source, Sparsify(drop=0.9, keep="magnitude"))
    kept, delta = deltas(leaves), kernels - base
    for e in range(EXPERTS):
        assert np.abs(delta[e][kept[e] == 0]).max() <= np.abs(kept[e][kept[e] != 0]).min()
    assert np.array_equal(kept[kept != 0], delta[kept != 0])
    others = [compressed(source, Sparsify(drop=0.9, keep=keep))[2] for keep in ("random", "exact")]
    assert figures.delta_error < 1 < min(other.delta_error for other in others)


def test_random_keeps_binomial_counts_in_room_for_the_largest(source):
    drop = 0.8
    leaves, target, _, kernels, base = compressed(source, Sparsify(drop=drop))
    counts = np.stack([np.count_nonzero(deltas(leaves, name), axis=(1, 2)) for name in ("gate", "up", "down")])
    assert target.bank.form.entries == counts.max() and len(set(counts.reshape(-1))) > 1
    deviation = math.sqrt(SIZE * drop * (1 - drop))
    assert (np.abs(counts - SIZE * (1 - drop)) < 5 * deviation).all()
    kept = deltas(leaves)
    np.testing.assert_allclose(kept[kept != 0], ((kernels - base) / (1 - drop))[kept != 0], rtol=1e-5)


@pytest.mark.parametrize("keep", ["random", "exact"])
def test_random_entries_are_right_on_average(source, keep):
    draws, drop = 100, 0.5
    total = 0.0
    for seed in range(draws):
        leaves, _, figures, kernels, base = compressed(source, Sparsify(drop=drop, keep=keep, seed=seed))
        total = total + deltas(leaves)
    # Of an entry kept with probability 1/2 and doubled the standard deviation is its own size.
    delta = kernels - base
    z = (total / draws - delta) / (np.abs(delta) / math.sqrt(draws))
    assert np.abs(z).max() < 5 and 0.9 < z.std() < 1.1
    # DARE's squared error is p / (1 - p) of the delta's.
    assert figures.delta_error == pytest.approx(math.sqrt(drop / (1 - drop)), rel=0.1)


def test_draws_depend_on_seed_layer_matrix_and_expert_only():
    one, two = memory_moe(BankConfig(), shape=SHAPE), memory_moe(BankConfig(), BankConfig(), shape=SHAPE)
    method = Sparsify(drop=0.7, keep="exact")
    alone, first, second = compressed(one, method)[0], compressed(two, method)[0], compressed(two, method, 1)[0]
    places = {"alone": alone, "first": first, "second": second}
    places["seed"] = compressed(one, Sparsify(drop=0.7, keep="exact", seed=1))[0]
    masks = {name: leaves["experts/delta/up/mask"] for name, leaves in places.items()}
    assert np.array_equal(masks["alone"], masks["first"])
    assert not np.array_equal(masks["first"], masks["second"])
    assert not np.array_equal(masks["alone"], masks["seed"])
    assert not np.array_equal(masks["alone"][0], masks["alone"][1])
    assert not np.array_equal(masks["alone"], alone["experts/delta/gate/mask"])


def test_room_is_the_same_in_layers_of_equal_shape():
    source = memory_moe(BankConfig(), BankConfig(), BankConfig(), shape=SHAPE)
    layers = [SourceLayer(source, i) for i in range(3)]
    method = Sparsify(drop=0.8)
    together = method.plan(layers, {})
    assert len({together[i].bank.form.entries for i in range(3)}) == 1
    alone = (method.plan([layer], {})[layer.index].bank.form.entries for layer in layers)
    assert together[0].bank.form.entries == max(alone)


def test_nothing_kept_is_still_a_model():
    leaves, target, figures, *_ = compressed(memory_moe(BankConfig(), shape=SHAPE), Sparsify(drop=0.99999))
    assert target.bank.form.entries == 1 and not deltas(leaves).any()
    assert figures.delta_error == pytest.approx(1.0)


def test_values_that_overflow_are_refused():
    source = memory_moe(BankConfig(), shape=SHAPE)
    up = source.leaves["layers/0/mlp/experts/up/kernel"].astype(np.float16)
    up[1, 0, 0] = 60000
    source.leaves["layers/0/mlp/experts/up/kernel"] = up
    with pytest.raises(InputError, match="values .* expert . in layer 0 are .* for float16"):
        for seed in range(40):
            compressed(source, Sparsify(drop=0.9, seed=seed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 1.0}, "drop=1 must lie in [0, 1)"),
        ({"drop": -0.1}, "drop=-0.1 must lie in [0, 1)"),
        ({"drop": float("nan")}, "drop=nan must lie in [0, 1)"),
        ({"drop": 0.5, "keep": "magnitude", "seed": 3}, "seed=3"),
        ({"drop": 0.5, "keep": "magnitud"}, "unknown keep 'magnitud' (did you mean 'magnitude'?)"),
        ({"drop": 0.5, "seed": -1}, "seed=-1 must not be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError) as caught:
        Sparsify(**options)
    assert message in str(caught.value)
