"""Adds new adapters to a model, and writes them with a reference to it as their base."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.checks.step0 import Probe, ProbeText, Step0, TextComparison
from moe_jax.core.draws import draw_factor, draw_router, stream
from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.core.formatting import count_bytes
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.experts.shapes import AdapterConfig, FFNConfig, LoRAConfig
from moe_jax.model_io.in_memory import Destination, open_writer
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import LeavesOverBase, as_base, is_tuned, own_leaves, with_nf4
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig, PerftConfig
from moe_jax.peft.spec import AdaptSpec
from moe_jax.peft.trained import parameter_sizes

_VARIANTS = {"perft-r": "routed", "perft-e": "embedded", "perft-d": "dense", "perft-s": "single"}
ROUTER = "router"
DROPOUT = 0.05


def adapted_config(config: ModelConfig, spec: AdaptSpec) -> ModelConfig:
    """Returns `config` with new adapters in every layer that can have them, over a frozen base.

    Raises:
      InputError: if the options contradict each other or do not fit the model, or the rank is above all that the
        adapters could have; all problems are listed.
    """
    config.check_no_further("adapt")
    config = as_base(config)
    raise_if_any(_unfit(config, spec), f"--method {spec.method}")
    adapter = parse_adapter(spec)
    layers = list(config.layers)
    for i, layer in enumerate(layers):
        try:
            layers[i] = _adapted(layer, spec, adapter)
        except InputError as error:
            # Equal layers have equal problems, so one of them is checked.
            raise InputError(f"--method {spec.method}: {error}") from None
    adapted = dataclasses.replace(config, layers=tuple(layers), frozen_base=True)
    if adapter.activation == "none":  # what is linear has no higher rank than the map that it is added to
        _check_rank(adapted, adapter.rank)
    return with_nf4(adapted, True) if spec.base == "nf4" else adapted


def _check_rank(adapted: ModelConfig, rank: int) -> None:
    specs, most = leaf_specs(adapted), 0
    for path in specs:
        for first, second in (("/lora/a", "/lora/b"), ("/adapters/down", "/adapters/up")):
            if path.endswith(first):
                most = max(most, min(specs[path].shape[-2], specs[path.removesuffix(first) + second].shape[-1]))
    if rank > most:
        raise InputError(
            f"--adapter lora:{shown(rank)}: no map that gets an adapter has a rank above {most:,}, the shorter side of "
            f"its matrix; take lora:{most} or less"
        )


def parse_adapter(spec: AdaptSpec) -> AdapterConfig:
    """Returns the config of an adapter: `lora:R` or `parallel:R`, with scale and dropout."""
    kind, rank, scale = spec.form_of_adapter
    return AdapterConfig(
        rank=rank,
        activation="none" if kind == "lora" else "silu",
        scale=scale,
        dropout=DROPOUT if spec.dropout is None else spec.dropout,
    )


def targets_of(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the kernels that can get LoRA in at least one layer of a model."""
    of_attention = (name for layer in config.layers for name in layer.attention.projections)
    of_mlp = (name for layer in config.layers for name in _targets(layer.mlp))
    return tuple(dict.fromkeys([*of_attention, *of_mlp]))


def _unfit(config: ModelConfig, spec: AdaptSpec) -> list[str]:
    """Returns the problems why the model cannot have these adapters."""
    problems = []
    if is_tuned(config):
        problems.append("the model has adapters already; merge them (moe-jax merge) or adapt the model below them")
    if spec.method != "lora" and not config.moe_layers:
        problems.append(
            "PERFT stands beside an MoE, and the model is dense; upcycle it first (moe-jax upcycle), or use LoRA"
        )
    if spec.method == "lora" and spec.target_names is not None:
        known = targets_of(config)
        unknown = [name for name in spec.target_names if name not in known]
        if unknown or not spec.target_names:
            named = ", ".join(unknown) or "nothing"
            problems.append(f"--targets: {named} matches no kernel; this model has {', '.join(known)}")
    return problems


def _adapted(layer: LayerConfig, spec: AdaptSpec, adapter: AdapterConfig) -> LayerConfig:
    if spec.method == "lora":
        return _with_lora(layer, spec, adapter)
    if not isinstance(layer.mlp, MoEConfig):
        return layer
    num_experts = layer.mlp.num_experts if spec.method == "perft-e" else spec.experts
    given = {"num_experts": num_experts, "balance_coef": spec.balance_coef, "z_coef": spec.z_coef}
    variant: Any = _VARIANTS[spec.method]
    perft = PerftConfig(
        variant=variant,
        adapter=adapter,
        top_k=spec.top_k,
        **{name: value for name, value in given.items() if value is not None},
    )
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, perft=perft))


def _with_lora(layer: LayerConfig, spec: AdaptSpec, adapter: AdapterConfig) -> LayerConfig:
    def lora(known: Iterable[str], dropout: float = adapter.dropout) -> LoRAConfig | None:
        targets = tuple(name for name in spec.target_names or () if name in known)
        return LoRAConfig(rank=adapter.rank, targets=targets, scale=adapter.scale, dropout=dropout) if targets else None

    attention = dataclasses.replace(layer.attention, lora=lora(layer.attention.projections))
    if isinstance(layer.mlp, FFNConfig):
        mlp = dataclasses.replace(layer.mlp, lora=lora(layer.mlp.matrices))
        return dataclasses.replace(layer, attention=attention, mlp=mlp)
    known = _targets(layer.mlp)
    # Full experts compute on sorted rows, without dropout. A rate that the user asked for is refused later.
    without_dropout = layer.mlp.bank.meets_sorted_rows and spec.dropout is None
    beside = lora([name for name in known if name != ROUTER], *([0.0] if without_dropout else []))
    expert = dataclasses.replace(layer.mlp.expert, lora=beside)
    router = lora([ROUTER] if ROUTER in known else [])
    mlp = dataclasses.replace(layer.mlp, expert=expert, router_lora=router)
    return dataclasses.replace(layer, attention=attention, mlp=mlp)


