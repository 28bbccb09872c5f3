"""Dense models with random weights, in directories."""

from pathlib import Path

import ml_dtypes
import numpy as np

from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)


DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def dense_config(*, num_layers=4, d_model=16, dim=24, gated=True, bias=False, vocab_size=40, **kwargs) -> ModelConfig:
    """A dense model with equal layers."""
    ffn = FFNConfig(dim=dim, gated=gated, bias=bias)
    layers = (LayerConfig(attention=ATTENTION, mlp=ffn),) * num_layers
    return ModelConfig(
        family="llama", vocab_size=vocab_size, d_model=d_model, max_positions=48, layers=layers, **kwargs
    )


def random_leaves(config: ModelConfig, *, dtype: str | None = None) -> dict[str, np.ndarray]:
    """Leaves of a model whose activations neither die out nor explode; norms and biases are random too."""
    random = np.random.default_rng(0)
    leaves = {}
    for path, spec in leaf_specs(config).items():
        drawn = random.standard_normal(spec.shape)
        if path.endswith("kernel"):
            drawn /= np.sqrt(spec.shape[-2])
        elif path.endswith("scale"):
            drawn = 1 + 0.1 * drawn
        leaves[path] = drawn.astype(DTYPES[dtype or config.dtype])
    return leaves


def write_model(dst: Path, config: ModelConfig, leaves: dict[str, np.ndarray], files: tuple[Path, ...] = ()) -> Path:
    """Writes a model directory."""
    entry = {"command": "test", "options": {}, "sources": []}
    with ModelDirectoryWriter(dst, config, tokenizer_files=files, lineage=[entry], allow_nonfinite=True) as writer:
        writer.write(leaves)
    return dst
