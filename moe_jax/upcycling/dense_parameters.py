"""The treatment of the dense model's own parameters when adapter experts are added to it (PESC; methods.md 6)."""

import dataclasses
from typing import Literal

from moe_jax.core.errors import InputError, check_member, nearest, shown
from moe_jax.experts.shapes import FFNConfig, LoRAConfig
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig

RESTS = ("qlora:R", "lora:R", "frozen", "full")
_KINDS = ("qlora", "lora", "frozen", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseParameters:
    """The treatment of the dense model's attention and FFNs (PESC); nothing else has LoRA or NF4.

    Attributes:
      kind: `full`: trained like everything else. `frozen`: not trained. `lora`: frozen, with LoRA on every kernel.
        `qlora`: the same with NF4 kernels (Dettmers et al. 2023).
      rank: r of LoRA.
      alpha: LoRA is scaled by alpha/r.
      dropout: on the inputs of LoRA in training.
    """

    kind: Literal["qlora", "lora", "frozen", "full"] = "full"
    rank: int | None = None
    alpha: float = 16.0
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_member("rest", self.kind, _KINDS)
        if (self.rank is not None) != self.has_lora:
            raise InputError(f"rest {self.kind!r} with rank {self.rank}: qlora and lora have a rank, the others none")
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rest: rank {self.rank} must be at least 1")

    @property
    def has_lora(self) -> bool:
        """Whether LoRA is added to every kernel of attention and FFNs."""
        return self.kind in ("qlora", "lora")

    def lora(self, targets: tuple[str, ...]) -> LoRAConfig | None:
        """Returns the LoRA on these kernels of a module; None without LoRA."""
        if not self.has_lora:
            return None
        assert self.rank is not None
        return LoRAConfig(rank=self.rank, targets=targets, scale=self.alpha / self.rank, dropout=self.dropout)


def parse_rest(text: str) -> DenseParameters:
    """Reads `qlora:R`, `lora:R`, `frozen` or `full`.

    Raises:
      InputError: for anything else, or a rank out of range.
    """
    kind, colon, number = text.partition(":")
    hint = "" if kind in _KINDS else nearest(kind, _KINDS)
    if kind not in _KINDS or bool(colon) != (kind in ("qlora", "lora")):
        raise InputError(f"unknown --rest {shown(text)}{hint}; it is one of {', '.join(RESTS)}")
    if not colon:
        return DenseParameters(kind=kind)
    try:
        rank = int(number)
    except ValueError:
        raise InputError(f"--rest {shown(text)}: expected a whole number after the colon") from None
    return DenseParameters(kind=kind, rank=rank)


def with_rest(config: ModelConfig, rest: DenseParameters) -> ModelConfig:
    """Returns the config with `rest` applied to attention and FFN (in an MoE, the experts' FFN) of every layer."""
    if rest.kind == "full":
        return config
    layers = tuple(_layer(layer, rest) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, frozen_base=True)


def _layer(layer: LayerConfig, rest: DenseParameters) -> LayerConfig:
    nf4 = rest.kind == "qlora"
    attention = dataclasses.replace(layer.attention, nf4=nf4, lora=rest.lora(layer.attention.projections))

    def ffn(config: FFNConfig) -> FFNConfig:
        return dataclasses.replace(config, nf4=nf4, lora=rest.lora(config.matrices))

    mlp = layer.mlp
    changed = dataclasses.replace(mlp, expert=ffn(mlp.expert)) if isinstance(mlp, MoEConfig) else ffn(mlp)
    return dataclasses.replace(layer, attention=attention, mlp=changed)
