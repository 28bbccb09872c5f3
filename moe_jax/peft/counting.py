"""Parameters of a model, tuned or not, from its config alone (METHODS 8)."""

import dataclasses
import math

from moe_jax.counting import is_parameter
from moe_jax.loading import leaf_specs
from moe_jax.models import ModelConfig, MoEConfig


def parameter_sizes(config: ModelConfig) -> dict[str, int]:
    """Leaf path -> number of parameters.

    Positions of sparse deltas and codes of quantised ones are not parameters. A kernel that is kept as NF4 codes counts
    the weights that it stands for, under the path that it would have as a plain kernel; its scales count nothing.
    """
    specs = leaf_specs(without_nf4(config))
    return {path: math.prod(spec.shape) for path, spec in specs.items() if is_parameter(spec)}


def active_size(config: ModelConfig, path: str, size: int) -> int:
    """How many of a leaf's parameters one token meets.

    All of them, but K of M where a router chooses: of what experts have of their own, and of adapters beside or after
    them (PERFT: S/D all, E k of E, R K of M; routers as a whole).

    Args:
      config: of the model.
      path: the leaf's, as in `parameter_sizes`.
      size: number of its parameters.
    """
    if "/mlp/perft/adapters/" in path:
        moe = config.layers[int(path.split("/")[1])].mlp
        perft = moe.perft
        chosen = {"routed": perft.top_k, "embedded": moe.top_k}.get(perft.variant, perft.num_experts)
        return size // perft.num_experts * chosen
    if "/mlp/experts/" not in path or "/mlp/experts/base/" in path:
        return size
    moe = config.layers[int(path.split("/")[1])].mlp
    return size // moe.bank_experts * min(moe.bank_top_k, moe.bank_experts)


def without_nf4(config: ModelConfig) -> ModelConfig:
    """The same model with plain kernels in place of NF4 codes."""
    layers = []
    for layer in config.layers:
        mlp = layer.mlp
        if isinstance(mlp, MoEConfig):
            mlp = dataclasses.replace(mlp, expert=dataclasses.replace(mlp.expert, nf4=False))
        else:
            mlp = dataclasses.replace(mlp, nf4=False)
        layers.append(dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, nf4=False), mlp=mlp))
    return dataclasses.replace(config, layers=tuple(layers))
