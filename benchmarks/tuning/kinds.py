"""What stories260K becomes in the first part: itself, a vanilla MoE, or PESC's."""

import dataclasses

from moe_jax.experts import AdapterExperts, BankConfig
from moe_jax.models import AdapterConfig, ModelConfig
from moe_jax.upcycle import PESC, UpcycleOptions, upcycled_config
from moe_jax.upcycle.rest import Rest, with_rest
from tuning.settings import Settings

DENSE, DENSE_LORA, VANILLA = "dense", "dense, LoRA", "vanilla"
FULL, LORA, QLORA, FROZEN = "full", "LoRA", "QLoRA", "frozen"
NONE, COPIES, ADAPTERS = "none", "copies", "adapters"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A row of the first table.

    Attributes:
      experts: `none` (dense), `copies` of the FFN (vanilla), or `adapters` (PESC).
      rest: how everything but adapters and routers is trained.
      adapter: width of PESC's adapters. The published 512 is an eighth of the model's width.
      rates_of: the kind whose learning rate is taken; None: its own.
    """

    experts: str
    rest: str = FULL
    adapter: int = 0
    rates_of: str | None = None


KINDS = {
    DENSE: Kind(NONE),
    DENSE_LORA: Kind(NONE, LORA),
    VANILLA: Kind(COPIES),
    "PESC 8, rest full": Kind(ADAPTERS, FULL, 8),
    "PESC 8, rest LoRA": Kind(ADAPTERS, LORA, 8),
    "PESC 8, rest QLoRA": Kind(ADAPTERS, QLORA, 8, "PESC 8, rest LoRA"),
    "PESC 8, rest frozen": Kind(ADAPTERS, FROZEN, 8),
    "PESC 64, rest full": Kind(ADAPTERS, FULL, 64, "PESC 8, rest full"),
    "PESC 64, rest LoRA": Kind(ADAPTERS, LORA, 64, "PESC 8, rest LoRA"),
    "PESC 64, rest QLoRA": Kind(ADAPTERS, QLORA, 64, "PESC 8, rest LoRA"),
    "PESC 64, rest frozen": Kind(ADAPTERS, FROZEN, 64, "PESC 8, rest frozen"),
}


def kind_config(dense: ModelConfig, kind: Kind, settings: Settings) -> ModelConfig:
    """The config of a dense model that becomes one of a kind; PESC's adapters, scale and dropout as published."""
    has_lora = kind.rest in (LORA, QLORA)
    rest = Rest(kind=kind.rest.lower(), rank=settings.rest_rank if has_lora else None)
    if kind.experts == NONE:
        return with_rest(dense, rest)
    if kind.experts == COPIES:
        return upcycled_config(dense, vanilla_options(settings))
    adapter: AdapterConfig = dataclasses.replace(PESC.bank.form.adapter, rank=kind.adapter)
    bank = BankConfig(AdapterExperts(adapter=adapter))
    options = dataclasses.replace(vanilla_options(settings), bank=bank, rest=rest)
    return upcycled_config(dense, options)


def vanilla_options(settings: Settings) -> UpcycleOptions:
    """Copies of the FFN in every layer."""
    return UpcycleOptions(
        num_experts=settings.num_experts, top_k=settings.top_k, every=1, balance_coef=settings.balance_coef
    )
