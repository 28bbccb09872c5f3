"""Small models and recipes for the tests of the training program."""

import dataclasses
import json
from pathlib import Path

from moe_jax.data.sections import DataSection
from moe_jax.models import (
    AttentionConfig,
    BankConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    RelativeBiasConfig,
    RopeConfig,
    config_to_json,
)
from moe_jax.training.recipe import ModelSection, Recipe, TrainSection
from tests.support.byte_tokenizer import BOS, EOS

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
FFN = FFNConfig(dim=32)
BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=2),
    "sparse": BankConfig(kind="sparse", rate=0.9),
}


def moe(bank: BankConfig = BANKS["full"], **options) -> MoEConfig:
    return MoEConfig(**{**dict(expert=FFN, num_experts=4, top_k=2, bank=bank), **options})


def config_of(*mlps: FFNConfig | MoEConfig, **options) -> ModelConfig:
    """A model with one layer per FFN or MoE given."""
    layers = tuple(LayerConfig(attention=ATTENTION, mlp=mlp) for mlp in mlps)
    fields = dict(family="llama", vocab_size=264, d_model=16, max_positions=64, bos_id=BOS, eos_ids=(EOS,))
    return ModelConfig(layers=layers, **{**fields, **options})


def encoder_decoder(encoder: FFNConfig | MoEConfig, decoder: FFNConfig | MoEConfig, **options) -> ModelConfig:
    """A model with two layers of each kind, in the form of T5, or with MoEs of Switch; it begins with token 0."""
    bias = RelativeBiasConfig(buckets=8, max_distance=16)
    both_ways = dataclasses.replace(ATTENTION, mask="bidirectional", relative_bias=bias, scale=1.0)
    causal = dataclasses.replace(ATTENTION, relative_bias=bias, scale=1.0)
    cross = dataclasses.replace(ATTENTION, mask="bidirectional", scale=1.0)
    first = LayerConfig(attention=both_ways, mlp=encoder)
    second = LayerConfig(attention=causal, cross=cross, mlp=decoder)
    family = "switch_transformers" if isinstance(decoder, MoEConfig) else "t5"
    fields = dict(family=family, vocab_size=264, d_model=16, max_positions=64, bos_id=None, eos_ids=(EOS,))
    fields |= dict(num_encoder_layers=2, decoder_start_id=0, rope=RopeConfig(fraction=0.0), tie_embeddings=True)
    return ModelConfig(layers=(first, first, second, second), **{**fields, **options})


def recipe_of(
    run_dir: str | Path = "run", *, steps: int = 4, batch_size: int = 8, seq_len: int = 16, **sections
) -> Recipe:
    """A recipe for a model drawn with the seed; `sections` replace whole sections."""
    recipe = Recipe(
        run_dir=str(run_dir),
        model=ModelSection(config="config.json", init="random"),
        train=TrainSection(steps=steps, batch_size=batch_size),
        data=DataSection(seq_len=seq_len),
    )
    return dataclasses.replace(recipe, **sections)


def write_config(path: Path, config: ModelConfig) -> Path:
    path.write_text(json.dumps(config_to_json(config)))
    return path
