"""The operations that a step spares because parameters are frozen."""

import dataclasses
from collections.abc import Iterable

from moe_jax.model_io.loading import VISION, disk_paths
from moe_jax.models import ModelConfig
from moe_jax.peft.trained import active_size, parameter_sizes
from moe_jax.training.flops import active_matmul_params, batch_flops, train_flops_per_token
from moe_jax.training.recipe import Recipe


def frozen_gradients(recipe: Recipe, config: ModelConfig, trained: Iterable[str]) -> float:
    """Returns the operations of the gradients of frozen kernels, which `batch_flops` counts and no step computes.

    They are two for every entry and token, a third of a kernel's. `trained` are paths in memory. With an encoder, whose
    tokens are others, the share of the whole model is taken. What pictures pass through is not among them, and neither
    are layers that predict tokens after the next: where these are run, they are trained.
    """
    changed = {leaf for path in trained for leaf in disk_paths(config, path)}
    learned = sum(
        active_size(config, path, size)
        for path, size in parameter_sizes(config).items()
        if path in changed and _is_multiplied(config, path) and not path.startswith(VISION)
    )
    frozen = max(0, active_matmul_params(config) - learned)  # kernels in codes are no parameters, and are multiplied
    of_decoder = batch_flops(dataclasses.replace(recipe, mtp=None), config)
    return of_decoder * 2 * frozen / train_flops_per_token(config, recipe.data.seq_len)


def _is_multiplied(config: ModelConfig, path: str) -> bool:
    if path.startswith("embed/"):
        return config.tie_embeddings
    module, leaf = path.split("/")[-2:]
    return leaf != "bias" and not module.endswith(("norm", "relative_bias"))
