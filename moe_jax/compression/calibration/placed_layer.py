"""The layers of a model one after another on a mesh, applied to rows of activations in batches."""

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from moe_jax.checks.streamed_layers import TABLE, BankCall, LinearInput, apply_layer, bank_calls, linear_inputs
from moe_jax.distributed.sharding import batch_spec, leaf_spec
from moe_jax.experts.devices import spec_on_mesh
from moe_jax.model_io.loading import TOWER
from moe_jax.model_io.model_source import ModelSource


class PlacedLayer:
    """The weights of a layer on the mesh, and the programs that apply it and that pull gradients back through it.

    `of_tower`: whether it is one of the model's image encoder. `programs` then are those of its layers alone.
    """

    def __init__(
        self, source: ModelSource, index: int, mesh: Mesh, programs: dict[Any, Any], *, of_tower: bool = False
    ):
        config = source.config.check_sees("pictures").tower if of_tower else source.config
        self.index, self.moe = index, index in config.moe_layers
        self._mesh = mesh
        prefix = f"{TOWER if of_tower else ''}layers/{index}/"
        layer, specs = config.layers[index], source.specs()
        paths = {path.removeprefix(prefix): path for path in specs if path.startswith(prefix)}
        if layer.attention.relative_bias is not None:
            paths[TABLE] = TABLE
        key = (layer, tuple((name, specs[path].dtype) for name, path in sorted(paths.items())))
        if key not in programs:
            programs[key] = tuple(jax.jit(partial(made, config, layer)) for made in (_apply, _pull, _see))
        self._program, self._pull, self._see = programs[key]
        self._paths = paths
        self._leaves = {name: self._placed(path, source.read(path)) for name, path in paths.items()}

    def with_leaves(self, leaves: Mapping[str, np.ndarray]) -> "PlacedLayer":
        """The layer with some leaves replaced, by their names below it."""
        changed = copy.copy(self)
        placed = {name: self._placed(self._paths[name], leaf) for name, leaf in leaves.items()}
        changed._leaves = self._leaves | placed
        return changed

    def apply(
        self, x: Float[np.ndarray, "B L d"], size: int, valid: Bool[np.ndarray, "B L"] | None = None
    ) -> tuple[Float[np.ndarray, "B L d"], list[BankCall]]:
        """Applies the layer to at most `size` rows, padded to this many; also returns the calls of its bank.

        `valid`: tokens that are not padding, of which activations are 0 afterwards; None: all.
        """
        y, calls = self._program(self._leaves, self._padded(x, size), self._valid(x, size, valid))
        y = np.asarray(y)[: len(x)]
        # Nothing is known of what stands at padding; if it were not finite, no mask would keep it away from the rest.
        return (y if valid is None else np.where(valid[:, :, None], y, 0)), calls

    def moments(
        self, x: Float[np.ndarray, "B L d"], size: int, valid: Bool[np.ndarray, "B L"]
    ) -> tuple[Float[np.ndarray, "B L d"], dict[str, Float[Array, "i i"]], list[BankCall]]:
        """Applies the layer as `apply` does, and also returns what its linear maps are given.

        Returns:
          The output; the sum over tokens of `x x^T` for the inputs x of every linear map outside the bank, by the path
          of its kernel below the layer, where those of one input are one array; and the calls of the bank.
        """
        y, by_input, calls = self._see(self._leaves, self._padded(x, size), self._valid(x, size, valid))
        moments = {f"{path}/kernel": moment for paths, moment in by_input.items() for path in paths.split()}
        return np.where(valid[:, :, None], np.asarray(y)[: len(x)], 0), moments, calls

    def gradient_before(
        self,
        x: Float[np.ndarray, "B L d"],
        after: Float[np.ndarray, "B L d"],
        size: int,
        valid: Bool[np.ndarray, "B L"] | None = None,
    ) -> Float[np.ndarray, "B L d"]:
        """The gradient of a loss with respect to the layer's input, given that with respect to its output."""
        placed = self._valid(x, size, valid)
        return np.asarray(self._pull(self._leaves, self._padded(x, size), placed, self._padded(after, size)))[: len(x)]

    def _padded(self, x: np.ndarray, size: int) -> jax.Array:
        """Puts `size` rows on the mesh, with zeros after the given ones."""
        padded = np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])
        return jax.device_put(padded, NamedSharding(self._mesh, P(batch_spec()[0])))

    def _valid(self, x: Float[np.ndarray, "B L d"], size: int, valid: Bool[np.ndarray, "B L"] | None) -> jax.Array:
        """Returns Bool[size, L], false for the rows that are added, too."""
        return self._padded(np.ones(x.shape[:2], bool) if valid is None else valid, size)

    def _placed(self, path: str, leaf: np.ndarray) -> jax.Array:
        spec = spec_on_mesh(leaf_spec(path), leaf.shape, self._mesh.shape)
        return jax.device_put(leaf, NamedSharding(self._mesh, spec))


