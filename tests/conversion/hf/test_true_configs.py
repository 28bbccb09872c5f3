"""Every true config is read, and a checkpoint of it would hold as many parameters as the true one."""

import io
import json
import pathlib
import re

import pytest
from rich.console import Console

from moe_jax.api.open_source import read_config
from moe_jax.conversion import convert, read_hf_config
from moe_jax.planning.model_costs import make_plan

# Published, or the sum over the tensors of the published checkpoint.
TOTALS = {
    "mistralai__Mixtral-8x7B-v0.1": 46_702_792_704,
    "allenai__OLMoE-1B-7B-0924": 6_919_161_856,
    "allenai__OLMoE-1B-7B-0125-Instruct": 6_919_161_856,
    "Qwen__Qwen3-30B-A3B": 30_532_122_624,
    "Qwen__Qwen3-30B-A3B-Base": 30_532_122_624,
    "deepseek-ai__deepseek-moe-16b": 16_375_728_128,
    "meta-llama__Llama-2-7b-hf": 6_738_415_616,
    "meta-llama__Llama-2-13b-hf": 13_015_864_320,
}

# The keys of published configs that sizes follow from, and the parameters that the class of Transformers 5.24 makes of
# them, with the biases of selection, which it counts as buffers.
_HEADS = {"num_key_value_heads": 8, "head_dim": 128}
_LLAMA4 = {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, **_HEADS, "vocab_size": 202048}
SIZES = {
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, **_HEADS,
         "attention_bias": True, "vocab_size": 151552},
        106_852_251_264,
    ),
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48, **_HEADS,
         "rotary_dim": 64, "vocab_size": 200064},
        228_689_764_864,
    ),
    "Granite 3.1 3B-A800M": (
        {"model_type": "granitemoe", "hidden_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 24,
         "num_key_value_heads": 8, "intermediate_size": 512, "num_local_experts": 40, "num_experts_per_tok": 8,
         "vocab_size": 49155, "tie_word_embeddings": True},
        3_298_793_472,
    ),
    "Kimi-K2": (
        {"model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
         "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "vocab_size": 163840},
        1_026_408_232_448,
    ),
    # config.json of https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct; its card rounds to 80 billion.
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
         "intermediate_size": 5120, "full_attention_interval": 4, "mlp_only_layers": [], "vocab_size": 151936},
        79_674_391_296,
    ),
    # The language model of https://huggingface.co/Qwen/Qwen3.5-35B-A3B; the values that it leaves out are those of the
    # config class of Transformers.
    "Qwen3.5-35B-A3B": (
        {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {},
         "text_config": {
             "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "vocab_size": 248320,
             "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
             "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
             "max_position_embeddings": 262144,
             "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                 "mrope_interleaved": True, "mrope_section": [11, 11, 10]}}},
        34_660_610_688,
    ),
    # The language models of meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E, whose cards count what they
    # see with, too: 109 and 400 billion.
    "Llama 4 Scout": (
        {"model_type": "llama4", "vision_config": {}, "text_config": {**_LLAMA4, "num_local_experts": 16}},
        107_769_861_120,
    ),
    "Llama 4 Maverick": (
        {"model_type": "llama4", "vision_config": {},
         "text_config": {**_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}},
        400_711_848_960,
    ),
    # The language model of https://huggingface.co/mistralai/Mistral-Small-4-119B-2603.
    "Mistral Small 4": (
        {"model_type": "mistral3", "tie_word_embeddings": False, "vision_config": {},
         "text_config": {
             "model_type": "mistral4", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
             "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4, "vocab_size": 131072}},
        118_972_826_624,
    ),
    "Qwen3-VL-30B-A3B": (
        {"model_type": "qwen3_vl_moe", "vision_config": {},
         "text_config": {
             "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
             "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
             "vocab_size": 151936}},
        30_532_122_624,
    ),
    "OLMo 2 7B": (
        {"model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "vocab_size": 100352},
        7_298_617_344,
    ),
}  # fmt: skip


def parameters_of(config: pathlib.Path) -> int:
    """The number that a dry run prints at its end."""
    printed = io.StringIO()
    convert(config, config.parent / "not-there", dry_run=True, console=Console(file=printed, width=400))
    return int(re.findall(r"([\d,]+) parameters", printed.getvalue())[-1].replace(",", ""))


_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


# The configs of https://huggingface.co/openai/gpt-oss-20b and gpt-oss-120b, whose layers differ in number only. The
# model card (arXiv:2508.10925, table 1) rounds the totals to 20.91 and 116.83 billion.
@pytest.mark.parametrize(
    ("layers", "experts", "total"), [(24, 32, 20_914_757_184), (36, 128, 116_829_156_672)], ids=["20b", "120b"]
)
def test_gpt_oss(tmp_path: pathlib.Path, layers: int, experts: int, total: int):
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    keys = _GPT_OSS | {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": types}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    assert parameters_of(file) == make_plan(read_config(file)).total_params == total


def test_every_true_config(data_dir: pathlib.Path):
    files = sorted(file for folder in ("as_found", "derived") for file in (data_dir / "configs" / folder).iterdir())
    assert files and TOTALS.keys() <= {file.stem for file in files}
    for file in files:
        found = parameters_of(file)
        assert found == make_plan(read_config(file)).total_params == TOTALS.get(file.stem, found), file


@pytest.mark.parametrize("name", SIZES)
def test_true_sizes(name: str):
    keys, total = SIZES[name]
    assert make_plan(read_hf_config(keys)).total_params == total
