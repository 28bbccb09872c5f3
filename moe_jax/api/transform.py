"""Verbs that make a model of a model: convert, upcycle, adapt, merge; and export.

Each takes a model or the path of one, and leaves its result in memory, or with `out` in a directory. Written to a
directory, a model goes through memory one layer at a time, whatever its size. Options have the names of the commands'
options, which `moe-jax COMMAND --help` describes at length.
"""

import dataclasses
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from moe_jax.api.built_in_text import probe_text
from moe_jax.api.model import Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.api.packed import packed_experts
from moe_jax.api.prompts import read_prompts
from moe_jax.conversion import export as _export
from moe_jax.conversion import export_peft as _export_peft
from moe_jax.conversion.from_hugging_face import convert as _convert
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.by_name import option_of_form
from moe_jax.experts.forms.protocol import ExpertForm
from moe_jax.files.storage_path import as_path
from moe_jax.peft.adapt import adapt as _adapt
from moe_jax.peft.merge import merge as _merge
from moe_jax.peft.options import adapted_config
from moe_jax.peft.options import chosen_options as _adapt_options
from moe_jax.upcycling import chosen_options as _upcycle_options
from moe_jax.upcycling import describe_options as _describe_upcycling
from moe_jax.upcycling import upcycled_config
from moe_jax.upcycling.dense_to_moe import upcycle as _upcycle

Dtype = Literal["float32", "bfloat16", "float16"]


def convert(
    src: str | os.PathLike[str],
    out: OutPath = None,
    *,
    dtype: Dtype | None = None,
    ignore_keys: Collection[str] = (),
    allow_nonfinite: bool = False,
) -> Model:
    """Reads a Hugging Face checkpoint or a GGUF file, tensor by tensor.

        >>> checkpoint = moe_jax.export(moe_jax.tiny_model(), folder / "checkpoint")
        >>> moe_jax.convert(checkpoint, folder / "model").path.name
        'model'
        >>> moe_jax.convert(checkpoint).config.family
        'llama'

    Args:
      src: Hugging Face directory: config.json, and safetensors or PyTorch files; or a GGUF file.
      out: where a model directory appears, which must not exist; None: the model stays in memory.
      dtype: of all parameters; None: every one is kept bit for bit, and quantised ones become float32.
      ignore_keys: unknown keys of config.json that are taken to change nothing; others are an error.
      allow_nonfinite: go on where weights are NaN or infinite.

    Returns:
      The model.

    Raises:
      FileNotFoundError: if there is nothing at `src`.
      InputError: if the checkpoint is damaged or does not fit its config, weights are not finite, or `out` exists.
      OSError: if the disk is full. Nothing is left at `out` then.
    """
    target = destination(out)
    quiet = Console(quiet=True)
    _convert(as_path(src), target, dtype=dtype, ignore_keys=ignore_keys, allow_nonfinite=allow_nonfinite, console=quiet)
    return result(target, src)


