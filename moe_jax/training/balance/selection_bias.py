"""Biases of selection that are moved towards balance after a step, by the loads of its batch and without a gradient.

Balancing without an auxiliary loss: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, section 2.1.2.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError
from moe_jax.core.formatting import index_set
from moe_jax.distributed.sharding import path_name
from moe_jax.experts.linear import Fixed
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.model_io.loading import FURTHER, disk_paths, further_number
from moe_jax.nn import Decoder
from moe_jax.nn.further.further_loss import further_routers
from moe_jax.nn.moe import Router, StackedStats

_NAME = "/router/selection_bias"


def is_selection_bias(path: str) -> bool:
    """Whether a path, in memory or on disk, is that of a router's bias of selection."""
    return path.endswith(_NAME)


def moved_biases(model: Decoder, rate: float, *, further: int = 0) -> frozenset[str]:
    """Returns the paths in memory of the biases of selection that steps with this rate move.

    Of layers that predict tokens after the next, the first `further` are run in a step, and their routers report.

    Raises:
      InputError: for a rate above 0, if the model has no MoE, or one whose router has no such bias.
    """
    if not rate:
        return frozenset()
    paths = filter(is_selection_bias, map(path_name, _paths(nnx.state(model, Fixed))))
    found = frozenset(path for path in paths if not path.startswith(FURTHER) or further_number(path) < further)
    layers = {layer for router in model.routers() if not router.of_perft for layer in router.layers}
    biased = {name for path in found for name in disk_paths(model.config, path, model=model)}
    without = [layer for layer in layers if _on_disk(layer) not in biased]
    if without or not layers:
        where = f"layers {index_set(without)} have none" if layers else "the model has no MoE"
        raise InputError(
            f"moe.bias_update_rate = {rate:g} moves the bias of selection of every router, and {where}; leave the key "
            "out, or train a model of a family with such a bias, such as deepseek_v3"
        )
    return found


def without_biases(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Splits what a step changes into the parameters, which gradients change, and the biases, which loads do."""
    if not isinstance(params, nnx.State):  # a plain tree of parameters
        return params, nnx.State({})
    learnt, biases = nnx.split_state(params, nnx.Param, ...)
    return learnt, biases


def biases_after_step(
    biases: nnx.State,
    model: Decoder,
    router: StackedStats,
    rate: float | Float[Array, ""],
    further: StackedStats = (),
) -> nnx.State:
    """Returns the biases after a step, float32.

    Args:
      biases: as `without_biases` splits them off.
      model: the model of the step, which says which router reports where.
      router: statistics over all tokens of the batch, in the order of `model.routers()`.
      rate: by how much each bias moves, up or down.
      further: likewise of the layers that predict tokens after the next, as `further_loss` returns them.

    Raises:
      InputError: if there is a bias of a layer that predicts tokens after the next, and that did not report.
    """
    stats = {
        _on_disk(position.layers[0]): (position, one)
        for position, one in zip(model.routers(), router, strict=True)
        if not position.of_perft
    }

    of_further = list(zip(further_routers(model.config, model.config.further_layers), further, strict=False))

    def moved(path: tuple, bias: Float[Array, "*R E"]) -> Float[Array, "*R E"]:
        name = path_name(path)
        if name.startswith(FURTHER):
            if further_number(name) >= len(of_further):
                raise InputError(f"{name} is moved by the load of a layer that the step does not run: see moved_biases")
            return bias + jnp.float32(rate) * missing_load(*of_further[further_number(name)])[0]
        first = disk_paths(model.config, name, model=model)[0]
        position, one = stats[first]
        return bias + jnp.float32(rate) * missing_load(position, one)

    return jax.tree_util.tree_map_with_path(moved, biases)


def missing_load(position: Router, stats: RouterStats) -> Float[Array, "R E"]:
    """Returns 1 for experts with fewer assignments than the mean of all, -1 for those with more, and 0 for the others.

    Shares are made whole numbers of assignments again, so that neither the mesh nor microbatches decide by rounding.
    """
    assignments = jnp.round(stats.load * (stats.tokens * position.top_k)[:, None])
    return jnp.sign(jnp.sum(assignments, axis=-1, keepdims=True) - assignments * stats.load.shape[-1])


def _on_disk(layer: int) -> str:
    return f"layers/{layer}/mlp{_NAME}"


def _paths(state: nnx.State) -> Sequence[tuple]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
