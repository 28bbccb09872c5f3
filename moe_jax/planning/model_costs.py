"""Parameters, bytes, FLOPs and training memory of a model, and the strategies of its experts, from its config alone.

Everything is counted on the real model, built by `eval_shape`: no weights, and no table of formulas that could
disagree with the code.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError, check_member, raise_if_any
from moe_jax.core.formatting import count_bytes
from moe_jax.distributed.mesh_axes import AXES, unknown_axes
from moe_jax.distributed.sharding import leaf_spec, parts, path_name, undivided
from moe_jax.experts.devices import Cost, Platform, spec_on_mesh
from moe_jax.experts.forms.optional import costs_of
from moe_jax.experts.shapes import Load
from moe_jax.experts.strategy import cheapest, strategy_costs
from moe_jax.model_io.loading import abstract_model, disk_paths, leaf_specs
from moe_jax.model_io.tuned_base import base_config, own_leaves
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn.projector import tokens_per_picture
from moe_jax.peft import split_model, trainable_paths
from moe_jax.peft.trained import active_size, parameter_sizes
from moe_jax.training.flops import picture_flops, train_flops_per_token
from moe_jax.training.optimizer import Placed, make_optimizer, state_specs
from moe_jax.training.recipe import OptimizerSection

if TYPE_CHECKING:
    from moe_jax.planning.proposals import Proposals


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The costs of a model, as `plan` returns them.

        >>> moe_jax.plan(moe_jax.tiny_model(experts=4)).expert_params
        12288

    Parameters are floating-point numbers that could be trained; positions of sparse deltas do not count. A kernel kept
    as NF4 counts the weights that it stands for.

    Attributes:
      dense_params: of the dense model: the one that is upcycled, or, for an MoE, the one it would be with a single
        expert per MoE layer and no router (for an upcycled model that is the model it came from, unless experts are
        pieces of its FFNs). Without adapters.
      total_params: of the model.
      added_params: `total_params - dense_params`.
      router_params: of all routers, those that choose among adapters included.
      expert_params: of all expert banks: kernels or shared bases, deltas, adapters, and per-expert biases.
      universal_params: of universal FFNs beside the banks; one that is a bank's last delta counts as an expert.
      norm_params: of all norms.
      active_params: parameters that one token of a text meets, without norms, as PERFT counts them (methods.md 8):
        embedding and head, attention, dense and universal FFNs, routers, shared bases, and `top_k` of E of the experts'
        own parameters (all of them if fewer are left after merging).
      trainable_params: parameters that training changes if no recipe says otherwise: all but frozen bases.
      param_bytes: everything a checkpoint holds, positions included, in the dtype of the config.
      formula_added_params: `added_params` as published counts of DeRS and PESC are made: without `universal_params`,
        without LoRA, which is merged, and without rounding the entries of a sparse delta per matrix, `N*P*(1-p)` per
        layer.
      train_flops_per_token: of one training step at the full context length (see `training.flops`).
      vision: of a model that sees: its eye; None: it takes no pictures.
      peft: the parameters that are trained beside a frozen base; None: there is no frozen base.
      training_bytes_per_chip: bytes per chip of training over a mesh; None: no mesh was given.
      strategies: how experts would be applied on a platform; None: none was given.
      proposals: the best ways to train by a recipe on a platform; None: none were asked for.
    """

    dense_params: int
    total_params: int
    added_params: int
    router_params: int
    expert_params: int
    universal_params: int
    norm_params: int
    active_params: int
    trainable_params: int
    param_bytes: int
    formula_added_params: int
    train_flops_per_token: float
    vision: "PlannedVision | None" = None
    peft: "TunedParameters | None" = None
    training_bytes_per_chip: "TrainingMemory | None" = None
    strategies: "PlannedStrategies | None" = None
    proposals: "Proposals | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedVision:
    """The costs of a model's eye.

    Attributes:
      tower_params, projector_params: of the image encoder, and of what makes its features embeddings.
      tower_bytes, projector_bytes: in a checkpoint.
      layers_run: layers of the tower that are run; the output of later ones is not taken.
      tokens_per_picture: tokens whose place a picture takes.
      tower_flops, projector_flops: of a forward pass for one picture.
      pictures: of the row below.
      tower_share: the tower's part of the operations of a training step, in rows of the whole context with so many
        pictures, where the tower is frozen; None: there are none.
    """

    tower_params: int
    projector_params: int
    tower_bytes: int
    projector_bytes: int
    layers_run: int
    tokens_per_picture: int
    tower_flops: float
    projector_flops: float
    pictures: int = 0
    tower_share: float | None = None


