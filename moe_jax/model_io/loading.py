"""Converts between leaves on disk, one per parameter and layer, and a stacked and sharded model in memory."""

import re
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from moe_jax.core.data_sheets import available_memory
from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.core.finite import cast, check_finite
from moe_jax.core.registry import forgets_replaced
from moe_jax.distributed.sharding import path_name, state_shardings
from moe_jax.experts.exchange import Exchange, exchange_from_environment
from moe_jax.experts.shapes import shapes_of
from moe_jax.experts.strategy import strategy_from_environment
from moe_jax.model_io.model_source import ModelSource, read_part
from moe_jax.models import ModelConfig, segments_of
from moe_jax.nn import Decoder, unstacked
from moe_jax.nn.vision import Vision, VisionTower

Index = tuple[slice, ...]
_Module = TypeVar("_Module", Decoder, VisionTower, Vision)

# Stacked layers up to this size are stacked, and taken apart, on the host: compiling a program per shape takes longer.
_ON_HOST = 32 << 20
_FEW_ROWS = 4
"""Rows with which a CPU generates about as fast with kernels in bfloat16 as in float32; with one, faster (measured)."""
VISION = "vision/"
TOWER = "vision/tower/"
"""The paths of the image encoder of a model that sees begin with it, in memory and on disk."""
FURTHER = "further/"
"""Likewise those of layers that predict tokens after the next."""
_STACKED = re.compile(r"(?:vision/tower/)?(stack/|encoder/|)segments/(\d+)/blocks/(\d+)/(.*)")


def further_number(path: str) -> int:
    """Returns which of the layers that predict tokens after the next a path lies in, one that begins with `FURTHER`."""
    return int(path.removeprefix(FURTHER).partition("/")[0])


def abstract_model(config: ModelConfig, *, compute_dtype: str = "float32", remat: str = "none") -> Decoder:
    """Returns the model with `ShapeDtypeStruct`s instead of parameters, which takes no memory.

    Raises:
      InputError: for an image encoder alone, which is no language model.
    """
    config.check_no_tower("a model that reads and writes tokens")
    environment = strategy_from_environment(), exchange_from_environment()
    return nnx.merge(*_abstract_parts(config, compute_dtype, remat, environment), copy=True)


