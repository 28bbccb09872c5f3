"""The loss of layers that predict tokens after the next (DeepSeek-V3, arXiv:2412.19437, equations 24 and 25)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from moe_jax.functional import keys
from moe_jax.models import ModelConfig, MoEConfig
from moe_jax.nn.block_stack import REMAT_POLICIES
from moe_jax.nn.context import make_context
from moe_jax.nn.decoder import Decoder
from moe_jax.nn.further.further_layer import FurtherLayer
from moe_jax.nn.inputs import Batch, model_inputs
from moe_jax.nn.moe import Router, StackedStats, routers_of_layer


def further_loss(
    model: Decoder, x: Float[Array, "B T d"], batch: Batch, *, depth: int, key: Array | None = None
) -> tuple[Float[Array, ""], StackedStats]:
    """Returns the mean cross-entropy, float32, of the first `depth` further layers, and what their routers say.

    The latter are the statistics of `further_routers`, of all tokens, the last of a document among them, which have no
    target. What the backward pass computes again in a layer is what the model's own layers do (`remat`).

    That of layer k is the weighted sum of the negative log-likelihoods of the targets, k tokens further than the
    model's own, as far as they are in the same document. A target has the weight that it has for the model itself, so
    that each layer's sum is divided by the number of all scored tokens, as in equation 24.

    Args:
      model: with at least as many `further_layers`.
      x: the head's input, of the same batch.
      batch: with `targets`, and `weights`, whose sum over the batch is 1; and perhaps `segment_ids` and `positions`.
      depth: number of layers.
      key: random key of the step in training; None: deterministic.
    """
    given = model_inputs(batch)
    given.pop("tokens")
    context = make_context(model.config, x.shape[:2], **given)
    targets, weights, documents = batch["targets"], batch["weights"], batch.get("segment_ids")
    total, stats = jnp.zeros((), jnp.float32), []
    for number in range(depth):
        layer, ahead = model.further[number], number + 1
        embedded = model.embed.look_up(_ahead(targets, number))
        layer_key = keys.fold_in(key, model.config.num_layers + number)

        def apply(x: Array, embedded: Array, layer: FurtherLayer = layer, key: Array | None = layer_key) -> Any:
            return layer(x, embedded, context, key)

        if model.stack.remat != "none":
            apply = jax.checkpoint(apply, policy=REMAT_POLICIES[model.stack.remat])
        x, of_layer = apply(x, embedded)
        stats += of_layer
        scored = _ahead(weights, ahead)
        if documents is not None:
            scored = jnp.where(_ahead(documents, ahead) == documents, scored, 0.0)
        total = total + model.weighted_loss(layer.final_norm(x), _ahead(targets, ahead), scored)
    return total / depth, tuple(jax.tree.map(lambda array: array[None], stats))


def further_routers(config: ModelConfig, depth: int) -> list[Router]:
    """Returns the routers of the first `depth` further layers, in the order in which `further_loss` reports them.

    Their layers are counted from 0, by themselves.
    """
    mlp = config.layers[-1].mlp
    if not isinstance(mlp, MoEConfig):
        return []
    return [router for number in range(depth) for router in routers_of_layer(mlp, [number])]


def _ahead(array: Shaped[Array, "B T"], count: int) -> Shaped[Array, "B T"]:
    """Returns what stands so many places further in every row; zeros behind its end."""
    return jnp.pad(array[:, count:], ((0, 0), (0, count)))
