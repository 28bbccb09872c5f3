"""Learning rate, rates of groups, moments, and updates that are those of plain Optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import AttentionConfig, Mamba2Config
from moe_jax.training.optimizer import (
    at_step,
    group_rates,
    is_decayed,
    is_orthogonalised,
    learning_rate,
    make_optimizer,
)
from moe_jax.training.recipe import GroupSection, OptimizerSection, ScheduleSection
from tests.support.tiers import long
from tests.support.training_models import BANKS, FFN, config_of, moe

PEAK = OptimizerSection(learning_rate=1.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, *(0.2 + 0.8 * (1 + np.cos(np.pi * x)) / 2 for x in (0.25, 0.5, 0.75, 1.0))]),
    ],
)
def test_learning_rate_warms_up_and_comes_down(kind, expected):
    schedule = learning_rate(PEAK, ScheduleSection(kind=kind, warmup_steps=2, final_ratio=0.2), steps=6)
    np.testing.assert_allclose([float(schedule(done)) for done in range(6)], expected, rtol=1e-6)


def test_wsd_stays_at_the_peak_until_the_last_steps():
    schedule = ScheduleSection(kind="wsd", warmup_steps=2, decay_steps=3, final_ratio=0.1)
    rates = learning_rate(PEAK, schedule, steps=8)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1, 0.1]
    np.testing.assert_allclose([float(rates(done)) for done in range(10)], expected, rtol=1e-6)
    # By default a tenth of the steps; and never more than the warm-up leaves.
    tenth = learning_rate(PEAK, ScheduleSection(kind="wsd", final_ratio=0.0), steps=40)
    assert [round(float(tenth(done)), 6) for done in (35, 36, 39)] == [1.0, 0.75, 0.0]
    short = learning_rate(PEAK, ScheduleSection(kind="wsd", warmup_steps=2, decay_steps=9, final_ratio=0.0), steps=4)
    np.testing.assert_allclose([float(short(done)) for done in range(4)], [0.5, 1.0, 0.5, 0.0], rtol=1e-6)


def test_learning_rate_without_warm_up_starts_near_the_peak():
    schedule = learning_rate(PEAK, ScheduleSection(kind="linear", final_ratio=0.0), steps=10)
    assert float(schedule(0)) == pytest.approx(0.9)
    assert float(schedule(9)) == pytest.approx(0.0)


def test_the_learning_rate_is_never_below_zero():
    """Compiled, the last step of a decay to 0 would come out at -1e-10."""
    section = OptimizerSection(learning_rate=5e-3)
    schedule = learning_rate(section, ScheduleSection(kind="linear", warmup_steps=20, final_ratio=0.0), steps=200)
    assert float(jax.jit(schedule)(jnp.int32(199))) == 0.0


def test_norms_and_biases_are_not_decayed():
    config = config_of(moe(BANKS["low-rank"]), FFN)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(abstract_model(config)))]
    section = OptimizerSection()
    kept = {path.split("/")[-2] for path in paths if not is_decayed(path, section)}
    assert kept == {"embed", "router", "final_norm", "attention_norm", "mlp_norm"}
    assert not is_decayed("stack/segments/0/blocks/0/mlp/experts/up/bias", section)
    assert is_decayed("lm_head/kernel", section)
    assert is_decayed("stack/segments/0/blocks/0/mlp/experts/delta/up/scales", section)
    everything = OptimizerSection(decay_embeddings=True, decay_router=True)
    assert is_decayed("embed/embedding", everything)
    assert is_decayed("stack/segments/0/blocks/0/mlp/router/kernel", everything)


def test_of_recurrent_layers_and_attention_with_sinks_only_kernels_and_convolutions_are_decayed():
    def decayed_of(**changes) -> set[str]:
        config = config_of(FFN)
        config = dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], **changes),))
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(abstract_model(config)))]
        found = (path.partition("/attention/") for path in paths if is_decayed(path, OptimizerSection()))
        return {name for _, of_attention, name in found if of_attention}

    convolutions = {f"{name}_conv" for name in "qkv"}
    sized = {"num_heads": 4, "head_dim": 8}
    mamba = decayed_of(attention=Mamba2Config(**sized, num_groups=1, state_dim=8))
    assert mamba >= convolutions and all(path.endswith("/kernel") for path in mamba - convolutions)
    kernels = {f"{name}/kernel" for name in "qkvo"}
    assert decayed_of(attention=AttentionConfig(**sized, num_kv_heads=4, sinks=True)) == kernels


def test_decay_alone_shrinks_kernels_only():
    section = OptimizerSection(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(section, lambda _: 0.1)
    params = nnx.State({"final_norm": {"scale": nnx.Param(jnp.ones(3))}, "lm_head": {"kernel": nnx.Param(jnp.ones(3))}})
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["final_norm"]["scale"][...], 0.0)
    np.testing.assert_allclose(updates["lm_head"]["kernel"][...], -0.05, rtol=1e-6)


def test_moments_are_float32_for_bfloat16_parameters():
    optimizer = make_optimizer(OptimizerSection(), lambda _: 1e-3)
    params = nnx.State({"lm_head": {"kernel": nnx.Param(jnp.ones((2, 2), jnp.bfloat16))}})
    state = optimizer.init(params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 2)]
    assert len(moments) == 2 and all(leaf.dtype == jnp.float32 for leaf in moments)
    updates, _ = optimizer.update(params, state, params)
    assert updates["lm_head"]["kernel"][...].dtype == jnp.float32


def test_gradients_are_clipped_to_the_global_norm():
    params = nnx.State({"lm_head": {"kernel": nnx.Param(jnp.zeros(4))}})
    grads = jax.tree.map(lambda leaf: leaf + 100.0, params)
    moments = {}
    for clip in (0.0, 1.0):
        optimizer = make_optimizer(OptimizerSection(clip_norm=clip, weight_decay=0.0), lambda _: 1e-3)
        _, state = optimizer.update(grads, optimizer.init(params), params)
        moments[clip] = next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,))
    np.testing.assert_allclose(moments[1.0], moments[0.0] / 200.0, rtol=1e-5)


LAYERS, EXPERTS, ROWS, COLUMNS = 2, 3, 130, 136
MLP = "stack/segments/0/blocks/0/mlp"
SHAPES = {
    "embed/embedding": (150, 130),
    "stack/final_norm/scale": (130,),
    f"{MLP}/experts/up/kernel": (LAYERS, EXPERTS, ROWS, COLUMNS),
    f"{MLP}/experts/up/bias": (LAYERS, EXPERTS, COLUMNS),
    f"{MLP}/router/kernel": (LAYERS, ROWS, EXPERTS),
}


def random_tree(seed: int) -> nnx.State:
    """Numbers in the form of parameters of a model with two equal layers, which are stacked."""
    rng = np.random.default_rng(seed)
    return tree_of({path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in SHAPES.items()})


def tree_of(leaves: dict[str, jax.Array]) -> nnx.State:
    tree: dict = {}
    for path, leaf in leaves.items():
        node = tree
        *parents, name = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = nnx.Param(leaf)
    return nnx.State(tree)


def apart(tree: nnx.State) -> dict[str, np.ndarray]:
    """Every matrix and vector as an array of its own."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        axes = leaf.ndim - (2 if name.endswith(("kernel", "embedding")) else 1)
        array = np.asarray(leaf)
        for index in np.ndindex(leaf.shape[:axes]):
            found["-".join([name, *map(str, index)])] = array[index]
    return found


