"""The step: the same on every mesh, accumulated or not; frozen parameters have neither gradient nor moments."""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.data.sections import DataSection
from moe_jax.distributed.sharding import local_rows, make_mesh, path_name, place, state_shardings, undivided_experts
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig
from moe_jax.nn import Decoder
from moe_jax.peft import split_model
from moe_jax.planning.compile_only import bytes_of, compiled_step
from moe_jax.training import program as program_module
from moe_jax.training.program import Program, first_state, make_program
from moe_jax.training.recipe import (
    EmaSection,
    MeshSection,
    ModelSection,
    PartitionSection,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from moe_jax.training.step import StepMetrics, make_step, step_key, updated_params
from moe_jax.training.train_state import TrainState
from tests.support.losses import token_losses
from tests.support.numerics import initialised
from tests.support.tiers import EVERY, long, one_in
from tests.support.training_models import ATTENTION, BANKS, FFN, config_of, moe, recipe_of


def random_batch(seed: int, rows: int = 8, length: int = 16) -> dict[str, np.ndarray]:
    """Packed rows of two documents, with padding at the end and some targets that are not scored."""
    rng = np.random.default_rng(seed)
    cut = rng.integers(3, 9, (rows, 1))
    end = rng.integers(10, length + 1, (rows, 1))
    index = np.arange(length)[None]
    inside = index < end
    return {
        "tokens": (rng.integers(0, 256, (rows, length)) * inside).astype(np.int32),
        "targets": (rng.integers(0, 256, (rows, length)) * inside).astype(np.int32),
        "weights": (rng.random((rows, length)) < 0.8).astype(np.float32) * inside.astype(np.float32),
        "segment_ids": np.where(inside, 1 + (index >= cut), 0).astype(np.int32),
        "positions": np.where(inside, index - cut * (index >= cut), 0).astype(np.int32),
    }


@functools.cache
def drawn(config: ModelConfig) -> nnx.State:
    """Parameters of a model as NumPy arrays, drawn once; by NumPy where all are floats, which compiles nothing."""

    def make() -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(0))

    are_floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(nnx.eval_shape(make)))
    state = nnx.state(initialised(make)) if are_floats else jax.jit(lambda: nnx.state(make()))()
    return jax.tree.map(np.asarray, state)


def initial_states(program: Program) -> tuple[nnx.State, nnx.State]:
    """Trained and frozen parameters before the first step, where the program wants them."""
    state = drawn(program.config)
    # A step donates what it is given.
    placed = jax.device_put(jax.tree.map(np.copy, state), state_shardings(state, program.mesh))
    _, params, frozen = split_model(nnx.merge(nnx.graphdef(program.model), placed), program.trainable)
    return params, frozen


def numbers(metrics: StepMetrics) -> list[float]:
    shown = (metrics.loss, metrics.auxiliary, metrics.grad_norm, metrics.scored)
    assert all(number.dtype == jnp.float32 for number in shown)
    return [float(number) for number in (*shown, metrics.tokens)]


def run(recipe: Recipe, config: ModelConfig, *, devices: int = 1, steps: int = 3, kept=None):
    """Losses of a few steps, with the program, the state and the frozen parameters after them.

    The state before each step, as a checkpoint would keep it, is added to the list `kept`.
    """
    program = make_program(recipe, config, jax.devices()[:devices])
    rows = recipe.train.batch_size
    records = []
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        state = first_state(program, params)
        for step in range(steps):
            if kept is not None:
                kept.append(jax.tree.map(np.array, state))
            batch = place(random_batch(step, rows), local_rows(program.mesh, rows), program.mesh, rows)
            state, metrics = program.step(state, frozen, batch)
            records.append(numbers(metrics))
    return np.array(records), program, state, frozen


def largest_difference(a, b) -> float:
    differences = jax.tree.map(lambda x, y: float(np.max(np.abs(np.asarray(x) - np.asarray(y)))), a, b)
    return max(jax.tree.leaves(differences))


PLAIN = FFNConfig(dim=32, gated=False, bias=True)
SOME = PartitionSection(train=(".*/mlp/.*", "embed/.*"))  # a kernel of every rank: fewer gradients compile faster
NOISE = {"low-rank": dict(universal="coder", cv_coef=0.01)}  # in the router
BY_KIND = {kind: dataclasses.replace(moe(bank, **NOISE.get(kind, {})), expert=PLAIN) for kind, bank in BANKS.items()}
EVERYTHING = config_of(PLAIN, *BY_KIND.values())
TWO_LAYERS = config_of(BY_KIND["full"], BY_KIND["full"])


