"""Exports the LoRA of an adapter directory as an adapter of the Hugging Face PEFT library.

PEFT adds LoRA to linear modules of a Transformers model, which have the names of their tensors. Our `a` [in, r] and `b`
[r, out] are the transposes of its `lora_A.weight` and `lora_B.weight`, and the scale is `lora_alpha / r`.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from moe_jax.convert.families import family_named
from moe_jax.convert.foreign_format import exported_config
from moe_jax.convert.hugging_face_dir import HuggingFaceDirectory
from moe_jax.convert.safetensors_file import encode_header, read_header
from moe_jax.convert.table import PER_EXPERT, apply_table
from moe_jax.convert.tensors import DTYPE_NAMES
from moe_jax.errors import InputError, raise_if_any
from moe_jax.experts.config import LoRAConfig
from moe_jax.finite import REMEDY, check_finite
from moe_jax.lineage import LINEAGE_FILE, new_lineage_entry
from moe_jax.loading import leaf_specs
from moe_jax.local_paths import check_beside
from moe_jax.model_source import ModelSource, OverBase
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig
from moe_jax.peft.base import base_config, own_leaves
from moe_jax.resume import staged_directory
from moe_jax.staging import refuse_existing, write_durably
from moe_jax.terminal import console_for_tables

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class Module(NamedTuple):
    """A linear module with LoRA: its leaf path, its name in Transformers, and the LoRA."""

    path: str
    name: str
    lora: LoRAConfig


def export_peft(
    source: ModelSource, dst: Path | str, *, allow_nonfinite: bool = False, console: Console | None = None
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which `peft.PeftModel.from_pretrained` loads.

    Args:
      source: an adapter directory with LoRA on attention, or on dense FFNs, and nothing else.
      dst: where the directory appears; must not exist.
      allow_nonfinite: go on where the adapters are not finite.
      console: where to print; default standard error.

    Raises:
      InputError: if `source` is no adapter directory, PEFT cannot express its adapters, these are not finite, or `dst`
        exists.
    """
    console = console or console_for_tables(stderr=True)
    dst = Path(dst)
    refuse_existing(dst)
    check_beside(dst, [source.path])
    if not isinstance(source, OverBase) or source.base is None:
        raise InputError(f"{source.path} is not an adapter directory; PEFT's format holds adapters without their base")
    raise_if_any(_inexpressible(source.config, source.own_specs()), f"PEFT's format cannot hold {source.path}")
    modules = _modules(source.config)
    tensors = dict(_tensors(source, modules, allow_nonfinite=allow_nonfinite))
    base = source.base.path if isinstance(source.base, HuggingFaceDirectory) else None
    config = peft_config(modules, model=source.config, base=base)
    options = {"format": "peft", "allow_nonfinite": allow_nonfinite}
    lineage = [*source.lineage, new_lineage_entry("export", options, [source])]
    with staged_directory(dst) as folder:
        write_durably(folder / WEIGHTS_FILE, _safetensors(tensors))
        write_durably(folder / CONFIG_FILE, _json(config))
        write_durably(folder / LINEAGE_FILE, _json(lineage))
        read_header(folder / WEIGHTS_FILE)  # compares it with the file
    console.print(f"wrote {dst}: LoRA beside {len(modules)} linear modules", markup=False)
    if base is None:
        console.print(f"its base as a Hugging Face checkpoint: moe-jax export {source.base.path} DST", markup=False)
    if any("/nf4/" in path for path in source.specs()):
        console.print("it was trained over NF4 kernels: over the unquantised base it computes something a little else")


def peft_config(modules: Iterable[Module], *, model: ModelConfig, base: Path | None) -> dict[str, Any]:
    """The adapter_config.json, with the modules that have LoRA, and their ranks and scales.

    PEFT has one dropout for all modules. It does not affect inference, and that of the first module is written.

    Args:
      modules: all with LoRA.
      model: that has them.
      base: the Hugging Face checkpoint of the base; None: not known.
    """
    modules = list(modules)
    ranks = {module.name: module.lora.rank for module in modules}
    alphas = {module.name: _alpha(module.lora) for module in modules}
    rank, alpha = ranks[modules[0].name], alphas[modules[0].name]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if model.has_encoder else "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base.resolve()),
        "inference_mode": True,
        "target_modules": _targets(modules, model),
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _others(ranks, rank),
        "alpha_pattern": _others(alphas, alpha),
        "lora_dropout": modules[0].lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _targets(modules: Iterable[Module], model: ModelConfig) -> list[str]:
    """Short names such as `q_proj` for modules with LoRA in every layer; full names for others."""
    if model.has_encoder:  # the projections of cross-attention have the same short names
        return [module.name for module in modules]
    by_name: dict[str, list[str]] = {}
    for module in modules:
        by_name.setdefault(module.name.rsplit(".", 1)[-1], []).append(module.name)
    every = model.num_layers
    return [target for short, names in by_name.items() for target in ([short] if len(names) == every else names)]