def steps_of(optimizer, params, grads) -> tuple[list, object]:
    """The parameters after every step, which is computed as a program."""
    state, after = jax.jit(optimizer.init)(params), []

    @jax.jit
    def step(grad, state, params):
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(grad, state, params)
        after.append(params)
    return after, state


def decayed(params: dict) -> dict:
    return {name: is_decayed(name.split("-")[0], OptimizerSection()) for name in params}


PLAIN = {
    "adamw": (OptimizerSection(), optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)),
    "adamw, relative": (
        OptimizerSection(weight_decay=0.0, parameter_scale=True),
        optax.chain(
            optax.scale_by_adam(b1=0.9, b2=0.95),
            optax.scale_by_param_block_rms(1e-4),
            optax.scale_by_learning_rate(1e-2),
        ),
    ),
    "lion": (OptimizerSection(kind="lion"), optax.lion(1e-2, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)),
    "adafactor": (
        OptimizerSection(kind="adafactor", weight_decay=0.0),
        optax.adafactor(1e-2, multiply_by_parameter_scale=False),
    ),
    "adafactor, relative": (
        OptimizerSection(kind="adafactor", weight_decay=0.0, parameter_scale=True),
        optax.adafactor(1e-2),
    ),
    "muon": (
        OptimizerSection(kind="muon"),
        optax.partition(
            {
                "matrix": optax.contrib.muon(1e-2, weight_decay=0.1, consistent_rms=0.2),
                "other": optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.0),
            },
            lambda params: {name: "matrix" if is_orthogonalised(name.split("-")[0]) else "other" for name in params},
        ),
    ),
    "bfloat16": (
        OptimizerSection(moments="bfloat16"),
        optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed, mu_dtype=jnp.bfloat16),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_updates_are_those_of_plain_optax_for_every_matrix_alone(name):
    section, plain = PLAIN[name]
    section = dataclasses.replace(section, clip_norm=0.0)
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2, 3)]
    ours, _ = steps_of(make_optimizer(section, lambda _: 1e-2), params, grads)
    theirs, _ = steps_of(plain, apart(params), [apart(grad) for grad in grads])
    for one, other in zip(ours, theirs, strict=True):
        one = apart(one)
        assert one.keys() == other.keys() and len(one) == 2 + LAYERS * (2 * EXPERTS + 1)
        for path, leaf in one.items():
            np.testing.assert_allclose(leaf, other[path], atol=2e-6, rtol=2e-6, err_msg=path)
    moved = max(
        float(np.abs(np.asarray(leaf) - np.asarray(other)).max())
        for leaf, other in zip(*map(jax.tree.leaves, (ours[-1], params)), strict=True)
    )
    assert moved > 1e-2