@pytest.fixture(scope="module")
def two_layers():
    return run(recipe_of(), TWO_LAYERS)


@one_in(12, first=5)  # low-rank deltas on the second mesh; `nn/test_moe.py` has layers of every kind over meshes
@pytest.mark.parametrize(
    "mesh",
    [
        MeshSection(data=2, fsdp=4),
        MeshSection(fsdp=1, expert=2, sequence=2, tensor=2),
        MeshSection(fsdp=2, expert=2, tensor=2),
        MeshSection(fsdp=2, sequence=4),
    ],
    ids=["data2-fsdp4", "expert2-sequence2-tensor2", "fsdp2-expert2-tensor2", "fsdp2-sequence4"],
)
def test_dense_and_moe_layers_of_every_kind_train_alike_on_every_mesh(one_device, mesh):
    records, _, state, _ = run(recipe_of(mesh=mesh), one_device[1].config, devices=8)
    np.testing.assert_allclose(records, one_device[0], atol=1e-4)
    assert largest_difference(state.params, one_device[2].params) < 1e-4


@pytest.fixture(scope="module", params=BY_KIND)
def one_device(request):
    """Three steps of an MoE, with `make test-all` after a dense layer, on one device; the state before the last."""
    kept = []
    layers = (PLAIN, BY_KIND[request.param])[0 if EVERY else 1 :]
    return *run(recipe_of(), config_of(*layers), kept=kept), kept[-1]


@long
def test_noise_is_the_same_after_an_interruption(one_device):
    records, program, state, frozen, before = one_device
    with jax.set_mesh(program.mesh):
        restored = jax.device_put(before, jax.tree.map(lambda leaf: leaf.sharding, program.state))
        continued, metrics = program.step(restored, frozen, random_batch(2))
    assert numbers(metrics) == records[2].tolist()
    assert largest_difference(continued.params, state.params) == 0.0


def test_the_loss_is_the_mean_over_scored_tokens_and_the_auxiliary_losses_are_reported(two_layers):
    records, program, _, frozen = two_layers
    batch = random_batch(0)
    params, _ = initial_states(program)
    model = nnx.merge(program.graphdef, params, frozen)
    out = nnx.jit(lambda model, tokens, **where: model(tokens, **where))(
        model, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]
    )
    losses = np.asarray(token_losses(out.logits, batch["targets"]))
    expected = (losses * batch["weights"]).sum() / batch["weights"].sum()
    np.testing.assert_allclose(records[0][0], expected, rtol=1e-5)
    assert records[0][3:].tolist() == [batch["weights"].sum(), (batch["segment_ids"] > 0).sum()]
    balance = sum(0.01 * float(jnp.sum(stats.balance)) for stats in out.router)
    np.testing.assert_allclose(records[0][1], balance, rtol=1e-5)
    assert balance > 0


def test_all_steps_of_a_run_are_one_program(monkeypatch):
    make = program_module._make_step
    monkeypatch.setattr(program_module, "_make_step", lambda *given: chex.assert_max_traces(make(*given), n=1))
    records, program, *_ = run(recipe_of(partition=SOME), config_of(PLAIN))
    assert len(records) == 3 and np.isfinite(records).all()
    with pytest.raises(AssertionError, match="traced > 1 times"), jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        program.step(first_state(program, params), frozen, random_batch(0, rows=2))


def test_without_a_score_the_router_is_trained_by_the_balance_loss_alone(two_layers):
    program = two_layers[1]
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        batch = random_batch(0) | {"weights": np.zeros((8, 16), np.float32)}
        batch = place(batch, local_rows(program.mesh, 8), program.mesh, 8)
        before = np.asarray(params["stack"]["segments"][0]["blocks"][0]["mlp"]["router"]["kernel"][...])
        state, metrics = program.step(first_state(program, params), frozen, batch)
    assert float(metrics.loss) == 0.0 and float(metrics.auxiliary) > 2 * 0.008 and float(metrics.grad_norm) > 0
    after = np.asarray(state.params["stack"]["segments"][0]["blocks"][0]["mlp"]["router"]["kernel"][...])
    assert np.abs(after - before).max() > 1e-5
    with jax.set_mesh(program.mesh):
        _, better = program.step(state, frozen, batch)
    assert float(better.auxiliary) < float(metrics.auxiliary)


@one_in(2, first=1)
@pytest.mark.parametrize(
    "mlp", [PLAIN, moe(balance_coef=0.5, z_coef=0.1, cv_coef=0.2)], ids=["dense", "auxiliary losses"]
)
def test_accumulation_of_4_times_2_equals_a_batch_of_8(mlp):
    """With losses that depend on the loads of all tokens, of which microbatches have different numbers."""
    config, accumulated = config_of(mlp), TrainSection(batch_size=8, accumulation=4)
    some = {} if EVERY else {"partition": SOME}
    whole, _, state, _ = run(recipe_of(train=TrainSection(batch_size=8), **some), config)
    parts, _, accumulated, _ = run(recipe_of(train=accumulated, **some), config)
    np.testing.assert_allclose(parts, whole, atol=1e-6, rtol=1e-6)
    assert largest_difference(accumulated.params, state.params) < 1e-6


@long
def test_a_microbatch_has_no_gradients_of_its_own():
    """Memory with four microbatches and with one of the same size: not even half of a layer's gradients waits."""
    layer = LayerConfig(attention=ATTENTION, mlp=FFNConfig(dim=2048))
    config = dataclasses.replace(config_of(FFN, d_model=256), layers=(layer,) * 6)

    def temporaries(accumulation: int) -> int:
        train = TrainSection(batch_size=4 * accumulation, accumulation=accumulation)
        program = make_program(recipe_of(train=train, mesh=MeshSection(fsdp=1)), config, jax.devices()[:1])
        return bytes_of(compiled_step(program, recipe_of(train=train)))["temporaries"]

    one_layer = 3 * 4 * 2048 * 256
    assert temporaries(4) - temporaries(1) < one_layer / 2


def test_sums_of_bfloat16_gradients_are_float32():
    model = ModelSection(config="c", init="random", param_dtype="bfloat16")
    train, some = TrainSection(batch_size=8), {"model": model, "partition": SOME}
    whole, *_ = run(recipe_of(train=train, **some), config_of(PLAIN), steps=1)
    parts, *_ = run(recipe_of(train=dataclasses.replace(train, accumulation=4), **some), config_of(PLAIN), steps=1)
    np.testing.assert_allclose(parts, whole, rtol=2.0**-8)


def test_every_seed_and_step_has_its_own_key():
    keys = {tuple(jax.random.key_data(step_key(seed, step)).tolist()) for seed in (0, 1) for step in (0, 1, 2)}
    assert len(keys) == 6


def test_a_step_without_a_seed_is_that_of_a_recipe_without_one():
    assert inspect.signature(make_step).parameters["seed"].default == recipe_of().seed


@long
def test_noise_differs_between_steps_and_microbatches():
    """A router of zeros has no logits but the noise, whose size shows in the z-loss."""
    config = config_of(dataclasses.replace(moe(universal="coder"), expert=PLAIN))

    def z_of(accumulation: int, *steps: int) -> list[float]:
        # Microbatches take every other row: here they are equal.
        batch = {name: np.repeat(array, accumulation, axis=0) for name, array in random_batch(0, rows=4).items()}
        train = TrainSection(batch_size=4 * accumulation, accumulation=accumulation)
        recipe = recipe_of(train=train, partition=PartitionSection(train=(".*/router/.*",)))
        program = make_program(recipe, config, jax.devices()[:1])
        found = []
        with jax.set_mesh(program.mesh):
            for step in steps:
                params, frozen = initial_states(program)
                zeroed = jax.tree_util.tree_map_with_path(
                    lambda path, leaf: leaf * 0 if "router" in path_name(path) else leaf, params
                )
                state = first_state(program, zeroed)._replace(step=jnp.int32(step))
                found.append(float(program.step(state, frozen, batch)[1].router[0].z[0]))
        return found

    first, second = z_of(1, 0, 1)
    assert abs(first - second) > 1e-4
    (mean,) = z_of(2, 0)
    assert abs(first - mean) > 1e-4  # of the same draw and another


def test_frozen_parameters_have_no_moments_and_do_not_move():
    freeze = ("embed/.*", ".*/attention/.*", ".*/router/.*")
    recipe = recipe_of(partition=PartitionSection(freeze=freeze), schedule=ScheduleSection(kind="constant"))
    config = config_of(moe(dataclasses.replace(BANKS["sparse"], train_base=False), expert=PLAIN))
    _, program, state, frozen = run(recipe, config, steps=2)
    trained = names(state.params)
    assert trained == names(program.state.params)
    assert not any("attention/" in name or "router" in name or "embed" in name or "/base/" in name for name in trained)
    assert any("/delta/up/values" in name for name in trained)
    moments = [name for name, leaf in leaves(state.opt_state) if leaf.ndim]
    assert sorted(moments) == sorted([f"mu/{name}" for name in trained] + [f"nu/{name}" for name in trained])
    untouched = initial_states(program)
    assert largest_difference(frozen, untouched[1]) == 0.0
    assert min_movement(state, untouched[0]) > 0.0