def apply_in_batches(
    layer: PlacedLayer,
    x: Float[np.ndarray, "N L d"],
    batch_size: int,
    mesh: Mesh,
    valid: Bool[np.ndarray, "N L"] | None = None,
) -> Float[np.ndarray, "N L d"]:
    """Applies a layer to rows, one batch after another."""
    size, batches = batches_of(len(x), batch_size, mesh)
    of_batch = [None if valid is None else valid[batch] for batch in batches]
    return np.concatenate([layer.apply(x[batch], size, own)[0] for batch, own in zip(batches, of_batch, strict=True)])


def batches_of(rows: int, batch_size: int, mesh: Mesh) -> tuple[int, list[slice]]:
    """The number of rows of a batch, a multiple of what the mesh divides them into; and the batches."""
    axes, _ = batch_spec()
    shards = int(np.prod([mesh.shape[axis] for axis in axes]))
    size = -(-min(batch_size, rows) // shards) * shards
    return size, [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _apply(config: Any, layer: Any, leaves: Any, x: Any, valid: Any) -> tuple[Any, list[BankCall]]:
    y, calls = apply_layer(config, layer, leaves, x, None, bank_calls, valid)
    return y, [call._replace(tokens=call.tokens.astype(jnp.bfloat16)) for call in calls]


def _pull(config: Any, layer: Any, leaves: Any, x: Any, valid: Any, gradient: Any) -> Any:
    _, pull = jax.vjp(lambda x: apply_layer(config, layer, leaves, x, None, lambda block: [], valid)[0], x)
    return pull(gradient)[0]


def _see(config: Any, layer: Any, leaves: Any, x: Any, valid: Any) -> tuple[Any, dict[str, Array], list[BankCall]]:
    """As `_apply`, with moments by the paths of all linear maps that have the same input, with spaces between them."""

    def watch(block: Any) -> list[Any]:
        inputs = linear_inputs(block)  # first: what watches the bank stands before the modules
        return [inputs, bank_calls(block)]

    y, (inputs, calls) = apply_layer(config, layer, leaves, x, None, watch, valid)
    by_input: dict[int, list[LinearInput]] = {}
    for one in inputs:
        by_input.setdefault(id(one.x), []).append(one)
    found = {}
    for alike in by_input.values():
        every = alike[0].x.reshape(-1, alike[0].x.shape[-1]).astype(jnp.float32)
        rows = jnp.where(valid.reshape(-1, 1), every, 0.0)  # padding may hold what is not finite
        found[" ".join(one.path for one in alike)] = jnp.matmul(rows.T, rows, precision="highest")
    return y, found, [call._replace(tokens=call.tokens.astype(jnp.bfloat16)) for call in calls]


def open_states(file: Path, dtype: Any, shape: tuple[int, ...] | None) -> np.memmap:
    """Opens a file of activations: to read, or with a shape to fill."""
    if shape is None:
        return np.lib.format.open_memmap(file, mode="r")
    return np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