def test_the_keys_that_there_always_were_compute_what_they_always_did():
    """To the last bit, in a state of the same names: older runs go on."""
    section, schedule = OptimizerSection(decay_router=True), learning_rate(PEAK, ScheduleSection(), steps=10)

    def decays(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(path_name(path), section), params)

    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decays)
    before = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2, 3)]
    old, old_state = steps_of(before, params, grads)
    new, new_state = steps_of(make_optimizer(section, schedule), params, grads)
    for one, other in zip(jax.tree.leaves((old, old_state)), jax.tree.leaves((new, new_state)), strict=True):
        np.testing.assert_array_equal(one, other)
    names = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
             for state in (old_state, new_state)]  # fmt: skip
    assert names[0] == names[1]


def test_the_second_moment_of_adafactor_is_factored_and_that_of_bfloat16_is_not_rounded():
    params = random_tree(0)

    def shapes(section: OptimizerSection) -> list:
        state = make_optimizer(section, lambda _: 1e-2).init(params)
        return sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(state) if leaf.size > 8)

    factors = [((LAYERS, EXPERTS, side), "float32") for side in (ROWS, COLUMNS)]
    kept = [((130,), "float32"), ((LAYERS, EXPERTS, COLUMNS), "float32"), ((LAYERS, ROWS, EXPERTS), "float32")]
    assert shapes(OptimizerSection(kind="adafactor")) == sorted(
        [*factors, *kept, ((150,), "float32"), ((130,), "float32")]
    )
    both = shapes(OptimizerSection(moments="bfloat16"))
    assert both == sorted((shape, dtype) for shape in SHAPES.values() for dtype in ("float32", "bfloat16"))
    assert shapes(OptimizerSection(kind="lion", moments="bfloat16")) == sorted(
        (shape, "bfloat16") for shape in SHAPES.values()
    )


