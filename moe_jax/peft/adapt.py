"""Adds new adapters to a model, and writes them with a reference to it as their base."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.checks.step0 import Probe, ProbeText, Step0, TextComparison
from moe_jax.core.draws import draw_factor, draw_router, stream
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import count_bytes
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.model_io.in_memory import Destination, open_writer
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import LeavesOverBase, own_leaves
from moe_jax.models import ModelConfig
from moe_jax.peft.adapted_config import adapted_config
from moe_jax.peft.spec import AdaptSpec
from moe_jax.peft.trained_table import parameter_sizes


def initial_leaves(config: ModelConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the leaves that the base does not have (`own_leaves`), in the order of `leaf_specs`.

    The first factor (`lora/a`, `adapters/down`) is drawn as in LoRA (Kaiming uniform), the second (`lora/b`,
    `adapters/up`) is zero, and routers are normal with standard deviation 0.02 (methods.md 6, 7).

    Args:
      config: config of the tuned model.
      seed: the same seed gives the same leaves; every leaf has its own stream of random numbers.

    Yields:
      Paths and leaves, in the dtype of the config.

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
    (make,) = (make for ending, make in _MAKERS.items() if path.endswith(ending))
    return make(path, spec, seed)


def _factor(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    """Draws the first factor: [in, r], or [E, in, r] with its own random stream for every expert."""
    leaf = np.empty(spec.shape, spec.dtype)
    for index, one in enumerate(leaf.reshape(-1, *spec.shape[-2:])):
        one[...] = draw_factor(_stream(seed, path, index), *one.shape)
    return leaf


def _zero(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    return np.zeros(spec.shape, spec.dtype)


def _router(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    return draw_router(_stream(seed, path, 0), *spec.shape).astype(spec.dtype)


_MAKERS: dict[str, Callable[[str, jax.ShapeDtypeStruct, int], np.ndarray]] = {
    "/lora/a": _factor,
    "/lora/b": _zero,
    "/adapters/down": _factor,
    "/adapters/up": _zero,
    "/router/kernel": _router,
}


def _stream(seed: int, path: str, index: int) -> np.random.Generator:
    return stream(seed, *path.encode(), index)


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

    Args:
      source: the model.
      dst: the directory to write, or memory.
      spec: the adapters. With `step0_check` the logits of the written model are compared with the source's before it
        appears at `dst`; without it no weights of the source are read.
      text: for a model with an NF4 base, a text on which the change of its predictions is measured.
      progress: called after every leaf and layer.

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
