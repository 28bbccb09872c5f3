"""`Module.sow` and `nnx.capture` inside layers that are stacked and applied in a loop."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from tests.support.tiers import long, one_in

IDS = np.random.default_rng(0).integers(0, 64, (2, 6))


class Sowing(moe_jax.nn.FFN):
    """An FFN that stores what it is given."""

    def __call__(self, x, key=None):
        self.sow(nnx.Intermediate, "given", x)
        return super().__call__(x, key)


class SowingLayer(moe_jax.nn.Block):
    """A layer with such an FFN."""

    def __init__(self, config, model, *, rngs, dtype):
        super().__init__(config, model, rngs=rngs, dtype=dtype)
        self.mlp = Sowing(config.mlp, model.d_model, rngs=rngs, dtype=dtype)


@pytest.fixture(scope="module")
def decoder():
    moe_jax.nn.register_layer("tests:Sowing", SowingLayer)
    attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    layer = moe_jax.LayerConfig(attention=attention, mlp=moe_jax.FFNConfig(dim=32), module="tests:Sowing")
    config = moe_jax.ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=(layer,) * 3)
    yield moe_jax.Decoder(config, rngs=nnx.Rngs(0))
    del moe_jax.models.own_parts.LAYERS["tests:Sowing"]


def given_to_ffn(found):
    """Returns what was stored, of the only segment: [3, B, T, d] for every call."""
    return found["stack"]["segments"][0]["blocks"][0]["mlp"]["given"].get_value()


def plain(decoder, **given):
    """Returns the result of a call, without what its layers store in the model then."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        out = decoder(IDS, **given)
    nnx.pop(decoder, nnx.Intermediate)
    return out


@pytest.fixture(scope="module")
def expected(decoder):
    """The input of every layer's FFN, layer by layer."""
    hidden, given = plain(decoder, hidden_states=(0, 1, 2)).hidden_states, []
    for i, layer in enumerate(decoder.layers):
        alone = layer.module
        context = moe_jax.nn.context.make_context(decoder.config, (2, 6))
        seen = nnx.capture(lambda block, x, context=context: block(x, context, None), nnx.Intermediate)
        given.append(seen(alone, hidden[i])[1]["mlp"]["given"].get_value()[0])
    return np.stack(given)


@one_in(2, first=1)
@pytest.mark.parametrize("program", [False, True], ids=["alone", "in a program"])
def test_what_layers_store_is_captured_layer_by_layer(decoder, expected, program):
    captured = nnx.capture(lambda decoder, ids: decoder(ids).logits, nnx.Intermediate)
    logits, found = (nnx.jit(captured) if program else captured)(decoder, IDS)
    (given,) = given_to_ffn(found)
    np.testing.assert_allclose(given, expected, atol=1e-5)
    assert not jax.tree.leaves(nnx.state(decoder, nnx.Intermediate))  # nothing is left in the model
    np.testing.assert_allclose(logits, plain(decoder).logits, atol=1e-6)


@long
def test_gradients_go_through_what_is_captured(decoder):
    @nnx.grad
    def gradient(decoder):
        _, found = nnx.capture(lambda decoder: decoder(IDS).logits, nnx.Intermediate)(decoder)
        return jnp.sum(given_to_ffn(found)[0] ** 2)

    grads = gradient(decoder)["stack"]["segments"][0]["blocks"][0]
    assert jnp.abs(grads["attention"]["q"]["kernel"][...]).max() > 0


@long
def test_results_of_all_methods_are_captured():
    decoder = moe_jax.tiny_model(experts=4).decoder
    expected = decoder(IDS, routing=True)
    out, found = nnx.capture(decoder, nnx.Intermediate, method_outputs=nnx.Intermediate)(IDS)
    logits = found["stack"]["segments"][0]["blocks"][0]["mlp"]["router"]["__call__"].get_value()[0]
    np.testing.assert_allclose(logits[1], expected.routing[1].logits.reshape(12, 4), atol=1e-5)
    np.testing.assert_allclose(out.logits, expected.logits, atol=1e-6)
    np.testing.assert_array_equal(decoder(IDS).logits, expected.logits)


def test_after_an_error_the_model_is_as_before():
    decoder = moe_jax.tiny_model(experts=4).decoder

    def wrong(logits):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        nnx.capture(decoder, nnx.Intermediate)(IDS, router_logits={1: wrong})
    assert len(jax.tree.leaves(nnx.state(decoder))) == len(jax.tree.leaves(nnx.state(decoder, nnx.Param)))


@long
def test_methods_that_are_patched_are_called_with_caches_too(monkeypatch):
    decoder = moe_jax.nn.unstacked(moe_jax.tiny_model(experts=4).decoder)

    def logits():
        caches = moe_jax.nn.init_cache(decoder.config, 2, 6, jnp.dtype("float32"), stacked=False)
        return decoder(IDS, caches=caches, begins=True).logits

    before, usual = logits(), moe_jax.nn.MoE.with_routing

    def doubled(self, *given, **named):
        y, *rest = usual(self, *given, **named)
        return 2 * y, *rest

    monkeypatch.setattr(moe_jax.nn.MoE, "with_routing", doubled)
    assert not np.allclose(logits(), before, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_without_capture_it_stays_until_it_is_popped(decoder, expected):
    for _ in range(2):
        decoder(IDS)
    first, second = given_to_ffn(nnx.pop(decoder, nnx.Intermediate))
    np.testing.assert_allclose(first, expected, atol=1e-5)
    np.testing.assert_allclose(second, expected, atol=1e-5)
