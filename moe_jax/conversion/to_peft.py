"""Exports the LoRA of an adapter directory as an adapter of the Hugging Face PEFT library.

PEFT adds LoRA to linear modules of a Transformers model, and since 0.17 to parameters that are no module's `weight`,
which it calls `target_parameters`: in Transformers 5, the two tensors that hold all experts of a layer, and the router.
In models with experts PEFT takes modules called `gate_proj`, `up_proj` or `down_proj` for the experts of Transformers
before 5, wherever they are; so there the weights of dense layers and of shared experts are `target_parameters` too.
Names are those that Transformers has in memory, where experts are fused. Our `a` [in, r] and `b` [r, out] are the
transposes of `lora_A.weight` and `lora_B.weight`, and the scale is `lora_alpha / r`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from moe_jax.conversion.families import family_named
from moe_jax.conversion.hf_format import exported_config
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from moe_jax.conversion.model_table import mapped as mapped_model
from moe_jax.conversion.safetensors_file import Layout, PlannedTensor, read_header
from moe_jax.conversion.table import FUSED
from moe_jax.conversion.tensors import DTYPE_NAMES
from moe_jax.conversion.writing.model_card import model_card
from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.core.finite import REMEDY, check_finite
from moe_jax.core.terminal import console_for_tables
from moe_jax.experts.shapes import LoRAConfig
from moe_jax.files.staging import check_beside, check_target, staged_directory
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.lineage import CARD, LINEAGE_FILE, hub_origin, new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource, OverBase
from moe_jax.model_io.portable_lineage import without_places
from moe_jax.model_io.tuned_base import base_config, own_leaves
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
WEIGHT = ".weight"


class Part(NamedTuple):
    """A kernel with LoRA inside a tensor."""

    path: str  # of the kernel's module, such as `layers/0/mlp/experts/gate`
    lora: LoRAConfig  # its LoRA
    runs: tuple[tuple[int, int], ...]  # of the tensor's outputs that are its own, in order: first and last, exclusive

    @property
    def outputs(self) -> np.ndarray:
        """The tensor's outputs that are its own, in their order."""
        return np.concatenate([np.arange(*run) for run in self.runs])


class Target(NamedTuple):
    """A tensor of Transformers with LoRA."""

    tensor: str  # its name, such as `model.layers.0.mlp.experts.gate_up_proj`
    template: str  # the same with `{i}` for the layer
    everywhere: int  # the number of layers that have such a tensor, with LoRA or without
    is_only: bool  # whether no other tensor of a layer has the same last name, as `out_proj` of two kinds of layers
    outputs: int  # rows of the tensor, or of one expert of it
    is_parameter: bool  # whether PEFT gets it by `target_parameters`
    parts: list[Part]  # its kernels that have LoRA

    @property
    def name(self) -> str:
        """PEFT's name of the target."""
        return self.tensor if self.is_parameter else self.tensor.removesuffix(WEIGHT)

    @property
    def rank(self) -> int:
        """Rank of all parts together: each has columns of its own."""
        return sum(part.lora.rank for part in self.parts)

    @property
    def scale(self) -> float:
        """Factor of the product of the two factors of LoRA, that of the first part."""
        return self.parts[0].lora.scale


