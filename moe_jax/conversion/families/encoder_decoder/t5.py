"""T5 1.0, T5 1.1 and Flan-T5: an encoder and a decoder with relative biases.

T5 1.0 has plain FFNs, and its head is the embedding, scaled; 1.1 and Flan have gated FFNs and a head of their own.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import ACTIVATIONS, Classifier, Family, dense_ffn
from moe_jax.conversion.families.parts.two_stacks import (
    DEFAULTS,
    EMBEDDING,
    HARMLESS,
    NORMS_AND_HEAD,
    attention_rows,
    read_encoder_decoder,
    read_lengths,
    write_encoder_decoder,
)
from moe_jax.conversion.table import Row, in_stack, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import FFNConfig, ModelConfig

# For each activation, the name that checkpoints of the family have.
_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_GATE = "layers/{i}/mlp/gate/kernel"


def _read(config: HFConfig) -> ModelConfig:
    ffn = _read_ffn(config)
    encoder, decoder = read_lengths(config)
    # Transformers scales the input of a tied head. The other key is of its release 5, in which all heads are tied.
    named = "scale_decoder_outputs" if config.given("scale_decoder_outputs") else "tie_word_embeddings"
    return read_encoder_decoder(config, "t5", [ffn] * encoder, [ffn] * decoder, scaled_head=config.flag(named))


def _read_ffn(config: HFConfig) -> FFNConfig:
    """Reads `feed_forward_proj`, the name of an activation, with `gated-` before it if the FFN is gated."""
    given = config.text("feed_forward_proj") or ""
    kind, _, name = given.rpartition("-")
    if given == "gated-gelu":
        name = "gelu_new"
    if kind not in ("", "gated") or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise InputError(
            f"config.json: unknown feed_forward_proj {shown(given)}; known: {known}, each also after 'gated-'"
        )
    is_gated = kind == "gated"
    config.must_be("dense_act_fn", name)
    config.must_be("is_gated_act", is_gated)
    return FFNConfig(dim=config.required_integer("d_ff"), gated=is_gated, activation=ACTIVATIONS[name])


def _write(config: ModelConfig) -> dict[str, Any]:
    keys, ffn = write_encoder_decoder(config), dense_ffn(config)
    projection = f"gated-{_NAMES[ffn.activation]}" if ffn.gated else _NAMES[ffn.activation]
    keys |= {"d_ff": ffn.dim, "feed_forward_proj": projection.replace("gated-gelu_new", "gated-gelu")}
    is_scaled = config.logit_scale != 1.0
    if is_scaled != config.tie_embeddings:
        keys["scale_decoder_outputs"] = is_scaled
    return keys


def _ffn_rows(block: str) -> tuple[Row, ...]:
    """Returns the rows of the FFN in a block's last part."""
    return (
        *norm(f"{block}.layer_norm", "layers/{i}/mlp_norm"),
        Row(f"{block}.DenseReluDense.wi.weight", "layers/{i}/mlp/up/kernel", transpose=True, without=_GATE),
        Row(f"{block}.DenseReluDense.wi_0.weight", _GATE, transpose=True),
        Row(f"{block}.DenseReluDense.wi_1.weight", "layers/{i}/mlp/up/kernel", transpose=True, beside=_GATE),
        *linear(f"{block}.DenseReluDense.wo", "layers/{i}/mlp/down"),
    )


FAMILY = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    classifier=Classifier(
        head=(
            *linear("classification_head.dense", "lm_head/hidden"),
            *linear("classification_head.out_proj", "lm_head"),
        ),
        prefix="transformer.",
        fields={"head_bias": True, "head_hidden": True},
    ),
    defaults={**DEFAULTS, "d_model": 512, "num_layers": 6, "num_heads": 8, "feed_forward_proj": "relu"},
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *in_stack("encoder", attention_rows("encoder") + _ffn_rows("encoder.block.{i}.layer.1")),
        *in_stack("decoder", attention_rows("decoder") + _ffn_rows("decoder.block.{i}.layer.2")),
        *NORMS_AND_HEAD,
    ),
    harmless=HARMLESS,
    moe_formats=("switch_transformers",),
)
