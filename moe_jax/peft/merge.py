"""Merges LoRA into its kernels: `W + scale * A B`, rounded once.

This applies to LoRA on attention, FFNs, bases of experts, full experts and routers. With an NF4 base, LoRA is added to
the dequantised kernel, because that is the model that was trained; the result is not the unquantised base plus LoRA.
Likewise a shared base of experts in codes becomes a plain one if it has LoRA; without LoRA it stays as it is.
Adapters (PESC, PERFT) cannot be merged into a kernel.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np

from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.core.finite import cast
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import check_equal, first_decides
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.forms.protocol import BesideBase
from moe_jax.experts.on_host import base_kernel
from moe_jax.experts.shapes import FFNConfig, LoRAConfig
from moe_jax.functional.codes import dequantize_nf4
from moe_jax.model_io.in_memory import Destination, open_writer, write_each
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import check_leaves, leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import base_leaf, is_tuned, with_of_base
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig, config_to_json
from moe_jax.peft.spec import MergeSpec

_KERNEL = re.compile(r"layers/(\d+)/(attention|mlp)/(.*)/kernel")
_NF4_LEAVES = ("codes", "scale_codes", "scales", "offset")


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Numbers of kernels that LoRA was merged into, and that were NF4 codes; and adapters that were kept, by kind."""

    folded: int
    dequantized: int
    kept: tuple[str, ...]


def merge(
    source: ModelSource, out: Destination, spec: MergeSpec = MergeSpec(), *, progress: Progress = no_progress
) -> Merged:
    """Writes a tuned model as a model directory that needs no base, leaf by leaf; says what was merged, and what kept.

    In memory are one leaf before and after merging, and one of its kernels in float32. If several processes make the
    same call, each merges its own leaves.

    Raises:
      InputError: if there is nothing to merge, something cannot be merged and the spec does not say `partly`, weights
        are not finite or become too large for their dtype, or `out` exists.
    """
    kept = unmergeable(source.config)
    if kept and not spec.partly:
        raise_if_any(
            [f"{kind}, which {why}" for kind, why in kept.items()],
            f"cannot merge {source.path}; --partly folds the rest and keeps them",
        )
    config = merged_config(source.config)
    stored, expected = source.specs(), leaf_specs(config)
    folded = [path for path in expected if _lora_beside(source.config, path) is not None]
    dequantized = [path for path in expected if path not in leaf_specs(source.config)]
    if not is_tuned(source.config) or not (folded or dequantized or source.base is not None):
        raise InputError(f"{source.path} has nothing to merge: neither LoRA nor NF4 kernels")
    check_leaves(leaf_specs(source.config), stored, str(source.path))

    result = Merged(folded=len(folded), dequantized=len(dequantized), kept=tuple(kept))
    options = spec.described()
    lineage = [*source.lineage, first_decides(lambda: new_lineage_entry("merge", options, [source]))]
    check_equal({"the options": options, "the model": config_to_json(source.config)})
    lineage[-1]["measured"] = {"folded_kernels": result.folded, "dequantized_kernels": result.dequantized}
    with open_writer(
        out,
        config,
        tokenizer_files=source.tokenizer_files,
        lineage=lineage,
        resume=True,
        allow_nonfinite=spec.allow_nonfinite,
    ) as writer:

        def leaf(path: str) -> np.ndarray:
            unchanged = path in stored and path not in folded
            return source.read(path) if unchanged else _folded_kernel(source, path)

        write_each(writer, expected, leaf, doing="merging", progress=progress)
    return result


def unmergeable(config: ModelConfig) -> dict[str, str]:
    """Returns a phrase for each kind of adapters that cannot be merged -> the reason."""
    found: dict[str, tuple[str, list[int]]] = {}
    for i in config.moe_layers:
        moe = config.moe(i)
        if isinstance(moe.bank.form, BesideBase) and moe.bank.form.beside_base_model:
            why = moe.bank.form.why_not_merged
            found.setdefault("adapter experts (PESC)", (why, []))[1].append(i)
        if moe.perft is not None:
            why = "stand parallel to the whole MoE, which is nonlinear, so that no kernel is theirs to join"
            found.setdefault(f"PERFT experts ({moe.perft.variant})", (why, []))[1].append(i)
    return {f"{kind} in {_layers(indices, config)}": why for kind, (why, indices) in found.items()}


