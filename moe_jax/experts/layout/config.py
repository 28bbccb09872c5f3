"""The shapes of FFNs, adapters and LoRA."""

import dataclasses
from typing import Literal

from moe_jax.core.errors import InputError, check_member, check_number, check_positive, clipped, shown
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS


def _check_strength(config: "AdapterConfig | LoRAConfig") -> None:
    check_number(config, "scale", "dropout")
    if not 0.0 <= config.dropout < 1.0:
        raise InputError(f"dropout={config.dropout} must lie in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A bottleneck, `scale * act(h Down) Up` (methods.md 6, 7): LoRA's shape, or a parallel or sequential adapter's.

        >>> moe_jax.AdapterConfig(rank=8, activation="gelu", scale=0.25).dropout
        0.0

    Attributes:
      rank: width r of the bottleneck.
      activation: `none` (LoRA), or a key of `kernels.plain.ACTIVATION_FUNCTIONS`.
      scale: s; of LoRA α/r.
      dropout: the share of the entries of `h` that dropout sets to zero in training.
      of_base: the adapter belongs to the base model, and is frozen with it.
    """

    rank: int
    activation: Literal["none", "silu", "gelu", "gelu_tanh", "relu"] = "none"
    scale: float = 1.0
    dropout: float = 0.0
    of_base: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        check_member("activation", self.activation, ("none", *ACTIVATION_FUNCTIONS))
        _check_strength(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Products `scale * (x A) B` beside some of a module's kernels (Hu et al. 2021).

        >>> moe_jax.LoRAConfig(rank=8, targets=("q", "v")).scale
        2.0

    Attributes:
      rank: r.
      targets: the names of the kernels in the module.
      scale: α/r.
      dropout: the share of the entries of `x` that dropout sets to zero in training.
    """

    rank: int
    targets: tuple[str, ...]
    scale: float = 2.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        _check_strength(self)
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(f"targets={shown(list(self.targets))} must name at least one kernel, and each once")

    def check_targets(self, known: tuple[str, ...]) -> None:
        """Raises `InputError` for a target that is none of `known`."""
        unknown = ", ".join(name for name in self.targets if name not in known)
        if unknown:
            raise InputError(f"LoRA targets {clipped(unknown)} do not exist here; there are {', '.join(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNConfig:
    """A feed-forward network: gated (gate, up, down) or plain (up, down).

        >>> moe_jax.FFNConfig(dim=32).shapes(16)
        {'gate': (16, 32), 'up': (16, 32), 'down': (32, 16)}

    Attributes:
      dim: hidden width f.
      gated: `act(x G) * (x U) D` if true, else `act(x U) D`.
      activation: a key of `kernels.plain.ACTIVATION_FUNCTIONS`.
      bias: whether every matrix has a bias.
      nf4: kernels are stored as NF4 and frozen. In a bank, this applies to its base, or to full kernels.
      lora: LoRA beside the kernels. In a bank, beside those of the base, or of every full expert.
    """

    dim: int
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    bias: bool = False
    nf4: bool = False
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        check_positive(self, "dim")
        check_member("activation", self.activation, tuple(ACTIVATION_FUNCTIONS))
        if self.lora is not None:
            self.lora.check_targets(self.matrices)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of use."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """`[in, out]` shape of every kernel for model width `d_model`."""
        return {name: (self.dim, d_model) if name == "down" else (d_model, self.dim) for name in self.matrices}