LEAVES = {path: [path] if len(shape) < 3 and "segments" not in path else [
    f"layers/{layer}/{path.split('blocks/0/')[1]}" for layer in range(LAYERS)
] for path, shape in SHAPES.items()}  # fmt: skip


def test_groups_have_rates_of_their_own_also_where_layers_are_stacked():
    section = OptimizerSection(
        learning_rate=1e-2,
        weight_decay=0.1,
        clip_norm=0.0,
        groups=(
            GroupSection(match=("layers/1/.*/kernel",), learning_rate=3e-3, weight_decay=0.2),
            GroupSection(match=("layers/.*", "embed/.*"), weight_decay=0.3),
        ),
    )
    rates = group_rates(section, LEAVES)
    kernel, bias = rates[f"{MLP}/experts/up/kernel"], rates[f"{MLP}/experts/up/bias"]
    assert kernel.factor == (1.0, pytest.approx(0.3)) and kernel.decay == (0.3, 0.2)
    assert bias == (1.0, 0.0) and rates["stack/final_norm/scale"] == (1.0, 0.0)
    assert rates["embed/embedding"] == (1.0, 0.3)
    assert rates[f"{MLP}/router/kernel"].decay == (0.3, 0.2)  # a group that names it says so

    def label(name: str) -> str:
        if name.endswith("bias") or "bias-" in name or "final_norm" in name:
            return "undecayed"
        return "first" if name.split("-")[1:2] == ["1"] else "second"

    def adamw(rate: float, decay: float):
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay)

    plain = optax.partition(
        {"undecayed": adamw(1e-2, 0.0), "first": adamw(3e-3, 0.2), "second": adamw(1e-2, 0.3)},
        lambda params: {name: label(name) for name in params},
    )
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2)]
    ours, _ = steps_of(make_optimizer(section, lambda _: 1e-2, rates), params, grads)
    theirs, _ = steps_of(plain, apart(params), [apart(grad) for grad in grads])
    for path, leaf in apart(ours[-1]).items():
        np.testing.assert_allclose(leaf, theirs[-1][path], rtol=2e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers/.*/ruoter/.*", r"'layers/\.\*/ruoter/\.\*' matches no trained"),
        ("layers/(", r"'layers/\(' is not a"),
        ("(a+)+b", "takes too long|matches no trained parameter"),
    ],
)
def test_a_pattern_of_nothing_is_an_error(pattern, message):
    section = OptimizerSection(groups=(GroupSection(match=(pattern,), learning_rate=1e-3),))
    with pytest.raises(InputError, match=message):
        group_rates(section, LEAVES)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "adafactor", "moments": "bfloat16"}, "first moment"),
        ({"kind": "lion", "parameter_scale": True}, "parameter_scale is adafactor's"),
        ({"momentum": 1.0}, r"momentum = 1.0 must lie in \[0, 1\)"),
    ],
)
def test_keys_that_do_not_go_together_are_an_error(keys, message):
    with pytest.raises(InputError, match=message):
        OptimizerSection(**keys)


@long
def test_a_new_state_has_the_learning_rate_of_its_step():
    schedule = learning_rate(PEAK, ScheduleSection(kind="linear", final_ratio=0.0), steps=10)
    optimizer = make_optimizer(OptimizerSection(kind="lion", weight_decay=0.0), schedule)
    params, grads = random_tree(0), random_tree(1)
    updates, _ = optimizer.update(grads, at_step(optimizer.init(params), jnp.int32(4)), params)
    np.testing.assert_allclose(jnp.abs(updates["embed"]["embedding"][...]), 0.5, rtol=1e-6)