# Tracing the constructor takes up to a second, and a job needs the same model several times.
@forgets_replaced
@lru_cache(maxsize=16)
def _abstract_parts(
    config: ModelConfig, compute_dtype: str, remat: str, environment: tuple[str, Exchange]
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns graph and state of that model; banks take their strategy and exchange from the environment when made."""
    dtype = jnp.dtype(compute_dtype)
    make = Decoder if config.patches is None else VisionTower
    return nnx.split(shapes_of(lambda rngs: make(config, rngs=rngs, compute_dtype=dtype, remat=remat)))


def leaf_specs(config: ModelConfig, dtype: str | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the leaves of a model on disk: leaf path -> shape and dtype. No weights are needed or made.

    Floating-point leaves have the dtype `dtype`, by default the config's.
    """
    return dict(_leaf_specs(config, dtype))


@forgets_replaced
@lru_cache(maxsize=16)
def _leaf_specs(config: ModelConfig, dtype: str | None) -> dict[str, jax.ShapeDtypeStruct]:
    specs = {}
    _, state = _abstract_parts(config, "float32", "none", (strategy_from_environment(), exchange_from_environment()))
    for path, leaf in _leaves(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise InputError(f"{path} is a random key, which a part of a model cannot keep; take the key of the call")
        leaf_dtype = jnp.dtype(dtype) if dtype and may_be_cast(path, leaf.dtype) else leaf.dtype
        shape = leaf.shape[1:] if _STACKED.fullmatch(path) else leaf.shape
        specs.update({name: jax.ShapeDtypeStruct(shape, leaf_dtype) for name in disk_paths(config, path)})
    return dict(sorted(specs.items(), key=lambda item: _by_layer(item[0])))


def disk_paths(
    config: ModelConfig, path: str, *, model: Decoder | VisionTower | None = None, cuts: Collection[int] = ()
) -> list[str]:
    """Returns the paths on disk of a parameter in memory: one per repeat if it is stacked.

    stack/segments/0/blocks/1/mlp/up/kernel -> layers/1/mlp/up/kernel, layers/3/mlp/up/kernel, ...
    stack/final_norm/scale                  -> final_norm/scale
    encoder/final_norm/scale                -> encoder_norm/scale
    encoder/relative_bias/table             -> encoder_relative_bias/table
    vision/tower/stack/final_norm/scale     -> vision/tower/final_norm/scale

    Layers are stacked as they are in `model`, if it is given: some were perhaps unstacked, or replaced. `cuts` are
    those of an image encoder's `Stack`.
    """
    if path.startswith(TOWER):
        vision, below = config.vision, path.removeprefix(TOWER)
        assert vision is not None
        of_tower = model.vision.tower if isinstance(model, Decoder) else None
        found = disk_paths(vision.tower, below, model=of_tower, cuts=vision.hidden_states)
        return [TOWER + name for name in found]
    match = _STACKED.fullmatch(path)
    if not match:
        if path.startswith("encoder/"):
            return [f"encoder_{path.removeprefix('encoder/').removeprefix('final_')}"]
        return [path.removeprefix("stack/")]
    in_encoder = match[1] == "encoder/"
    start = 0 if in_encoder else config.num_encoder_layers
    if model is None:
        segments: Any = segments_of((config.encoder if in_encoder else config.decoder).layers, cuts=cuts)
    else:
        stack = model.encoder if in_encoder and isinstance(model, Decoder) else model.stack
        segments = stack.segments
    segment = segments[int(match[2])]
    layers = (start + segment.layer(repeat, int(match[3])) for repeat in range(segment.repeats))
    return [f"layers/{layer}/{match[4]}" for layer in layers]


def load_model(
    source: ModelSource,
    *,
    param_dtype: str | Callable[[str], str | None] | None = None,
    compute_dtype: str = "float32",
    remat: str = "none",
    mesh: Mesh | None = None,
    finite: bool = False,
    stacked: bool = True,
) -> Decoder:
    """Reads a model, leaf by leaf. Large layers are stacked on the device, so the host holds one leaf at a time.

    If the source can read parts, only the part of a sharded leaf that this process's devices need is read and held.

    Args:
      source: the model.
      param_dtype: dtype of floating-point parameters, or a function from a path in memory to it; None: as stored (the
        widest, where stacked layers differ). Codes and scales of NF4 kernels are always as stored.
      compute_dtype: dtype of the activations.
      remat: as in `Decoder`.
      mesh: the mesh to shard over, by the rule table; None: one device.
      finite: whether to refuse weights that are not finite.
      stacked: whether layers are stacked; if not, every layer has arrays of its own, as generation wants them.

    Raises:
      InputError: if the source lacks leaves, has others, or they have other shapes (all are listed), or weights are too
        large for `param_dtype`.
    """
    model = abstract_model(source.config, compute_dtype=compute_dtype, remat=remat)
    model = model if stacked else unstacked(model)
    return _loaded(source, model, param_dtype, mesh, finite, paths=partial(disk_paths, source.config, model=model))


def load_tower(
    source: ModelSource,
    *,
    param_dtype: str | Callable[[str], str | None] | None = None,
    compute_dtype: str = "float32",
    mesh: Mesh | None = None,
) -> VisionTower:
    """Reads an image encoder alone, as `load_model` reads a language model.

    Raises:
      InputError: if the source is none, and as `load_model`.
    """
    if source.config.patches is None:
        raise InputError(f"{source.path} is a {source.config.family!r} model, and not an image encoder")
    environment = strategy_from_environment(), exchange_from_environment()
    model = nnx.merge(*_abstract_parts(source.config, compute_dtype, "none", environment), copy=True)
    return _loaded(source, model, param_dtype, mesh, False, paths=partial(disk_paths, source.config, model=model))


def load_vision(
    source: ModelSource,
    *,
    param_dtype: str | Callable[[str], str | None] | None = None,
    compute_dtype: str = "float32",
    mesh: Mesh | None = None,
) -> Vision:
    """Reads the eye of a model that sees, and nothing of its language model; otherwise as `load_model`.

    Raises:
      InputError: if the model takes no pictures, and as `load_model`.
    """
    source.config.check_sees("an image encoder")
    model = abstract_model(source.config, compute_dtype=compute_dtype).vision
    return _loaded(source, model, param_dtype, mesh, False, paths=partial(vision_paths, source.config))


def vision_paths(config: ModelConfig, path: str) -> list[str]:
    """Returns the paths on disk, in the whole model, of a parameter of the eye, as `disk_paths`."""
    return disk_paths(config, VISION + path)


def _loaded(
    source: ModelSource,
    model: _Module,
    param_dtype: str | Callable[[str], str | None] | None,
    mesh: Mesh | None,
    finite: bool,
    *,
    paths: Callable[[str], list[str]],
) -> _Module:
    """Reads the parameters of a module, by their paths in it; `paths` returns those on disk."""
    graphdef, state = nnx.split(model)
    specs = source.specs()
    check_leaves(leaf_specs(source.config), specs, str(source.path))
    here = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: here, state) if mesh is None else state_shardings(state, mesh)

    def reader(name: str, dtype: jnp.dtype) -> Callable[[Index], np.ndarray]:
        """Returns a function that returns boxes of a leaf; it reads the leaf once."""

        def checked(leaf: np.ndarray) -> np.ndarray:
            if finite:
                check_finite(name, leaf, "mend the model")
            return cast(name, leaf, dtype)

        if not hasattr(source, "read_part") or "/nf4/" in name:
            leaf = checked(source.read(name))
            return lambda index: leaf[index]
        parts: dict[str, np.ndarray] = {}

        def part(index: Index) -> np.ndarray:
            key = str(index)
            if key not in parts:
                box = tuple(slice(*axis.indices(n)[:2]) for axis, n in zip(index, specs[name].shape, strict=True))
                parts[key] = checked(read_part(source, name, box))
            return parts[key]

        return part

    def load(path: tuple, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        names = paths(path_name(path))
        dtype = jnp.result_type(*(specs[name].dtype for name in names))
        wanted = param_dtype(path_name(path)) if callable(param_dtype) else param_dtype
        if wanted and may_be_cast(names[0], dtype):
            dtype = jnp.dtype(wanted)
        if leaf.shape == specs[names[0]].shape:
            return _put(leaf.shape, sharding, reader(names[0], dtype))
        if len(names) == 1:
            one = reader(names[0], dtype)
            return _put(leaf.shape, sharding, lambda index: one(index[1:])[None])
        if leaf.size * dtype.itemsize <= _ON_HOST:
            each = [reader(name, dtype) for name in names]
            return _put(leaf.shape, sharding, lambda index: np.stack([part(index[1:]) for part in each[index[0]]]))
        layers = _zeros_program(leaf.shape, dtype, sharding)()
        layer_sharding = _without_leading_axis(sharding)
        for index, name in enumerate(names):
            layers = _set_layer(layers, _put(leaf.shape[1:], layer_sharding, reader(name, dtype)), index)
        return layers

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(load, state, shardings))


def dtype_for_generation(
    source: ModelSource, compute_dtype: str, mesh: Mesh | None = None, *, rows: int | None = None
) -> str | None:
    """Returns the `param_dtype` that suits a model which only generates.

    On a CPU a dense model is faster with weights in float32. So narrower ones are widened when they are read, which
    changes no result, unless that needs more than half of the free memory. Those in bfloat16 stay as they are for few
    rows, or in an MoE, whose experts are given few rows each: half as many bytes are read in less time.

    Args:
      source: the model.
      compute_dtype: of the activations.
      mesh: over which the model is split; None: one device.
      rows: that are generated together; None: many.
    """
    platform = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform
    if platform != "cpu" or compute_dtype != "float32":
        return None
    specs = source.specs().items()
    few = mesh is None and rows is not None and rows <= _FEW_ROWS
    if (few or source.config.moe_layers) and all(spec.dtype != jnp.float16 for _, spec in specs):
        return None
    widened = sum(spec.size * (4 if may_be_cast(path, spec.dtype) else spec.dtype.itemsize) for path, spec in specs)
    available = available_memory()
    return "float32" if available is None or widened <= available // 2 else None


def may_be_cast(path: str, dtype: jnp.dtype) -> bool:
    """Whether a leaf may be cast to another floating-point dtype.

    Integers, the scales of NF4 kernels, and biases of selection, whose differences would be lost, may not.
    """
    is_nf4 = "/nf4/" in path or "/coded_nf4/" in path
    return jnp.issubdtype(dtype, jnp.floating) and not is_nf4 and not path.endswith("/selection_bias")


def model_leaves(model: Decoder) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
    """Yields the leaves of a model in memory in their form on disk, layer by layer."""
    for name, (leaf, index) in stacked_leaves(model).items():
        yield name, layer_of(leaf, index)


def layer_of(leaf: jax.Array, index: int | None) -> jax.Array | np.ndarray:
    """Returns one of several stacked layers, or the leaf itself if `index` is None.

    The layer is on the host if the leaf is small and no other host has a part of it.
    """
    if index is None:
        return leaf
    if leaf.nbytes <= _ON_HOST and leaf.is_fully_addressable:
        return np.asarray(leaf)[index, ...]
    if leaf.is_fully_addressable:
        return leaf[index]
    return _layer_program(_without_leading_axis(leaf.sharding))(leaf, index)


def stacked_leaves(model: Decoder) -> dict[str, tuple[jax.Array, int | None]]:
    """Returns the place in memory of every leaf on disk, layer by layer: an array, and an index if that is stacked."""
    entries = {}
    for path, leaf in _leaves(nnx.state(model)):
        for index, name in enumerate(disk_paths(model.config, path, model=model)):
            entries[name] = leaf, index if _STACKED.fullmatch(path) else None
    return dict(sorted(entries.items(), key=lambda entry: _by_layer(entry[0])))


def check_leaves(expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Raises `InputError` that lists every leaf, by path, which is missing, unexpected or misshapen in a source."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name].shape}, config.json says {spec.shape}"
        for name, spec in expected.items()
        if name in found and tuple(found[name].shape) != tuple(spec.shape)
    ]
    raise_if_any(problems, f"{where} does not hold the model its config.json describes")


def _leaves(state: nnx.State) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]


def _by_layer(path: str) -> tuple[int, int, str]:
    """Sort key: embedding, layers in order, the rest."""
    match = re.match(r"layers/(\d+)/", path)
    return (1, int(match[1]), path) if match else (0 if path.startswith("embed/") else 2, 0, path)


def _put(shape: tuple[int, ...], sharding: jax.sharding.Sharding, part: Callable[[Index], np.ndarray]) -> jax.Array:
    # A callback and not device_put, so that every process of a pod asks only for its own shards.
    return jax.make_array_from_callback(shape, sharding, lambda index: part(index or ()))


@lru_cache(maxsize=64)
def _layer_program(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, int], jax.Array]:
    """Returns a program that takes one layer out of several and leaves every shard on its device."""
    return jax.jit(lambda leaf, index: leaf[index], out_shardings=sharding)


def _without_leading_axis(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
    return sharding


# Cached: many leaves of a model have the same shape, and compiling takes longer than filling all but the largest.
@lru_cache(maxsize=256)
def _zeros_program(shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@partial(jax.jit, donate_argnums=0)
def _set_layer(stacked: jax.Array, layer: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, 0)
