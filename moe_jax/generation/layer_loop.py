"""Whether tokens are generated in a loop over stacked layers, or by layers with arrays of their own.

A loop is one program for all layers: it compiles in a fraction of the time, and takes a fraction of the memory. But on
every turn it takes a layer's arrays out of the stack, and copies those that an operation wants whole, such as kernels.
Of codes, and of the bits of bfloat16, a CPU reads what a token is multiplied with where it lies, in a loop or not
(`functional.few_rows`). Experts and adapters lie in one array of all layers (`arrangements.of_all_layers`), and caches
go through the loop whole (`nn.block_stack`). So a model is as fast in a loop if little is left to copy, and layers that
have other codes than others can go in one too (`alike_layers`). Kernels in NF4 are made whole for every token, in a
loop or not, beside which it takes little to copy LoRA.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.distributed.sharding import mesh_of
from moe_jax.experts.arrangements.of_all_layers import join_experts, leaves_of_all_layers
from moe_jax.experts.devices import current_chip, current_mesh
from moe_jax.experts.forms.kernel_of_codes import FOLDERS_OF_NF4
from moe_jax.generation.alike_layers import alike_segments, has_layers_of_config, join_alike_layers
from moe_jax.nn import Decoder, is_stacked, unstacked

_MOST_COPIED = 1 / 8
"""Share of the bytes that a token is multiplied with that may be copied: of LoRA next to nothing is noticed, of whole
kernels that are a seventh, 2 to 8 % more time."""
_MOST_BESIDE_NF4 = 6
"""Bytes that may be copied for a byte of kernels in NF4. LoRA of rank 256 has 5.7 on SmolLM2's maps: a token then takes
0.88 of its time by single layers, and with LoRA of rank 64 0.85."""
_CODES = (jnp.uint8, jnp.uint16)


def loops(model: Decoder) -> bool:
    """Whether a model, stacked or not, on one device, generates in a loop over its layers; its shapes are enough."""
    if current_chip().platform != "cpu" or current_mesh() is not None or model.config.has_encoder:
        return False
    can_be = is_stacked(model) or alike_segments(model.config) is not None
    return can_be and has_layers_of_config(model) and _copies_little(model)


def for_rows(model: Decoder) -> Decoder:
    """Returns the model as it generates best: in a loop over its layers, or unstacked, which copies stacked ones.

    In a loop, experts are those of all layers (`arrangements.of_all_layers`).

    Args:
      model: stacked or not, on one device or split over a mesh.
    """
    if not loops(model) or mesh_of(nnx.state(model)) is not None:
        return unstacked(model)
    # Joining takes arrays out of variables: not out of those of the model.
    copy = nnx.merge(*nnx.split(model), copy=True)
    if not join_alike_layers(copy) and not is_stacked(copy):
        return copy
    join_experts(copy)
    return copy


def join_for_loop(model: Decoder) -> None:
    """Changes in place a model on one device: if it is looped over, layers that are alike are joined for that."""
    if loops(model):
        join_alike_layers(model)


def _copies_little(model: Decoder) -> bool:
    """Whether little of what a token is multiplied with is copied: all but experts, adapters and codes is."""
    joined, config = leaves_of_all_layers(model.stack.segments), model.config
    chosen = [config.moe(i).top_k / config.moe(i).num_experts for i in config.moe_layers]
    forms: dict[tuple, list] = {}
    for path, leaf in _leaves(model):
        size = _nbytes(leaf) * (max(chosen) if chosen and path in joined else 1)
        forms.setdefault(path[:-1], []).append((size, leaf.dtype in _CODES or path in joined))
    sizes = {path: sum(size for size, _ in leaves) for path, leaves in forms.items()}
    copied = sum(sizes[path] for path, leaves in forms.items() if not any(in_place for _, in_place in leaves))
    nf4 = sum(size for path, size in sizes.items() if path[-1] in FOLDERS_OF_NF4)
    return copied <= _MOST_COPIED * sum(sizes.values()) + _MOST_BESIDE_NF4 * nf4


def _leaves(model: Decoder) -> list[tuple[tuple, jax.Array | jax.ShapeDtypeStruct]]:
    """Returns the arrays of the segments of the decoder by their paths; norms outside of layers are not among them."""
    segments = nnx.to_pure_dict(nnx.state(model.stack.segments))
    found = jax.tree_util.tree_leaves_with_path(segments)
    return [(tuple(getattr(key, "key", None) for key in path), leaf) for path, leaf in found]


def _nbytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize
