"""Whether tokens are generated in a loop over stacked layers, or by layers with arrays of their own.

A loop is one program for all layers: it compiles in a fraction of the time, and takes a fraction of the memory. But on
every turn it takes a layer's arrays out of the stack, and copies those that an operation wants whole, such as kernels.
Of codes, and of the bits of bfloat16, a CPU reads what a token is multiplied with where it lies, in a loop or not
(`functional.few_rows`). Adapters lie in one array of all layers (`arrangements.of_all_layers`), and caches go through
the loop whole (`nn.block_stack`). So a model all of whose kernels are codes or bits is as fast in a loop, and layers
that have other codes than others can go in one too (`alike_layers`). Kernels in NF4 are made whole for every token, in
a loop or not, beside which it takes little to copy LoRA.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.distributed.sharding import mesh_of
from moe_jax.experts.adapters import Adapters
from moe_jax.experts.arrangements.of_all_layers import join_experts
from moe_jax.experts.devices import current_chip
from moe_jax.experts.forms.kernel_of_codes import FOLDERS_OF_NF4
from moe_jax.generation.alike_layers import alike_segments, join_alike_layers
from moe_jax.nn import Decoder, is_stacked, unstacked

_MOST_COPIED = 1 / 64
"""Share of the layers' bytes that may be copied: norms and routers have less, one kernel has more."""
_MOST_BESIDE_NF4 = 5 / 2
"""Bytes that may be copied for a byte of kernels in NF4: LoRA of rank 64 has 1.8 on SmolLM2's maps. A loop took as long
as single layers where three to five were copied."""
_CODES = (jnp.uint8, jnp.uint16)


def loops(model: Decoder) -> bool:
    """Whether a model, stacked or not, on one device, generates in a loop over its layers; its shapes are enough."""
    if current_chip().platform != "cpu" or model.config.has_encoder or not _is_codes(model):
        return False
    return is_stacked(model) or alike_segments(model.config) is not None


def for_rows(model: Decoder) -> Decoder:
    """Returns the model as it generates best: in a loop over its layers, or unstacked, which copies stacked ones.

    In a loop, experts are those of all layers (`arrangements.of_all_layers`).

    Args:
      model: stacked or not, on one device or split over a mesh.
    """
    if not loops(model) or mesh_of(nnx.state(model)) is not None:
        return unstacked(model)
    copy = nnx.merge(*nnx.split(model))
    join_alike_layers(copy)
    join_experts(copy)
    return copy


def join_for_loop(model: Decoder) -> None:
    """Changes in place a model on one device: if it is looped over, layers that are alike are joined for that."""
    if loops(model):
        join_alike_layers(model)


def _is_codes(model: Decoder) -> bool:
    """Whether hardly anything that a loop copies takes room: anything but adapters, codes and their scales."""
    modules = nnx.iter_modules(model.stack.segments)
    adapters = {path for path, module in modules if isinstance(module, Adapters)}
    forms: dict[tuple, list] = {}
    for path, leaf in _leaves(model):
        if path[:-1] not in adapters:
            forms.setdefault(path[:-1], []).append(leaf)
    sizes = {path: sum(map(_nbytes, leaves)) for path, leaves in forms.items()}
    coded = {path for path, leaves in forms.items() if any(leaf.dtype in _CODES for leaf in leaves)}
    others = sum(size for path, size in sizes.items() if path not in coded)
    nf4 = sum(size for path, size in sizes.items() if path[-1] in FOLDERS_OF_NF4)
    return others <= _MOST_COPIED * sum(sizes.values()) + _MOST_BESIDE_NF4 * nf4


def _leaves(model: Decoder) -> list[tuple[tuple, jax.Array | jax.ShapeDtypeStruct]]:
    """Returns the arrays of the segments of the decoder by their paths; norms outside of layers are not among them."""
    segments = nnx.to_pure_dict(nnx.state(model.stack.segments))
    found = jax.tree_util.tree_leaves_with_path(segments)
    return [(tuple(getattr(key, "key", None) for key in path), leaf) for path, leaf in found]


def _nbytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize
