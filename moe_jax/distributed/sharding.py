"""The device mesh, and how parameters and batches are split over it: parameters by an ordered table of rules.

Axes: `data` (replicas), `fsdp` (replicas whose parameters are split), `expert` (experts are split; outside the
MoE layers it splits the batch like `data`), `sequence` (sequences are split, and parameters as by `fsdp`), `tensor`
(matrices are split). Axis types are Auto: the compiler propagates the shardings, and only the expert layers, attention
and the loss are written by hand.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.distributed.mesh_axes import AXES, unknown_axes
from moe_jax.distributed.own_rules import own_spec
from moe_jax.experts.devices import spec_on_mesh
from moe_jax.experts.forms.protocol import delta_specs, shared_delta_specs
from moe_jax.experts.forms.whole import whole_kernel_specs
from moe_jax.experts.shapes import Split

# (path pattern, spec of an unstacked leaf). The first match decides. Parameters of layers in memory, below `segments/`,
# carry one more leading axis, the repeats of the layer, which is never split.
RULES: tuple[tuple[str, P], ...] = (
    (r"embed/embedding", P("tensor", "fsdp")),
    (r"embed/positions", P(None, "fsdp")),
    (r"lm_head/kernel", P("fsdp", "tensor")),
    # A patch of 14 x 14 pixels has 588 entries, which few axes divide.
    (r"(.*/)?patches/projection/kernel", P(None, "fsdp")),
    (r"(.*/)?patches/positions", P(None, "fsdp")),
    (r"(.*/)?patches/(projection/bias|class_token)", P()),
    (r"(.*/)?projector/\d+/bias", P("tensor")),
    (r"(.*/)?projector/\d+/scale", P()),
    (r"lm_head/bias", P("tensor")),
    (r"lm_head/hidden/kernel", P("fsdp", None)),
    (r"lm_head/hidden/bias", P()),
    (r"further/\d+/joint/kernel", P("fsdp", None)),
    (r".*norm/(scale|bias)|.*/(attention|cross_attention|mlp|output|expert)_scale", P()),
    (r".*relative_bias/table", P()),
    (r".*attention/[qkv]/bias", P("tensor")),
    (r".*attention/o/bias", P()),
    (r".*attention/sinks", P()),
    (r".*attention/([qkv]_)?conv", P(None, "tensor")),
    (r".*attention/([qkv]_)?conv_bias|.*attention/decay/bias", P("tensor")),
    (r".*attention/indexer/(q|k|weights)", P("fsdp", None)),
    (r".*attention/indexer/k_(scale|bias)", P()),
    (r".*attention/(log_rate|rate_bias|skip)", P()),
    (r".*router/lora/[ab]", P()),
    (r".*adapters/down", P(None, "fsdp", None)),
    (r".*adapters/up", P(None, None, "fsdp")),
    (r".*router/((hidden|noise|universal)/)?kernel", P("fsdp", None)),
    (r".*router/(selection_)?bias", P()),
    (r".*router/out/kernel", P()),
    (r"(.*/)?groups", P()),
    (r".*experts/(gate|up)/bias", P("expert", "tensor")),
    (r".*experts/down/bias", P("expert", None)),
    (r".*(gate|up)/bias", P("tensor")),
    (r".*down/bias", P()),
)

# All other leaves belong to kernels. Their form (`experts.forms`) says how they are split, given the axis of the kernel
# that `tensor` splits: for the linear maps with these paths its rows (`in`) or its columns (`out`). Rows only if the
# input is split alike: for maps that take whole activations, programs were compiled (by XLA of JAX 0.10.2, with a batch
# of one row for each device) that gave wrong results.
LINEAR_MAPS: tuple[tuple[str, Split], ...] = (
    (r".*attention/([qkv]|q_down|kv_down|beta|decay)|.*(gate|up)|(.*/)?projector/\d+|lm_head|embed", "out"),
    (r".*attention/o|.*down", "in"),
)


def mesh_sizes(axes: Mapping[str, int], count: int) -> dict[str, int]:
    """Returns the sizes of all axes of a mesh; absent ones are 1, and one may be -1, for all remaining devices.

    Raises `InputError` for unknown axes, or sizes whose product is not the number of devices.
    """
    raise_if_any(unknown_axes(axes), f"mesh (axes are {', '.join(AXES)})")
    sizes = {name: axes.get(name, 1) for name in AXES}
    wild = [name for name, size in sizes.items() if size == -1]
    bad = [f"{name}={size}" for name, size in sizes.items() if size != -1 and size < 1]
    if bad or len(wild) > 1:
        raise InputError(f"mesh {dict(axes)}: sizes are positive, and at most one is -1 (the rest of the devices)")
    known = math.prod(size for size in sizes.values() if size != -1)
    if wild and count % known == 0:
        sizes[wild[0]] = count // known
    if math.prod(sizes.values()) != count:
        fixed = " x ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, -1)) or "1"
        rest = f"{fixed} takes {known}"
        if wild:
            rest = f"{wild[0]} = -1 is for the rest of them, which {fixed} does not divide"
        raise InputError(
            f"mesh {dict(axes)} does not fit {count} devices: {rest}; the product of its sizes must be that"
        )
    return sizes


def undivided_experts(counts: Iterable[int], mesh: Mapping[str, int]) -> list[str]:
    """Returns notes, in words, on MoE layers with these numbers of experts which the axis `expert` does not divide.

    Every device then holds all experts of such a layer.
    """
    size = mesh.get("expert", 1)
    undivided_counts = sorted({count for count in counts if count % size})
    what = "experts of a layer: all devices hold all of them"
    return [f"expert={size} does not divide the {count} {what}" for count in undivided_counts]


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Makes the mesh `data x fsdp x expert x sequence x tensor` of some devices, by default all; see `mesh_sizes`."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(axes, len(devices))
    # A mesh axis of 8 on a torus of 4 x 4 x 4 chips covers parts of two of the torus's sides.
    placed = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_spec() -> P:
    """Returns the PartitionSpec of a batch [B, T]: split over every axis except `tensor`."""
    return P(("data", "fsdp", "expert"), "sequence")


def leaf_spec(path: str) -> P:
    """Returns the PartitionSpec of a parameter, from the table of rules.

    Args:
      path: "/"-joined path in memory (`stack/segments/0/blocks/1/...`) or on disk (`layers/3/...`).

    Raises:
      InputError: if no rule matches.
    """
    spec = next((spec for pattern, spec in RULES if re.fullmatch(pattern, path)), None)
    spec = _kernel_spec(path) if spec is None else spec
    spec = own_spec(path) if spec is None else spec
    if spec is None:
        raise InputError(f"no sharding rule matches parameter {path!r}; add one to moe_jax.distributed.sharding.RULES")
    return P(None, *spec) if "segments/" in path else spec


_DELTA = re.compile(r"(?:.*/)?experts/delta/(\w+)/(.+)")
_STACKED_EXPERTS = re.compile(r"(?:.*/)?experts/\w+")


def _kernel_spec(path: str) -> P | None:
    """Returns the PartitionSpec of a leaf of a kernel in one of the registered forms; None: it is none."""
    if match := _DELTA.fullmatch(path):
        matrix, leaf = match.groups()
        shared = shared_delta_specs().get(f"{matrix}/{leaf}")
        return delta_specs("in" if matrix == "down" else "out").get(leaf) if shared is None else shared
    for pattern, split in LINEAR_MAPS:
        for leaf, spec in whole_kernel_specs(split).items():
            module = path.removesuffix(f"/{leaf}")
            if module != path and re.fullmatch(pattern, module):
                return spec if _STACKED_EXPERTS.fullmatch(module) else P(*spec[1:])
    return None


def state_shardings(state: nnx.State, mesh: Mesh) -> Any:
    """Returns the tree of a model's state (arrays or ShapeDtypeStructs) with a NamedSharding for every leaf.

    Raises:
      InputError: for every parameter without a rule, or with a dimension that its axes do not divide.
    """
    problems: list[str] = []

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        name, spec = path_name(path), P()
        try:
            spec = spec_on_mesh(leaf_spec(name), leaf.shape, mesh.shape)
        except InputError as error:
            problems.append(str(error))
        problems.extend(f"{name} {leaf.shape}: {problem}" for problem in undivided(leaf.shape, spec, mesh.shape))
        return NamedSharding(mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(sharding, state)
    raise_if_any(problems, "sharding")
    return shardings


def parts(axis: str | tuple[str, ...] | None, mesh: Mapping[str, int]) -> int:
    """Number of parts into which an entry of a PartitionSpec splits an array; absent axes are 1."""
    names = axis if isinstance(axis, tuple) else (axis,)
    return math.prod(mesh.get(name, 1) for name in names if name is not None)


def undivided(shape: tuple[int, ...], spec: P, mesh: Mapping[str, int]) -> list[str]:
    """Returns, in words, the sizes of a parameter that the axes which split them do not divide."""
    return [
        f"{size} is not divisible by mesh axis {axis}={parts(axis, mesh)}"
        for size, axis in zip(shape, spec, strict=False)
        if size % parts(axis, mesh)
    ]


def mesh_of(state: nnx.State) -> Mesh | None:
    """Returns the mesh that the arrays of a state are split over; None: they are on one device."""
    shardings = {leaf.sharding for leaf in jax.tree.leaves(state)}
    meshes = (one.mesh for one in shardings if isinstance(one, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def path_name(path: tuple) -> str:
    """Returns a name such as `stack/segments/0/blocks/1/mlp/...` from a key path of a state."""
    parts = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path)
    return "/".join(str(part) for part in parts if part not in ("value", None))


def batch_sharding(mesh: Mesh, length: int) -> NamedSharding:
    """Returns the sharding of an array [B, length] of a batch; rows are whole if `sequence` does not divide them."""
    rows, tokens = batch_spec()
    return NamedSharding(mesh, P(rows, None if length % mesh.shape["sequence"] else tokens))


def batch_shards(mesh: Mapping[str, int]) -> int:
    """Returns the number of parts into which the rows of a batch are split, on a mesh with axes of these sizes."""
    return mesh["data"] * mesh["fsdp"] * mesh["expert"]


def check_batch_divides(mesh: Mapping[str, int], batch_size: int, accumulation: int) -> None:
    """Raises `InputError` unless every device of a mesh with these axes gets as many rows of every microbatch."""
    shards = batch_shards(mesh)
    if batch_size // accumulation % shards:
        raise InputError(
            f"train.batch_size = {batch_size} in {accumulation} microbatches leaves {batch_size // accumulation} "
            f"sequences for the {shards} parts of the mesh (data x fsdp x expert); make it a multiple of "
            f"{shards * accumulation}"
        )


def check_sequence_divides(mesh: Mapping[str, int], seq_len: int) -> None:
    """Raises `InputError` unless every device of a mesh with these axes gets as many tokens of every sequence."""
    if seq_len % mesh["sequence"]:
        raise InputError(
            f"data.seq_len = {seq_len} is not divisible by mesh.sequence = {mesh['sequence']}, which splits every "
            "sequence"
        )


def local_rows(mesh: Mesh, batch_size: int) -> list[int]:
    """Returns the rows of the global batch that the devices of this process hold, sorted."""
    rows = np.zeros(batch_size, bool)
    for index in batch_sharding(mesh, 1).addressable_devices_indices_map((batch_size, 1)).values():
        assert index is not None
        rows[index[0]] = True
    return np.flatnonzero(rows).tolist()


def place(batch: Mapping[str, np.ndarray], rows: list[int], mesh: Mesh, batch_size: int) -> dict[str, jax.Array]:
    """Makes global arrays [B, ...] from arrays [R, T], the rows of the global batch that `local_rows` names."""
    place_of = {row: i for i, row in enumerate(rows)}

    def one(local: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            return local[[place_of[row] for row in range(*index[0].indices(batch_size))], index[1]]

        # Pictures of a row stay together, however many there are.
        sharding = batch_sharding(mesh, local.shape[1] if local.ndim == 2 else 1)
        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, shard)

    return {key: one(array) for key, array in batch.items()}


def merge_positions(state: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Returns the data position of the whole batch, from those of each process's rows (see `PackedRow`)."""
    if jax.process_count() == 1:
        return dict(state)
    table = np.full((batch_size, 2), -1, np.int64)
    for row, position in state["rows"].items():
        table[int(row)] = position
    # As int32 pairs: JAX would truncate int64.
    gathered = np.asarray(multihost_utils.process_allgather(table.view(np.int32)))
    rows = gathered.view(np.int64).max(axis=0)
    return {**state, "rows": {str(row): position for row, position in enumerate(rows.tolist())}}