def export(
    model: ModelOrPath,
    out: str | os.PathLike[str],
    *,
    max_shard_size: str | int | None = None,
    expert_layout: Literal["per-expert", "fused"] = "per-expert",
    dense_layers: Literal["replicate", "refuse"] = "replicate",
    dtype: Dtype | None = None,
    allow_nonfinite: bool = False,
    format: Literal["checkpoint", "compressed-tensors", "peft"] = "checkpoint",
    bits: Literal[4, 8] | None = None,
    group_size: int | None = None,
) -> Path:
    """Writes a model as a Hugging Face checkpoint. Deltas of experts are merged into full experts.

        >>> checkpoint = moe_jax.export(moe_jax.tiny_model(experts=4), folder / "checkpoint")
        >>> sorted(file.name for file in checkpoint.iterdir())
        ['config.json', 'lineage.json', 'model.safetensors']

    Args:
      model: a model, or the path of one.
      out: where the Hugging Face directory appears; must not exist.
      max_shard_size: the largest file, like 5GB, 500MB or 2GiB, or in bytes; None: 5GB, and in a bucket 500MB.
      expert_layout: one tensor per expert, as on the hub; or the fused tensors of Transformers 5.
      dense_layers: where a format needs an MoE in every layer, store a dense layer as equal experts; or take another
        format that holds the model, or stop.
      dtype: of all tensors; None: every one is kept bit for bit.
      allow_nonfinite: go on where weights are NaN or infinite.
      format: a checkpoint of the whole model; the same with experts in codes, which Transformers and vLLM load; or, of
        the path of an adapter directory, its LoRA for the PEFT library. That has no other options but
        `allow_nonfinite`.
      bits, group_size: of these codes. Experts that are such codes already keep them, others are rounded; None: what
        the experts have, or 4 bits and 128 inputs to a scale.

    Returns:
      `out`.

    Raises:
      InputError: if no Hugging Face format can hold the model, weights are not finite, or `out` exists.
      OSError: if the disk is full. Nothing is left at `out` then.
    """
    if format == "peft":
        _export_peft(open_model(model), as_path(out), allow_nonfinite=allow_nonfinite, console=Console(quiet=True))
        return as_path(out)
    if format != "compressed-tensors" and (bits is not None or group_size is not None):
        raise InputError("bits and group_size: only with format='compressed-tensors'")
    _export(
        open_model(model),
        as_path(out),
        packed=packed_experts(bits, group_size) if format == "compressed-tensors" else None,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
        dense_layers=dense_layers,
        dtype=dtype,
        allow_nonfinite=allow_nonfinite,
        console=Console(quiet=True),
    )
    return as_path(out)


