"""`jax.vmap` of a decoder and of its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from tests.support.tiers import long, one_in

IDS = np.random.default_rng(0).integers(0, 64, (3, 2, 7))
FORMS = ["full", "low-rank:2", "sparse:0.5", "quantized", "nf4"]


def decoder_of(form):
    dense = moe_jax.tiny_model()
    if form == "quantized":
        return moe_jax.compress(moe_jax.upcycle(dense, experts=4), method="ders-quantize", bits=4).decoder
    if form == "nf4":
        return moe_jax.upcycle(dense, experts=4, method="pesc", adapter=4, rest="qlora:2").decoder
    return moe_jax.upcycle(dense, experts=4, delta=form).decoder


@long
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_batches_is_computed_as_one_by_one(form):
    decoder = decoder_of(form)
    got = jax.jit(jax.vmap(lambda ids: decoder(ids).logits))(IDS)
    expected = jnp.stack([decoder(ids).logits for ids in IDS])
    np.testing.assert_allclose(got, expected, atol=1e-5)


@one_in(5)
@pytest.mark.parametrize("form", FORMS)
@long
def test_gradients_of_single_examples_are_those_of_each(form):
    graphdef, trained, rest = nnx.split(decoder_of(form), nnx.Param, ...)

    def loss(trained, ids):
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        return nnx.merge(graphdef, trained, rest).loss(batch)

    gradient = jax.grad(loss, allow_int=True)
    got = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(trained, IDS)
    one_by_one = jax.jit(gradient)
    for i, ids in enumerate(IDS):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one_by_one(trained, ids)), strict=True):
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(a[i], b, atol=1e-5)


@long
def test_models_with_other_parameters_are_computed_at_once():
    models = [moe_jax.upcycle(moe_jax.tiny_model(), experts=4, seed=seed).decoder for seed in range(2)]
    graphdef, _ = nnx.split(models[0])
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, models))
    got = jax.vmap(lambda state: nnx.merge(graphdef, state)(IDS[0]).logits)(states)
    np.testing.assert_allclose(got, jnp.stack([model(IDS[0]).logits for model in models]), atol=1e-5)
