"""Common parts of T5 and Switch: an encoder and a decoder with relative biases and one embedding for both."""

from collections.abc import Sequence
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import read_dtype, same_in_all_layers
from moe_jax.conversion.table import Ignored, Row, Table, Tied, linear, norm
from moe_jax.core.errors import InputError
from moe_jax.models import (
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    RelativeBiasConfig,
    RopeConfig,
)
from moe_jax.models.config import check_num_layers

UNROTATED = RopeConfig(fraction=0.0)

# Both stacks look tokens up in the same embedding, which old files hold up to three times.
EMBEDDING: Table = (
    Row("shared.weight", "embed/embedding"),
    Tied("encoder.embed_tokens.weight", equals="shared.weight"),
    Tied("decoder.embed_tokens.weight", equals="shared.weight"),
)

# The table of a stack is that of its first block.
_BIASES = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_UNUSED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"

NORMS_AND_HEAD: Table = (
    Row(f"encoder.{_BIASES}", "encoder_relative_bias/table"),
    Row(f"decoder.{_BIASES}", "relative_bias/table"),
    *norm("encoder.final_layer_norm", "encoder_norm"),
    *norm("decoder.final_layer_norm", "final_norm"),
    *linear("lm_head", "lm_head"),
    Tied("lm_head.weight", equals="shared.weight"),
    Ignored(_UNUSED, "relative biases of cross-attention, which has none"),
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32128,
    "d_kv": 64,
    "d_ff": 2048,
    "n_positions": 512,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

# Dropout, which our training applies only to adapters, and a key of the first releases of Transformers.
HARMLESS = ("dropout_rate", "output_past")


def attention_rows(stack: str) -> tuple[Row, ...]:
    """Returns the rows of the attention of one stack, whose name its tensors begin with."""
    block = f"{stack}.block.{{i}}.layer"
    rows = [*norm(f"{block}.0.layer_norm", "layers/{i}/attention_norm")]
    for name in "qkvo":
        rows += linear(f"{block}.0.SelfAttention.{name}", f"layers/{{i}}/attention/{name}")
    if stack == "decoder":
        rows += norm(f"{block}.1.layer_norm", "layers/{i}/cross_attention_norm")
        for name in "qkvo":
            rows += linear(f"{block}.1.EncDecAttention.{name}", f"layers/{{i}}/cross_attention/{name}")
    return tuple(rows)


def read_lengths(config: HFConfig) -> tuple[int, int]:
    """Reads the numbers of layers of the encoder and the decoder, at least 1 each, and no more than possible."""
    encoder = config.required_integer("num_layers")
    decoder = config.integer("num_decoder_layers")
    decoder = encoder if decoder is None else decoder
    for key, count in (("num_layers", encoder), ("num_decoder_layers", decoder)):
        if count < 1:
            raise InputError(f"config.json: {key}={count} must be at least 1")
    check_num_layers(encoder + decoder)
    return encoder, decoder


def read_encoder_decoder(
    config: HFConfig,
    family: str,
    encoder: Sequence[FFNConfig | MoEConfig],
    decoder: Sequence[FFNConfig | MoEConfig],
    *,
    scaled_head: bool,
) -> ModelConfig:
    """Reads everything but the FFNs and MoEs, one for each layer.

    Args:
      config: the Hugging Face config.
      family: becomes `ModelConfig.family`.
      encoder, decoder: FFN or MoE of each of their layers.
      scaled_head: logits are multiplied by `1 / sqrt(d_model)`.
    """
    config.must_be("is_encoder_decoder", True)
    vocab_size, d_model = config.required_integer("vocab_size"), config.required_integer("d_model")
    bias = RelativeBiasConfig(
        buckets=config.required_integer("relative_attention_num_buckets"),
        max_distance=config.required_integer("relative_attention_max_distance"),
    )
    heads = config.required_integer("num_heads")
    shape: dict[str, Any] = dict(
        num_heads=heads, num_kv_heads=heads, head_dim=config.required_integer("d_kv"), scale=1.0
    )
    both_ways = AttentionConfig(**shape, mask="bidirectional", relative_bias=bias)
    causal = AttentionConfig(**shape, relative_bias=bias)
    cross = AttentionConfig(**shape, mask="bidirectional")
    # Transformers begins with padding if a config does not name a token; all published configs do so.
    start = config.integer("decoder_start_token_id")
    if start is None:
        start = config.required_integer("pad_token_id")
        config.keep("pad_token_id", start)
    eos = config.integers("eos_token_id")
    if config.is_default("eos_token_id"):
        eos = tuple(token for token in eos if token < vocab_size)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        d_model=d_model,
        # Nothing is limited to it: relative biases continue beyond.
        max_positions=config.required_integer("n_positions"),
        layers=(
            *(LayerConfig(attention=both_ways, mlp=mlp) for mlp in encoder),
            *(LayerConfig(attention=causal, cross=cross, mlp=mlp) for mlp in decoder),
        ),
        num_encoder_layers=len(encoder),
        decoder_start_id=start,
        rope=UNROTATED,
        norm_eps=config.required_number("layer_norm_epsilon"),
        tie_embeddings=config.flag("tie_word_embeddings"),
        logit_scale=d_model**-0.5 if scaled_head and d_model > 0 else 1.0,
        bos_id=config.integer("bos_token_id"),
        eos_ids=eos,
        dtype=read_dtype(config),
        foreign=config.unread_keys(),
    )


def write_encoder_decoder(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `read_encoder_decoder` and `read_lengths` read."""
    if not config.has_encoder:
        raise InputError(f"the format of {config.family!r} holds models with an encoder and a decoder, and no others")
    attention = same_in_all_layers(
        config,
        "choice of heads (number, width) and relative biases",
        lambda layer: (layer.attention.num_heads, layer.attention.head_dim, layer.attention.relative_bias),
    )
    heads, width, bias = attention
    if bias is None:
        raise InputError(f"the format of {config.family!r} has relative biases, and this model has none")
    eos = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None
    return {
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_kv": width,
        "num_heads": heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_layers - config.num_encoder_layers,
        "n_positions": config.max_positions,
        "relative_attention_num_buckets": bias.buckets,
        "relative_attention_max_distance": bias.max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "decoder_start_token_id": config.decoder_start_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos,
        "torch_dtype": config.dtype,
    }
