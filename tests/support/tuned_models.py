"""Small models with every kind of module beside a base."""

import dataclasses

from moe_jax.experts import AdapterConfig, BankConfig, FFNConfig, LoRAConfig
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.models.attention_config import PROJECTIONS
from moe_jax.models.moe_config import PerftConfig

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, biases=("q", "k", "v"))
FFN = FFNConfig(dim=24)
LOW_RANK = BankConfig(kind="low-rank", rank=2)
LORA = AdapterConfig(rank=3)


def model(*mlps: FFNConfig | MoEConfig, attention: AttentionConfig = ATTENTION, **options) -> ModelConfig:
    """One layer per FFN or MoE."""
    layers = tuple(LayerConfig(attention=attention, mlp=mlp) for mlp in mlps)
    fields = dict(family="llama", vocab_size=40, d_model=16, max_positions=48)
    return ModelConfig(layers=layers, **{**fields, **options})


def moe(expert: FFNConfig = FFN, **options) -> MoEConfig:
    return MoEConfig(expert=expert, num_experts=4, top_k=2, **options)


def lora(*targets: str, rank: int = 3) -> LoRAConfig:
    return LoRAConfig(rank=rank, targets=targets)


def tuned_and_base() -> dict[str, tuple[ModelConfig, ModelConfig]]:
    """By what is beside the base: a tuned model and its base."""
    qlora = dataclasses.replace(ATTENTION, nf4=True, lora=lora(*PROJECTIONS))
    biased = FFNConfig(dim=24, gated=False, bias=True, activation="gelu")
    quantized = dataclasses.replace(biased, nf4=True, lora=lora("up", "down"))
    pesc = moe(quantized, bank=BankConfig(kind="adapter", adapter=LORA))
    routed = PerftConfig(variant="routed", adapter=LORA, num_experts=3, top_k=1)
    embedded = PerftConfig(variant="embedded", adapter=LORA, num_experts=4)
    nf4 = dataclasses.replace(FFN, nf4=True)
    universal = dict(bank=LOW_RANK, universal="coder")
    return {
        "PESC": (
            model(pesc, quantized, attention=qlora, frozen_base=True, tie_embeddings=True),
            model(biased, biased, tie_embeddings=True),
        ),
        "PERFT-R beside NF4 experts": (model(FFN, moe(nf4, perft=routed), frozen_base=True), model(FFN, moe())),
        "PERFT-E and LoRA on the router": (
            model(moe(perft=embedded, router_lora=lora("router")), frozen_base=True),
            model(moe()),
        ),
        "NF4 and LoRA beside a shared base": (
            model(moe(dataclasses.replace(nf4, lora=lora("gate")), **universal), frozen_base=True),
            model(moe(**universal)),
        ),
        "LoRA on full experts": (model(moe(dataclasses.replace(FFN, lora=lora("up")))), model(moe())),
    }
