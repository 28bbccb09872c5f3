"""The options of `adapt` and `merge`."""

import dataclasses
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from moe_jax.core.errors import (
    InputError,
    check_member,
    check_number,
    check_positive,
    flag_of,
    nearest,
    raise_if_any,
    shown,
)
from moe_jax.core.verb_spec import Shown, TakesMovedBase, TakesNonfinite

Method = Literal["perft-r", "perft-e", "perft-d", "perft-s", "lora"]
Kept = Literal["stored", "nf4"]
# Alpha is twice the rank by default (methods.md 7).
LORA_SCALE = 2.0
PARALLEL_SCALE = 1.0
# Options that only some methods have.
_ONLY = {
    "experts": ("perft-r", "perft-d"),
    "top_k": ("perft-r",),
    "balance_coef": ("perft-r",),
    "z_coef": ("perft-r",),
    "targets": ("lora",),
}
_REQUIRED = {"experts": ("perft-r", "perft-d"), "top_k": ("perft-r",), "targets": ("lora",)}


class FormOfAdapter(NamedTuple):
    """The form of an adapter: `lora` or `parallel`, the rank, and the factor of its outputs."""

    kind: str
    rank: int
    scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptSpec(TakesNonfinite):
    """The options of `adapt`: which adapters are put beside a frozen model. None takes the default of the method.

    >>> spec = moe_jax.AdaptSpec(method="lora", adapter="lora:2", targets="q,v")
    >>> moe_jax.adapt(moe_jax.tiny_model(), None, spec).config.frozen_base
    True

    Raises:
      InputError: for options that cannot be read or contradict each other; all problems are listed.
    """

    example: ClassVar[str] = "--method perft-s --adapter lora:16"

    method: Method
    """PERFT puts adapters beside every MoE: M adapters with their own router (perft-r), one per expert, weighted by the
    MoE's router (perft-e), M that see every token (perft-d), or one that does (perft-s). lora: LoRA on `targets`."""
    adapter: Annotated[str, Shown("lora:R|parallel:R")]
    """The form of an adapter: two matrices of rank R, without (lora) or with SiLU in between (parallel, PERFT only)."""
    experts: Annotated[int | None, Shown("M")] = None
    """perft-r and perft-d, which require it: the number of adapters per MoE."""
    top_k: Annotated[int | None, Shown("K")] = None
    """perft-r, which requires it: the number of adapters that a token is routed to."""
    targets: Annotated[str | Iterable[str] | None, Shown("q,v,...", "", str | None)] = None
    """lora, which requires it: which kernels get LoRA, out of q, k, v, o (of attention; in latent attention q_down,
    q_up, kv_down and kv_up instead of q, k and v; in layers with a recurrence also beta, decay, in_gate and out_gate),
    gate, up, down (of FFNs and experts; gate also of attention and recurrences) and router; in every layer that has
    them."""
    scale: Annotated[float | None, Shown("X", "2 of lora:R, 1 of parallel:R")] = None
    """The factor by which the adapters' outputs are multiplied."""
    alpha: Annotated[float | None, Shown("X", "2R")] = None
    """lora:R: sets the scale to ALPHA/R; instead of `scale`."""
    dropout: Annotated[float | None, Shown("X", "0.05; of LoRA on full experts 0")] = None
    """Dropout rate on the adapters' inputs in training."""
    base: Kept = "stored"
    """How the frozen base is kept: as stored, or with the kernels of attention, FFNs and experts quantised to NF4,
    4-bit codes of normally distributed weights."""
    balance_coef: Annotated[float | None, Shown("X", "0.01")] = None
    """perft-r: coefficient of the loss that makes the adapters' router use them alike."""
    z_coef: Annotated[float | None, Shown("X", "0")] = None
    """perft-r: coefficient of the z-loss of the adapters' router, which keeps its logits small."""
    seed: int = 0
    """Seed of the initial adapters and routers."""
    step0_check: bool = True
    """Compares the new model's logits with those of the original model."""
    text: Annotated[str | os.PathLike[str] | None, Shown("FILE", "a built-in text", Path | None)] = None
    """With `base` nf4: a text on which the loss before and after quantising, and the KL divergence, are shown; its
    first 512 tokens."""

    def __post_init__(self) -> None:
        if self.targets is not None and not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))  # an iterator could be read only once
        check_positive(self, "experts", "top_k")
        check_number(self, "dropout", "balance_coef", "z_coef", at_least=0)
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must not be negative")
        check_member("--method", self.method, get_args(Method))
        check_member("--base", self.base, get_args(Kept))
        problems: list[str] = []
        try:
            self.form_of_adapter  # noqa: B018  (checks `adapter`, `scale` and `alpha`)
        except InputError as error:
            problems.append(str(error))
        if self.dropout is not None and not self.dropout < 1:
            problems.append(f"dropout={self.dropout} must lie in [0, 1)")
        if self.top_k is not None and self.experts is not None and self.top_k > self.experts:
            problems.append(f"top_k={self.top_k} must lie between 1 and experts={self.experts}")
        if len(set(self.target_names or ())) < len(self.target_names or ()):
            problems.append("--targets: name every kernel once")
        raise_if_any(problems + self._misplaced(), f"--method {self.method}")

    @property
    def form_of_adapter(self) -> FormOfAdapter:
        """The form of an adapter, `lora:R` or `parallel:R`, read, with its scale.

        Raises:
          InputError: for anything else, or values out of range.
        """
        kind, colon, number = self.adapter.partition(":")
        if kind not in ("lora", "parallel") or not colon:
            hint = nearest(kind, ("lora", "parallel"))
            raise InputError(f"unknown --adapter {shown(self.adapter)}{hint}; it is lora:R or parallel:R")
        if self.method == "lora" and kind != "lora":
            raise InputError(f"--adapter {self.adapter} does not go with LoRA, whose adapters are lora:R")
        try:
            rank = int(number)
        except ValueError:
            raise InputError(f"--adapter {shown(self.adapter)}: expected a whole number after the colon") from None
        if rank < 1:
            raise InputError(f"--adapter {self.adapter}: the rank must be at least 1")
        scale = self._scale(kind, rank)
        # As it will be computed with, in float32.
        if not 0.0 < np.float32(scale) < math.inf:
            raise InputError(f"a scale of {scale:g} makes nothing of the adapters; it must be above 0")
        return FormOfAdapter(kind, rank, scale)

    @property
    def target_names(self) -> tuple[str, ...] | None:
        """The kernels that get LoRA, by name."""
        names = self.targets.split(",") if isinstance(self.targets, str) else self.targets
        return None if names is None else tuple(name for name in names if name)

    def described(self) -> dict[str, Any]:
        """Returns the options as they are written to the lineage."""
        names = ("method", "adapter", "scale", "alpha", "dropout", "experts", "top_k", "balance_coef", "z_coef")
        described = {"num_experts" if name == "experts" else name: getattr(self, name) for name in names}
        described |= {"targets": self.target_names, "base": self.base, "seed": self.seed}
        return described | {"step0_check": self.step0_check, "allow_nonfinite": self.allow_nonfinite}

    def _scale(self, kind: str, rank: int) -> float:
        if self.alpha is None:
            return self.scale if self.scale is not None else LORA_SCALE if kind == "lora" else PARALLEL_SCALE
        if kind != "lora":
            raise InputError("--alpha is LoRA's, and a parallel adapter has none; use --scale")
        if self.scale is not None:
            raise InputError("give --alpha or --scale, which is alpha/R, but not both")
        return self.alpha / rank

    def _misplaced(self) -> list[str]:
        """Returns a problem for each option that the method does not have, and each required one that is missing."""
        problems = []
        for name, methods in _ONLY.items():
            flag = flag_of(name)
            given = getattr(self, name) is not None
            if given and self.method == "perft-e" and name == "experts":
                problems.append("PERFT-E has one adapter for each of the MoE's experts; leave --experts out")
            elif given and self.method not in methods:
                problems.append(f"{flag} goes with {' and '.join(methods)} only")
            elif not given and self.method in _REQUIRED.get(name, ()):
                problems.append(f"{flag} is missing")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeSpec(TakesMovedBase, TakesNonfinite):
    """The options of `merge`.

    >>> moe_jax.MergeSpec().partly
    False
    """

    partly: bool = False
    """Keeps adapters that cannot be merged (PESC, PERFT) as they are, instead of refusing."""

    def described(self) -> dict[str, Any]:
        """Returns the options as they are written to the lineage."""
        return {"partly": self.partly, "allow_nonfinite": self.allow_nonfinite}