def planned_vision(config: ModelConfig, pictures: int = 0) -> PlannedVision | None:
    """Counts the eye of a model, and its part of a training step with so many pictures in every row.

    Raises:
      InputError: if pictures are asked for, and the model takes none or a row has no room for them.
    """
    if pictures < 0:
        raise InputError(f"pictures={pictures} must be at least 0")
    if config.vision is None:
        if pictures:
            config.check_sees("pictures")
        return None
    sizes, specs = parameter_sizes(config), leaf_specs(config)

    def of(part: str) -> tuple[int, int]:
        paths = [path for path in specs if path.startswith(f"vision/{part}/")]
        return sum(sizes[path] for path in paths), count_bytes(specs[path] for path in paths)

    (tower, tower_bytes), (projector, projector_bytes) = of("tower"), of("projector")
    flops, tokens = picture_flops(config), tokens_per_picture(config.vision, config.d_model)
    if pictures * tokens > config.max_positions:
        raise InputError(
            f"pictures={pictures}: each takes {tokens:,} tokens, and the model has {config.max_positions:,} positions"
        )
    whole = config.max_positions * train_flops_per_token(config, config.max_positions) + pictures * flops.of_step()
    return PlannedVision(
        tower_params=tower,
        projector_params=projector,
        tower_bytes=tower_bytes,
        projector_bytes=projector_bytes,
        layers_run=max(config.vision.hidden_states),
        tokens_per_picture=tokens,
        tower_flops=flops.tower,
        projector_flops=flops.projector,
        pictures=pictures,
        tower_share=pictures * flops.tower / whole if pictures else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes per chip that training holds all the time, without activations.

    `params` are all parameters, positions included; `gradients` those of trained ones; `optimizer` is its state: two
    moments of AdamW per trained parameter, float32, or what another optimizer keeps.
    """

    params: int
    gradients: int
    optimizer: int
    total: int


def make_plan(config: ModelConfig, origin: ModelConfig | None = None) -> ModelPlan:
    """Counts a model; `origin` is the dense model that it is made from, if known. No weights are needed or made."""
    params, trained = parameter_sizes(config), trained_leaves(config)

    def below(folder: str) -> int:
        return sum(size for path, size in params.items() if folder in path)

    added = sum(params.values()) - sum(parameter_sizes(dense_config(origin or config)).values())
    universal = below("/mlp/universal/")
    rounded_away = sum(_rounded_away(config, layer) for layer in config.layers)
    return ModelPlan(
        dense_params=sum(params.values()) - added,
        total_params=sum(params.values()),
        added_params=added,
        router_params=below("/router/"),
        expert_params=below("/mlp/experts/"),
        universal_params=universal,
        norm_params=sum(params.values()) - sum(_without_norms(params).values()),
        active_params=_active(config, _without_norms(params)),
        trainable_params=sum(size for path, size in params.items() if path in trained),
        param_bytes=count_bytes(leaf_specs(config).values()),
        formula_added_params=added - universal - below("/lora/") + round(rounded_away),
        train_flops_per_token=train_flops_per_token(config, config.max_positions),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedParameters:
    """The trained parameters of a model with a frozen base (methods.md 8).

    Attributes:
      total_params: of adapters, LoRA, and the routers that choose among adapters.
      active_params: the part that one token meets: for S, D and LoRA all, for E and PESC k of E adapters, for R K of M;
        and whole routers.
      active_fraction: `active_params`, as a share of the active parameters of the base model.
    """

    total_params: int
    active_params: int
    active_fraction: float


def tuned_parameters(config: ModelConfig) -> TunedParameters | None:
    """Counts the parameters that tuning trains; None for a model whose base is not frozen."""
    if not config.frozen_base:
        return None
    added, base = own_leaves(config), base_config(config)
    own = {path: size for path, size in parameter_sizes(config).items() if path in added}
    active, below = _active(config, own), parameter_sizes(base)
    share = active / _active(base, _without_norms(below))
    return TunedParameters(total_params=sum(own.values()), active_params=active, active_fraction=share)


def training_memory(
    config: ModelConfig,
    mesh: Mapping[str, int],
    param_dtype: str = "float32",
    optimizer: OptimizerSection | None = None,
) -> TrainingMemory:
    """Returns the bytes that training holds on each chip, sharded by the rule table.

    Axes that `mesh` lacks have size 1. Trained parameters and gradients are in `param_dtype`, frozen ones in the dtype
    of the config. Raises `InputError` for unknown axes or sizes, or a dimension that its axes do not divide.
    """
    problems = unknown_axes(mesh)
    problems += [f"{name}={size} must be at least 1" for name, size in mesh.items() if size < 1]
    raise_if_any(problems, f"mesh (axes are {', '.join(AXES)})")
    itemsize = jnp.dtype(param_dtype).itemsize
    trained_here = trained_leaves(config)
    params = trained = 0
    for path, spec in leaf_specs(config).items():
        size = math.prod(_shard_shape(path, spec.shape, mesh, problems))
        params += size * (itemsize if path in trained_here else spec.dtype.itemsize)
        trained += size if path in trained_here else 0
    raise_if_any(problems, "mesh")
    gradients, kept = trained * itemsize, _optimizer_bytes(config, mesh, optimizer or OptimizerSection())
    return TrainingMemory(params=params, gradients=gradients, optimizer=kept, total=params + gradients + kept)


def _optimizer_bytes(config: ModelConfig, mesh: Mapping[str, int], section: OptimizerSection) -> int:
    """Returns the bytes on each chip of an optimizer's state, from shapes alone; its counters are left out."""
    model = abstract_model(config)
    _, params, _ = split_model(model, trainable_paths(model))
    leaves = [(path_name(path), leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    state = jax.eval_shape(make_optimizer(section, lambda _: 0.0).init, params)
    placed = {path: Placed(shape, spec_on_mesh(leaf_spec(path), shape, mesh)) for path, shape in leaves}
    specs = state_specs(state, placed)
    is_spec = {"is_leaf": lambda node: isinstance(node, PartitionSpec)}
    return sum(
        leaf.size * leaf.dtype.itemsize // math.prod(parts(axis, mesh) for axis in spec)
        for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs, **is_spec), strict=True)
        if leaf.ndim
    )


def dense_config(config: ModelConfig) -> ModelConfig:
    """Returns the model with one expert of every MoE layer in place of the layer, and no adapters."""
    base = base_config(config)
    layers = (
        dataclasses.replace(layer, mlp=layer.mlp.expert) if isinstance(layer.mlp, MoEConfig) else layer
        for layer in base.layers
    )
    return dataclasses.replace(base, layers=tuple(layers))


def trained_leaves(config: ModelConfig) -> frozenset[str]:
    """Returns the paths of the leaves that training changes if no recipe says otherwise."""
    model = abstract_model(config)
    return frozenset(leaf for path in trainable_paths(model) for leaf in disk_paths(config, path))


def _active(config: ModelConfig, params: Mapping[str, int]) -> int:
    """Returns how many of these parameters one token meets."""
    return sum(active_size(config, path, size) for path, size in params.items())


def _without_norms(params: Mapping[str, int]) -> dict[str, int]:
    return {path: size for path, size in params.items() if not path.split("/")[-2].endswith("norm")}


def _rounded_away(config: ModelConfig, layer: LayerConfig) -> float:
    """Returns the entries of sparse deltas lost by rounding to whole numbers per matrix and expert (or added: < 0)."""
    if not isinstance(layer.mlp, MoEConfig):
        return 0.0
    form, experts = layer.mlp.bank.form, (layer.mlp.expert, config.d_model)
    by_formula = costs_of(form).formula_entries(*experts)
    return 0.0 if by_formula is None else layer.mlp.bank_experts * (by_formula - form.multiplied_entries(*experts))


def _shard_shape(path: str, shape: tuple[int, ...], mesh: Mapping[str, int], problems: list[str]) -> tuple[int, ...]:
    spec = spec_on_mesh(leaf_spec(path), shape, mesh)
    name = re.sub(r"^layers/\d+/", "layers/*/", path)
    found = (f"{name} {shape}: {problem}" for problem in undivided(shape, spec, mesh))
    problems.extend(problem for problem in found if problem not in problems)
    axes = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(size // parts(axis, mesh) for size, axis in zip(shape, axes, strict=True))


TOKENS = 8192
"""Tokens of a training batch on one device by default: two sequences of 4096."""
DECODED = 8
"""Rows of a decoding step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTime:
    """Least microseconds that a strategy can take for one layer, forward.

    Attributes:
      products: in the matrix unit, at its peak.
      bytes: for reading parameters, and rows that are sorted, at the bandwidth of the memory.
      making: for entries of kernels that are synthesised from stored arrays; estimated.
      total, bound: the sum, by which strategies are compared, and the name of its largest part.
    """

    products: float
    bytes: float
    making: float
    total: float
    bound: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStrategies:
    """The strategies of one kind of experts, such as `low-rank experts`, in some layers, under one load.

    `use` is `training` or `decoding`; `chosen` is the strategy that takes least, among all that the bank has.
    """

    experts: str
    layers: tuple[int, ...]
    use: str
    tokens: int
    num_experts: int
    top_k: int
    chosen: str
    times: dict[str, StrategyTime]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStrategies:
    """The strategies of all expert banks of a model on a chip.

    Attributes:
      platform: its name, a key of `CHIPS`.
      operations_per_second, bytes_per_second: of products in the dtype of the config, and of the memory.
      source: of these two numbers.
      dtype: of the config, in which activations and parameters are counted.
      layers: one for every kind of bank and load.
      left_out: kinds of experts without a choice of strategies, with the number of their layers.
    """

    platform: str
    operations_per_second: float
    bytes_per_second: float
    source: str
    dtype: str
    layers: tuple[LayerStrategies, ...]
    left_out: dict[str, int]


def planned_strategies(config: ModelConfig, platform: str, tokens: int | None = None) -> PlannedStrategies:
    """Returns the strategies that the cost model would choose on one device, without a mesh.

    `platform` is a key of `CHIPS`, `tokens` their number in a training batch on the device, by default `TOKENS`. Raises
    `InputError` for an unknown platform, or a number of tokens below 1.
    """
    check_member("platform", platform, tuple(CHIPS))
    if tokens is not None and tokens < 1:
        raise InputError(f"tokens={tokens} must be at least 1")
    chip, itemsize = CHIPS[platform], jnp.dtype(config.dtype).itemsize
    kinds: dict[MoEConfig, list[int]] = {}
    for layer in config.moe_layers:
        kinds.setdefault(config.moe(layer), []).append(layer)
    loads = (("training", TOKENS if tokens is None else tokens), ("decoding", DECODED))
    planned, left_out, costs = [], Counter[str](), {}
    for moe, layers in kinds.items():
        of_bank: dict[str, Any] = {"experts": f"{moe.bank.kind} experts", "layers": tuple(layers)}
        for use, n in loads:
            load = Load(moe.bank_experts, n, moe.top_k)
            costs = strategy_costs(moe.bank, moe.expert, config.d_model, load, Platform.of(chip, itemsize))
            if costs:
                of_load = {**load._asdict(), "times": {name: _time(cost) for name, cost in costs.items()}}
                planned.append(LayerStrategies(**of_bank, **of_load, use=use, chosen=cheapest(costs)))
        if not costs:
            left_out[f"{moe.bank.kind} experts"] += len(layers)
    return PlannedStrategies(
        platform=platform,
        operations_per_second=chip.operations_per_second(itemsize),
        bytes_per_second=chip.bandwidth,
        source=chip.source,
        dtype=config.dtype,
        layers=tuple(planned),
        left_out=dict(left_out),
    )


def _time(cost: Cost) -> StrategyTime:
    products, moved, making = (1e6 * seconds for seconds in cost)
    return StrategyTime(products=products, bytes=moved, making=making, total=1e6 * cost.total, bound=cost.bound)
