"""The options of `convert`, `export` and `attach`."""

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from moe_jax.core.errors import InputError, flag_of, shown
from moe_jax.core.formatting import parse_bytes
from moe_jax.core.verb_spec import Shown, TakesMovedBase, TakesNonfinite

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_SIDE = 4096


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
    vision_tower: Annotated[str | os.PathLike[str] | None, Shown("DIR", "in the checkpoint", Path | None)] = None
    """Of a MoE-LLaVA, whose checkpoint may only name its image encoder: a Hugging Face directory of that or of the CLIP
    that it is a part of, or ORG/NAME. Its weights take the place of any in the checkpoint."""
    projector: Annotated[
        str | os.PathLike[str] | None, Shown("FILE", "in the checkpoint or beside it", Path | None)
    ] = None
    """Of a MoE-LLaVA: the mm_projector.bin that a first stage of training left."""

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """The keys of `ignore_keys`."""
        keys = self.ignore_keys
        return tuple(keys.split(",") if isinstance(keys, str) and keys else keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSpec(TakesMovedBase, TakesNonfinite):
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
    format: Literal["checkpoint", "compressed-tensors", "peft"] = "checkpoint"
    """A checkpoint of the whole model; the same with experts in codes, which Transformers and vLLM load; or the LoRA of
    an adapter directory, for the PEFT library."""
    bits: Annotated[Literal[4, 8] | None, Shown("4|8", "those that the experts have, or 4")] = None
    """With `format` compressed-tensors: of the codes. Experts that are such codes already keep them; others are
    rounded."""
    group_size: Annotated[
        int | None, Shown("N", "that of the experts if it fits, or the largest of 128, 64 and 32 that does")
    ] = None
    """With `format` compressed-tensors: inputs that share a scale."""
    dtype: Dtype | None = None
    """Dtype of all tensors; by default each keeps its own, bit for bit."""

    def __post_init__(self) -> None:
        known = ("base", "format", "allow_nonfinite")
        others = {field.name: field.default for field in dataclasses.fields(self) if field.name not in known}
        given = [flag_of(name) for name, default in others.items() if getattr(self, name) != default]
        if self.format == "peft" and given:
            raise InputError(f"{', '.join(given)}: does not go with --format peft, which writes LoRA as it is stored")
        if self.format != "compressed-tensors" and (self.bits is not None or self.group_size is not None):
            raise InputError("--bits and --group-size: only with --format compressed-tensors")
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            raise InputError(f"--group-size {self.group_size} must be a multiple of 8")
        if self.max_shard_size is not None:
            parse_bytes(self.max_shard_size, flag="--max-shard-size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachSpec(TakesNonfinite):
    """The options of `attach`: the image encoder, what is taken of it, and the steps to the language model's width.

        >>> moe_jax.AttachSpec(tower="clip", features="-2,-5").taken
        (-2, -5)

    Raises:
      InputError: for options that cannot be read or are out of range.
    """

    example: ClassVar[str] = "--tower clip-vit-large-patch14-336"

    tower: Annotated[str | os.PathLike[str], Shown("DIR", read_as=Path)]
    """The image encoder: a Hugging Face directory of CLIP, SigLIP or DINOv2, or ORG/NAME."""
    size: Annotated[int | None, Shown("N", "as the encoder's preprocessor config says")] = None
    """Pixels of a side of the encoder's pictures. Given, pictures are padded to a square and resized to it, and the
    encoder's positions are interpolated."""
    features: Annotated[str | Collection[int], Shown("N,N,...", read_as=str)] = "-2"
    """The hidden states of the encoder that are joined: 0 is the input of its first layer, -1 the output of its last
    one. Layers after the last of them are never computed."""
    projector: Annotated[str | Collection[str], Shown("STEP,STEP,...", read_as=str)] = "linear,gelu,linear"
    """Steps from the features to the language model, drawn anew: linear, linear:unbiased, norm, an activation, pool:S
    or pixel_shuffle:S, which make one token of S x S patches."""
    placeholder: Annotated[str | None, Shown("TOKEN", "<image>, if the tokenizer has it")] = None
    """The token of the language model's tokenizer that stands for a picture in a prompt."""
    seed: int = 0
    """Seed of the projector."""

    def __post_init__(self) -> None:
        if self.size is not None and (isinstance(self.size, bool) or not 1 <= self.size <= MAX_SIDE):
            raise InputError(f"--size {shown(self.size)}: expected pixels from 1 to {MAX_SIDE}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {shown(self.seed)} must lie between 0 and {2**32 - 1}")
        if not self.steps:
            raise InputError("--projector names no step; expected some, such as linear,gelu,linear")
        if not self.taken:
            raise InputError("--features names no hidden state; expected some, such as -2")

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of `projector`."""
        given = self.projector
        return tuple(given.split(",") if isinstance(given, str) and given else given)

    @property
    def taken(self) -> tuple[int, ...]:
        """The numbers of `features`."""
        given = self.features
        try:
            return tuple(int(one) for one in (given.split(",") if isinstance(given, str) and given else given))
        except ValueError:
            raise InputError(
                f"--features {shown(given)}: expected numbers of hidden states, such as -2 or 3,-2"
            ) from None

    def described(self) -> dict[str, Any]:
        """Returns the options as they are written to the lineage."""
        return {
            "tower": os.fspath(self.tower),
            "size": self.size,
            "features": list(self.taken),
            "projector": list(self.steps),
            "placeholder": self.placeholder,
            "seed": self.seed,
        }