def test_the_average_keeps_less_of_itself_in_early_steps():
    kept = []
    _, _, state, _ = run(recipe_of(ema=EmaSection(decay=0.2), partition=SOME), config_of(PLAIN), steps=3, kept=kept)
    average = kept[0].params
    for step, now in enumerate([*kept[1:], jax.tree.map(np.asarray, state)], start=1):
        share = min(0.2, (1 + step) / (10 + step))
        average = jax.tree.map(lambda a, b, share=share: share * a + (1 - share) * b, average, now.params)
        assert largest_difference(now.ema, average) < 1e-6
    assert largest_difference(state.ema, state.params) > 1e-6


def names(state: nnx.State) -> list[str]:
    return [name for name, _ in leaves(state)]


def leaves(state) -> list[tuple[str, jax.Array]]:
    """Leaves by path; the positions inside Optax's chain are left out."""
    found = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
    return [("/".join(part for part in name.split("/")).lstrip("0123456789/"), leaf) for name, leaf in found]


def min_movement(state: TrainState, before: nnx.State) -> float:
    return min(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), state.params, before)))


@long
def test_bfloat16_compute_keeps_float32_parameters_and_a_near_loss(two_layers):
    exact = two_layers[0]
    model = ModelSection(config="c", init="random", compute_dtype="bfloat16")
    rough, _, state, _ = run(recipe_of(model=model), TWO_LAYERS)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    np.testing.assert_allclose(rough[:, 0], exact[:, 0], atol=0.02)
    assert np.abs(rough[:, 0] - exact[:, 0]).max() > 0


def test_rematerialisation_changes_no_number(two_layers):
    again, *_ = run(recipe_of(model=ModelSection(config="c", init="random", remat="full")), TWO_LAYERS, steps=2)
    np.testing.assert_allclose(again, two_layers[0][:2], rtol=1e-5)


def test_moments_lie_where_their_parameters_do():
    program: Program = make_program(recipe_of(mesh=MeshSection(fsdp=2, expert=2, tensor=2)), EVERYTHING)
    where = {name: leaf.sharding for name, leaf in leaves(program.state.params)}
    moments = [(name, leaf) for name, leaf in leaves(program.state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(where)
    for name, leaf in moments:
        assert leaf.sharding == where[name.split("/", 1)[1]], name


def test_experts_that_the_mesh_does_not_divide_are_noted():
    assert undivided_experts([8, 6, 8], {"expert": 4, "data": 2}) == [
        "expert=4 does not divide the 6 experts of a layer: all devices hold all of them"
    ]
    assert len(undivided_experts([8, 4], {"expert": 16})) == 2 and not undivided_experts([3], {})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"mesh": MeshSection(fsdp=3)}, "does not fit 8 devices"),
        ({"train": TrainSection(batch_size=12)}, "batch_size = 12 in 1 microbatches leaves 12 sequences for the 8"),
        ({"train": TrainSection(batch_size=8, accumulation=2)}, "multiple of 16"),
        ({"mesh": MeshSection(fsdp=1, tensor=8)}, "mlp/experts/delta|not divisible"),
        ({"mesh": MeshSection(fsdp=1, sequence=8), "data": DataSection(seq_len=12)}, "seq_len = 12 is not divisible"),
    ],
)
def test_what_does_not_fit_the_mesh_is_an_error(sections, message):
    config = config_of(dataclasses.replace(FFN, dim=12))
    with pytest.raises(InputError, match=message):
        make_program(recipe_of(**sections), config)


def test_updates_of_bfloat16_are_not_lost_and_the_same_on_every_mesh():
    """Rounded to the nearest number, an update of a hundredth of a step would change nothing."""
    shape, weight, update = (256, 128), 2.0**-6, 2.0**-15
    params = {"a": jnp.full(shape, weight, jnp.bfloat16), "b": jnp.full(shape, weight, jnp.float32)}
    updates = jax.tree.map(lambda leaf: jnp.full(leaf.shape, update, jnp.float32), params)
    moved = jax.jit(updated_params)(params, updates, jax.random.key(3))
    assert moved["a"].dtype == jnp.bfloat16 and (moved["b"] == weight + update).all()
    change, step = moved["a"].astype(jnp.float32) - weight, 2.0**-13
    share = update / step
    assert set(np.unique(change)) == {0.0, step}
    assert abs(float(change.mean()) / step - share) < 4 * np.sqrt(share * (1 - share) / change.size)
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    split = jax.device_put((params, updates), NamedSharding(mesh, P("fsdp", "tensor")))
    assert (jax.jit(updated_params)(*split, jax.random.key(3))["a"] == moved["a"]).all()
