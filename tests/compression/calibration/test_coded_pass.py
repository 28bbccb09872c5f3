"""The pass over a text by a model whose layers are put in codes: what it knows of inputs, and both losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.checks.streamed_layers import apply_final_norm, apply_layer, linear_inputs
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.coded_pass import CodedPass
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.tiers import one_in


@pytest.fixture(scope="module")
def source(models):
    return ModelDirectory(models["moe"])


@pytest.fixture(scope="module")
def rows(source):
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, (3, 12)).astype(np.int32)
    return CalibrationRows.of_windows(ids)


@pytest.fixture
def begun(source, rows, tmp_path):
    return CodedPass(source, rows, tmp_path, mesh=make_mesh({}, jax.devices()[:1]), batch_size=2)


def changed_leaves(source: ModelDirectory, layer: int) -> dict[str, np.ndarray]:
    """The kernels of a layer as coarse codes would have them."""
    paths = [path for path in source.specs() if path.startswith(f"layers/{layer}/") and path.endswith("/kernel")]
    return {path: np.round(source.read(path) * 8) / 8 for path in paths if "/router/" not in path}


def nll(decoder, rows: CalibrationRows) -> float:
    logits = np.asarray(logits_of(decoder, rows.tokens), np.float64)[:, :-1]
    told = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    told -= logits.max(-1, keepdims=True)
    return float(-np.take_along_axis(told, rows.tokens[:, 1:, None], -1).mean())


@one_in(2)
@pytest.mark.parametrize("whole_layers", [(1,), (0,)])
def test_knows_inputs_in_codes_and_both_losses(source, rows, begun, whole_layers):
    """Every moment is that of the inputs which a layer is given by those before it, as they are in codes.

    A layer that stays whole is given them, too.
    """
    config, x = source.config, None
    every: dict[str, np.ndarray] = {}
    for layer in range(config.num_layers):
        begun.begin(layer)
        if x is None:
            x = source.read("embed/embedding")[rows.tokens]
        prefix = f"layers/{layer}/"
        own = {path.removeprefix(prefix): source.read(path) for path in source.specs() if path.startswith(prefix)}
        placed = jax.tree.map(jnp.asarray, own)
        _, seen = apply_layer(config, config.layers[layer], placed, jnp.asarray(x), None, linear_inputs)
        assert {one.path for one in seen} >= {f"attention/{name}" for name in "qkvo"}
        for one in seen:
            flat = np.asarray(one.x, np.float64).reshape(-1, one.x.shape[-1])
            found = next(begun.moments(f"{prefix}{one.path}/kernel"))
            np.testing.assert_allclose(found, flat.T @ flat, rtol=1e-4, atol=1e-4 * np.abs(flat.T @ flat).max())
            np.testing.assert_array_equal(next(begun.squares(f"{prefix}{one.path}/kernel")), np.diagonal(found))
        if layer in config.moe_layers:
            path = f"{prefix}mlp/experts/down/kernel"
            for squares, moment in zip(begun.squares(path), begun.moments(path), strict=True):
                np.testing.assert_allclose(squares, np.diagonal(moment), rtol=1e-4)
                assert squares.shape == (config.moe(layer).expert.dim,)
        decoded = {} if layer in whole_layers else changed_leaves(source, layer)
        every |= decoded
        begun.finish(decoded)
        changed = placed | {path.removeprefix(prefix): jnp.asarray(leaf) for path, leaf in decoded.items()}
        x, _ = apply_layer(config, config.layers[layer], changed, jnp.asarray(x), None, lambda block: [])
    assert begun.next == config.num_layers
    before, after = begun.losses({})
    coded = MemorySource(config, {path: source.read(path) for path in source.specs()} | every)
    assert before == pytest.approx(nll(load_model(source), rows), rel=1e-5)
    assert after == pytest.approx(nll(load_model(coded), rows), rel=1e-5)
    given = apply_final_norm(config, {path: source.read(path) for path in source.specs()}, jnp.asarray(x))
    flat = np.asarray(given, np.float64).reshape(-1, config.d_model)
    np.testing.assert_allclose(next(begun.moments("lm_head/kernel")), flat.T @ flat, rtol=1e-4, atol=1e-3)


def test_experts_count_the_tokens_that_are_routed_to_them(source, rows, begun):
    layer = source.config.moe_layers[0]
    assert layer == 0
    begun.begin(0)
    moments = list(begun.moments("layers/0/mlp/experts/up/kernel"))
    assert len(moments) == source.config.moe(0).num_experts
    # Each has the weight of its own tokens, and of some of all: traces differ, and none is nothing.
    traces = [float(np.trace(moment)) for moment in moments]
    assert min(traces) > 0 and len({round(trace, 6) for trace in traces}) == len(traces)


def test_goes_on_where_it_was_stopped(source, rows, tmp_path):
    how = {"mesh": make_mesh({}, jax.devices()[:1]), "batch_size": 2}
    losses = []
    for stops in (False, True):
        folder = tmp_path / str(stops)
        folder.mkdir()
        begun = CodedPass(source, rows, folder, **how)
        for layer in range(source.config.num_layers):
            if stops:  # as if it was killed after the layer was begun
                begun.begin(layer)
                begun = CodedPass(source, rows, folder, **how)
                assert begun.next == layer
            begun.begin(layer)
            begun.finish(changed_leaves(source, layer))
        losses.append(begun.losses({}))
    assert losses[0] == losses[1]


def test_activations_that_are_not_finite_are_told(source, begun):
    begun.begin(0)
    decoded = {path: np.full_like(leaf, np.inf) for path, leaf in changed_leaves(source, 0).items()}
    with pytest.raises(InputError, match="layer 0 gives"):
        begun.finish(decoded)
