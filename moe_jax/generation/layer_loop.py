"""Whether tokens are generated in a loop over stacked layers, or by layers with arrays of their own.

A loop is one program for all layers: it compiles in a fraction of the time, and takes a fraction of the memory. But on
every turn it takes a layer's arrays out of the stack, and copies those that an operation wants whole: kernels, and
caches. Of codes, and of the bits of bfloat16, a CPU reads what a token is multiplied with where it lies, in a loop or
not (`functional.few_rows`). So a model all of whose kernels are codes or bits is as fast in a loop but for its caches:
as long as copying these takes less time than compiling would, all in all the loop is faster.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.distributed.sharding import mesh_of
from moe_jax.experts.arrangements.of_all_layers import join_experts
from moe_jax.experts.devices import current_chip
from moe_jax.nn import Decoder, init_cache, is_stacked, unstacked

_MOST_COPIED = 1 / 64
"""Share of the layers' bytes that may be copied: norms and routers have less, one kernel has more."""
_COPYING = 2.4e-10
"""Seconds that a token takes longer for a byte of the caches (measured): it is read and written twice more."""
_COMPILING = 0.3
"""Seconds that a layer with arrays of its own takes to compile (measured)."""
_CODES = (jnp.uint8, jnp.uint16)


def loops(model: Decoder, tokens: int | None) -> bool:
    """Whether a model generates in a loop over its layers, as tokens come sooner then, compiling included.

    Args:
      model: stacked or not, on one device; its shapes are enough.
      tokens: that the caches of all rows hold; None: not known, which counts as many.
    """
    if tokens is None or current_chip().platform != "cpu" or not is_stacked(model) or model.config.has_encoder:
        return False
    caches = jax.eval_shape(lambda: init_cache(model.config, 1, tokens, jnp.dtype(model.compute_dtype)))
    # On average half of what there is in the end. Of several rows, fewer tokens come one after the other.
    copying = _COPYING * tokens * sum(map(_nbytes, jax.tree.leaves(caches))) / 2
    return _is_codes(model) and copying <= _COMPILING * len(model.config.layers)


def for_rows(model: Decoder, tokens: int | None) -> Decoder:
    """Returns the model as it generates best: in a loop over its layers, or unstacked, which copies stacked ones.

    In a loop, experts are those of all layers (`arrangements.of_all_layers`).

    Args:
      model: stacked or not, on one device or split over a mesh.
      tokens: see `loops`.
    """
    if not loops(model, tokens) or mesh_of(nnx.state(model)) is not None:
        return unstacked(model)
    copy = nnx.merge(*nnx.split(model))
    join_experts(copy)
    return copy


def _is_codes(model: Decoder) -> bool:
    """Whether hardly anything in the layers but codes and what belongs to them, such as scales, takes room."""
    forms: dict[tuple, list] = {}
    for path, leaf in _leaves(model):
        forms.setdefault(path[:-1], []).append(leaf)
    sizes = {path: sum(map(_nbytes, leaves)) for path, leaves in forms.items()}
    coded = {path for path, leaves in forms.items() if any(leaf.dtype in _CODES for leaf in leaves)}
    others = sum(size for path, size in sizes.items() if path not in coded)
    return others <= _MOST_COPIED * sum(sizes.values())


def _leaves(model: Decoder) -> list[tuple[tuple, jax.Array | jax.ShapeDtypeStruct]]:
    """Returns the arrays of the segments of the decoder by their paths; norms outside of layers are not among them."""
    segments = nnx.to_pure_dict(nnx.state(model.stack.segments))
    found = jax.tree_util.tree_leaves_with_path(segments)
    return [(tuple(getattr(key, "key", None) for key in path), leaf) for path, leaf in found]


def _nbytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize
