"""The options of `convert` and `export`."""

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, get_args

from moe_jax.core.errors import InputError, check_member, flag_of, shown
from moe_jax.core.formatting import parse_bytes
from moe_jax.core.verb_spec import Shown, TakesCalibrationSeed, TakesMovedBase, TakesNonfinite
from moe_jax.data.calibration_texts.weighted_sources import CalibrationSources
from moe_jax.data.sections import check_seq_len
from moe_jax.files.storage_path import as_path

Dtype = Literal["float32", "bfloat16", "float16"]
Code = Literal["2", "3", "4", "8", "fp8", "fp8-block", "nvfp4", "mxfp4"]
"""Numbers that a part of a model can be stored in, by their names in `encoders`."""
CODES = "|".join(get_args(Code))
CODES_OF: dict[str, tuple[str, ...]] = {
    "compressed-tensors": ("4", "8", "fp8", "fp8-block", "nvfp4", "mxfp4"),
    "gptq": ("2", "3", "4", "8"),
}
"""Those that each format in codes has."""
_IN_CODES = " or ".join(CODES_OF)
GGUFType = Literal[
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0",
    "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K",
]  # fmt: skip
GGUF_TYPES: tuple[str, ...] = get_args(GGUFType)
AS_CODED = "as-coded"
"""Stands for the types that are nearest to the codes that experts have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertSpec(TakesNonfinite):
    """The options of `convert`.

    >>> moe_jax.ConvertSpec(ignore_keys="one,other").ignored_keys
    ('one', 'other')
    """

    dtype: Dtype | None = None
    """Dtype of all parameters; by default each keeps its own, bit for bit, and quantised ones become float32."""
    ignore_keys: Annotated[str | Collection[str], Shown("KEY,KEY,...", read_as=str)] = ""
    """Keys of config.json that this library does not know, and that you know to change nothing; by default they are
    refused."""
    codes: Literal["decode", "keep"] = "decode"
    """Of a quantised checkpoint: decode all tensors; or keep experts in their codes, bit for bit, where a model
    directory can hold them, and decode the rest."""
    vision_tower: Annotated[str | os.PathLike[str] | None, Shown("DIR", "in the checkpoint", Path | None)] = None
    """Of a MoE-LLaVA, whose checkpoint may only name its image encoder: a Hugging Face directory of that or of the CLIP
    that it is a part of, or ORG/NAME. Its weights take the place of any in the checkpoint."""
    projector: Annotated[
        str | os.PathLike[str] | None, Shown("FILE", "in the checkpoint or beside it", Path | None)
    ] = None
    """Of a MoE-LLaVA: the mm_projector.bin that a first stage of training left."""
    further: Literal["leave", "keep"] = "leave"
    """Layers behind the last one, which predict tokens after the next (DeepSeek-V3 and V3.2, Kimi-K2, GLM-4.5 and 4.7):
    leave them out; or keep them, to be trained with [mtp] in a recipe, and exported with the model. It computes the
    same."""

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """The keys of `ignore_keys`."""
        keys = self.ignore_keys
        return tuple(keys.split(",") if isinstance(keys, str) and keys else keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSpec(TakesMovedBase, TakesNonfinite, TakesCalibrationSeed):
    """The options of `export`.

        >>> moe_jax.ExportSpec(format="peft", bits=4)
        Traceback (most recent call last):
        moe_jax.core.errors.InputError: --bits: does not go with --format peft, which writes LoRA as it is stored

    Raises:
      InputError: for options that do not go with the format.
    """

    max_shard_size: Annotated[str | int | None, Shown("SIZE", "5GB, in a bucket 500MB", str | None)] = None
    """Largest size of a file, such as 5GB, 500MB or 2GiB; a larger tensor has a file of its own. In a bucket, a few of
    them are in memory at a time."""
    expert_layout: Literal["per-expert", "fused"] = "per-expert"
    """One tensor per expert, as on the hub; or fused tensors, which only Transformers 5 and later read."""
    dense_layers: Literal["replicate", "refuse"] = "replicate"
    """If a format needs an MoE in every layer: store a dense layer as equal experts (replicate); or take another format
    that holds the model, or stop (refuse)."""
    format: Literal["checkpoint", "compressed-tensors", "gptq", "gguf", "peft"] = "checkpoint"
    """A checkpoint of the whole model; the same with experts in codes, as compressed-tensors, which Transformers and
    vLLM load, or as GPTQ, which GPTQModel and vLLM load; a GGUF file of the whole model, which llama.cpp loads; or the
    LoRA of an adapter directory, for the PEFT library."""
    gguf_type: Annotated[
        GGUFType | Literal["as-coded"] | None, Shown("TYPE", "F32, F16 or BF16, as the matrices are", str | None)
    ] = None
    """With `format` gguf: F32, F16 or BF16; Q8_0, Q6_K, Q5_1, Q5_0, Q4_1, Q4_0 or Q2_K; or a mix of several, Q5_K_M,
    Q5_K_S, Q4_K_M, Q4_K_S, Q3_K_L, Q3_K_M or Q3_K_S; or as-coded, of experts in codes: every matrix in the K-quant (of
    8 bits, in Q8_0) of as many bits as its codes have, and all else as in the mix of most of them. Codes on a shared
    base get more bits, by how much larger the sums are than what they add. Norms, biases and routers are always F32."""
    imatrix: Annotated[str | os.PathLike[str] | None, Shown("FILE", "all inputs count the same", Path | None)] = None
    """With `format` gguf: a file of llama.cpp's llama-imatrix for this model, which says how much the inputs of every
    matrix count when it is rounded to a K-quant, or to Q5_1, Q5_0, Q4_1 or Q4_0."""
    bits: Annotated[
        Code | Literal[2, 3, 4, 8] | None, Shown(CODES, "those that the experts have, or 4", str | None)
    ] = None
    """With `format` compressed-tensors: numbers that experts are stored in: whole ones of 4 or 8 bits, FP8 with a scale
    for every output (fp8) or for 128 x 128 (fp8-block), NVFP4 or MXFP4; with gptq: whole ones of 2, 3, 4 or 8 bits.
    Experts that are such codes already keep them; others are rounded."""
    parts: Literal["experts", "model"] = "experts"
    """With `format` compressed-tensors or gptq: what is stored so: experts, or all linear layers of the decoder but the
    head and routers."""
    attention_bits: Annotated[
        Code | Literal[2, 3, 4, 8] | None, Shown(CODES, "as --bits if of the model", str | None)
    ] = None
    """With `format` compressed-tensors or gptq: the same, of attention."""
    dense_bits: Annotated[Code | Literal[2, 3, 4, 8] | None, Shown(CODES, "as --bits if of the model", str | None)] = (
        None
    )
    """With `format` compressed-tensors or gptq: the same, of FFNs that are no experts, or stand beside them."""
    head_bits: Annotated[Code | Literal[2, 3, 4, 8] | None, Shown(CODES, "it stays whole", str | None)] = None
    """With `format` compressed-tensors or gptq: the same, of a head that is not the embedding."""
    group_size: Annotated[
        int | None, Shown("N", "that of the experts if it fits, or the largest of 128, 64 and 32 that does")
    ] = None
    """With `format` compressed-tensors or gptq: inputs that share a scale of whole numbers."""
    zero_points: bool = False
    """With `format` compressed-tensors or gptq: groups of new whole numbers have a zero point beside their scale, which
    changes the model less, and takes 4 or 8 bits for a group; not all kernels of vLLM know it."""
    calibrate: Annotated[
        CalibrationSources | None, Shown("SOURCE[:WEIGHT],...", "all inputs count the same", str | None)
    ] = None
    """What the model is run on while it is put in codes: a text, a file of rows as training data has, `built-in`,
    `self`, or several of them with weights, as in `compress`. Whole numbers and blocks of GGUF files (see `imatrix`)
    then change what linear maps give least, and not their weights. With `format` compressed-tensors or gptq, the loss
    on it is said, before and after."""
    save_imatrix: Annotated[str | os.PathLike[str] | None, Shown("FILE", "it is not kept", Path | None)] = None
    """With `format` gguf and `calibrate`: a file in which what was measured is kept, as llama.cpp's tools and `imatrix`
    read it; must not exist. Of experts, tokens count by their router weights."""
    samples: Annotated[int | None, Shown("N", "128, or as many as there are")] = None
    """With `calibrate`: windows, rows and texts that are drawn of all sources together, as `compress` draws them."""
    seq_len: Annotated[int | None, Shown("TOKENS", "1024, or what the model can do")] = None
    """With `calibrate`: tokens of a window."""
    dtype: Dtype | None = None
    """Dtype of all tensors; by default each keeps its own, bit for bit."""

    @property
    def codes(self) -> dict[str, str | None]:
        """By part of the model, the numbers that it is stored in; None: those that the experts have."""
        given = {"dense": self.dense_bits, "attention": self.attention_bits, "head": self.head_bits}
        codes = {part: str(code) for part, code in given.items() if code is not None}
        return {"experts": None if self.bits is None else str(self.bits), **codes}

    def __post_init__(self) -> None:
        known = ("base", "format", "allow_nonfinite")
        others = {field.name: field.default for field in dataclasses.fields(self) if field.name not in known}
        given = [flag_of(name) for name, default in others.items() if getattr(self, name) != default]
        if self.format == "peft" and given:
            raise InputError(f"{', '.join(given)}: does not go with --format peft, which writes LoRA as it is stored")
        names = ("gguf_type", "imatrix", "save_imatrix")
        of_gguf = [flag_of(name) for name in names if getattr(self, name) is not None]
        if self.format != "gguf" and of_gguf:
            raise InputError(f"{', '.join(of_gguf)}: only with --format gguf")
        if self.gguf_type is not None:
            check_member("--gguf-type", self.gguf_type, (*GGUF_TYPES, AS_CODED))
        not_in_gguf = [name for name in ("dtype", "expert_layout", "max_shard_size") if flag_of(name) in given]
        if self.format == "gguf" and not_in_gguf:
            raise InputError(f"{', '.join(map(flag_of, not_in_gguf))}: does not go with --format gguf; see --gguf-type")
        of_codes = ("bits", "parts", "attention_bits", "dense_bits", "head_bits", "group_size", "zero_points")
        given = [flag_of(name) for name in of_codes if getattr(self, name) != others[name]]
        if self.format not in CODES_OF and given:
            raise InputError(f"{', '.join(given)}: only with --format {_IN_CODES}")
        for name in ("bits", "attention_bits", "dense_bits", "head_bits"):
            value = getattr(self, name)
            if value is not None and str(value) not in CODES_OF[self.format]:
                others = [one for one, codes in CODES_OF.items() if str(value) in codes]
                elsewhere = f"; {value} is in --format {others[0]}" if others else ""
                expected = f"with --format {self.format}, expected one of {', '.join(CODES_OF[self.format])}"
                raise InputError(f"{flag_of(name)} {shown(value)}: {expected}{elsewhere}")
        self._check_calibration()
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            raise InputError(f"--group-size {self.group_size} must be a multiple of 8")
        if self.max_shard_size is not None:
            parse_bytes(self.max_shard_size, flag="--max-shard-size")

    def _check_calibration(self) -> None:
        names = ("samples", "seq_len", "calibration_seed", "save_imatrix")
        of_text = [flag_of(name) for name in names if getattr(self, name) is not None]
        if self.calibrate is None:
            if of_text:
                raise InputError(f"{', '.join(of_text)}: only with --calibrate")
            return
        if self.format not in (*CODES_OF, "gguf"):
            raise InputError(f"--calibrate: only with --format {_IN_CODES} or gguf, which have codes")
        if self.imatrix is not None:
            raise InputError("--calibrate and --imatrix both say how much inputs count; give one of them")
        if self.samples is not None and self.samples < 1:
            raise InputError(f"--samples {self.samples} must be at least 1")
        self.check_calibration_seed()
        if self.seq_len is not None:
            check_seq_len(self.seq_len)


def check_gguf_name(dst: Path | str) -> None:
    """Raises `InputError` unless a GGUF file can be written under this name."""
    path = as_path(dst)
    if not path.renames:
        raise InputError(f"{dst}: GGUF files are written on a disk; write it there, and copy it to the bucket")
    if path.suffix.lower() != ".gguf":
        raise InputError(f"{dst}: --format gguf writes one file; call it NAME.gguf")
