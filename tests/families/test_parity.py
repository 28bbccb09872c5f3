"""Every family against Transformers on the same weights: logits, generation, loss and gradient, all in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.model_io.loading import load_model, model_leaves  # noqa: E402
from tests.families.cases import CASES, FILES, SMALL, first_of_each  # noqa: E402
from tests.families.reference import first_difference, gradients, mean_loss, random_model, saved  # noqa: E402
from tests.support.generated import generate  # noqa: E402
from tests.support.tiers import EVERY, one_in  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 40))
NEW_TOKENS = 64 if EVERY else 40
# Transformers caches keys with the rotation that a shorter row had in these; ours is that of one pass.
GENERATED = [name for name in first_of_each(1) if "dynamic" not in name and "longrope" not in name]


def test_every_family_has_four_shapes():
    few = {file.__name__.rsplit(".", 1)[1]: len(file.CASES) for file in FILES if len(file.CASES) < 4}
    assert not few and sum(len(file.CASES) for file in FILES) == len(CASES)  # no name is that of two cases


@pytest.mark.parametrize("name", first_of_each(1))
def test_logits_equal_transformers(name, tmp_path, strict_numerics):
    reference = random_model(CASES[name], name)
    source = saved(reference, tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS), use_cache=False, output_hidden_states=True)
    logits = expected.logits.numpy()
    assert np.std(logits) > 0.1  # otherwise equality would say little
    logits_of = nnx.jit(lambda model, tokens: model(tokens).logits)
    got = np.asarray(logits_of(load_model(source), jnp.asarray(TOKENS, jnp.int32)))
    if not np.abs(got - logits).max() <= 2e-5 * np.abs(logits).max():
        theirs = [state.numpy() for state in expected.hidden_states]
        pytest.fail(f"{np.abs(got - logits).max()=}; {first_difference(source, theirs, TOKENS)}")


@one_in(16, first=4)  # windows; MoEs and latents are generated with in `test_deepseek_moe` and `nn`
@pytest.mark.parametrize("name", GENERATED)
def test_greedy_continuations_equal_transformers(name, tmp_path):
    reference = random_model(CASES[name], name, max_position_embeddings=6 + NEW_TOKENS)
    model = load_model(saved(reference, tmp_path))
    prompts = TOKENS[:, :6]
    with torch.no_grad():
        options = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        mask = torch.ones(prompts.shape, dtype=torch.long)
        theirs = reference.generate(torch.tensor(prompts), attention_mask=mask, pad_token_id=0, **options)
    assert generate(model, prompts.tolist(), max_new_tokens=NEW_TOKENS) == theirs[:, prompts.shape[1] :].tolist()


@one_in(16, first=5)  # a few of all kinds
@pytest.mark.parametrize("name", first_of_each(1))
def test_loss_and_gradient_equal_transformers(name, tmp_path, strict_numerics):
    reference = random_model(CASES[name], name)
    graphdef, params = nnx.split(load_model(saved(reference, tmp_path / "weights")))
    tokens = jnp.asarray(TOKENS, jnp.int32)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        return mean_loss(nnx.merge(graphdef, params)(tokens).logits, tokens)

    loss, gradient = loss_and_gradient(params)
    logits = reference(torch.tensor(TOKENS), use_cache=False).logits
    theirs = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(TOKENS)[:, 1:].flatten())
    theirs.backward()
    np.testing.assert_allclose(loss, theirs.item(), rtol=1e-4)
    expected = gradients(reference, tmp_path / "gradients")
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in model_leaves(nnx.merge(graphdef, gradient)):
        # Of some leaves, biases of keys for one, the exact gradient is zero; what is left is rounding.
        scale = max(np.abs(expected[path]).max(), 1e-2 * largest)
        np.testing.assert_allclose(leaf, expected[path], atol=1e-4 * scale, rtol=0, err_msg=path)


def test_a_difference_is_found_where_it_arises(tmp_path):
    """What a failing test of logits prints names the first layer that is wrong."""
    reference = random_model(CASES["llama"], "llama")
    with torch.no_grad():
        theirs = reference(torch.tensor(TOKENS), output_hidden_states=True).hidden_states
        reference.model.layers[1].mlp.up_proj.weight *= 1.5
    found = first_difference(saved(reference, tmp_path), [state.numpy() for state in theirs], TOKENS)
    errors = [float(part.rsplit(": ", 1)[1]) for part in found.split(", ")]
    assert len(errors) == 1 + SMALL["num_hidden_layers"] and max(errors[:2]) < 1e-5 < 1e-2 < min(errors[2:]), found
