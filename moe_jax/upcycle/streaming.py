"""Dense model -> MoE model, on disk, layer by layer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.counting import count_bytes, count_parameters
from moe_jax.errors import InputError
from moe_jax.loading import leaf_specs
from moe_jax.memory import available_memory
from moe_jax.model_dir import ModelDirectoryWriter, new_lineage_entry, read_lineage
from moe_jax.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.upcycle.leaves import MATRICES, moe_leaves
from moe_jax.upcycle.options import UpcycleOptions, keeps_the_function, upcycled_config
from moe_jax.upcycle.step0 import Step0, StreamedModel, compare_logits, probe_tokens

Specs = dict[str, jax.ShapeDtypeStruct]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of it is done: `progress("writing layers", 3, 32)`."""


class Stored(NamedTuple):
    """How much is stored: parameters (positions of sparse deltas are not counted), and bytes of everything."""

    params: int
    bytes: int


class Upcycled(NamedTuple):
    """What came out.

    Attributes:
      config: of the new model.
      dense, upcycled: what is stored before and after.
      step0: comparison with the dense model; None if it was not asked for.
    """

    config: ModelConfig
    dense: Stored
    upcycled: Stored
    step0: Step0 | None


def upcycle(
    source: ModelSource,
    dst: Path,
    options: UpcycleOptions,
    *,
    seed: int = 0,
    check: bool = True,
    described: Mapping[str, Any],
    progress: Progress = lambda what, done, total: None,
) -> Upcycled:
    """Writes the MoE that a dense model becomes. Memory holds one layer at a time.

    Args:
      source: the dense model.
      dst: the model directory to write.
      options: what to do.
      seed: of routers, factors and positions; the same seed gives the same files' contents.
      check: compare the logits of the written model with the source's before it appears at `dst`.
      described: the options as the user gave them, for the lineage.
      progress: called after every layer.

    Raises:
      InputError: if the source is an MoE, the options do not go with it, `dst` exists, the check cannot be made
        in this machine's memory, or the logits differ. Nothing is left behind.
    """
    config = upcycled_config(source.config, options)
    if seed < 0:
        raise InputError(f"seed={seed} must not be negative")
    if check and not keeps_the_function(options):
        raise InputError(_why_not_equal(options))
    dense_specs = source.specs()
    specs = upcycled_specs(config, dense_specs)
    entry = new_lineage_entry("upcycle", described, [source])
    writer = ModelDirectoryWriter(
        dst, config, tokenizer_files=source.tokenizer_files, lineage=[*read_lineage(source.path), entry]
    )
    step0 = None
    probe = _Probe(source, config, specs, seed) if check else None
    with writer:
        _write_layers(source, config, writer, seed, progress)
        if probe is not None:
            step0 = probe.compare(writer.read_back().read, progress)
        result = Upcycled(config, _stored(dense_specs), _stored(specs), step0)
        writer.lineage[-1]["measured"] = _measured(result)
    return result


def _why_not_equal(options: UpcycleOptions) -> str:
    if options.universal == "none":
        what = f"gate {options.gate!r} with top_k={options.top_k} of {options.num_experts} experts"
        instead = "gate 'topk_softmax'"
    else:
        what, instead = f"universal {options.universal!r}", "universal 'coder'"
    return (
        f"{what} has weights that do not sum to 1, so the MoE cannot equal the dense model at step 0; use {instead}, "
        "or --no-step0-check if that is meant"
    )


def upcycled_specs(config: ModelConfig, dense: Mapping[str, jax.ShapeDtypeStruct]) -> Specs:
    """Shapes and dtypes of the leaves that are written.

    Args:
      config: of the upcycled model.
      dense: of the dense model as stored; its dtypes are kept, and new leaves take those of the FFN.
    """

    def stored(path: str, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if path in dense:
            return dense[path]
        if not jnp.issubdtype(spec.dtype, jnp.floating):
            return spec
        layer, below = path.split("/mlp/")
        matrix = next((name for name in MATRICES if f"/{name}/" in below), "up")
        kind = "bias" if below.endswith("/bias") else "kernel"
        return jax.ShapeDtypeStruct(spec.shape, dense[f"{layer}/mlp/{matrix}/{kind}"].dtype)

    return {path: stored(path, spec) for path, spec in leaf_specs(config).items()}


class _Probe:
    """Both models, compiled for the step-0 check before anything is written."""

    def __init__(self, source: ModelSource, config: ModelConfig, specs: Specs, seed: int):
        tokens = probe_tokens(source.config, seed)
        self._source = source
        self._dense = StreamedModel(source.config, source.specs(), tokens)
        self._upcycled = StreamedModel(config, specs, tokens, like=self._dense)
        self._total = source.config.num_layers + config.num_layers
        needed, available = max(self._dense.memory, self._upcycled.memory), available_memory()
        if available is not None and needed > available:
            raise InputError(
                f"the step-0 check needs {needed / 1e9:.1f} GB for the largest layer, {available / 1e9:.1f} GB are "
                "free; use a larger machine, or --no-step0-check"
            )

    def compare(self, read: Callable[[str], np.ndarray], progress: Progress) -> Step0:
        """Raises `InputError` if the model that is read is not equal to the source."""
        done = 0

        def on_layer() -> None:
            nonlocal done
            done += 1
            progress("checking step 0", done, self._total)

        dense = self._dense.logits(self._source.read, on_layer)
        step0 = compare_logits(dense, self._upcycled.logits(read, on_layer), self._source.config.num_layers)
        if not step0.equal:
            raise InputError(
                f"step-0 check: the upcycled model's logits differ from the dense model's by {step0.difference:.3g} "
                f"(largest logit {step0.largest:.3g}, allowed {step0.allowed:.3g}); nothing was kept. Are all weights "
                "of the dense model finite?"
            )
        return step0


def _write_layers(
    source: ModelSource, config: ModelConfig, writer: ModelDirectoryWriter, seed: int, progress: Progress
) -> None:
    by_layer: dict[str, list[str]] = {}
    for path in leaf_specs(source.config):
        by_layer.setdefault(path.split("/")[1] if path.startswith("layers/") else "", []).append(path)
    for path in by_layer.pop(""):
        writer.write({path: source.read(path)})
    upcycled = {str(i) for i in config.moe_layers}
    for done, (layer, paths) in enumerate(by_layer.items(), start=1):
        prefix = f"layers/{layer}/mlp/"
        replaced = [path for path in paths if path.startswith(prefix)] if layer in upcycled else []
        for path in paths:
            if path not in replaced:
                writer.write({path: source.read(path)})
        if replaced:
            ffn = {path.removeprefix(prefix): source.read(path) for path in replaced}
            for name, leaf in moe_leaves(ffn, config.layers[int(layer)].mlp, seed=seed, layer=int(layer)):
                writer.write({prefix + name: leaf})
        progress("writing layers", done, len(by_layer))


def _stored(specs: Mapping[str, jax.ShapeDtypeStruct]) -> Stored:
    return Stored(count_parameters(specs.values()), count_bytes(specs.values()))


def _measured(result: Upcycled) -> dict[str, Any]:
    measured = {
        "dense_params": result.dense.params,
        "total_params": result.upcycled.params,
        "param_bytes": result.upcycled.bytes,
        "step0_max_abs_difference": None,
    }
    if result.step0 is not None:
        measured |= {
            "step0_max_abs_difference": result.step0.difference,
            "step0_max_abs_logit": result.step0.largest,
            "step0_allowed": result.step0.allowed,
            "step0_probe_tokens": list(probe_tokens(result.config, seed=0).shape),
        }
    return measured
