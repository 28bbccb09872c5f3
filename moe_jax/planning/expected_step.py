"""The expected cost of a training step on a mesh, without mesh or compiler: memory, transfers, least time.

The compiler computes them exactly (`compile_only`, `hlo`); here they follow from shapes and the sharding rules alone.

Memory: the parts follow from how a step works. How many copies of an array exist at a time (`_COPIES`) depends on XLA:
the numbers were fitted to 27 steps compiled for TPUs, those of `benchmarks/pods.py` and seven of a smaller model, such
that the largest error of a step's total is least (10%). Steps with other layers may differ more, and so may those with
other remat than `full`: with `dots`, perft_mixtral's step on v6e:2x4 took 13% more than expected (19.6 GiB, compiled).
XLA:GPU needs less: 6 to 17% for three steps.

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
- Where the loads of all microbatches are counted first (`counts_loads_first`), the model runs forward once more,
  without its head.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.core.data_sheets import Chip
from moe_jax.core.errors import raise_if_any
from moe_jax.distributed.mesh_axes import AXES
from moe_jax.distributed.sharding import leaf_spec, parts, path_name, undivided
from moe_jax.experts.devices import TOKEN_AXES, Platform, spec_on_mesh
from moe_jax.experts.exchange import Exchange, exchange_from_environment
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.shapes import Load
from moe_jax.experts.strategy import strategy_on
from moe_jax.model_io.loading import FURTHER, further_number
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.planning.frozen_gradients import frozen_gradients
from moe_jax.planning.hlo import Transfer
from moe_jax.planning.step_time import StateNumbers, StepRoofline, counts_loads_first, step_roofline
from moe_jax.training.flops import batch_flops
from moe_jax.training.program import Program, abstract_batch, further_tokens
from moe_jax.training.recipe import Recipe
from moe_jax.training.step import make_loss

# Axes that split parameters which every device along them needs as a whole.
_GATHERED = ("fsdp", "sequence")

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
    "gradients of wholes": 1.42,
}


class PlacedLeaf(NamedTuple):
    """A parameter, one of `layers` of this shape, as it would lie on a mesh of any size, which need not exist.

    `axes` are the mesh axes that split it, with their sizes above 1; `trained`: whether a step changes it.
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
        """Whether it is of a layer, perhaps of one that predicts tokens after the next."""
        return self.layer is not None

    @property
    def layer(self) -> str | None:
        """The layers that have it, as the beginning of its path: a place in a pattern; None: it is of no layer."""
        if self.path.startswith(FURTHER):
            return "/".join(self.path.split("/")[:2])
        names = self.path.split("/")
        return "/".join(names[: names.index("blocks") + 2]) if "segments/" in self.path else None


def placed_leaves(program: Program, mesh: Mapping[str, int]) -> list[PlacedLeaf]:
    """Returns all parameters of a program on a mesh with axes of these sizes; the program's own mesh may be another.

    Raises `InputError` for dimensions that their axes do not divide; all are listed.
    """
    problems, found = [], []
    for trained, tree in ((True, program.state.params), (False, program.frozen)):
        for key, leaf in jax.tree_util.tree_leaves_with_path(tree):
            path = path_name(key)
            spec = spec_on_mesh(leaf_spec(path), leaf.shape, mesh)
            problems += [f"{path} {leaf.shape}: {problem}" for problem in undivided(leaf.shape, spec, mesh)]
            shape, layers = (leaf.shape[1:], leaf.shape[0]) if "segments/" in path else (leaf.shape, 1)
            names = [name for part in spec if part for name in (part if isinstance(part, tuple) else (part,))]
            axes = {name: parts(name, mesh) for name in names if parts(name, mesh) > 1}
            found.append(PlacedLeaf(path, shape, layers, np.dtype(leaf.dtype), axes, trained))
    raise_if_any(problems, "mesh")
    return found


class ExpectedStep(NamedTuple):
    """The expected cost of a step, on every device.

    Attributes:
      temporaries: bytes that it holds beside its arguments, gradients included.
      kept: of these, the bytes that a microbatch keeps for its backward pass.
      sent: its collectives.
      model_flops: operations, without those done again and the gradients of frozen kernels.
      roofline: the least time.
    """

    temporaries: int
    kept: int
    sent: list[Transfer]
    model_flops: float
    roofline: StepRoofline