def merged_config(config: ModelConfig) -> ModelConfig:
    """Returns the config after merging: without LoRA, NF4, `frozen_base`, and codes of a shared base that has LoRA.

    Adapters (PESC, PERFT) stay.
    """
    return replace(config, layers=tuple(map(_merged_layer, config.layers)), frozen_base=False)


def _merged_layer(layer: LayerConfig) -> LayerConfig:
    layer = with_of_base(layer, False)
    attention, mlp = replace(layer.attention, nf4=False, lora=None), layer.mlp
    if isinstance(mlp, MoEConfig):
        bank = mlp.bank if mlp.expert.lora is None else replace(mlp.bank, base_codes=None)
        merged = replace(mlp, expert=_plain(mlp.expert), router_lora=None, bank=bank)
        return replace(layer, attention=attention, mlp=merged)
    return replace(layer, attention=attention, mlp=_plain(mlp))


def _plain(ffn: FFNConfig) -> FFNConfig:
    return replace(ffn, nf4=False, lora=None)


def _lora_beside(config: ModelConfig, path: str) -> LoRAConfig | None:
    """Returns the LoRA of the kernel at a path, if it has any."""
    match = _KERNEL.fullmatch(path)
    if not match:
        return None
    layer, name = config.layers[int(match[1])], match[3].rsplit("/", 1)[-1]
    if match[2] == "attention":
        lora = layer.attention.lora
    elif not isinstance(layer.mlp, MoEConfig):
        lora = layer.mlp.lora
    else:
        lora = layer.mlp.router_lora if match[3] == "router" else layer.mlp.expert.lora
    return lora if lora is not None and name in lora.targets else None


def _folded_kernel(source: ModelSource, path: str) -> np.ndarray:
    """Returns a merged kernel, or a stack of them, in the dtype of the kernel without LoRA."""
    module, lora = path.removesuffix("/kernel"), _lora_beside(source.config, path)
    shape = leaf_specs(merged_config(source.config))[path].shape
    result = np.empty(shape, _kernel_dtype(source, path))
    factors = None if lora is None else [source.read(f"{module}/lora/{name}") for name in ("a", "b")]
    for index, kernel in enumerate(_kernels(source, path, shape)):
        if lora is not None and factors is not None:
            a, b = (factor.reshape(-1, *factor.shape[-2:])[index].astype(np.float32) for factor in factors)
            kernel = kernel + np.float32(lora.scale) * (a @ b)
        result.reshape(-1, *shape[-2:])[index] = cast(path, kernel, result.dtype)
    return result


def _kernels(source: ModelSource, path: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yields the kernels without LoRA in float32; kernels that are stored as codes are dequantised."""
    if path in source.specs():
        for kernel in source.read(path).reshape(-1, *shape[-2:]):
            yield kernel.astype(np.float32)
        return
    module = path.removesuffix("/kernel")
    if f"{module}/nf4/codes" not in source.specs():
        bank, _, name = module.rpartition("/base/")
        moe = source.config.moe(int(path.split("/")[1]))
        yield base_kernel(source.read, moe.bank, bank, ffn_matrices(moe.expert, source.config.d_model)[name])
        return
    leaves = {name: source.read(f"{module}/nf4/{name}") for name in _NF4_LEAVES}
    if len(shape) == 2:
        leaves = {name: leaf[None] for name, leaf in leaves.items()}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for index in range(len(leaves["codes"])):
            one = {name: leaf[index] for name, leaf in leaves.items()}
            yield np.asarray(dequantize_nf4(one, shape[-2], np.dtype(np.float32)))


def _kernel_dtype(source: ModelSource, path: str) -> np.dtype:
    """Returns the dtype of a kernel; for one in codes, the dtype of the base's kernel, or else of the model."""
    if path in source.specs():
        return np.dtype(source.specs()[path].dtype)
    if source.base is not None:
        of_base = base_leaf(source.config, path)
        assert of_base is not None, path
        if of_base in source.base.specs():  # a base in codes is no kernel there either
            return np.dtype(source.base.specs()[of_base].dtype)
    return np.dtype(leaf_specs(merged_config(source.config))[path].dtype)


def _layers(indices: list[int], config: ModelConfig) -> str:
    if len(indices) == config.num_layers:
        return "every layer"
    return f"layer {indices[0]}" if len(indices) == 1 else f"{len(indices)} layers (first: {indices[0]})"
