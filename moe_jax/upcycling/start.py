"""How experts begin that are not plain copies of the dense FFN, and what that does to step 0 (methods.md 2.6)."""

import dataclasses
from typing import Literal

from moe_jax.core.errors import InputError, check_member, check_number, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What is done to the copies of the FFN before they are the experts. Only full experts can begin in another way.

    Attributes:
      noise: standard deviation of Gaussian noise on every kernel of every expert, relative to that of the kernel's
        entries.
      drop: share of every expert's neurons that are drawn anew (Drop-Upcycling, Nakamura et al. 2025).
      granularity: G: every copy of the FFN is cut along its neurons into G experts (He et al. 2024).
      models: how many models the experts are from, one copy from each (Branch-Train-MiX); 0: all from one.
      rest_from: then, what becomes of all that is no expert: the mean over these models, or that of the dense model.
    """

    noise: float = 0.0
    drop: float = 0.0
    granularity: int = 1
    models: int = 0
    rest_from: Literal["mean", "base"] = "mean"

    def __post_init__(self) -> None:
        check_number(self, "noise", "drop", at_least=0)
        check_positive(self, "granularity")
        check_member("rest_from", self.rest_from, ("mean", "base"))
        if self.rest_from != "mean" and not self.models:
            raise InputError(f"rest_from {self.rest_from!r} goes with experts from several models; name these")
        if self.drop > 1:
            raise InputError(f"drop={self.drop} is a share of the neurons, at most 1")

    @property
    def copies(self) -> bool:
        """Whether the experts are plain copies."""
        return self == PLAIN

    def needs_full_experts(self) -> list[str]:
        """What experts with a shared base, or adapters, could not begin with: options, each with its reason."""
        changed = {"noise": self.noise > 0, "drop": self.drop > 0, "granularity": self.granularity > 1}
        changed["experts-from"] = self.models > 0
        why = {
            "noise": "noise is no delta of low rank, nor of few entries",
            "drop": "neurons drawn anew are no delta of low rank, nor of few entries",
            "granularity": "experts that are different pieces of the FFN have no base in common",
            "experts-from": "what different models have learnt is no delta of low rank, nor of few entries",
        }
        return [f"--{name} needs --delta full: {why[name]}" for name in why if changed[name]]


PLAIN = Start()
