"""Configs of every family in small, and checkpoints of random tensors, as Hugging Face directories."""

import json
import math
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax.conversion import read_hf_config
from moe_jax.conversion.families import family_named
from moe_jax.conversion.table import PER_EXPERT, apply_table
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import leaf_specs
from tests.support.hf_hybrid_configs import HYBRID
from tests.support.hf_newer_configs import NEWER

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "pad_token_id": 0,
}


# Families with LayerNorms have another key for their epsilon.
LAYER_NORMS = {key: value for key, value in BASE.items() if key != "rms_norm_eps"} | {"layer_norm_eps": 1e-5}


STABLELM = {**LAYER_NORMS, "model_type": "stablelm", "partial_rotary_factor": 0.25}


# Gemma 2 and 3 have another key for the activation.
GEMMA = {key: value for key, value in BASE.items() if key != "hidden_act"} | {
    "head_dim": 12,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 10,
    "sliding_window": 8,
}


QWEN = {
    "model_type": "qwen",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "seq_length": 40,
    "layer_norm_epsilon": 1e-5,
    "no_bias": True,
    "rotary_pct": 1.0,
    "rotary_emb_base": 500.0,
    "scale_attn_weights": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "tie_word_embeddings": False,
}


T5 = {
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "is_encoder_decoder": True,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


LATENT = BASE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


CONFIGS = {
    "llama": {**BASE, "model_type": "llama"},
    "llama-tied": {**BASE, "model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {**BASE, "model_type": "llama", "head_dim": 16},
    "llama-llama3": {
        **BASE,
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": 8},
    "qwen2": {**BASE, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {**BASE, "model_type": "qwen3", "head_dim": 16},
    "qwen3-window": {
        **BASE,
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "stablelm": {**STABLELM, "use_qkv_bias": True},
    "stablelm-parallel-head-norms": {**STABLELM, "use_parallel_residual": True, "qk_layernorm": True},
    "mixtral": {**BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **BASE,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "qwen2_moe-dense-layers": {
        **BASE,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 8,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen3_moe": {
        **BASE,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen3_moe-dense-layers": {
        **BASE,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "olmoe": {**BASE, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5},
    "deepseek": {
        **BASE,
        "model_type": "deepseek",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "aux_loss_alpha": 0.01,
        "seq_aux": True,
    },
    "deepseek_v2": {
        **LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "truncate": True,
        },
    },
    "deepseek_v3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": 20,
        "attention_bias": True,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "phi": {**LAYER_NORMS, "model_type": "phi", "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "t5": {**T5, "tie_word_embeddings": True},
    "t5-gated": {
        **T5,
        "num_decoder_layers": 3,
        "d_kv": 16,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    },
    "switch_transformers": {
        **T5,
        "model_type": "switch_transformers",
        "dense_act_fn": "relu",
        "num_layers": 3,
        "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 4,
        "num_experts": 3,
        "expert_capacity": 64,
        "tie_word_embeddings": True,
    },
    "phi-tied-wide-heads": {
        **LAYER_NORMS,
        "model_type": "phi",
        "hidden_act": "relu",
        "layer_norm_eps": 1e-3,
        "head_dim": 20,
        "partial_rotary_factor": 0.4,
        "tie_word_embeddings": True,
    },
    "gemma": {**BASE, "model_type": "gemma", "head_dim": 12, "hidden_act": "gelu_pytorch_tanh", "attention_bias": True},
    "gemma2": {**GEMMA, "model_type": "gemma2"},
    "qwen": QWEN,
    "qwen-biases-everywhere": {**QWEN, "no_bias": False, "rotary_pct": 0.5, "tie_word_embeddings": True},
    "gemma3_text": {
        **GEMMA,
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    **{
        name: {key: value for key, value in (BASE | keys).items() if value is not None}
        for name, keys in (NEWER | HYBRID).items()
    },
}


def expected_tensors(config: dict, layout: str = PER_EXPERT) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint with this config.json."""
    model = read_hf_config(config)
    family = family_named(model.family)
    encoder = model.num_encoder_layers
    mapped = apply_table(
        family.table_of(model), leaf_specs(model), model.num_layers, layout, model.family, num_encoder_layers=encoder
    )
    return mapped.tensors


def random_tensors(config: dict, dtype: str = "float32", layout: str = PER_EXPERT) -> dict[str, np.ndarray]:
    """A checkpoint of random numbers; norms are about 1."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in expected_tensors(config, layout).items():
        values = rng.normal(size=shape) / math.sqrt(shape[-1])
        tensors[name] = ((1 + 0.1 * values) if "norm" in name else values).astype(DTYPES[dtype])
    return tensors


def write_checkpoint(
    folder: pathlib.Path, config: dict, tensors: dict[str, np.ndarray], *, shards: int = 1
) -> pathlib.Path:
    """Writes config.json and safetensors, in `shards` files with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name, file in weight_map.items() if file == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, read by the safetensors library."""
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
        assert a[name].tobytes() == b[name].tobytes(), name


def complaint(config: dict) -> str:
    """What is said of a config.json that is refused."""
    with pytest.raises(InputError) as error:
        read_hf_config(config)
    return str(error.value)