def _targets(mlp: FFNConfig | MoEConfig) -> tuple[str, ...]:
    """Returns the names of the kernels of a layer's FFN or MoE that can get LoRA."""
    if isinstance(mlp, FFNConfig):
        return mlp.matrices
    router = () if mlp.universal == "coder" else (ROUTER,)
    return (*(mlp.expert.matrices if mlp.bank.has_linear_maps else ()), *router)


def initial_leaves(config: ModelConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the leaves that the base does not have (`own_leaves`), by path, in the order of `leaf_specs`.

    The first factor (`lora/a`, `adapters/down`) is drawn as in LoRA (Kaiming uniform), the second (`lora/b`,
    `adapters/up`) is zero, and routers are normal with standard deviation 0.02 (methods.md 6, 7). The same seed gives
    the same leaves; every leaf has its own stream of random numbers.

    Raises:
      InputError: for a negative seed.
    """
    if seed < 0:
        raise InputError(f"seed={seed} must not be negative")
    own = own_leaves(config)
    for path, spec in leaf_specs(config).items():
        if path in own:
            yield path, initial_leaf(path, spec, seed)


def initial_leaf(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    """Makes one initial leaf; `spec` is its shape and dtype."""
    if path.endswith(("/lora/b", "/adapters/up")):
        return np.zeros(spec.shape, spec.dtype)
    if path.endswith("/router/kernel"):
        return draw_router(stream(seed, *path.encode(), 0), *spec.shape).astype(spec.dtype)
    assert path.endswith(("/lora/a", "/adapters/down")), path
    leaf = np.empty(spec.shape, spec.dtype)
    # [in, r], or [E, in, r] with its own random stream for every expert
    for index, one in enumerate(leaf.reshape(-1, *spec.shape[-2:])):
        one[...] = draw_factor(stream(seed, *path.encode(), index), *one.shape)
    return leaf


class Adapted(NamedTuple):
    """The result of `adapt`.

    Attributes:
      config: config of the tuned model.
      params, bytes: number of parameters of the adapters, and their bytes.
      step0: comparison of the tuned model with the original, or, with an NF4 base, with the original in NF4; None if
        it was not asked for.
      quantization: comparison of the original in NF4 with the original; None if the base is not NF4.
      on_text: the same comparison on a given text; None if there was none.
    """

    config: ModelConfig
    params: int
    bytes: int
    step0: Step0 | None = None
    quantization: Step0 | None = None
    on_text: TextComparison | None = None


def adapt(
    source: ModelSource,
    dst: Destination,
    spec: AdaptSpec,
    *,
    text: ProbeText | None = None,
    progress: Progress = no_progress,
) -> Adapted:
    """Writes adapters that do not change the model yet, with a reference to it. One layer at a time is in memory.

    With `step0_check` the logits of the written model are compared with the source's before it appears at `dst`;
    without it no weights of the source are read. The text shows how an NF4 base changes the predictions.

    Raises:
      InputError: if the options do not fit the model, it has adapters already, `dst` exists,
        weights are found not to be finite, the check cannot be made in this machine's memory, or the logits differ.
        Nothing is left behind.
    """
    config = adapted_config(source.config, spec)
    leaves, own, sizes = initial_leaves(config, spec.seed), own_leaves(config), parameter_sizes(config)
    writer = open_writer(
        dst,
        config,
        base=source,
        tokenizer_files=source.tokenizer_files,
        lineage=[*source.lineage, new_lineage_entry("adapt", spec.described(), [source])],
        allow_nonfinite=spec.allow_nonfinite,
    )
    specs = leaf_specs(config)
    result = Adapted(config, sum(sizes[path] for path in own), count_bytes(specs[path] for path in own))
    below = LeavesOverBase(config, source).specs
    stored = below | {path: specs[path] for path in own}
    probe = None
    if spec.step0_check:
        probe = Probe(source, config, stored, spec.seed, text=text, allow_nonfinite=spec.allow_nonfinite)
    with writer:
        for done, (path, leaf) in enumerate(leaves, start=1):
            writer.write({path: leaf})
            progress("writing adapters", done, len(own))
        if probe is not None:
            read = LeavesOverBase(config, source, writer.read_back()).read
            result = result._replace(**probe.compare(read, progress)._asdict())
        writer.lineage[-1]["measured"] = _measured(result)
    return result


def _measured(result: Adapted) -> dict[str, Any]:
    measured: dict[str, Any] = {"adapter_params": result.params, "adapter_bytes": result.bytes}
    if result.step0 is not None:
        measured |= {
            "step0_max_abs_difference": result.step0.difference,
            "step0_max_abs_logit": result.step0.largest,
            "step0_allowed": result.step0.allowed,
        }
    if result.quantization is not None:
        measured["nf4_max_abs_difference"] = result.quantization.difference
    if result.on_text is not None:
        measured |= {f"nf4_{name}": value for name, value in result.on_text._asdict().items()}
    return measured