class WholeStep(NamedTuple):
    """The numbers of a step that are the same on every mesh, of all devices together.

    Attributes:
      model_flops: operations, without those done again, as if no kernel were frozen.
      frozen: of these, the gradients of frozen kernels.
      kept: bytes that a microbatch keeps for its backward pass; with `remat = "full"` they are the inputs of layers,
        which are counted on the mesh, and this is 0.
    """

    model_flops: float
    frozen: float
    kept: int


def whole_step(recipe: Recipe, config: ModelConfig, program: Program) -> WholeStep:
    """Returns what no mesh changes of a step, which is traced unless `remat` is full.

    `program` is that of the recipe on one device.
    """
    trained = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(program.state.params)]
    kept = 0 if recipe.model.remat == "full" else kept_bytes(program, recipe)
    return WholeStep(batch_flops(recipe, config), frozen_gradients(recipe, config, trained), kept)


def expected_step(
    recipe: Recipe,
    config: ModelConfig,
    whole: WholeStep,
    leaves: Sequence[PlacedLeaf],
    mesh: Mapping[str, int],
    chip: Chip,
    changed: int,
    per_host: int | None = None,
) -> ExpectedStep:
    """Estimates a step.

    `leaves` are the parameters of the recipe's program as they lie on the mesh with these sizes. The step changes
    `changed` bytes on a device. `per_host` as in `step_roofline`.
    """
    devices = math.prod(mesh.values())
    step = _Step(recipe, config, leaves, mesh, chip)
    if recipe.model.remat == "full":
        # The input of every layer; those that predict tokens after the next have two.
        inputs = len(config.layers) + 2 * recipe.further_depth(config.further_layers)
        kept = inputs * step.tokens * config.d_model * step.number
    else:
        kept = math.ceil(whole.kept / (devices // mesh["tensor"]))
    temporaries, sent = step.temporaries(kept), step.transfers()
    model_flops, frozen = whole.model_flops / devices, whole.frozen / devices
    state = StateNumbers(
        used=sum(leaf.gathered * leaf.layers for leaf in step.leaves),
        changed=changed,
        trained=sum(leaf.held * leaf.layers for leaf in leaves if leaf.trained),
    )
    roofline = step_roofline(recipe, config, chip, model_flops, state, temporaries, sent, devices, per_host, frozen)
    return ExpectedStep(temporaries, kept, sent, model_flops - frozen, roofline)


class _Step:
    """A step of a run on a mesh: `tokens` of a microbatch on a device, and `number` bytes for each of their numbers.

    `leaves` are the parameters that it reads.
    """

    def __init__(
        self, recipe: Recipe, config: ModelConfig, leaves: Sequence[PlacedLeaf], mesh: Mapping[str, int], chip: Chip
    ):
        depth = recipe.further_depth(config.further_layers)
        self._recipe, self._config, self._mesh, self._chip = recipe, config, mesh, chip
        self.leaves = [leaf for leaf in leaves if not _is_idle(leaf, depth)]
        self._layers = (*config.layers, *config.layers[-1:] * depth)
        self._microbatches = recipe.train.accumulation
        self._again = recipe.model.remat == "full"
        self._first = counts_loads_first(recipe, config)
        self.number = np.dtype(recipe.model.compute_dtype).itemsize
        rows = recipe.train.batch_size // recipe.train.accumulation
        self.tokens = math.ceil(rows * recipe.data.seq_len / math.prod(mesh[axis] for axis in TOKEN_AXES))

    @property
    def _exchange(self) -> Exchange:
        named = self._recipe.model.exchange
        return exchange_from_environment() if named is None else Exchange.parse(named, "model.exchange")

    def temporaries(self, kept: int) -> int:
        """Returns the bytes that a step holds beside its arguments, of which a microbatch keeps `kept`."""
        trained = [leaf for leaf in self.leaves if leaf.trained]
        gradients = sum(4 * leaf.held * leaf.layers for leaf in trained)
        rounded = [leaf for leaf in trained if leaf.dtype.itemsize < 4]
        if self._microbatches > 1 and rounded:
            # Gradients of a microbatch, if all parameters are bfloat16 and nothing is added in place; or a float32 copy
            # of the few that are (`sum_of_gradients`).
            itemsize = rounded[0].dtype.itemsize if len(rounded) == len(trained) else 4
            gradients += itemsize * sum(leaf.held * leaf.layers for leaf in rounded)
        # Kernels of all layers are converted before the loop over layers.
        converted = sum(
            self.number * leaf.held * leaf.layers
            for leaf in trained
            if leaf.is_in_stack and leaf.axes and leaf.dtype.itemsize != self.number
        )
        rows, hidden = zip(*(self._rows_and_hidden(layer.mlp) for layer in self._config.layers), strict=True)
        alone = [leaf for leaf in trained if leaf.is_in_stack and not leaf.gathered_over]
        parts = {
            "kernels": self._most_gathered(trained),
            "frozen kernels": self._most_gathered([leaf for leaf in self.leaves if not leaf.trained]),
            "hidden": self.number * max(hidden),
            "rows": self.number * max(rows) * self._config.d_model,
            "gradients of parts": sum(4 * leaf.held * leaf.layers for leaf in alone if leaf.axes),
            "gradients of wholes": sum(4 * leaf.held * leaf.layers for leaf in alone if not leaf.axes),
        }
        return round(gradients + converted + kept + sum(_COPIES[name] * size for name, size in parts.items()))

    def _most_gathered(self, leaves: Sequence[PlacedLeaf]) -> int:
        """Returns the most bytes that are gathered for one layer."""
        sizes: dict[str, int] = {}
        for leaf in leaves:
            if leaf.layer is not None and leaf.gathered_over:
                # A byte of NF4 holds two codes, each of which becomes a number.
                packed = 2 * self.number if "/nf4/" in leaf.path else 1
                itemsize = self.number if leaf.dtype.itemsize > 1 else packed
                sizes[leaf.layer] = sizes.get(leaf.layer, 0) + leaf.gathered * itemsize
        return max(sizes.values(), default=0)

    def _rows_and_hidden(self, mlp: FFNConfig | MoEConfig) -> tuple[float, float]:
        """Returns the rows of a device that go to a layer's experts, 0 in a dense one, and the neurons of all rows."""
        if isinstance(mlp, FFNConfig):
            return 0, self.tokens * mlp.dim / self._mesh["tensor"]
        rows = float(self.tokens * mlp.bank_top_k)
        if self._exchanges(mlp):
            rows *= self._exchange.capacity
        beside = self.tokens * mlp.universal_ffn.dim if mlp.universal_beside else 0
        return rows, (rows * mlp.expert.dim + beside) / self._mesh["tensor"]

    def transfers(self) -> list[Transfer]:
        """Returns the collectives of one step."""
        sent = [*self._parameter_transfers(), *self._activation_transfers()]
        return [one for one in sent if one.bytes and len(one.group) > 1]

    def _parameter_transfers(self) -> Iterator[Transfer]:
        moes = {layer.mlp for layer in self._config.layers if isinstance(layer.mlp, MoEConfig)}
        base = "(base/)?" if any(self._is_synthesised(moe) for moe in moes) else ""
        explicit = re.compile(rf"(.*/)?experts/{base}[^/]*/kernel")
        for leaf in self.leaves:
            runs, over = self._microbatches * leaf.layers, leaf.gathered_over
            # `over_mesh` gathers kernels [E, i, o] of experts without a base, and the base of synthesised kernels.
            gathered_explicitly = explicit.fullmatch(leaf.path) is not None
            if over:
                is_float = leaf.dtype.kind == "f" or leaf.dtype.name == "bfloat16"
                itemsize = self.number if is_float else leaf.dtype.itemsize
                gathers = self._gathers(leaf, gathered_explicitly=gathered_explicitly)
                yield Transfer("all-gather", runs * gathers, leaf.gathered * itemsize, self._group(over))
            if not leaf.trained:
                continue
            is_dense_kernel = leaf.is_in_stack and len(leaf.shape) > 1 and not gathered_explicitly
            itemsize = self.number if is_dense_kernel else 4
            rest = tuple(axis for axis in TOKEN_AXES if axis not in leaf.axes)
            if over and leaf.path.startswith("embed/"):
                yield Transfer("all-reduce", runs, leaf.gathered * 4, self._group((*over, *rest)))
                continue
            if over:
                yield Transfer("reduce-scatter", runs, leaf.gathered * itemsize, self._group(over))
            yield Transfer("all-reduce", runs, leaf.held * itemsize, self._group(rest))

    def _gathers(self, leaf: PlacedLeaf, *, gathered_explicitly: bool) -> int:
        """Returns how often one microbatch gathers a parameter."""
        if not leaf.is_in_stack:
            # What counts the loads first has no head.
            return (2 if self._config.tie_embeddings else 1) + (self._first and not leaf.path.startswith("lm_head/"))
        if gathered_explicitly:
            return (1 if self._recipe.model.remat == "none" else 2) + self._first
        # Packed leaves are unpacked again; small leaves with an axis of experts are gathered ahead of their products.
        is_dense_product = len(leaf.shape) == 2 and leaf.dtype.kind != "u"
        return (3 if self._again and is_dense_product else 2) + self._first

    def _activation_transfers(self) -> Iterator[Transfer]:
        tokens, runs, again, first = self.tokens, self._microbatches, self._again, self._first
        row = self._config.d_model * self.number
        tensor, expert = self._group(("tensor",)), self._group(("expert",))
        for layer in self._layers:
            # Forward the outputs of both halves of a layer, backward the gradients of their inputs; of these, only the
            # first half's output is computed again: nothing in the layer needs the output of the second.
            yield Transfer("all-reduce", runs * (4 + again + 2 * first), tokens * row, tensor)
            if not layer.is_recurrent:  # a recurrence does not go with sequences that are split
                yield self._head_transfer(layer, runs * (2 + again + first))
            if not isinstance(layer.mlp, MoEConfig) or not self._exchanges(layer.mlp):
                continue
            devices, top_k = self._mesh["expert"], layer.mlp.bank_top_k
            if self._exchange.chosen(devices, top_k) == "all-to-all":
                kind = "all-to-all" if self._chip.platform == "cpu" else "ragged-all-to-all"
                yield Transfer(kind, runs * 2 * (2 + again + first), tokens * top_k * row, expert)
            else:
                size = devices * tokens * row
                yield Transfer("all-gather", runs * (2 + again + first), size, expert)
                yield Transfer("reduce-scatter", runs * (2 + first), size, expert)

    def _head_transfer(self, layer: LayerConfig, runs: int) -> Transfer:
        """Returns the transfer of queries, keys and values to the devices of their heads, and of outputs back."""
        attention, axis = layer.softmax_attention, self._group(("sequence",))
        column, width = self.tokens * self.number, attention.head_dim + attention.value_dim
        sequence, tensor = self._mesh["sequence"], self._mesh["tensor"]
        keys = attention.num_kv_heads * width
        if attention.num_kv_heads % (sequence * tensor) == 0:
            queries = attention.num_heads * width
            return Transfer("all-to-all", runs, (queries + keys) // tensor * column, axis)
        # Every device has all keys, and its own queries.
        return Transfer("all-gather", runs, sequence * keys * column, axis)

    def _exchanges(self, moe: MoEConfig) -> bool:
        """Whether tokens travel to the devices that hold their experts."""
        form = moe.bank.form
        if self._mesh["expert"] == 1 or not isinstance(form, KernelForm):
            return False
        return not form.over_base or self._is_synthesised(moe)

    def _is_synthesised(self, moe: MoEConfig) -> bool:
        """Whether kernels of experts are synthesised from a base and the experts' own arrays (`experts.strategy`)."""
        form = moe.bank.form
        if not isinstance(form, KernelForm) or not form.over_base:
            return False
        tokens = self.tokens * math.prod(self._mesh[axis] for axis in TOKEN_AXES)
        load = Load(moe.bank_experts, tokens, moe.bank_top_k)
        platform, alone = Platform.of(self._chip, self.number), math.prod(self._mesh.values()) == 1
        return strategy_on(platform, moe.bank, moe.expert, self._config.d_model, load, alone=alone) == "synthesised"

    def _group(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Returns the devices that differ from the first in these axes alone, in the order of the mesh."""
        sizes = [self._mesh[axis] for axis in AXES]
        along = tuple(slice(None) if axis in axes else 0 for axis in AXES)
        return tuple(np.arange(math.prod(sizes)).reshape(sizes)[along].reshape(-1).tolist())


def _is_idle(leaf: PlacedLeaf, depth: int) -> bool:
    """Whether a parameter is of a layer that predicts tokens after the next, and no step runs it."""
    return leaf.path.startswith(FURTHER) and further_number(leaf.path) >= depth


def kept_bytes(program: Program, recipe: Recipe) -> int:
    """Returns the bytes that a microbatch keeps for its backward pass, traced by JAX, without parameters and batch."""
    loss = make_loss(program.graphdef, further=further_tokens(recipe, program.config))
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