def export_peft(
    source: ModelSource, dst: Path | str, *, allow_nonfinite: bool = False, console: Console | None = None
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which `peft.PeftModel.from_pretrained` loads.

    Raises:
      InputError: if `source` is no adapter directory, PEFT cannot express its adapters, these are not finite, or `dst`
        exists.
    """
    console = console or console_for_tables(stderr=True)
    dst = as_path(dst)
    check_target(dst, buckets=True)
    check_beside(dst, [source.path])
    raise_if_any(problems_of_adapter(source), f"PEFT's format cannot hold {source.path}")
    assert isinstance(source, OverBase) and source.base is not None
    targets = targets_of(source.config)
    rank, scale = _common(targets)
    tensors = dict(_tensors(source, targets, rank, scale, allow_nonfinite=allow_nonfinite))
    base = base_name(source.base)
    config = peft_config(targets, model=source.config, base=base)
    options = {"format": "peft", "allow_nonfinite": allow_nonfinite}
    lineage = [*source.lineage, new_lineage_entry("export", options, [source])]
    portable = without_places(lineage)
    with staged_directory(dst) as folder:
        # In memory, because adapters are small.
        layout = Layout.of({name: PlannedTensor(DTYPE_NAMES[one.dtype], one.shape) for name, one in tensors.items()})
        content = layout.header + b"".join(tensors[name].tobytes() for name in layout.starts)
        (folder / WEIGHTS_FILE).write_durably(content)
        (folder / LINEAGE_FILE).write_durably(_json(portable))
        (folder / CARD).write_durably(model_card(source.config, portable, library="peft"))
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
    """Returns the adapter_config.json of a model; `base` is the Hugging Face checkpoint of its base, if known.

    PEFT has one dropout for all linear modules, and none for parameters. It does not affect inference; that of the
    first target is written if all are linear modules.
    """
    rank, scale = _common(targets)
    modules, parameters = ([one for one in targets if one.is_parameter == which] for which in (False, True))
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


def problems_of_adapter(source: ModelSource) -> list[str]:
    """Returns why PEFT's format cannot hold an adapter directory, as `problems_of_peft`; none if it can."""
    if not isinstance(source, OverBase) or source.base is None:
        return ["it is not an adapter directory; PEFT's format holds adapters without their base"]
    problems = problems_of_peft(source.config)
    retrained = sorted(source.own_specs().keys() - own_leaves(source.config))
    if retrained:
        problems.append(f"{len(retrained)} leaves of the base were trained too, the first is {retrained[0]}")
    return problems


def problems_of_peft(config: ModelConfig) -> list[str]:
    """Returns why PEFT's format cannot hold the adapters of a model, one phrase per kind; none if it can."""
    if kinds := kinds_without_place(config):
        return [f"{kind} have no place in it" for kind in kinds]
    if config.vision is not None:
        return ["PEFT finds modules by names which the image encoder has too; merge the adapter, and export that"]
    if not any(_loras(layer) for layer in config.layers):
        return ["it has no LoRA"]
    try:
        targets_of(config)
    except InputError as error:
        return [str(error)]
    return []


def kinds_without_place(config: ModelConfig) -> list[str]:
    """Returns the kinds of adapters of a model that neither PEFT's format nor a Hugging Face checkpoint holds."""
    moes = [config.moe(i) for i in config.moe_layers]
    kinds = {
        "adapter experts (PESC)": [not moe.bank.form.has_expert_kernels for moe in moes],
        "PERFT experts": [moe.perft is not None for moe in moes],
    }
    return [kind for kind, found in kinds.items() if any(found)]


def targets_of(config: ModelConfig) -> list[Target]:
    """Returns the tensors with LoRA of a model, by their names in the checkpoint that `export` would write of its base.

    Raises:
      InputError: if no Hugging Face format can hold the base, or a kernel has no tensor there that PEFT could adapt.
    """
    base = exported_config(base_config(config), replicate_dense=True)
    family = family_named(base.family)
    specs = leaf_specs(base)
    mapped = mapped_model(base, specs, FUSED)
    stored = leaf_specs(config)
    every = (piece for pieces in mapped.pieces.values() for piece in pieces)
    templates = Counter({piece.tensor: piece.template for piece in every}.values())
    last_names = Counter(_last_name(template) for template in templates if "{i}" in template)
    found: dict[str, Target] = {}
    for i, layer in enumerate(config.layers):
        for name, lora in _loras(layer).items():
            path = f"layers/{i}/{name}"
            if f"{path}/lora/a" not in stored:
                raise InputError(f"the LoRA of {path} is beside a base that experts share; merge the adapter instead")
            pieces = mapped.pieces.get(f"{path}/kernel", [])
            tensors = {piece.tensor for piece in pieces}
            if len(tensors) != 1:
                raise InputError(f"in the format of {family.name!r}, {path} is no tensor that PEFT can adapt")
            if family.own_code and pieces[0].expert is not None:
                raise InputError(f"{family.name!r} comes with code of its own, in which experts are not one parameter")
            piece, shape = pieces[0], mapped.tensors[pieces[0].tensor]
            if _last_name(piece.template) in family.without_lora:
                raise InputError(f"PEFT puts no LoRA beside {piece.tensor} ({path}); merge the adapter instead")
            *_, outputs, inputs = shape
            # The kernel itself may be stored as NF4.
            a, b = (stored[f"{path}/lora/{factor}"].shape for factor in "ab")
            if (*a[:-1], b[-1]) != tuple(specs[f"{path}/kernel"].shape) or not piece.transpose:
                raise InputError(
                    f"in the format of {family.name!r}, {path} has another shape; merge the adapter instead"
                )
            # Routers are no linear modules, fused experts no modules; of the other FFNs the module's docstring speaks.
            is_parameter = not piece.tensor.endswith(WEIGHT) or bool(config.moe_layers and name.startswith("mlp/"))
            everywhere, is_only = templates[piece.template], last_names[_last_name(piece.template)] == 1
            new = Target(piece.tensor, piece.template, everywhere, is_only, outputs, is_parameter, [])
            target = found.setdefault(piece.tensor, new)
            of_one = [one for one in pieces if one.expert == piece.expert]  # of all experts, those of the first
            starts = [(one.offset // inputs, one.shape[0]) for one in of_one]
            target.parts.append(Part(path, lora, tuple((start, start + count) for start, count in starts)))
    places = {f"{part.path}/lora/a" for target in found.values() for part in target.parts}
    if left := sorted(path for path in stored if path.endswith("/lora/a") and path not in places):
        raise InputError(f"{left[0].removesuffix('/lora/a')} has LoRA and no place in it")
    return list(found.values())


def factors(target: Target, read: Callable[[str], np.ndarray], *, rank: int, scale: float) -> tuple[np.ndarray, ...]:
    """Returns `lora_A.weight` [rank (E), in] and `lora_B.weight` [out, rank (E)] as PEFT packs them.

    Each part has columns and outputs of its own; a rank that is larger than theirs is filled up with zeros. For
    experts, rows of A are ordered by expert first, and columns of B by column first. PEFT will multiply the product by
    `scale`; a part with another scale gets the quotient into its B.
    """

    def with_experts(path: str) -> np.ndarray:
        factor = read(path)
        return factor if factor.ndim == 3 else factor[None]

    one = [with_experts(f"{part.path}/lora/a") for part in target.parts]
    count, inputs, dtype = one[0].shape[0], one[0].shape[1], one[0].dtype
    a = np.zeros((count, rank, inputs), dtype)
    b = np.zeros((count, target.outputs, rank), dtype)
    end = 0
    for part, of_part in zip(target.parts, one, strict=True):
        begin, end = end, end + part.lora.rank
        other = with_experts(f"{part.path}/lora/b")
        a[:, begin:end] = of_part.swapaxes(1, 2)
        b[:, part.outputs, begin:end] = other.swapaxes(1, 2) * dtype.type(part.lora.scale / scale)
    return a.reshape(-1, inputs), np.ascontiguousarray(b.transpose(1, 2, 0)).reshape(target.outputs, -1)


def tensor_names(targets: Sequence[Target]) -> Iterator[tuple[Target, str]]:
    """Yields every target with the name under which PEFT stores its factors, without `.lora_A.weight`.

    For two parameters of one module, PEFT wraps the module twice: the one that is registered first is inside.
    """
    inner = Counter(target.tensor.rpartition(".")[0] for target in targets if target.is_parameter)
    for target in targets:
        name = target.name
        if target.is_parameter:
            name = target.tensor.rpartition(".")[0]
            inner[name] -= 1
            name += ".base_layer" * inner[name]
        yield target, name


def _loras(layer: LayerConfig) -> dict[str, LoRAConfig]:
    """Returns the LoRA of every kernel of a layer, by the path of its module inside the layer."""
    found = {}
    if layer.attention.lora is not None:
        found |= {f"attention/{name}": layer.attention.lora for name in layer.attention.lora.targets}
    mlp = layer.mlp
    if isinstance(mlp, MoEConfig):
        if mlp.router_lora is not None:
            found["mlp/router"] = mlp.router_lora
        if mlp.expert.lora is not None:
            # In the order that Transformers registers them: `gate_up_proj` before `down_proj`.
            names = sorted(mlp.expert.lora.targets, key=lambda name: (name == "down", name))
            found |= {f"mlp/experts/{name}": mlp.expert.lora for name in names}
        if mlp.universal_beside and mlp.universal_ffn.lora is not None:
            found |= {f"mlp/universal/{name}": mlp.universal_ffn.lora for name in mlp.universal_ffn.lora.targets}
    elif mlp.lora is not None:
        found |= {f"mlp/{name}": mlp.lora for name in mlp.lora.targets}
    return found


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
        in_layer = template.rpartition("{i}.")[2].removesuffix("" if alike[0].is_parameter else WEIGHT)
        short = in_layer if alike[0].is_parameter or not alike[0].is_only else _last_name(template)
        named += [short] if len(alike) == alike[0].everywhere else [target.name for target in alike]
    return named


def _last_name(tensor: str) -> str:
    return tensor.removesuffix(WEIGHT).rpartition(".")[2]


def _alpha(scale: float, rank: int) -> float:
    """Returns the alpha of a scale alpha/r; as an integer if it is whole."""
    alpha = scale * rank
    return int(alpha) if alpha == int(alpha) else alpha


def _others(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Returns values that differ from the default, by module name. PEFT matches ends of names, without `model.`."""
    return {name.removeprefix("model."): value for name, value in values.items() if value != default}


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


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
