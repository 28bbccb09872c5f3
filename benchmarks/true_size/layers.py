"""The layers: their shapes, and model directories of drawn weights."""

import json
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

NOISE = 0.5
WORDS = 4096


class Shape(NamedTuple):
    """A layer: its experts, their neurons, the width of the model, and of how many experts these are a part."""

    experts: int
    neurons: int
    d_model: int
    of_experts: int | None = None


LAYERS = {
    "Mixtral-8x7B": Shape(8, 14336, 4096),
    "DeepSeekMoE-16B": Shape(64, 1408, 2048),
    "Qwen3-30B-A3B": Shape(128, 768, 2048),
}


def layer_config(shape: Shape, *, layers: int = 1) -> ModelConfig:
    """A model that is little else than such layers."""
    moe = MoEConfig(expert=FFNConfig(dim=shape.neurons), num_experts=shape.experts, top_k=2)
    layer = LayerConfig(attention=AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=128), mlp=moe)
    return ModelConfig(
        family="mixtral",
        vocab_size=WORDS,
        d_model=shape.d_model,
        max_positions=1024,
        layers=(layer,) * layers,
        dtype="bfloat16",
    )


def write_layer(folder: Path, shape: Shape, *, planted: bool, layers: int = 1) -> None:
    """Writes the model, one kernel of all experts at a time; its tokens are words of `write_words`."""
    config = layer_config(shape, layers=layers)
    orders = [np.random.default_rng(expert).permutation(shape.neurons) for expert in range(shape.experts)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = folder.parent / "tokenizer.json"
    vocabulary = {_word(number): number for number in range(WORDS)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": _word(0)}
    tokenizer.write_text(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}))
    with ModelDirectoryWriter(folder, config, tokenizer_files=(tokenizer,), lineage=[]) as writer:
        for index, (path, spec) in enumerate(leaf_specs(config).items()):
            random = np.random.Generator(np.random.SFC64([index, 7]))
            scale = np.float32(shape.d_model**-0.5)
            if "/experts/" not in path:
                drawn = np.ones(spec.shape, np.float32)
                if len(spec.shape) > 1:  # no scale of a norm: of size 1 where what is given is of size 1
                    of_size = np.float32(1) if path.startswith("embed") else scale
                    drawn = random.standard_normal(spec.shape, dtype=np.float32) * of_size
                writer.write({path: drawn.astype(ml_dtypes.bfloat16)})
                continue
            common = random.standard_normal(spec.shape[1:], dtype=np.float32) * scale
            kernels = np.empty(spec.shape, ml_dtypes.bfloat16)
            for expert, order in enumerate(orders):
                own = random.standard_normal(common.shape, dtype=np.float32) * scale
                if planted:
                    own = common + np.float32(NOISE) * own
                kernels[expert] = own[order] if "/down/" in path else own[:, order]
            writer.write({path: kernels})


def write_words(file: Path, count: int) -> Path:
    """Writes a text of so many words, drawn alike, each of which is a token; returns the file."""
    drawn = np.random.default_rng(11).integers(0, WORDS, count)
    file.write_text(" ".join(map(_word, drawn.tolist())))
    return file


def planted_objective(shape: Shape) -> float:
    """Of the right orders, on average: E - 1 of the E parts of the noise that are not common to all experts."""
    entries = shape.neurons * 3 * shape.d_model
    return entries * NOISE**2 / shape.d_model * (shape.experts - 1) / shape.experts


def _word(number: int) -> str:
    return f"w{number}"
