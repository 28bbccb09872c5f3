"""Small models to tune."""

import dataclasses

from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
FFN = FFNConfig(dim=24)
FULL = MoEConfig(expert=FFN, num_experts=4, top_k=2)
SHARED = dataclasses.replace(FULL, bank=BankConfig(kind="low-rank", rank=2))
BARE = dataclasses.replace(FULL, bank=BankConfig(kind="low-rank", rank=2, base="none"))


def model_of(*mlps: FFNConfig | MoEConfig, **options) -> ModelConfig:
    """A model of one layer for every FFN or MoE; d = 16."""
    layers = tuple(LayerConfig(attention=ATTENTION, mlp=mlp) for mlp in mlps)
    return ModelConfig(family="llama", vocab_size=40, d_model=16, max_positions=48, layers=layers, **options)
