"""The expected cost of a training step on a mesh, without mesh or compiler: memory, transfers, least time.

The compiler computes them exactly (`compile_only`, `hlo`); here they follow from shapes and the sharding rules alone.

Memory: the parts follow from how a step works. How many copies of an array exist at a time (`_COPIES`) depends on XLA:
the numbers were fitted to 27 steps compiled for TPUs, those of `benchmarks/pods.py` and seven of a smaller model, such
that the largest error of a step's total is least (9%). Steps with other layers may differ more. XLA:GPU needs less: 6
to 17% for three steps.

Transfers are right within a tenth for the steps of `benchmarks/pods.py`. Whole arrays are counted, as XLA gathers and
adds them up there:

- A parameter that `fsdp` splits is gathered by the forward pass and by the backward pass of every microbatch: in the
  dtype of the products, or packed as it is stored. With `remat` the backward pass gathers kernels of dense products
  twice: for the layer that it computes again, and for the gradient of its input. The embedding and the head are
  gathered once.
- Gradients are added up and scattered over `fsdp`, and the parts are added up over all other axes that split the
  batch: those of whole experts and of the head in float32, the rest in the dtype of the products. The gradient of the
  embedding is added up whole.
- Activations travel to experts and back (`over_mesh`), are added up over `tensor`, and change from a part of the
  tokens to a part of the heads and back over `sequence` (`grouped_query`): forward, again with `remat`, and
  backward.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.core.data_sheets import Chip
from moe_jax.core.errors import raise_if_any
from moe_jax.data.sections import input_length
from moe_jax.distributed.sharding import AXES, leaf_spec, parts, path_name, undivided
from moe_jax.experts.devices import TOKEN_AXES, Platform, spec_on_mesh
from moe_jax.experts.exchange import Exchange, exchange_from_environment
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.shapes import Load
from moe_jax.experts.strategy import strategy_on
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.planning.hlo import KINDS, Collectives, Transfer
from moe_jax.planning.step_time import StateNumbers, StepRoofline, step_roofline
from moe_jax.training.flops import step_flops
from moe_jax.training.program import Program, abstract_batch
from moe_jax.training.recipe import Recipe
from moe_jax.training.step import make_loss

# Axes that split parameters which every device along them needs as a whole.
_GATHERED = ("fsdp", "sequence")


class PlacedLeaf(NamedTuple):
    """A parameter on a mesh.

    Attributes:
      path: in memory, see `distributed.sharding.leaf_spec`.
      shape: of one layer's parameter.
      layers: number of layers that have one.
      dtype: as it is stored.
      axes: mesh axes that split it, with their sizes above 1.
      trained: whether a step changes it.
    """

    path: str
    shape: tuple[int, ...]
    layers: int
    dtype: np.dtype
    axes: dict[str, int]
    trained: bool

    @property
    def gathered_over(self) -> tuple[str, ...]:
        """The axes along which every device needs the whole parameter."""
        return tuple(axis for axis in _GATHERED if axis in self.axes)

    @property
    def held(self) -> int:
        """Number of one layer's entries that a device keeps."""
        return math.prod(self.shape) // math.prod(self.axes.values())

    @property
    def gathered(self) -> int:
        """Number of one layer's entries when it is gathered."""
        return self.held * math.prod(self.axes[axis] for axis in self.gathered_over)

    @property
    def is_in_stack(self) -> bool:
        """Whether it belongs to a layer."""
        return "segments/" in self.path


def placed_leaves(program: Program, mesh: Mapping[str, int]) -> list[PlacedLeaf]:
    """Returns all parameters of a program on a mesh with axes of these sizes; the program's own mesh may be another.

    Raises:
      InputError: a dimension that its axes do not divide; all are listed.
    """
    problems: list[str] = []
    trees = ((True, program.state.params), (False, program.frozen))
    found = [leaf for trained, tree in trees for leaf in _placed(tree, trained, mesh, problems)]
    raise_if_any(problems, "mesh")
    return found


def _placed(tree: object, trained: bool, mesh: Mapping[str, int], problems: list[str]) -> Iterator[PlacedLeaf]:
    for key, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = path_name(key)
        spec = spec_on_mesh(leaf_spec(path), leaf.shape, mesh)
        problems += [f"{path} {leaf.shape}: {problem}" for problem in undivided(leaf.shape, spec, mesh)]
        shape, layers = (leaf.shape[1:], leaf.shape[0]) if "segments/" in path else (leaf.shape, 1)
        yield PlacedLeaf(path, shape, layers, np.dtype(leaf.dtype), _axes(spec, mesh), trained)


