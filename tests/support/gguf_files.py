"""GGUF files of Hugging Face checkpoints, written by the `gguf` package, with its own names of tensors."""

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from moe_jax.conversion.families import FAMILIES

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "olmoe": "olmoe",
    "qwen3_moe": "qwen3moe", "stablelm": "stablelm", "phi": "phi2", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}  # fmt: skip


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The halves of every head's rows in turn, as files of Llama have them."""
    width = len(rows) // heads
    return np.concatenate(
        [np.stack([rows[h * width + i] for j in range(width // 2) for i in (j, j + width // 2)]) for h in range(heads)]
    )


def latent_keys(config: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The keys of DeepSeek's models; of older files, whose map to keys and values is `whole`, fewer."""
    rank, rotated, heads = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_attention_heads"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    found = {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.head_count_kv": heads if whole else 1,
        "attention.key_length": key if whole else rank + rotated,
        "attention.value_length": value if whole else rank,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }
    if not whole:
        found |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    if config["model_type"] == "deepseek_v3":
        found |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    if yarn := config.get("rope_scaling"):
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn["factor"],
            "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * yarn["mscale_all_dim"],
        }
    return found


def split_by_heads(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The maps from the latent to keys and values as newer files have them: two stacks, of which one is transposed."""
    heads, unrotated = config["num_attention_heads"], config["qk_nope_head_dim"]
    found = dict(tensors)
    for name in [name for name in tensors if ".attn_kv_b." in name]:
        whole = found.pop(name)
        by_head = whole.reshape(heads, -1, whole.shape[-1])
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(by_head[:, :unrotated].swapaxes(1, 2))
        found[name.replace("kv_b", "v_b")] = by_head[:, unrotated:]
    return found


def metadata_of(config: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """The keys of a model, without the architecture's name; `whole` is for DeepSeek: see `latent_keys`."""
    config = {**FAMILIES[config["model_type"]].defaults, **config}
    heads, d_model = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim", d_model // heads)
    epsilon = "layer_norm_epsilon" if "layer_norm_eps" in config else "layer_norm_rms_epsilon"
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": d_model,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        f"attention.{epsilon}": config.get("layer_norm_eps", config.get("rms_norm_eps")),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": config.get("rope_theta", 10000.0),
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
    }
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts:
        found |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "kv_lora_rank" in config:
        found |= latent_keys(config, whole=whole) | {"expert_used_count": config["num_experts_per_tok"]}
    if config["model_type"] == "mistral":
        found["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "olmoe":
        found["attention.clamp_kqv"] = config["clip_qkv"]
    return found


def tensors_of(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, whole: bool = False
) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint under the names that the `gguf` package has for them, and in their order of rows."""
    architecture = ARCHITECTURES[config["model_type"]]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found: dict[str, np.ndarray] = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        words = name.split(".")
        if "experts" in words or "norms" in words:  # one tensor for each, which the format stacks
            at = words.index("experts" if "experts" in words else "norms")
            number = int(words.pop(at + 1))
            if words[at] == "norms":
                words.pop(at)
            parts.setdefault(".".join(words), {})[number] = values
            continue
        found[name] = values
    found |= {name: np.stack([part[i] for i in range(len(part))]) for name, part in parts.items()}
    out = {}
    for name, values in found.items():
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        stem, _, suffix = name.rpartition(".")
        short = stem.replace("model.layers", "layers") if "experts" in stem and "block_sparse" in stem else stem
        theirs = names.get_name(stem) or names.get_name(short.replace("block_sparse_moe", "feed_forward"))
        assert theirs is not None, name
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
            values = interleave(values, heads)
        out[f"{theirs}.{suffix}"] = values
    return out if whole or "kv_lora_rank" not in config else split_by_heads(config, out)


def write_gguf(
    path: pathlib.Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    raw: Mapping[str, np.ndarray] | None = None,
    whole: bool = False,
) -> pathlib.Path:
    """Writes a GGUF file.

    Args:
      path: of the file.
      config: a config.json.
      tensors: the checkpoint that it describes.
      kinds: name of a tensor in the file -> type of the blocks that it is quantised in.
      metadata: further keys, whole.
      without: keys that are left out.
      raw: further tensors by their names in the file.
      whole: whether it is as older files of DeepSeek are.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    keys = {f"{architecture}.{key}": value for key, value in metadata_of(config, whole=whole).items()} | dict(
        metadata or {}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if key not in without and value is not None:
            _add(writer, key, value)
    for name, values in (tensors_of(config, tensors, whole=whole) | dict(raw or {})).items():
        kind = (kinds or {}).get(name)
        if kind is not None:
            writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
        elif values.dtype.name == "bfloat16":
            writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
