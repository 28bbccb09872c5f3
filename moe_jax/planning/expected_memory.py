"""Expected memory of a training step on every device of a mesh, beside its arguments, from shapes alone.

The compiler computes it exactly; this needs no compiler. The parts follow from how a step works. How many copies of an
array exist at a time (`_COPIES`) depends on XLA: the numbers were fitted to 27 steps compiled for TPUs, those of
`benchmarks/pods.py` and seven of a smaller model, such that the largest error of a step's total is least (9%). Steps
with other layers may differ more. XLA:GPU needs less: 6 to 17% for three steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.core.data_sheets import Chip
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig
from moe_jax.planning.expected_transfers import exchange_of, exchanges, local_tokens
from moe_jax.planning.placed_leaves import PlacedLeaf
from moe_jax.training.recipe.schema import Recipe

_COPIES = {
    # Kernels that are gathered for a layer, with their gradients, and those of the next layer.
    "kernels": 6.3,
    # Kernels that are not trained: as they are stored, as they are multiplied, and those of the next layer.
    "frozen kernels": 3.0,
    # Hidden neurons of the rows in work: of gate, up, their product, and their gradients.
    "hidden": 5.7,
    # Rows of MoE layers, sorted by expert, sent and received, and their gradients.
    "rows": 14.2,
    # Gradients that are not gathered, before they are added to those of other devices; split over experts, or whole.
    "gradients of parts": 0.3,
    "gradients of wholes": 1.4,
}


def expected_temporaries(
    recipe: Recipe, config: ModelConfig, leaves: Sequence[PlacedLeaf], mesh: Mapping[str, int], chip: Chip, kept: int
) -> int:
    """Returns the bytes that a step holds beside its arguments, gradients included.

    Args:
      recipe, config: of the run.
      leaves: its parameters, as they lie on the mesh.
      mesh: size of every axis.
      chip: of the mesh.
      kept: bytes that a microbatch keeps on a device for its backward pass.
    """
    number = np.dtype(recipe.model.compute_dtype).itemsize
    trained = [leaf for leaf in leaves if leaf.trained]
    gradients = sum(4 * leaf.held * leaf.layers for leaf in trained)
    rounded = [leaf for leaf in trained if leaf.dtype.itemsize < 4]
    if recipe.train.accumulation > 1:
        # Gradients of a microbatch, if all parameters are bfloat16 and nothing is added in place; or a float32 copy of
        # the few that are (`accumulation`).
        size = sum(leaf.held * leaf.layers for leaf in rounded)
        gradients += size * (rounded[0].dtype.itemsize if len(rounded) == len(trained) else 4) if rounded else 0
    # Kernels of all layers are converted before the loop over layers.
    converted = sum(
        number * leaf.held * leaf.layers
        for leaf in trained
        if leaf.is_in_stack and leaf.axes and leaf.dtype.itemsize != number
    )
    work = [_work(layer, recipe, config, mesh, chip) for layer in config.layers]
    alone = [leaf for leaf in trained if leaf.is_in_stack and not leaf.gathered_over]
    parts = {
        "kernels": _most_gathered(trained, number),
        "frozen kernels": _most_gathered([leaf for leaf in leaves if not leaf.trained], number),
        "hidden": number * max(one.hidden for one in work),
        "rows": number * max(one.rows for one in work) * config.d_model,
        "gradients of parts": sum(4 * leaf.held * leaf.layers for leaf in alone if leaf.axes),
        "gradients of wholes": sum(4 * leaf.held * leaf.layers for leaf in alone if not leaf.axes),
    }
    return round(gradients + converted + kept + sum(_COPIES[name] * size for name, size in parts.items()))


def _most_gathered(leaves: Sequence[PlacedLeaf], number: int) -> int:
    """Returns the most bytes that are gathered for one layer."""
    sizes: dict[str, int] = {}
    for leaf in leaves:
        if leaf.is_in_stack and leaf.gathered_over:
            layer = "/".join(leaf.path.split("/")[: leaf.path.split("/").index("blocks") + 2])
            sizes[layer] = sizes.get(layer, 0) + leaf.gathered * _unpacked(leaf, number)
    return max(sizes.values(), default=0)


def _unpacked(leaf: PlacedLeaf, number: int) -> int:
    """Returns the bytes of one number as it is used: a byte of NF4 holds two codes, each of which becomes a number."""
    if leaf.dtype.itemsize > 1:
        return number
    return 2 * number if "/nf4/" in leaf.path else 1


class _Work(NamedTuple):
    """The work of a device in a layer.

    Attributes:
      rows: number of rows that go to experts; 0 in a dense layer.
      hidden: number of neurons of all rows.
    """

    rows: float
    hidden: float


def _work(layer: LayerConfig, recipe: Recipe, config: ModelConfig, mesh: Mapping[str, int], chip: Chip) -> _Work:
    mlp, tokens = layer.mlp, local_tokens(recipe, mesh)
    if isinstance(mlp, FFNConfig):
        return _Work(0, tokens * mlp.dim / mesh["tensor"])
    rows = float(tokens * mlp.bank_top_k)
    if exchanges(mlp, config, mesh, tokens, np.dtype(recipe.model.compute_dtype).itemsize, chip):
        rows *= exchange_of(recipe).capacity
    beside = tokens * mlp.universal_ffn.dim if mlp.universal_beside else 0
    return _Work(rows, (rows * mlp.expert.dim + beside) / mesh["tensor"])


def expected_kept(recipe: Recipe, config: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes that a microbatch keeps on a device for its backward pass with `remat = "full"`.

    That is the input of every layer.
    """
    number = np.dtype(recipe.model.compute_dtype).itemsize
    return math.ceil(len(config.layers) * local_tokens(recipe, mesh) * config.d_model * number)
