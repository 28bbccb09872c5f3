"""The options of `adapt` and `merge`."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from moe_jax.core.errors import InputError, check_number, check_positive
from moe_jax.core.verb_spec import Shown, TakesMovedBase, TakesNonfinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptSpec(TakesNonfinite):
    """The options of `adapt`: which adapters are put beside a frozen model. None takes the default of the method.

    >>> spec = moe_jax.AdaptSpec(method="lora", adapter="lora:2", targets="q,v")
    >>> moe_jax.adapt(moe_jax.tiny_model(), None, spec).config.frozen_base
    True
    """

    example: ClassVar[str] = "--method perft-s --adapter lora:16"

    method: Literal["perft-r", "perft-e", "perft-d", "perft-s", "lora"]
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
    q_up, kv_down and kv_up instead of q, k and v), gate, up, down (of FFNs and experts) and router; in every layer that
    has them."""
    scale: Annotated[float | None, Shown("X", "2 of lora:R, 1 of parallel:R")] = None
    """The factor by which the adapters' outputs are multiplied."""
    alpha: Annotated[float | None, Shown("X", "2R")] = None
    """lora:R: sets the scale to ALPHA/R; instead of `scale`."""
    dropout: Annotated[float | None, Shown("X", "0.05; of LoRA on full experts 0")] = None
    """Dropout rate on the adapters' inputs in training."""
    base: Literal["stored", "nf4"] = "stored"
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