def _alpha(lora: LoRAConfig) -> float:
    """The alpha of a scale alpha/r; as an integer if it is whole."""
    alpha = lora.scale * lora.rank
    return int(alpha) if alpha == int(alpha) else alpha


def _others(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Values that differ from the default, by module name. PEFT matches the ends of names, without `model.`."""
    return {name.removeprefix("model."): value for name, value in values.items() if value != default}


def _inexpressible(config: ModelConfig, own: Collection[str]) -> list[str]:
    """Problems: what the adapter directory has besides LoRA on attention and dense FFNs, one phrase per kind."""
    problems = []
    moes = [config.moe(i) for i in config.moe_layers]
    kinds = {
        "adapter experts (PESC)": [not moe.bank.form.has_expert_kernels for moe in moes],
        "PERFT experts": [moe.perft is not None for moe in moes],
        "LoRA on routers": [moe.router_lora is not None for moe in moes],
        "LoRA on experts": [moe.expert.lora is not None for moe in moes],
    }
    problems += [f"{kind} have no place in it" for kind, found in kinds.items() if any(found)]
    retrained = sorted(set(own) - own_leaves(config))
    if retrained:
        problems.append(f"{len(retrained)} leaves of the base were trained too, the first is {retrained[0]}")
    if not problems and not any(_loras(layer) for layer in config.layers):
        problems.append("it has no LoRA")
    return problems


def _loras(layer: LayerConfig) -> dict[str, LoRAConfig]:
    """Path of a module inside the layer -> its LoRA, for modules that Transformers also has."""
    found = {}
    mlp = None if isinstance(layer.mlp, MoEConfig) else layer.mlp
    for part, lora in (("attention", layer.attention.lora), ("mlp", mlp and mlp.lora)):
        if lora is not None:
            found |= {f"{part}/{name}": lora for name in lora.targets}
    return found


def _modules(config: ModelConfig) -> list[Module]:
    """All modules with LoRA, with their names in the checkpoint that `export` would write of the base.

    Raises:
      InputError: if no Hugging Face format can hold the base, or a module is fused with others in it.
    """
    base = exported_config(base_config(config), replicate_dense=True)
    family = family_named(base.family)
    mapped = apply_table(
        family.table_of(base),
        leaf_specs(base),
        base.num_layers,
        PER_EXPERT,
        family.name,
        num_encoder_layers=base.num_encoder_layers,
    )
    modules = []
    for i, layer in enumerate(config.layers):
        for name, lora in _loras(layer).items():
            path = f"layers/{i}/{name}"
            pieces = mapped.pieces.get(f"{path}/kernel", [])
            # A part of a fused tensor is not a module.
            if len(pieces) != 1 or pieces[0].shape != mapped.tensors[pieces[0].tensor]:
                raise InputError(f"in the format of {family.name!r}, {path} is no linear module that LoRA could join")
            modules.append(Module(path, pieces[0].tensor.removesuffix(".weight"), lora))
    return modules


def _tensors(
    source: ModelSource, modules: Iterable[Module], *, allow_nonfinite: bool
) -> Iterable[tuple[str, np.ndarray]]:
    for module in modules:
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            factor = source.read(f"{module.path}/lora/{ours}")
            if not allow_nonfinite:
                check_finite(f"{module.path}/lora/{ours}", factor, REMEDY)
            yield f"base_model.model.{module.name}.{theirs}.weight", np.ascontiguousarray(factor.T)


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The content of a safetensors file, in memory because adapters are small."""
    # Widest dtypes first, as the reference implementation does: every tensor then begins aligned.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    spans, end = {}, 0
    for name, tensor in tensors.items():
        spans[name] = (DTYPE_NAMES[tensor.dtype], tensor.shape, end, end + tensor.nbytes)
        end += tensor.nbytes
    return encode_header(spans) + b"".join(tensor.tobytes() for tensor in tensors.values())


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
