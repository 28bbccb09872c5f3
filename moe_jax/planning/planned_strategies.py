"""The strategies by which a chip would apply a model's experts, and the time of each; for `plan`."""

import dataclasses
from collections import Counter

import jax.numpy as jnp

from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError, check_member
from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.shapes import Load
from moe_jax.experts.strategy import cheapest, strategy_costs
from moe_jax.models import ModelConfig, MoEConfig

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
      total: the sum, by which strategies are compared.
      bound: the largest part: `products`, `bytes` or `making`.
    """

    products: float
    bytes: float
    making: float
    total: float
    bound: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStrategies:
    """The strategies of one kind of expert bank under one load.

    Attributes:
      experts: kind of the experts, such as `low-rank experts`.
      layers: indices of the layers that have such a bank.
      use: `training` or `decoding`.
      tokens: of the call.
      num_experts, top_k: of the layers.
      chosen: the strategy that takes least.
      times: of all strategies that the bank has.
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
      operations_per_second: of products in the dtype of the config.
      bytes_per_second: of the memory.
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

    Args:
      config: of the model.
      platform: a key of `CHIPS`.
      tokens: number in a training batch on the device; None: `TOKENS`.

    Raises:
      InputError: for an unknown platform, or a number of tokens below 1.
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
        experts = f"{moe.bank.kind} experts"
        for use, n in loads:
            load = Load(moe.bank_experts, n, moe.top_k)
            costs = strategy_costs(moe.bank, moe.expert, config.d_model, load, Platform.of(chip, itemsize))
            if costs:
                planned.append(_strategies(experts, tuple(layers), use, load, costs))
        if not costs:
            left_out[experts] += len(layers)
    return PlannedStrategies(
        platform=platform,
        operations_per_second=chip.operations_per_second(itemsize),
        bytes_per_second=chip.bandwidth,
        source=chip.source,
        dtype=config.dtype,
        layers=tuple(planned),
        left_out=dict(left_out),
    )


def _strategies(experts: str, layers: tuple[int, ...], use: str, load: Load, costs: dict[str, Cost]) -> LayerStrategies:
    return LayerStrategies(
        experts=experts,
        layers=layers,
        use=use,
        tokens=load.tokens,
        num_experts=load.num_experts,
        top_k=load.top_k,
        chosen=cheapest(costs),
        times={name: _time(cost) for name, cost in costs.items()},
    )


def _time(cost: Cost) -> StrategyTime:
    products, moved, making = (1e6 * seconds for seconds in cost)
    return StrategyTime(products=products, bytes=moved, making=making, total=1e6 * cost.total, bound=cost.bound)
