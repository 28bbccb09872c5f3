"""What stands beside a trained MoE in the second part, and how many of its parameters a token meets."""

import dataclasses

from moe_jax.models import ModelConfig
from moe_jax.peft.base import own_leaves
from moe_jax.peft.options import AdaptOptions, adapted_config
from moe_jax.peft.trained_table import trained_groups
from tuning.settings import Settings

R, E, D, S = "PERFT-R", "PERFT-E", "PERFT-D", "PERFT-S"
LORA_QV, LORA_ROUTER, FULL = "LoRA q,v", "LoRA router", "full fine-tuning"
FAMILIES = (R, E, D, S, LORA_QV, LORA_ROUTER)
_METHODS = {R: "perft-r", E: "perft-e", D: "perft-d", S: "perft-s", LORA_QV: "lora", LORA_ROUTER: "lora"}
_TARGETS = {LORA_QV: ("q", "v"), LORA_ROUTER: ("router",)}
MAIN_RANK = 8


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of tuning.

    Attributes:
      family: of `FAMILIES`, or `FULL`: every parameter of the MoE is trained.
      rank: r.
      experts: adapters M; of PERFT-E as many as the MoE has experts.
      top_k: adapters per token K, of PERFT-R.
      parallel: the adapter has a SiLU and scale 1, not LoRA's shape and scale 2.
    """

    family: str
    rank: int = 0
    experts: int = 1
    top_k: int | None = None
    parallel: bool = False

    @property
    def name(self) -> str:
        """Such as `PERFT-R 8/2 r=16`."""
        parts = [self.family]
        if self.family == R:
            parts.append(f"{self.experts}/{self.top_k}")
        if self.family == D:
            parts.append(f"{self.experts}")
        if self.rank:
            parts.append(f"r={self.rank}")
        return " ".join([*parts, "parallel"] if self.parallel else parts)


def variants(settings: Settings) -> tuple[Variant, ...]:
    """All that is tried, the most telling first: a benchmark that has no time for all of it can be reported."""
    count = settings.num_experts

    def of_rank(rank: int) -> list[Variant]:
        routed, embedded, single = Variant(R, rank, 8, 2), Variant(E, rank, count), Variant(S, rank)
        dense = [Variant(D, rank, experts) for experts in (4, 8, 2)] if rank in (2, 8, 32) else []
        router = [Variant(LORA_ROUTER, rank)] if rank <= MAIN_RANK else []
        return [routed, embedded, *dense, single, Variant(LORA_QV, rank), *router]

    return (
        Variant(FULL),
        *(variant for rank in (8, 2, 32, 64) for variant in of_rank(rank)),
        *(Variant(R, MAIN_RANK, *sizes) for sizes in ((8, 8), (4, 1), (4, 2), (8, 1), (8, 4), (16, 2))),
        Variant(R, MAIN_RANK, 8, 2, parallel=True),
        Variant(E, MAIN_RANK, count, parallel=True),
        Variant(D, MAIN_RANK, 4, parallel=True),
        Variant(S, MAIN_RANK, parallel=True),
        *(variant for rank in (16, 4) for variant in of_rank(rank)),
    )


def rates_of(variant: Variant, settings: Settings) -> Variant:
    """The variant whose learning rate is taken: of the same family, and of a rank that is as small or large."""
    if variant.family in (FULL, LORA_ROUTER):
        return dataclasses.replace(variant, rank=variant.rank and MAIN_RANK)
    rank = 2 if variant.rank < 8 else 32 if variant.rank > 16 else 8
    sizes = {R: (8, 2), E: (settings.num_experts, None), D: (4, None)}.get(variant.family, (1, None))
    return Variant(variant.family, rank, *sizes)


def tuned_config(base: ModelConfig, variant: Variant) -> ModelConfig:
    """The config of a base MoE with a variant beside it."""
    if variant.family == FULL:
        return base
    options = AdaptOptions(
        method=_METHODS[variant.family],
        adapter=f"{'parallel' if variant.parallel else 'lora'}:{variant.rank}",
        num_experts=variant.experts if variant.family in (R, D) else None,
        top_k=variant.top_k,
        targets=_TARGETS.get(variant.family),
    )
    return adapted_config(base, options)


def active_params(config: ModelConfig) -> int:
    """Parameters beside a frozen base that a token meets (methods.md 8); 0 if the base is trained."""
    own = own_leaves(config) if config.frozen_base else ()
    return sum(group.active for group in trained_groups(config, own))
