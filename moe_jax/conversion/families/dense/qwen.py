"""The first Qwen (1.8B, 7B, 14B, 72B): queries, keys and values in one matrix with a bias, and no other biases.

Transformers does not have it: the model's definition, `modeling_qwen.py`, is published with the checkpoints.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.table import Ignored, Row, Tied, joined_qkv, linear, norm
from moe_jax.core.errors import InputError
from moe_jax.data.tokens.tiktoken_file import qwen_tokenizer
from moe_jax.models import AttentionConfig, FFNConfig, ModelConfig, RopeConfig

# They act only beyond `seq_length`: there scores grow with the logarithm of the position, and the rotation depends on
# the length of the prompt.
_BEYOND_TRAINING = ("use_dynamic_ntk", "use_logn_attn")


def _read(config: HFConfig) -> ModelConfig:
    config.must_be("scale_attn_weights", True)
    config.must_be("use_cache_quantization", False)
    beyond = {key: config.flag(key) for key in _BEYOND_TRAINING}
    for key, value in beyond.items():
        config.keep(key, value)
    bias = not config.flag("no_bias")
    attention, ffn = _read_attention(config, bias=bias), _read_ffn(config, bias=bias)
    theta, fraction = config.required_number("rotary_emb_base"), config.required_number("rotary_pct")
    return usual.read_decoder(
        config,
        "qwen",
        usual.repeat_layers(config, attention, ffn),
        eps="layer_norm_epsilon",
        positions="seq_length",
        rope=RopeConfig(theta=theta, fraction=fraction),
        bounded_positions=any(beyond.values()),
    )


def _read_attention(config: HFConfig, *, bias: bool) -> AttentionConfig:
    keys = ("hidden_size", "num_attention_heads", "kv_channels")
    config.require(*keys)
    d_model, heads, width = map(config.required_integer, keys)
    if heads * width != d_model:
        raise InputError(
            f"config.json: in the format of 'qwen' num_attention_heads * kv_channels is hidden_size = {d_model}, not "
            f"{heads} * {width}"
        )
    return AttentionConfig(
        num_heads=heads, num_kv_heads=heads, head_dim=width, biases=("q", "k", "v", "o") if bias else ("q", "k", "v")
    )


def _read_ffn(config: HFConfig, *, bias: bool) -> FFNConfig:
    """Reads the FFN; `intermediate_size` counts the rows of both matrices into it."""
    both = config.required_integer("intermediate_size")
    if both % 2:
        raise InputError(f"config.json: intermediate_size={both} must be even: it counts two matrices of equal width")
    return FFNConfig(dim=both // 2, gated=True, activation="silu", bias=bias)


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn = usual.dense_ffn(config)
    heads, width = usual.same_attention(
        config, "choice of heads (query, width)", lambda attention: (attention.num_heads, attention.head_dim)
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "kv_channels": width,
        "intermediate_size": 2 * ffn.dim,
        "seq_length": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "rotary_emb_base": config.rope.theta,
        "rotary_pct": config.rope.fraction,
        "no_bias": not ffn.bias,
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tie_embeddings,
        **usual.write_tokens(config),
        "torch_dtype": config.dtype,
        **({} if config.bounded_positions else dict.fromkeys(_BEYOND_TRAINING, False)),
    }


QWEN = Family(
    name="qwen",
    own_code=True,
    architecture="QWenLMHeadModel",
    # From `configuration_qwen.py`; the end of a text is a token of the tokenizer that all of the family have.
    defaults={
        "vocab_size": 151936,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 8192,
        "kv_channels": 128,
        "rotary_pct": 1.0,
        "rotary_emb_base": 10000.0,
        "no_bias": True,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
        "use_cache_quantization": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "eos_token_id": 151643,
    },
    harmless=(
        *("attn_dropout_prob", "bf16", "emb_dropout_prob", "fp16", "fp32", "onnx_safe", "softmax_in_fp32"),
        "use_cache_kernel",
    ),
    read=_read,
    write=_write,
    table=(
        Row("transformer.wte.weight", "embed/embedding"),
        *norm("transformer.h.{i}.ln_1", "layers/{i}/attention_norm"),
        *joined_qkv("transformer.h.{i}.attn.c_attn"),
        *linear("transformer.h.{i}.attn.c_proj", "layers/{i}/attention/o"),
        *norm("transformer.h.{i}.ln_2", "layers/{i}/mlp_norm"),
        # The activation is applied to the second of the two.
        *linear("transformer.h.{i}.mlp.w2", "layers/{i}/mlp/gate"),
        *linear("transformer.h.{i}.mlp.w1", "layers/{i}/mlp/up"),
        *linear("transformer.h.{i}.mlp.c_proj", "layers/{i}/mlp/down"),
        *norm("transformer.ln_f", "final_norm"),
        *linear("lm_head", "lm_head"),
        Tied("lm_head.weight", equals="transformer.wte.weight"),
        Ignored(r"transformer\.(h\.\d+\.attn\.)?rotary_emb\.inv_freq", "RoPE frequencies, recomputed from the config"),
        Ignored(r"transformer\.h\.\d+\.attn\.(masked_bias|logn_tensor)", "constants of masks and long texts"),
    ),
    moe_formats=("moe_llava_qwen",),
    vocabulary=("qwen.tiktoken", qwen_tokenizer),
)
