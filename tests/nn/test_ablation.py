"""Experts that are off, and biases of routers: by layer, in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.functional.routing.gates import GATES
from moe_jax.models import SelectionConfig
from moe_jax.nn import unstacked
from tests.support.tiers import long, one_in

IDS = np.random.default_rng(0).integers(0, 64, (2, 6))


def decoder(**options):
    expert = moe_jax.FFNConfig(dim=32)
    attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    moe = moe_jax.MoEConfig(expert=expert, num_experts=4, top_k=2, **options)
    pattern = tuple(moe_jax.LayerConfig(attention=attention, mlp=mlp) for mlp in (expert, moe))
    config = moe_jax.ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=pattern * 3)
    return moe_jax.Decoder(config, rngs=nnx.Rngs(0))


SIGMOID = {"gate": "topk_sigmoid", "selection": SelectionConfig(bias=True)}


@long
@pytest.mark.parametrize("options", [{}, SIGMOID], ids=["softmax", "sigmoid with a bias of selection"])
def test_an_expert_that_is_off_is_the_one_whose_output_does_not_count(options):
    """What it computes changes nothing any more, and in other layers nothing was changed."""
    made = decoder(**options)
    if options:  # expert 2 would be chosen by everyone
        made.layers[3].mlp.router.selection_bias[...] = jnp.array([0.0, 0.0, 9.0, 0.0])
    off = made(IDS, experts_off={3: [2]}, routing=True)
    usual = made(IDS, routing=True)
    assert (np.asarray(usual.routing[3].experts) == 2).any() and not (np.asarray(off.routing[3].experts) == 2).any()
    np.testing.assert_array_equal(off.routing[1].experts, usual.routing[1].experts)
    assert np.isfinite(off.logits).all() and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(off.router))
    assert not np.allclose(off.logits, usual.logits, atol=1e-5)
    made.layers[3].mlp.experts[2] = jax.tree.map(jnp.ones_like, made.layers[3].mlp.experts[2].kernels())
    np.testing.assert_array_equal(made(IDS, experts_off={3: [2]}).logits, off.logits)
    np.testing.assert_allclose(unstacked(made)(IDS, experts_off={3: [2]}).logits, off.logits, atol=1e-5)


@long
def test_biases_are_added_to_the_logits_of_their_layer():
    made, bias = decoder(), np.array([0.5, -1.0, 0.0, 2.0], np.float32)
    biased, usual = (made(IDS, routing=True, router_bias=given) for given in ({1: bias}, None))
    np.testing.assert_allclose(biased.routing[1].logits, usual.routing[1].logits + bias, atol=1e-5)
    zeros = made(IDS, router_bias={1: [0.0] * 4, 5: np.zeros(4)})
    np.testing.assert_allclose(zeros.logits, usual.logits, atol=1e-6)
    both = made(IDS, routing=True, router_bias={1: bias}, experts_off={1: [3]})
    assert not (np.asarray(both.routing[1].experts) == 3).any()
    np.testing.assert_allclose(both.routing[1].logits[..., :3], biased.routing[1].logits[..., :3], atol=1e-5)


def test_with_too_few_experts_there_is_no_other():
    routing = decoder()(IDS, experts_off={np.int64(1): np.array([0, 1, 3])}, routing=True).routing[1]
    np.testing.assert_array_equal(routing.experts, np.broadcast_to([2, -1], (2, 6, 2)))
    np.testing.assert_array_equal(routing.weights, np.broadcast_to([1.0, 0.0], (2, 6, 2)))


def test_an_expert_that_is_off_has_no_weight_whatever_the_gate():
    even = moe_jax.functional.Gate(jax.nn.softmax, lambda logits, scores: jnp.full_like(scores, 0.5))
    moe_jax.functional.register_gate("tests:even", even)
    try:
        routing = decoder(gate="tests:even")(IDS, experts_off={1: [0, 1, 3]}, routing=True).routing[1]
    finally:
        del GATES["tests:even"]
    np.testing.assert_array_equal(routing.weights, np.broadcast_to([0.5, 0.0], (2, 6, 2)))


@long
def test_gradients_reach_a_bias():
    graphdef, state = nnx.split(decoder())

    def loss(bias):
        return jnp.sum(nnx.merge(graphdef, state)(IDS, router_bias={3: bias}).logits ** 2)

    assert jnp.abs(jax.jit(jax.grad(loss))(jnp.zeros(4))).max() > 0


@one_in(3)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experts_off": {0: [1]}}, "layer 0, which is no layer with an MoE"),
        ({"experts_off": {6: [1]}}, "layer 6"),
        ({"router_bias": {"3": [0.0] * 4}}, "router_bias names layer '3'"),
        ({"experts_off": {3: [True]}}, "experts_off[3] names True"),
        ({"experts_off": {3: 1}}, "experts_off[3] is 1, expected a list"),
        ({"experts_off": [0, 1]}, "experts_off is [0, 1], expected what it asks for by layer"),
        ({"hidden_states": 1}, "hidden_states is 1, expected a list"),
        ({"experts_off": {3: [4]}}, "experts_off[3] names 4; there are 0 to 3"),
        ({"experts_off": {3: range(4)}}, "all 4 experts"),
        ({"router_bias": {3: [0.0] * 3}}, "router_bias[3] has the shape (3,), expected (4)"),
        ({"router_bias": {3: [0] * 4}}, "router_bias[3] is of int64"),
    ],
)
def test_what_is_not_there_cannot_be_off(given, message):
    with pytest.raises(InputError) as raised:
        decoder()(IDS, **given)
    assert message in str(raised.value)


def test_logits_are_what_a_function_makes_of_them():
    """The function of a layer is given its logits, and that of another one its own, although both are stacked."""
    made, usual = decoder(), decoder()(IDS, routing=True)
    functions = {1: lambda logits: -logits, 5: lambda logits: jnp.zeros_like(logits).at[..., 2].set(1.0)}
    changed = made(IDS, routing=True, router_logits=functions)
    np.testing.assert_allclose(changed.routing[1].logits, -usual.routing[1].logits, atol=1e-5)
    np.testing.assert_array_equal(changed.routing[5].experts[..., 0], np.full((2, 6), 2))
    mixed = made(IDS, routing=True, router_logits={1: functions[1]}, router_bias={1: [0.0, 0.0, 9.0, 0.0]})
    np.testing.assert_allclose(mixed.routing[1].logits[..., :2], -usual.routing[1].logits[..., :2], atol=1e-5)
    np.testing.assert_allclose(mixed.routing[1].logits[..., 2], -usual.routing[1].logits[..., 2] - 9.0, atol=1e-5)
    same = made(IDS, router_logits={3: lambda logits: logits})
    np.testing.assert_allclose(same.logits, usual.logits, atol=1e-6)
    # Layers that are not stacked, and continued rows, take another path.
    np.testing.assert_allclose(unstacked(made)(IDS, router_logits=functions).logits, changed.logits, atol=1e-5)
    caches = moe_jax.nn.init_cache(made.config, 2, 6, jnp.dtype("float32"))
    cached = made(IDS, caches=caches, begins=True, router_logits=functions)
    np.testing.assert_allclose(cached.logits, changed.logits, atol=1e-5)


@long
def test_the_function_of_one_router_has_gradients_and_is_compiled_once():
    graphdef, state = nnx.split(decoder())

    @jax.jit
    def gradient(scale):
        def loss(scale):
            model = nnx.merge(graphdef, state)
            return jnp.sum(model(IDS, router_logits={3: lambda logits: scale * logits}).logits ** 2)

        return jax.grad(loss)(scale)

    assert jnp.abs(gradient(1.0)) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (3.0, "router_logits[3] is 3.0, expected a function"),
        (lambda logits: None, "router_logits[3](logits) is None, expected an array"),
        (lambda logits: logits[..., :2], "router_logits[3](logits) has the shape (2, 6, 2), expected (2, 6, 4)"),
    ],
    ids=["no function", "nothing", "another shape"],
)
def test_what_makes_no_logits_is_refused(change, message):
    with pytest.raises(InputError) as raised:
        decoder()(IDS, router_logits={3: change})
    assert message in str(raised.value)


@long
def test_a_mesh_changes_nothing():
    mesh, made = make_mesh({"data": 2, "expert": 2, "tensor": 2}), decoder()
    given = {"routing": True, "hidden_states": (0, 4), "experts_off": {3: [1]}, "router_logits": {1: lambda x: -x}}
    expected = made(IDS, **given)
    graphdef, state = nnx.split(made)
    with jax.set_mesh(mesh):
        split = jax.device_put(state, state_shardings(state, mesh))
        out = jax.jit(lambda state: nnx.merge(graphdef, state)(IDS, **given))(split)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), (out[0], *out[3:]), (expected[0], *expected[3:])
    )


@long
def test_outside_of_programs_a_function_is_called_with_its_present_values():
    """What it closes over may have changed since the last call; so may a function in the place of a router."""
    made, state = decoder(), {"factor": 1.0}
    change = {1: lambda logits: logits * state["factor"]}
    made.layers[3].mlp.router = lambda x: state["factor"] * x[:, :4]
    for factor in (1.0, -5.0):
        state["factor"] = factor
        routing = made(IDS, routing=True, router_logits=change).routing
        usual = made(IDS, routing=True, hidden_states=(3,)).routing
        np.testing.assert_allclose(routing[1].logits, factor * usual[1].logits, atol=1e-5)
        if factor == 1.0:
            first = usual[3].logits
    np.testing.assert_allclose(usual[3].logits, -5.0 * first, atol=1e-5)


@long
def test_the_loss_is_that_of_the_changed_model():
    made, batch = decoder(), {"tokens": IDS[:, :-1], "targets": IDS[:, 1:]}
    off = {1: [0, 1], 3: [2]}
    out = made(batch["tokens"], experts_off=off)
    log_probs = jax.nn.log_softmax(out.logits)
    nll = -jnp.take_along_axis(log_probs, jnp.asarray(batch["targets"])[..., None], axis=-1).mean()
    np.testing.assert_allclose(made.loss(batch, experts_off=off), nll + made.auxiliary_loss(out), rtol=1e-5)
