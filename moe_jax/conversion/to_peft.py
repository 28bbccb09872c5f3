"""Exports the LoRA of an adapter directory as an adapter of the Hugging Face PEFT library.

PEFT adds LoRA to tensors of a Transformers model. Our `a` [in, r] and `b` [r, out] are the transposes of its
`lora_A.weight` and `lora_B.weight`, and the scale is `lora_alpha / r`.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from moe_jax.conversion.formats.safetensors_file import encode_header, read_header
from moe_jax.conversion.formats.tensors import DTYPE_NAMES
from moe_jax.conversion.hf.hugging_face_dir import HuggingFaceDirectory
from moe_jax.conversion.peft_targets import Target, factors, problems_of_peft, targets_of, tensor_names
from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.core.finite import REMEDY, check_finite
from moe_jax.core.terminal import console_for_tables
from moe_jax.files.resume import staged_directory
from moe_jax.files.staging import check_beside, check_target
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.lineage import LINEAGE_FILE, hub_origin, new_lineage_entry
from moe_jax.model_io.model_source import ModelSource, OverBase
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.models import ModelConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def export_peft(
    source: ModelSource, dst: Path | str, *, allow_nonfinite: bool = False, console: Console | None = None
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which `peft.PeftModel.from_pretrained` loads.

    Args:
      source: an adapter directory with LoRA and nothing else.
      dst: where the directory appears; must not exist.
      allow_nonfinite: go on where the adapters are not finite.
      console: where to print; default standard error.

    Raises:
      InputError: if `source` is no adapter directory, PEFT cannot express its adapters, these are not finite, or `dst`
        exists.
    """
    console = console or console_for_tables(stderr=True)
    dst = as_path(dst)
    check_target(dst, buckets=True)
    check_beside(dst, [source.path])
    if not isinstance(source, OverBase) or source.base is None:
        raise InputError(f"{source.path} is not an adapter directory; PEFT's format holds adapters without their base")
    raise_if_any(_problems(source.config, source.own_specs()), f"PEFT's format cannot hold {source.path}")
    targets = targets_of(source.config)
    rank, scale = _common(targets)
    tensors = dict(_tensors(source, targets, rank, scale, allow_nonfinite=allow_nonfinite))
    base = base_name(source.base)
    config = peft_config(targets, model=source.config, base=base)
    options = {"format": "peft", "allow_nonfinite": allow_nonfinite}
    lineage = [*source.lineage, new_lineage_entry("export", options, [source])]
    with staged_directory(dst) as folder:
        (folder / WEIGHTS_FILE).write_durably(_safetensors(tensors))
        (folder / LINEAGE_FILE).write_durably(_json(lineage))
        read_header(folder / WEIGHTS_FILE)  # compares it with the file
        (folder / CONFIG_FILE).write_durably(_json(config))  # last: in a bucket the adapter counts from then on
    parameters = sum(target.is_parameter for target in targets)
    console.print(f"wrote {dst}: LoRA beside {len(targets) - parameters} linear modules", markup=False, end="")
    console.print(f" and {parameters} parameters" if parameters else "", markup=False)
    if base is None:
        console.print(f"its base as a Hugging Face checkpoint: moe-jax export {source.base.path} DST", markup=False)
    if any("/nf4/" in path for path in source.specs()):
        console.print("it was trained over NF4 kernels: over the unquantised base it computes something a little else")


