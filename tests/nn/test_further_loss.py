"""Layers that predict tokens after the next, document by document from the paper's equations 21 to 25."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from flax import nnx

from moe_jax.model_io.loading import leaf_specs
from moe_jax.nn import Decoder
from moe_jax.nn.context import make_context
from moe_jax.nn.further.further_loss import further_loss
from moe_jax.peft import trainable_paths
from moe_jax.peft.trained import active_size, parameter_sizes, print_trained
from tests.support.numerics import initialised
from tests.support.tiers import long
from tests.support.training_models import FFN, config_of, moe
from tests.training.test_step import random_batch

DEPTH = 2
CONFIG = dataclasses.replace(config_of(moe(), moe()), further_layers=DEPTH)


def normed(x, norm) -> jnp.ndarray:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + CONFIG.norm_eps) * norm.scale[...]


def by_hand(model: Decoder, batch: dict) -> float:
    """The mean over the depths of the sums over all documents, each of which is computed by itself."""
    embedding, head, total = model.embed.embedding[...], model.lm_head.kernel[...], 0.0
    for row, documents in enumerate(batch["segment_ids"]):
        for document in set(documents.tolist()) - {0}:
            at = np.flatnonzero(documents == document)
            tokens, weights = batch["tokens"][row, at], batch["weights"][row, at]
            targets = batch["targets"][row, at]
            hidden = model.activations(tokens[None]).x[0]
            for k in range(1, DEPTH + 1):
                left = len(tokens) - k  # tokens i for which t_{i+k+1} is in the document
                if left < 1:
                    break
                layer = model.further[k - 1]
                # t_{i+k} as the batch has it: the target of the token k - 1 further.
                embedded = embedding[targets[k - 1 : k - 1 + left]]
                pair = [normed(embedded, layer.embedding_norm), normed(hidden[:left], layer.hidden_norm)]
                joined = jnp.concatenate(pair, axis=-1) @ layer.joint.kernel[...]
                hidden = layer.block(joined[None], make_context(CONFIG, (1, left)), None)[0][0]
                scores = jax.nn.log_softmax(normed(hidden, layer.final_norm) @ head)
                total -= float(jnp.sum(scores[np.arange(left), targets[k : k + left]] * weights[k : k + left]))
    return total / DEPTH


def random_model() -> Decoder:
    model = initialised(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    for layer in model.further:
        for norm in (layer.embedding_norm, layer.hidden_norm, layer.final_norm):
            norm.scale.set_value(jnp.asarray(1 + 0.3 * rng.normal(size=norm.scale.shape), jnp.float32))
    return model


@long
def test_packed_documents_have_the_losses_of_each_by_itself():
    model, batch = random_model(), random_batch(0, 2, 10)
    given = {name: batch[name] for name in ("segment_ids", "positions")}
    found, stats = further_loss(model, model.activations(batch["tokens"], **given).x, batch, depth=DEPTH)
    assert [one.load.shape for one in stats] == [(1, 4)] * DEPTH and float(stats[1].tokens[0]) == 20
    np.testing.assert_allclose(found, by_hand(model, batch), rtol=2e-5)
    assert found > 10  # of some ten tokens


def test_a_model_with_further_layers_says_where_they_lie():
    specs, sizes = leaf_specs(CONFIG), parameter_sizes(CONFIG)
    assert specs["further/1/joint/kernel"].shape == (32, 16)
    assert specs["further/0/block/mlp/experts/up/kernel"].shape == (4, 16, 32)
    path = "further/0/block/mlp/experts/up/kernel"
    assert sizes[path] == 4 * 16 * 32 and active_size(CONFIG, path, sizes[path]) == 0
    model = initialised(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    assert not [one for one in trainable_paths(model) if one.startswith("further/")]
    console = rich.console.Console(file=io.StringIO(), width=120)
    print_trained(console, config_of(FFN, moe(), further_layers=1), {path, "layers/1/mlp/router/kernel"})
    assert "the router is among them: yes" in console.file.getvalue()