def _axes(spec: P, mesh: Mapping[str, int]) -> dict[str, int]:
    names = [name for part in spec for name in (part if isinstance(part, tuple) else (part,)) if name is not None]
    return {name: parts(name, mesh) for name in names if parts(name, mesh) > 1}


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
    work = [_layer_work(layer, recipe, config, mesh, chip) for layer in config.layers]
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


class _LayerWork(NamedTuple):
    """The work of a device in a layer.

    Attributes:
      rows: number of rows that go to experts; 0 in a dense layer.
      hidden: number of neurons of all rows.
    """

    rows: float
    hidden: float


def _layer_work(
    layer: LayerConfig, recipe: Recipe, config: ModelConfig, mesh: Mapping[str, int], chip: Chip
) -> _LayerWork:
    mlp, tokens = layer.mlp, local_tokens(recipe, mesh)
    if isinstance(mlp, FFNConfig):
        return _LayerWork(0, tokens * mlp.dim / mesh["tensor"])
    rows = float(tokens * mlp.bank_top_k)
    if exchanges(mlp, config, mesh, tokens, np.dtype(recipe.model.compute_dtype).itemsize, chip):
        rows *= exchange_of(recipe).capacity
    beside = tokens * mlp.universal_ffn.dim if mlp.universal_beside else 0
    return _LayerWork(rows, (rows * mlp.expert.dim + beside) / mesh["tensor"])