def upcycle(
    model: ModelOrPath,
    out: OutPath = None,
    *,
    method: Literal["vanilla", "ders", "pesc"] | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    every: int | None = None,
    layers: Sequence[int] | None = None,
    delta: str | ExpertForm | None = None,
    adapter: int | None = None,
    scale: float | None = None,
    rest: str | None = None,
    freeze_base: bool = False,
    gate: Literal["topk_softmax", "softmax_topk", "top1"] | None = None,
    universal: Literal["none", "coder", "med"] | None = None,
    extended: bool = False,
    balance_coef: float | None = None,
    z_coef: float | None = None,
    cv_coef: float | None = None,
    noise: float | None = None,
    drop: float | None = None,
    granularity: int | None = None,
    experts_from: Sequence[ModelOrPath] | None = None,
    rest_from: Literal["mean", "base"] | None = None,
    router_from: Sequence[str] | None = None,
    seed: int = 0,
    step0_check: bool = True,
    text: str | os.PathLike[str] | None = None,
    allow_nonfinite: bool = False,
) -> Model:
    """Turns a dense model into a Mixture-of-Experts that gives the same logits until it is trained.

        >>> moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, top_k=2, every=2, delta="low-rank:2")
        >>> moe.config.moe_layers
        (1,)
        >>> measured = moe.lineage[-1]["measured"]
        >>> measured["step0_max_abs_difference"] <= measured["step0_allowed"]
        True

    Args:
      model: a dense model, or the path of one.
      out: where a directory appears, which must not exist; None: the model stays in memory. With `method="pesc"`,
        unless `rest` is `full`, it is an adapter directory, which refers to the dense model and needs the path of one.
      method: `vanilla`: the experts are copies of the FFN; `ders`: the FFN, which all share, plus a `delta`; `pesc`:
        the FFN, which all share, and an adapter after it. None: by `delta`.
      experts: per MoE layer; by default 8.
      top_k: experts that a token goes to; by default 2.
      every: every N-th layer becomes an MoE: with 2 layers 1, 3, 5, ... counted from 0, in each stack of a model with
        an encoder. By default 2, of `pesc` 1.
      layers: the layers that become MoEs, counted from 0 and through both stacks, instead of `every`.
      delta: what an expert is: `full`, a copy of the FFN; `low-rank:R` or `sparse:RATE`, the FFN that all share plus a
        product of rank R per matrix, or single entries of which the share RATE is left out; or the form itself, such as
        `moe_jax.configs.LowRank(rank=16)`. By default `full`.
      adapter, scale: of `pesc`: width of the adapters, 512, and what their outputs are multiplied by, 0.25.
      rest: of `pesc`: what becomes of the dense model: `qlora:R`, `lora:R`, `frozen`, `full`; by default `qlora:64`.
      freeze_base: the shared FFN will not be trained.
      gate: weights of the chosen experts: softmax over these, their share of the softmax over all, or that of the
        first.
      universal: a copy of the FFN that sees every token: of weight 1 - p of the best expert (`coder`), or 1 (`med`).
      extended: the universal FFN is one more delta over the FFN that the experts share.
      balance_coef, z_coef, cv_coef: coefficients of the auxiliary losses; by default 0.01, 0 and 0.
      noise: standard deviation of Gaussian noise on the experts' kernels, relative to that of a kernel. The MoE does
        not begin with the dense model's logits then; the check measures how far off they are.
      drop: share of every expert's neurons that are drawn anew (Drop-Upcycling); with it, the same.
      granularity: every copy of the FFN is cut into so many experts (granular upcycling), and of these so many times
        `top_k` are chosen.
      experts_from: models that experts are from, one each, or their paths (Branch-Train-MiX); all else is their mean.
      rest_from: with these, what is no expert: their `mean`, or the `base`, which is the dense model.
      router_from: texts that the routers begin from, one for each expert, or "@" and the path of a file with it.
      seed: of routers, low-rank factors and sparse positions, noise and dropped neurons.
      step0_check: compare the logits of both models. It also refuses gates that cannot equal the dense model.
      text: with NF4 kernels (`rest="qlora:R"`), the path of a text on which the loss before and after quantising, and
        the KL divergence, are measured; by default a short one of our own.
      allow_nonfinite: go on where weights are NaN or infinite.

    Returns:
      The MoE.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if the model is an MoE already, the options do not go with it or each other, weights are not
        finite, the logits differ, or `out` exists. Nothing is left behind.
    """
    models = [open_model(one) for one in experts_from or ()]
    given = {
        "method": method,
        "experts": experts,
        "top_k": top_k,
        "every": every,
        "layers": layers,
        "delta": None if delta is None else option_of_form(delta),
        "adapter": adapter,
        "scale": scale,
        "rest": rest,
        "freeze_base": freeze_base,
        "gate": gate,
        "universal": universal,
        "extended": extended,
        "balance_coef": balance_coef,
        "z_coef": z_coef,
        "cv_coef": cv_coef,
        "noise": noise,
        "drop": drop,
        "granularity": granularity,
        "experts_from": [model.path for model in models],
        "rest_from": rest_from,
        "router_from": router_from,
        "seed": seed,
        "no_step0_check": not step0_check,
    }
    options, target = _upcycle_options(**given), destination(out)
    described = _describe_upcycling(options, **given)
    source = open_model(model)
    _upcycle(
        source,
        target,
        options,
        seed=seed,
        check=step0_check,
        text=probe_text(source, upcycled_config(source.config, options), text, check=step0_check),
        prompts=read_prompts(source, router_from or ()),
        experts_from=models,
        allow_nonfinite=allow_nonfinite,
        described=described,
    )
    return result(target, model)


