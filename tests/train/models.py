"""Small models and recipes for the tests of the training program."""

import dataclasses
import json
from pathlib import Path

from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, config_to_json
from moe_jax.train.recipe import DataSection, ModelSection, Recipe, TrainSection
from tests.train.conftest import BOS, EOS

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
FFN = FFNConfig(dim=32)
BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=2),
    "sparse": BankConfig(kind="sparse", rate=0.9),
}


def moe(bank: BankConfig = BANKS["full"], **options) -> MoEConfig:
    return MoEConfig(expert=FFN, num_experts=4, top_k=2, bank=bank, **options)


def config_of(*mlps: FFNConfig | MoEConfig, **options) -> ModelConfig:
    """A model with one layer per FFN or MoE given."""
    layers = tuple(LayerConfig(attention=ATTENTION, mlp=mlp) for mlp in mlps)
    fields = dict(family="llama", vocab_size=264, d_model=16, max_positions=64, bos_id=BOS, eos_ids=(EOS,))
    return ModelConfig(layers=layers, **{**fields, **options})


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