def expected_kept(recipe: Recipe, config: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes that a microbatch keeps on a device for its backward pass with `remat = "full"`.

    That is the input of every layer.
    """
    number = np.dtype(recipe.model.compute_dtype).itemsize
    return math.ceil(len(config.layers) * local_tokens(recipe, mesh) * config.d_model * number)


def expected_transfers(
    recipe: Recipe, config: ModelConfig, leaves: Sequence[PlacedLeaf], mesh: Mapping[str, int], chip: Chip
) -> list[Transfer]:
    """Returns the collectives of one step.

    Args:
      recipe, config: of the run.
      leaves: its parameters, as they lie on the mesh.
      mesh: size of every axis.
      chip: of the mesh, on which depends how experts are applied.
    """
    sent = [
        *_parameter_transfers(recipe, config, leaves, mesh, chip),
        *_activation_transfers(recipe, config, mesh, chip),
    ]
    return [one for one in sent if one.bytes and len(one.group) > 1]


def sums_by_kind(sent: Sequence[Transfer]) -> dict[str, Collectives]:
    """Returns the sums by kind; see `hlo.collectives`."""
    found: dict[str, Collectives] = {}
    for one in sent:
        before = found.get(one.kind, Collectives(0, 0))
        found[one.kind] = Collectives(before.count + one.count, before.bytes + one.count * one.bytes)
    return {kind: found[kind] for kind in KINDS if kind in found}


def local_tokens(recipe: Recipe, mesh: Mapping[str, int]) -> int:
    """Returns the number of tokens of a microbatch on one device."""
    rows = recipe.train.batch_size // recipe.train.accumulation
    return math.ceil(rows * recipe.data.seq_len / math.prod(mesh[axis] for axis in TOKEN_AXES))


def _parameter_transfers(
    recipe: Recipe, config: ModelConfig, leaves: Sequence[PlacedLeaf], mesh: Mapping[str, int], chip: Chip
) -> Iterator[Transfer]:
    number = np.dtype(recipe.model.compute_dtype).itemsize
    microbatches = recipe.train.accumulation
    moes = {layer.mlp for layer in config.layers if isinstance(layer.mlp, MoEConfig)}
    tokens = local_tokens(recipe, mesh)
    makes_kernels = any(is_synthesised(moe, config, mesh, tokens, number, chip) for moe in moes)
    for leaf in leaves:
        runs = microbatches * leaf.layers
        over = leaf.gathered_over
        gathered_explicitly = _is_gathered_explicitly(leaf, makes_kernels=makes_kernels)
        if over:
            itemsize = number if leaf.dtype.kind == "f" or leaf.dtype.name == "bfloat16" else leaf.dtype.itemsize
            gathers = _gathers(
                leaf, recipe.model.remat, gathered_explicitly=gathered_explicitly, tied=config.tie_embeddings
            )
            yield Transfer("all-gather", runs * gathers, leaf.gathered * itemsize, group(mesh, over))
        if not leaf.trained:
            continue
        is_dense_kernel = leaf.is_in_stack and len(leaf.shape) > 1 and not gathered_explicitly
        summed = leaf.held * (number if is_dense_kernel else 4)
        rest = tuple(axis for axis in TOKEN_AXES if axis not in leaf.axes)
        if over and leaf.path.startswith("embed/"):
            yield Transfer("all-reduce", runs, leaf.gathered * 4, group(mesh, (*over, *rest)))
            continue
        if over:
            size = leaf.gathered * (number if is_dense_kernel else 4)
            yield Transfer("reduce-scatter", runs, size, group(mesh, over))
        yield Transfer("all-reduce", runs, summed, group(mesh, rest))


def _is_gathered_explicitly(leaf: PlacedLeaf, *, makes_kernels: bool) -> bool:
    """Whether `over_mesh` gathers the parameter explicitly.

    It gathers kernels [E, i, o] of experts without a base, and the base of experts whose kernels are synthesised.
    """
    path = leaf.path.split("/")
    if path[-1] != "kernel":
        return False
    return path[-3:-2] == ["experts"] or makes_kernels and path[-4:-2] == ["experts", "base"]


def _gathers(leaf: PlacedLeaf, remat: str, *, gathered_explicitly: bool, tied: bool) -> int:
    """Returns how often one microbatch gathers a parameter."""
    if not leaf.is_in_stack:
        return 2 if tied else 1
    if gathered_explicitly:
        return 1 if remat == "none" else 2
    # Packed leaves are unpacked again; small leaves with an axis of experts are gathered ahead of their products.
    is_dense_product = len(leaf.shape) == 2 and leaf.dtype.kind != "u"
    return 3 if remat == "full" and is_dense_product else 2


def _activation_transfers(
    recipe: Recipe, config: ModelConfig, mesh: Mapping[str, int], chip: Chip
) -> Iterator[Transfer]:
    number = np.dtype(recipe.model.compute_dtype).itemsize
    tokens, microbatches = local_tokens(recipe, mesh), recipe.train.accumulation
    again = recipe.model.remat == "full"
    row = config.d_model * number
    for layer in config.layers:
        # Forward the outputs of both halves of a layer, backward the gradients of their inputs; of these, only the
        # first half's output is computed again: nothing in the layer needs the output of the second.
        yield Transfer("all-reduce", microbatches * (5 if again else 4), tokens * row, group(mesh, ("tensor",)))
        yield from _head_transfers(layer, tokens * number, microbatches * (3 if again else 2), mesh)
        if not isinstance(layer.mlp, MoEConfig) or not exchanges(layer.mlp, config, mesh, tokens, number, chip):
            continue
        devices, top_k = mesh["expert"], layer.mlp.bank_top_k
        if exchange_of(recipe).chosen(devices, top_k) == "all-to-all":
            kind = "all-to-all" if chip.platform == "cpu" else "ragged-all-to-all"
            passes = 6 if again else 4
            yield Transfer(kind, microbatches * passes, tokens * top_k * row, group(mesh, ("expert",)))
        else:
            size = devices * tokens * row
            yield Transfer("all-gather", microbatches * (3 if again else 2), size, group(mesh, ("expert",)))
            yield Transfer("reduce-scatter", microbatches * 2, size, group(mesh, ("expert",)))


def _head_transfers(layer: LayerConfig, column: int, passes: int, mesh: Mapping[str, int]) -> Iterator[Transfer]:
    """Yields the transfers of queries, keys and values to the devices of their heads, and of outputs back."""
    attention, devices = layer.attention, mesh["sequence"] * mesh["tensor"]
    keys = attention.num_kv_heads * (attention.head_dim + attention.value_dim)
    queries = attention.num_heads * (attention.head_dim + attention.value_dim)
    axis = group(mesh, ("sequence",))
    if attention.num_kv_heads % devices == 0:
        yield Transfer("all-to-all", passes, (queries + keys) // mesh["tensor"] * column, axis)
        return
    # Every device has all keys, and its own queries.
    yield Transfer("all-gather", passes, mesh["sequence"] * keys * column, axis)


def exchange_of(recipe: Recipe) -> Exchange:
    """Returns how tokens come to experts if they travel."""
    if recipe.model.exchange is not None:
        return Exchange.parse(recipe.model.exchange, "model.exchange")
    return exchange_from_environment()


def exchanges(
    moe: MoEConfig, config: ModelConfig, mesh: Mapping[str, int], tokens: int, itemsize: int, chip: Chip
) -> bool:
    """Whether tokens travel to the devices that hold their experts."""
    form = moe.bank.form
    if mesh["expert"] == 1 or not isinstance(form, KernelForm):
        return False
    return not form.over_base or is_synthesised(moe, config, mesh, tokens, itemsize, chip)


def is_synthesised(
    moe: MoEConfig, config: ModelConfig, mesh: Mapping[str, int], tokens: int, itemsize: int, chip: Chip
) -> bool:
    """Whether kernels of experts are synthesised from a base and the experts' own arrays (`experts.strategy`)."""
    form = moe.bank.form
    if not isinstance(form, KernelForm) or not form.over_base:
        return False
    load = Load(moe.bank_experts, tokens * math.prod(mesh[axis] for axis in TOKEN_AXES), moe.bank_top_k)
    platform, alone = Platform.of(chip, itemsize), math.prod(mesh.values()) == 1
    return strategy_on(platform, moe.bank, moe.expert, config.d_model, load, alone=alone) == "synthesised"


def group(mesh: Mapping[str, int], axes: Sequence[str]) -> tuple[int, ...]:
    """Returns the devices that differ from the first in these axes alone, in the order of the mesh."""
    numbers = np.arange(math.prod(mesh[axis] for axis in AXES)).reshape([mesh[axis] for axis in AXES])
    along = tuple(slice(None) if axis in axes else 0 for axis in AXES)
    return tuple(numbers[along].reshape(-1).tolist())


class ExpectedStep(NamedTuple):
    """The expected cost of a step, on every device.

    Attributes:
      temporaries: bytes that it holds beside its arguments, see `expected_temporaries`.
      kept: of these, the bytes that a microbatch keeps for its backward pass.
      sent: its collectives, see `expected_transfers`.
      model_flops: operations, without those done again.
      roofline: the least time.
    """

    temporaries: int
    kept: int
    sent: list[Transfer]
    model_flops: float
    roofline: StepRoofline


def expected_step(
    recipe: Recipe,
    config: ModelConfig,
    program: Program,
    leaves: Sequence[PlacedLeaf],
    mesh: Mapping[str, int],
    chip: Chip,
    changed: int,
    per_host: int | None = None,
) -> ExpectedStep:
    """Estimates a step.

    Args:
      recipe, config: of the run.
      program: of the recipe, on one device.
      leaves: its parameters, as they lie on the mesh.
      mesh: size of every axis.
      chip: of the mesh.
      changed: bytes on a device that a step changes, see `StateNumbers`.
      per_host: devices of a host; None: all are in one slice.
    """
    devices = math.prod(mesh.values())
    if recipe.model.remat == "full":
        kept = expected_kept(recipe, config, mesh)
    else:
        kept = math.ceil(kept_bytes(program, recipe) / (devices // mesh["tensor"]))
    temporaries = expected_temporaries(recipe, config, leaves, mesh, chip, kept)
    sent = expected_transfers(recipe, config, leaves, mesh, chip)
    rows, seq_len, input_len = recipe.train.batch_size, recipe.data.seq_len, input_length(recipe.data)
    model_flops = step_flops(config, seq_len, input_len)(rows * seq_len, rows * input_len) / devices
    state = StateNumbers(
        used=sum(leaf.gathered * leaf.layers for leaf in leaves),
        changed=changed,
        trained=sum(leaf.held * leaf.layers for leaf in leaves if leaf.trained),
    )
    roofline = step_roofline(recipe, chip, model_flops, state, temporaries, sent, devices, per_host)
    return ExpectedStep(temporaries, kept, sent, model_flops, roofline)


def kept_bytes(program: Program, recipe: Recipe) -> int:
    """Returns the bytes that a microbatch keeps for its backward pass, traced by JAX, without parameters and batch."""
    loss = make_loss(program.graphdef, program.config, accumulation=recipe.train.accumulation)
    rows = recipe.train.batch_size // recipe.train.accumulation
    micro = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, batch_size=rows, accumulation=1))

    def kept(params: nnx.State, frozen: nnx.State, batch: dict[str, jax.Array]) -> list[jax.Array]:
        key = jax.random.key(recipe.seed)
        _, vjp, _ = jax.vjp(lambda params: loss(params, frozen, batch, 1.0, key), params, has_aux=True)
        return jax.tree.leaves(vjp)

    with jax.set_mesh(program.mesh):
        batch = abstract_batch(micro, program.config, program.mesh)
        traced = jax.make_jaxpr(kept)(program.state.params, program.frozen, batch).jaxpr
    given = {id(var) for var in (*traced.invars, *traced.constvars)}
    found = {id(var): var.aval for var in traced.outvars if id(var) not in given}
    return sum(
        math.prod(getattr(aval, "shape", ())) * np.dtype(aval.dtype).itemsize
        for aval in found.values()
        if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    )