def adapt(
    model: ModelOrPath,
    out: OutPath = None,
    *,
    method: Literal["perft-r", "perft-e", "perft-d", "perft-s", "lora"],
    adapter: str,
    experts: int | None = None,
    top_k: int | None = None,
    targets: str | Iterable[str] | None = None,
    scale: float | None = None,
    alpha: float | None = None,
    dropout: float | None = None,
    base: Literal["stored", "nf4"] = "stored",
    balance_coef: float | None = None,
    z_coef: float | None = None,
    seed: int = 0,
    step0_check: bool = True,
    text: str | os.PathLike[str] | None = None,
    allow_nonfinite: bool = False,
) -> Model:
    """Puts fresh adapters beside a model, to be trained while the model is frozen: PERFT beside the MoEs, or LoRA.

        >>> tuned = moe_jax.adapt(moe_jax.tiny_model(experts=4), method="lora", adapter="lora:2", targets="q,v")
        >>> tuned.config.layers[0].attention.lora.rank
        2

    Args:
      model: a model, or the path of one.
      out: where an adapter directory appears, which must not exist. It refers to the model, so that a path is needed.
        None: the model stays in memory, with its adapters.
      method: M adapters beside every MoE with a router of their own (`perft-r`), one for each expert, weighted by the
        model's router (`perft-e`), M that see every token (`perft-d`), or one (`perft-s`); or products beside kernels
        (`lora`).
      adapter: `lora:R`, a product of rank R, or `parallel:R`, with SiLU between its factors (PERFT only).
      experts: of `perft-r` and `perft-d`, how many adapters there are.
      top_k: of `perft-r`, adapters that a token goes to.
      targets: of `lora`, the kernels, out of q, k, v, o, gate, up, down and router: `"q,v"` or `["q", "v"]`.
      scale: what the adapters' outputs are multiplied by; by default 2 of `lora:R` and 1 of `parallel:R`.
      alpha: of `lora:R`, instead of `scale`, which is alpha/R.
      dropout: share of the adapters' inputs set to zero in training; by default 0.05.
      base: how the frozen base is held: as it is stored, or with its kernels as NF4 codes.
      balance_coef, z_coef: of `perft-r`, of the losses of the adapters' router; by default 0.01 and 0.
      seed: of the adapters and their routers.
      step0_check: compare the logits with the untouched model's.
      text: with `base="nf4"`, the path of a text on which the loss before and after quantising, and the KL divergence,
        are measured; by default a short one of our own.
      allow_nonfinite: go on where weights of the model are NaN or infinite.

    Returns:
      The model with its adapters.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if the model has adapters already, the options do not go with it or each other, weights are not
        finite, the logits differ, or `out` exists. Nothing is left behind.
    """
    options = _adapt_options(
        method=method,
        adapter=adapter,
        experts=experts,
        top_k=top_k,
        targets=targets,
        scale=scale,
        alpha=alpha,
        dropout=dropout,
        base=base,
        balance_coef=balance_coef,
        z_coef=z_coef,
    )
    target = destination(out)
    described = {**dataclasses.asdict(options), "seed": seed, "step0_check": step0_check}
    source = open_model(model)
    _adapt(
        source,
        target,
        options,
        seed=seed,
        check=step0_check,
        text=probe_text(source, adapted_config(source.config, options), text, check=step0_check),
        allow_nonfinite=allow_nonfinite,
        described=described,
    )
    return result(target, model)


def merge(
    model: ModelOrPath,
    out: OutPath = None,
    *,
    base: str | os.PathLike[str] | None = None,
    partly: bool = False,
    allow_nonfinite: bool = False,
) -> Model:
    """Folds LoRA into the kernels that it stands beside; the model then needs no base.

    Over NF4 kernels it is folded into what these stand for, so that the model computes what was trained.

        >>> tuned = moe_jax.adapt(moe_jax.tiny_model(), method="lora", adapter="lora:2", targets=["q", "v"])
        >>> merged = moe_jax.merge(tuned)
        >>> merged.config.layers[0].attention.lora is None
        True

    Args:
      model: a model with LoRA or NF4 kernels, or the path of one.
      out: where a model directory appears, which must not exist; None: the model stays in memory.
      base: where the base of an adapter directory is now; by default where the directory says.
      partly: keep what cannot be folded, adapter experts (PESC) and PERFT, instead of refusing.
      allow_nonfinite: go on where weights are NaN or infinite.

    Returns:
      The merged model.

    Raises:
      FileNotFoundError: if there is nothing at the path.
      InputError: if there is nothing to fold, something cannot be folded and `partly` is not said, weights are
        not finite, or `out` exists.
    """
    target = destination(out)
    _merge(open_model(model, base), target, partly=partly, allow_nonfinite=allow_nonfinite)
    return result(target, model)
