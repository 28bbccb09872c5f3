"""A checkpoint with the names and shapes of DeepSeek-V3's tensors, as published, of which all but the headers is empty.

The files have the sizes of the true ones, 689 GB, and take next to no room: what was never written has no blocks.
"""

import io
import json
import math
import re

import transformers
from rich.console import Console

from moe_jax.commands.cli import main
from moe_jax.conversion import convert
from tests.support.tiers import long

BYTES = {"F8_E4M3": 1, "F32": 4, "BF16": 2}
BLOCK = 128
EXPORT = ("--format", "gguf", "--gguf-type", "Q4_K_M", "--dry-run")


def deepseek_v3_tensors(config):
    """Dtypes and shapes by name, with the layer that predicts a second token, whose number follows the last one's."""
    d, tensors = config.hidden_size, {}

    def plain(name, *shape, dtype="BF16"):
        tensors[name] = (dtype, list(shape))

    def linear(name, rows, columns):
        plain(f"{name}.weight", rows, columns, dtype="F8_E4M3")
        plain(f"{name}.weight_scale_inv", math.ceil(rows / BLOCK), math.ceil(columns / BLOCK), dtype="F32")

    def ffn(name, width):
        linear(f"{name}.gate_proj", width, d)
        linear(f"{name}.up_proj", width, d)
        linear(f"{name}.down_proj", d, width)

    heads, rank = config.num_attention_heads, config.kv_lora_rank
    plain("model.embed_tokens.weight", config.vocab_size, d)
    for i in range(config.num_hidden_layers + 1):
        layer = f"model.layers.{i}"
        if i == config.num_hidden_layers:
            for name in ("embed_tokens", "shared_head.head"):
                plain(f"{layer}.{name}.weight", config.vocab_size, d)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                plain(f"{layer}.{name}.weight", d)
            plain(f"{layer}.eh_proj.weight", d, 2 * d)
        linear(f"{layer}.self_attn.q_a_proj", config.q_lora_rank, d)
        plain(f"{layer}.self_attn.q_a_layernorm.weight", config.q_lora_rank)
        linear(
            f"{layer}.self_attn.q_b_proj",
            heads * (config.qk_nope_head_dim + config.qk_rope_head_dim),
            config.q_lora_rank,
        )
        linear(f"{layer}.self_attn.kv_a_proj_with_mqa", rank + config.qk_rope_head_dim, d)
        plain(f"{layer}.self_attn.kv_a_layernorm.weight", rank)
        linear(f"{layer}.self_attn.kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), rank)
        linear(f"{layer}.self_attn.o_proj", d, heads * config.v_head_dim)
        plain(f"{layer}.input_layernorm.weight", d)
        plain(f"{layer}.post_attention_layernorm.weight", d)
        if i < config.first_k_dense_replace:
            ffn(f"{layer}.mlp", config.intermediate_size)
            continue
        plain(f"{layer}.mlp.gate.weight", config.n_routed_experts, d)
        plain(f"{layer}.mlp.gate.e_score_correction_bias", config.n_routed_experts, dtype="F32")
        for expert in ("shared_experts", *(f"experts.{e}" for e in range(config.n_routed_experts))):
            ffn(f"{layer}.mlp.{expert}", config.moe_intermediate_size)
    plain("model.norm.weight", d)
    plain("lm_head.weight", config.vocab_size, d)
    return tensors


def write_empty(folder, tensors, shard_bytes=4_300_000_000):
    """Writes headers and an index; the rest of every file is a hole."""
    shards, size = [{}], 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * BYTES[dtype]
        if size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + nbytes]}
        size += nbytes
    weight_map = {}
    for number, header in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        text = json.dumps(header).encode()
        with file.open("wb") as written:
            written.write(len(text).to_bytes(8, "little") + text)
            written.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
        weight_map |= dict.fromkeys(header, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@long
def test_every_tensor_of_deepseek_v3_is_found(tmp_path, capsys):
    config = transformers.DeepseekV3Config()  # its defaults are those of DeepSeek-V3
    keys = config.to_dict() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    tensors = deepseek_v3_tensors(config)
    assert len(tensors) == 91_991  # as many as in the published index
    folder = tmp_path / "hf"
    folder.mkdir()
    write_empty(folder, tensors)
    (folder / "config.json").write_text(json.dumps(keys))
    printed = io.StringIO()
    convert(folder, tmp_path / "not-there", dry_run=True, console=Console(file=printed, width=400))
    said = printed.getvalue()
    assert "quantised tensors become float32: 45,032 in fp8; 363 tensors are not in codes" in said
    assert "left out: 788 tensors, of a layer that predicts tokens after the next" in said
    assert re.search(r"^45395 tensors, 1025 leaves, 671,026,419,200 parameters, ", said, re.MULTILINE)
    assert main(["export", str(folder), str(tmp_path / "m.gguf"), *EXPORT]) == 0
    # 13 in each of 3 dense layers, 18 in each of the others, and 3 outside.
    assert re.search(r"^1086 tensors, 671,026,419,200 parameters, ", capsys.readouterr().out, re.MULTILINE)
