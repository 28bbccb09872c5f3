"""The options of parameter-efficient tuning, and the config of the tuned model."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from moe_jax.core.errors import InputError, check_member, flag_of, nearest, raise_if_any, shown
from moe_jax.experts.layout.config import AdapterConfig, FFNConfig, LoRAConfig
from moe_jax.model_io.tuned_base import as_base, is_tuned, with_nf4
from moe_jax.models.config import LayerConfig, ModelConfig, MoEConfig, PerftConfig

METHODS = {"perft-r": "routed", "perft-e": "embedded", "perft-d": "dense", "perft-s": "single", "lora": "lora"}
BASES = ("stored", "nf4")
ROUTER = "router"
DROPOUT = 0.05
# Alpha is twice the rank by default (methods.md 7).
LORA_SCALE = 2.0
PARALLEL_SCALE = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """How adapters are added to a model. An option that is None takes the default of the method.

    Attributes:
      method: one of `METHODS`.
      adapter: `lora:R` or `parallel:R`, with the width R.
      scale: factor of the adapters' outputs; by default 2 for LoRA and 1 for parallel adapters.
      alpha: for LoRA, instead of `scale`, which is alpha/R.
      dropout: on the adapters' inputs; default 0.05.
      num_experts, top_k: M adapters, K of them for each token (PERFT-R; PERFT-D has only M).
      balance_coef, z_coef: coefficients of the losses of PERFT-R's router; default 0.01 and 0.
      targets: the kernels that get LoRA, by name: q, k, v, o, gate, up, down, router; in latent attention q_down, q_up,
        kv_down and kv_up instead of q, k and v.
      base: how the frozen base is kept: as stored, or as NF4 codes.
    """

    method: str
    adapter: str
    scale: float | None = None
    alpha: float | None = None
    dropout: float | None = None
    num_experts: int | None = None
    top_k: int | None = None
    balance_coef: float | None = None
    z_coef: float | None = None
    targets: tuple[str, ...] | None = None
    base: Literal["stored", "nf4"] = "stored"


def chosen_options(
    *,
    method: str | None,
    adapter: str | None,
    experts: int | None = None,
    top_k: int | None = None,
    targets: str | Iterable[str] | None = None,
    scale: float | None = None,
    alpha: float | None = None,
    dropout: float | None = None,
    base: Literal["stored", "nf4"] | None = None,
    balance_coef: float | None = None,
    z_coef: float | None = None,
) -> AdaptOptions:
    """Reads the options, which `moe-jax adapt --help` explains. None: not given.

    Raises:
      InputError: if there is no method or adapter.
    """
    if method is None or adapter is None:
        missing = "--method" if method is None else "--adapter"
        raise InputError(f"{missing} is missing, as in --method perft-s --adapter lora:16")
    if isinstance(targets, str):
        targets = filter(None, targets.split(","))
    return AdaptOptions(
        method=method,
        adapter=adapter,
        scale=scale,
        alpha=alpha,
        dropout=dropout,
        num_experts=experts,
        top_k=top_k,
        balance_coef=balance_coef,
        z_coef=z_coef,
        targets=None if targets is None else tuple(targets),
        base=base or "stored",
    )


# Options that only some methods have.
_ONLY = {
    "num_experts": ("perft-r", "perft-d"),
    "top_k": ("perft-r",),
    "balance_coef": ("perft-r",),
    "z_coef": ("perft-r",),
    "targets": ("lora",),
}
_REQUIRED = {"num_experts": ("perft-r", "perft-d"), "top_k": ("perft-r",), "targets": ("lora",)}
_FLAGS = {"num_experts": "--experts"}


def adapted_config(config: ModelConfig, options: AdaptOptions) -> ModelConfig:
    """The config of a model with new adapters over a frozen base.

    Args:
      config: of the base.
      options: the adapters.

    Returns:
      `config` with adapters in every layer that can have them, and `frozen_base`.

    Raises:
      InputError: if the options contradict each other or do not fit the model; all problems are listed.
    """
    check_member("--method", options.method, tuple(METHODS))
    check_member("--base", options.base, BASES)
    config = as_base(config)
    problems: list[str] = []
    adapter = _collected(problems, lambda: parse_adapter(options))
    problems += _misplaced(options)
    problems += _unfit(config, options)
    if adapter is None or problems:
        raise_if_any(problems, f"--method {options.method}")
    assert adapter is not None
    layers = list(config.layers)
    for i, layer in enumerate(layers):
        try:
            layers[i] = _adapted(layer, options, adapter)
        except InputError as error:
            # Equal layers have equal problems: one of them is enough.
            raise InputError(f"--method {options.method}: {error}") from None
    adapted = dataclasses.replace(config, layers=tuple(layers), frozen_base=True)
    return with_nf4(adapted, True) if options.base == "nf4" else adapted


def parse_adapter(options: AdaptOptions) -> AdapterConfig:
    """Reads `lora:R` or `parallel:R`, with scale, alpha and dropout.

    Raises:
      InputError: for anything else, or values out of range.
    """
    kind, colon, number = options.adapter.partition(":")
    if kind not in ("lora", "parallel") or not colon:
        raise InputError(
            f"unknown --adapter {shown(options.adapter)}{nearest(kind, ('lora', 'parallel'))}; "
            "it is lora:R or parallel:R"
        )
    if options.method == "lora" and kind != "lora":
        raise InputError(f"--adapter {options.adapter} does not go with LoRA, whose adapters are lora:R")
    try:
        rank = int(number)
    except ValueError:
        raise InputError(f"--adapter {shown(options.adapter)}: expected a whole number after the colon") from None
    if rank < 1:
        raise InputError(f"--adapter {options.adapter}: the rank must be at least 1")
    scale = _scale(options, kind, rank)
    if not 0.0 < scale < math.inf:
        raise InputError(f"a scale of {scale:g} makes nothing of the adapters; it must be above 0")
    return AdapterConfig(
        rank=rank,
        activation="none" if kind == "lora" else "silu",
        scale=scale,
        dropout=DROPOUT if options.dropout is None else options.dropout,
    )


def targets_of(config: ModelConfig) -> tuple[str, ...]:
    """Names of the kernels that can get LoRA in at least one layer of a model."""
    of_attention = (name for layer in config.layers for name in layer.attention.projections)
    of_mlp = (name for layer in config.layers for name in _targets(layer.mlp))
    return tuple(dict.fromkeys([*of_attention, *of_mlp]))


def _scale(options: AdaptOptions, kind: str, rank: int) -> float:
    if options.alpha is None:
        return options.scale if options.scale is not None else LORA_SCALE if kind == "lora" else PARALLEL_SCALE
    if kind != "lora":
        raise InputError("--alpha is LoRA's, and a parallel adapter has none; use --scale")
    if options.scale is not None:
        raise InputError("give --alpha or --scale, which is alpha/R, but not both")
    return options.alpha / rank


def _misplaced(options: AdaptOptions) -> list[str]:
    """Problems: options that the method does not have, and required ones that are missing."""
    problems = []
    for name, methods in _ONLY.items():
        flag = _FLAGS.get(name, flag_of(name))
        given = getattr(options, name) is not None
        if given and options.method == "perft-e" and name == "num_experts":
            problems.append("PERFT-E has one adapter for each of the MoE's experts; leave --experts out")
        elif given and options.method not in methods:
            problems.append(f"{flag} goes with {' and '.join(methods)} only")
        elif not given and options.method in _REQUIRED.get(name, ()):
            problems.append(f"{flag} is missing")
    return problems


def _unfit(config: ModelConfig, options: AdaptOptions) -> list[str]:
    """Problems: why the model cannot have these adapters."""
    problems = []
    if is_tuned(config):
        problems.append("the model has adapters already; merge them (moe-jax merge) or adapt the model below them")
    if options.method != "lora" and not config.moe_layers:
        problems.append(
            "PERFT stands beside an MoE, and the model is dense; upcycle it first (moe-jax upcycle), or use LoRA"
        )
    if options.method == "lora" and options.targets is not None:
        known = targets_of(config)
        unknown = [name for name in options.targets if name not in known]
        if unknown or not options.targets:
            named = ", ".join(unknown) or "nothing"
            problems.append(f"--targets: {named} matches no kernel; this model has {', '.join(known)}")
        if len(set(options.targets)) < len(options.targets):
            problems.append("--targets: name every kernel once")
    return problems


def _collected(problems: list[str], make: Callable[[], AdapterConfig]) -> AdapterConfig | None:
    try:
        return make()
    except InputError as error:
        problems.append(str(error))
        return None


def _adapted(layer: LayerConfig, options: AdaptOptions, adapter: AdapterConfig) -> LayerConfig:
    if options.method == "lora":
        return _with_lora(layer, options, adapter)
    if not isinstance(layer.mlp, MoEConfig):
        return layer
    num_experts = layer.mlp.num_experts if options.method == "perft-e" else options.num_experts
    given = {"num_experts": num_experts, "balance_coef": options.balance_coef, "z_coef": options.z_coef}
    variant: Any = METHODS[options.method]
    perft = PerftConfig(
        variant=variant,
        adapter=adapter,
        top_k=options.top_k,
        **{name: value for name, value in given.items() if value is not None},
    )
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, perft=perft))


def _with_lora(layer: LayerConfig, options: AdaptOptions, adapter: AdapterConfig) -> LayerConfig:
    def lora(known: Iterable[str], dropout: float = adapter.dropout) -> LoRAConfig | None:
        targets = tuple(name for name in options.targets or () if name in known)
        return LoRAConfig(rank=adapter.rank, targets=targets, scale=adapter.scale, dropout=dropout) if targets else None

    attention = dataclasses.replace(layer.attention, lora=lora(layer.attention.projections))
    if isinstance(layer.mlp, FFNConfig):
        mlp = dataclasses.replace(layer.mlp, lora=lora(layer.mlp.matrices))
        return dataclasses.replace(layer, attention=attention, mlp=mlp)
    known = _targets(layer.mlp)
    # Full experts take sorted rows, without dropout. A rate that the user asked for is refused later.
    without_dropout = layer.mlp.bank.meets_sorted_rows and options.dropout is None
    beside = lora([name for name in known if name != ROUTER], *([0.0] if without_dropout else []))
    expert = dataclasses.replace(layer.mlp.expert, lora=beside)
    router = lora([ROUTER] if ROUTER in known else [])
    mlp = dataclasses.replace(layer.mlp, expert=expert, router_lora=router)
    return dataclasses.replace(layer, attention=attention, mlp=mlp)


def _targets(mlp: FFNConfig | MoEConfig) -> tuple[str, ...]:
    """Names of the kernels of a layer's FFN or MoE that can get LoRA."""
    if isinstance(mlp, FFNConfig):
        return mlp.matrices
    router = () if mlp.universal == "coder" else (ROUTER,)
    return (*(mlp.expert.matrices if mlp.bank.has_linear_maps else ()), *router)