def peft_config(targets: Sequence[Target], *, model: ModelConfig, base: str | None) -> dict[str, Any]:
    """Returns the adapter_config.json, with the tensors that have LoRA, and their ranks and scales.

    PEFT has one dropout for all linear modules, and none for parameters. It does not affect inference; that of the
    first target is written if all are linear modules.

    Args:
      targets: all tensors with LoRA.
      model: that has them.
      base: the Hugging Face checkpoint of the base; None: unknown.
    """
    rank, scale = _common(targets)
    modules = [target for target in targets if not target.is_parameter]
    parameters = [target for target in targets if target.is_parameter]
    alpha = _alpha(scale, rank)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if model.has_encoder else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": _names(modules, model),
        "target_parameters": _names(parameters, model) or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _others({target.name: target.rank for target in modules}, rank),
        "alpha_pattern": _others({target.name: _alpha(target.scale, target.rank) for target in modules}, alpha),
        "lora_dropout": 0.0 if parameters else targets[0].parts[0].lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def base_name(base: ModelSource) -> str | None:
    """Returns the Hugging Face checkpoint that a model is, or was converted from unchanged; None: there is none."""
    if isinstance(base, HuggingFaceDirectory):
        return hub_origin(base.path) or str(base.path.resolve())
    entries = list(base.lineage)
    if len(entries) != 1 or entries[0].get("command") != "convert" or (entries[0].get("options") or {}).get("dtype"):
        return None
    [source, *_] = entries[0].get("sources") or [{}]
    path = source.get("hub") or source.get("path")
    return path if path is None or not as_path(path).exists() else str(as_path(path).resolve())


def _common(targets: Sequence[Target]) -> tuple[int, float]:
    """Returns the rank and scale for all targets in a config; those of parameters, if any, must be these."""
    parameters = [target for target in targets if target.is_parameter]
    rank = max((target.rank for target in parameters), default=targets[0].rank)
    return rank, (parameters or targets)[0].scale


def _names(targets: Sequence[Target], model: ModelConfig) -> list[str]:
    """Returns short names such as `q_proj` for tensors with LoRA in every possible layer; full names for others."""
    if model.has_encoder:  # the projections of cross-attention have the same short names
        return [target.name for target in targets]
    by_template: dict[str, list[Target]] = {}
    for target in targets:
        by_template.setdefault(target.template, []).append(target)
    named = []
    for template, alike in by_template.items():
        every = len(model.moe_layers) if alike[0].is_parameter else model.num_layers
        short = template.rpartition("{i}.")[2] if alike[0].is_parameter else alike[0].name.rsplit(".", 1)[-1]
        named += [short] if len(alike) == every else [target.name for target in alike]
    return named


def _alpha(scale: float, rank: int) -> float:
    """Returns the alpha of a scale alpha/r; as an integer if it is whole."""
    alpha = scale * rank
    return int(alpha) if alpha == int(alpha) else alpha


def _others(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Returns values that differ from the default, by module name. PEFT matches ends of names, without `model.`."""
    return {name.removeprefix("model."): value for name, value in values.items() if value != default}


def _problems(config: ModelConfig, own: Collection[str]) -> list[str]:
    """Returns why PEFT's format cannot hold the leaves of an adapter directory."""
    problems = problems_of_peft(config)
    retrained = sorted(set(own) - own_leaves(config))
    if retrained:
        problems.append(f"{len(retrained)} leaves of the base were trained too, the first is {retrained[0]}")
    return problems


def _tensors(
    source: ModelSource, targets: Sequence[Target], rank: int, scale: float, *, allow_nonfinite: bool
) -> Iterable[tuple[str, np.ndarray]]:
    def read(path: str) -> np.ndarray:
        leaf = source.read(path)
        if not allow_nonfinite:
            check_finite(path, leaf, REMEDY)
        return leaf

    for target, name in tensor_names(targets):
        # A linear module has its own rank and scale in the config.
        own = (rank, scale) if target.is_parameter else (target.rank, target.scale)
        for theirs, factor in zip(("lora_A", "lora_B"), factors(target, read, rank=own[0], scale=own[1]), strict=True):
            yield f"base_model.model.{name}.{theirs}.weight", np.ascontiguousarray(factor)


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Returns the content of a safetensors file, in memory because adapters are small."""
    # Widest dtypes first, as the reference implementation does: every tensor then begins aligned.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    spans, end = {}, 0
    for name, tensor in tensors.items():
        spans[name] = (DTYPE_NAMES[tensor.dtype], tensor.shape, end, end + tensor.nbytes)
        end += tensor.nbytes
    return encode_header(spans) + b"".join(tensor.tobytes() for tensor in tensors.values())


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
