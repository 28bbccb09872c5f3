"""T5 1.0, T5 1.1, Flan-T5 and Switch Transformers: an encoder and a decoder with relative biases, and one embedding."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Classifier, Family
from moe_jax.conversion.table import Ignored, Row, Table, Tied, linear, norm
from moe_jax.core.errors import InputError, shown
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

# Both stacks look tokens up in the same embedding, which old files hold up to three times.
_EMBEDDING: Table = (
    Row("shared.weight", "embed/embedding"),
    Tied("encoder.embed_tokens.weight", equals="shared.weight"),
    Tied("decoder.embed_tokens.weight", equals="shared.weight"),
)

# The table of a stack is that of its first block.
_BIASES = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_UNUSED = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"

_NORMS_AND_HEAD: Table = (
    Row(f"encoder.{_BIASES}", "encoder_relative_bias/table"),
    Row(f"decoder.{_BIASES}", "relative_bias/table"),
    *norm("encoder.final_layer_norm", "encoder_norm"),
    *norm("decoder.final_layer_norm", "final_norm"),
    *linear("lm_head", "lm_head"),
    Tied("lm_head.weight", equals="shared.weight"),
    Ignored(_UNUSED, "relative biases of cross-attention, which has none"),
)

_DEFAULTS: dict[str, Any] = {
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
_HARMLESS = ("dropout_rate", "output_past")


def _table(ffn_rows: Callable[[str], tuple[Row, ...]]) -> Table:
    """Returns the table of a family with these rows for the FFN or MoE, which is in a block's last part."""
    return (*_EMBEDDING, *_stack("encoder", ffn_rows), *_stack("decoder", ffn_rows), *_NORMS_AND_HEAD)


def _stack(stack: Literal["encoder", "decoder"], ffn_rows: Callable[[str], tuple[Row, ...]]) -> Table:
    block = f"{stack}.block.{{i}}.layer"
    rows = [*norm(f"{block}.0.layer_norm", "layers/{i}/attention_norm")]
    for name in "qkvo":
        rows += linear(f"{block}.0.SelfAttention.{name}", f"layers/{{i}}/attention/{name}")
    if stack == "decoder":
        rows += norm(f"{block}.1.layer_norm", "layers/{i}/cross_attention_norm")
        for name in "qkvo":
            rows += linear(f"{block}.1.EncDecAttention.{name}", f"layers/{{i}}/cross_attention/{name}")
    rows += ffn_rows(f"{block}.{1 if stack == 'encoder' else 2}")
    return tuple(dataclasses.replace(row, stack=stack) for row in rows)


def _read_lengths(config: HFConfig) -> tuple[int, int]:
    """Reads the numbers of layers of the encoder and the decoder, at least 1 each, and no more than possible."""
    encoder, decoder = config.required_integer("num_layers"), config.integer("num_decoder_layers")
    decoder = encoder if decoder is None else decoder
    for key, count in (("num_layers", encoder), ("num_decoder_layers", decoder)):
        if count < 1:
            raise InputError(f"config.json: {key}={count} must be at least 1")
    check_num_layers(encoder + decoder)
    return encoder, decoder


def _read_encoder_decoder(
    config: HFConfig,
    family: str,
    encoder: Sequence[FFNConfig | MoEConfig],
    decoder: Sequence[FFNConfig | MoEConfig],
    *,
    scaled_head: bool,
) -> ModelConfig:
    """Reads everything but the FFNs and MoEs of the layers of `encoder` and `decoder`.

    If the head is scaled, logits are multiplied by `1 / sqrt(d_model)`.
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
    eos = usual.read_eos(config, vocab_size)
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
        rope=RopeConfig(fraction=0.0),
        norm_eps=config.required_number("layer_norm_epsilon"),
        tie_embeddings=config.flag("tie_word_embeddings"),
        logit_scale=d_model**-0.5 if scaled_head and d_model > 0 else 1.0,
        bos_id=config.integer("bos_token_id"),
        eos_ids=eos,
        dtype=usual.read_dtype(config),
        foreign=config.unread_keys(),
    )


def _write_encoder_decoder(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `_read_encoder_decoder` and `_read_lengths` read."""
    if not config.has_encoder:
        raise InputError(f"the format of {config.family!r} holds models with an encoder and a decoder, and no others")
    heads, width, bias = usual.same_attention(
        config,
        "choice of heads (number, width) and relative biases",
        lambda attention: (attention.num_heads, attention.head_dim, attention.relative_bias),
    )
    if bias is None:
        raise InputError(f"the format of {config.family!r} has relative biases, and this model has none")
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
        **usual.write_tokens(config),
        "torch_dtype": config.dtype,
    }


# --- T5 -------------------------------------------------------------------------------------------

# 1.0 has plain FFNs, and its head is the embedding, scaled; 1.1 and Flan have gated FFNs and a head of their own.

# For each activation, the name that checkpoints of the family have.
_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_GATE = "layers/{i}/mlp/gate/kernel"


def _read_t5(config: HFConfig) -> ModelConfig:
    ffn = _read_ffn(config)
    encoder, decoder = _read_lengths(config)
    # Transformers scales the input of a tied head. The other key is of its release 5, in which all heads are tied.
    named = "scale_decoder_outputs" if config.given("scale_decoder_outputs") else "tie_word_embeddings"
    return _read_encoder_decoder(config, "t5", [ffn] * encoder, [ffn] * decoder, scaled_head=config.flag(named))


def _read_ffn(config: HFConfig) -> FFNConfig:
    """Reads `feed_forward_proj`, the name of an activation, with `gated-` before it if the FFN is gated."""
    given = config.text("feed_forward_proj") or ""
    kind, _, name = given.rpartition("-")
    if given == "gated-gelu":
        name = "gelu_new"
    if kind not in ("", "gated") or name not in usual.ACTIVATIONS:
        known = ", ".join(usual.ACTIVATIONS)
        raise InputError(
            f"config.json: unknown feed_forward_proj {shown(given)}; known: {known}, each also after 'gated-'"
        )
    is_gated = kind == "gated"
    config.must_be("dense_act_fn", name)
    config.must_be("is_gated_act", is_gated)
    return FFNConfig(dim=config.required_integer("d_ff"), gated=is_gated, activation=usual.ACTIVATIONS[name])


def _write_t5(config: ModelConfig) -> dict[str, Any]:
    keys, ffn = _write_encoder_decoder(config), usual.dense_ffn(config)
    name = _NAMES[ffn.activation] if ffn.activation in _NAMES else usual.write_activation(ffn)
    projection = f"gated-{name}" if ffn.gated else name
    keys |= {"d_ff": ffn.dim, "feed_forward_proj": projection.replace("gated-gelu_new", "gated-gelu")}
    is_scaled = config.logit_scale != 1.0
    if is_scaled != config.tie_embeddings:
        keys["scale_decoder_outputs"] = is_scaled
    return keys


def _t5_ffn_rows(block: str) -> tuple[Row, ...]:
    return (
        *norm(f"{block}.layer_norm", "layers/{i}/mlp_norm"),
        Row(f"{block}.DenseReluDense.wi.weight", "layers/{i}/mlp/up/kernel", transpose=True, without=_GATE),
        Row(f"{block}.DenseReluDense.wi_0.weight", _GATE, transpose=True),
        Row(f"{block}.DenseReluDense.wi_1.weight", "layers/{i}/mlp/up/kernel", transpose=True, beside=_GATE),
        *linear(f"{block}.DenseReluDense.wo", "layers/{i}/mlp/down"),
    )


T5 = Family(
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
    defaults={**_DEFAULTS, "d_model": 512, "num_layers": 6, "num_heads": 8, "feed_forward_proj": "relu"},
    read=_read_t5,
    write=_write_t5,
    table=_table(_t5_ffn_rows),
    harmless=_HARMLESS,
    moe_formats=("switch_transformers",),
)

# --- Switch Transformers --------------------------------------------------------------------------

# T5 1.0 in which every n-th FFN is an MoE that routes a token to one expert. No token is dropped. Transformers lets an
# expert take `expert_capacity` tokens of a sequence, padding included, and drops the others, also at evaluation; the
# key is kept, and written back. In training `capacity_factor` limits the tokens of an expert, as a share of all tokens.
# Noise on the router's inputs in training (`router_jitter_noise`) is not made.


def _read_switch(config: HFConfig) -> ModelConfig:
    for key, value in _FIXED.items():
        config.must_be(key, value)
    activation = usual.read_activation(config, "dense_act_fn")
    ffn = FFNConfig(dim=config.required_integer("d_ff"), gated=False, activation=activation)
    stacks = []
    for stack, count in zip(("encoder", "decoder"), _read_lengths(config), strict=True):
        sparse = config.required_integer(f"num_sparse_{stack}_layers")
        if sparse < 0:
            raise InputError(f"config.json: num_sparse_{stack}_layers={sparse} must be at least 0")
        # The step is written in addition to the number that it follows from.
        config.must_be(f"{stack}_sparse_step", _sparse_step(sparse, count))
        stacks.append(_is_sparse(sparse, count))
    moe: FFNConfig | MoEConfig = ffn
    if any(map(any, stacks)):
        moe = MoEConfig(
            expert=ffn,
            num_experts=config.required_integer("num_experts"),
            # The weight is p_1 of the full softmax, as with gate `top1`.
            top_k=1,
            gate="softmax_topk",
            balance_coef=config.required_number("router_aux_loss_coef"),
            z_coef=config.required_number("router_z_loss_coef"),
        )
    encoder, decoder = ([moe if is_moe else ffn for is_moe in stack] for stack in stacks)
    return _read_encoder_decoder(config, "switch_transformers", encoder, decoder, scaled_head=True)


def _sparse_step(sparse: int, count: int) -> int:
    return count // sparse if sparse > 0 else count


def _is_sparse(sparse: int, count: int) -> list[bool]:
    """Returns for each of `count` layers whether it is an MoE, if `sparse` shall be, as Transformers computes it.

    If `sparse` is 0, the second layer is one all the same, and if it is above `count` none is.
    """
    step = _sparse_step(sparse, count)
    return [step > 0 and (i % step == 1 or step == 1) for i in range(count)]


def _write_switch(config: ModelConfig) -> dict[str, Any]:
    if not config.tie_embeddings:
        raise InputError(f"in the format of {config.family!r} the head is the embedding, and this model has its own")
    keys = _write_encoder_decoder(config)
    ffn = usual.same_in_all_layers(
        config,
        "shape of FFNs and experts",
        lambda layer: layer.mlp.expert if isinstance(layer.mlp, MoEConfig) else layer.mlp,
    )
    keys |= {"d_ff": ffn.dim, "dense_act_fn": usual.write_activation(ffn)}
    first = config.num_encoder_layers
    for stack, layers in (("encoder", config.layers[:first]), ("decoder", config.layers[first:])):
        is_moe = [isinstance(layer.mlp, MoEConfig) for layer in layers]
        fitting = [n for n in range(len(layers) + 2) if _is_sparse(n, len(layers)) == is_moe]
        if not fitting:
            raise InputError(
                f"the format of {config.family!r} has an MoE in every n-th layer from the second on, or in all; "
                f"in the {stack}, layers {[i for i, here in enumerate(is_moe) if here]} of {len(layers)} are MoEs"
            )
        # If several numbers give these layers, the true one is taken if it is among them.
        keys[f"num_sparse_{stack}_layers"] = min(fitting, key=lambda n: abs(n - sum(is_moe)))
    if config.moe_layers:
        moe = usual.uniform_moe(config, among=config.moe_layers)
        keys |= {
            "num_experts": moe.num_experts,
            "router_aux_loss_coef": moe.balance_coef,
            "router_z_loss_coef": moe.z_coef,
        }
    return keys


def _switch_ffn_rows(block: str) -> tuple[Row, ...]:
    return (
        *norm(f"{block}.layer_norm", "layers/{i}/mlp_norm"),
        *linear(f"{block}.mlp.wi", "layers/{i}/mlp/up"),
        *linear(f"{block}.mlp.wo", "layers/{i}/mlp/down"),
        *linear(f"{block}.mlp.router.classifier", "layers/{i}/mlp/router"),
        *linear(f"{block}.mlp.experts.expert_{{e}}.wi", "layers/{i}/mlp/experts/up"),
        *linear(f"{block}.mlp.experts.expert_{{e}}.wo", "layers/{i}/mlp/experts/down"),
    )


# The reader relies on these. Untied, Transformers 5 has an embedding for each stack, which no checkpoint holds.
_FIXED = {"router_bias": False, "router_dtype": "float32", "is_gated_act": False, "tie_word_embeddings": True}

SWITCH_TRANSFORMERS = Family(
    name="switch_transformers",
    architecture="SwitchTransformersForConditionalGeneration",
    defaults={
        **_DEFAULTS,
        "d_model": 768,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "num_sparse_encoder_layers": 3,
        "num_sparse_decoder_layers": 3,
        "num_experts": 8,
        "dense_act_fn": "relu",
        "router_aux_loss_coef": 0.001,
        "router_z_loss_coef": 0.001,
    },
    read=_read_switch,
    write=_write_switch,
    table=_table(_switch_ffn_rows),
    # Of these, Transformers uses only the capacity at evaluation (see above).
    harmless=(
        *_HARMLESS,
        "expert_capacity",
        "router_ignore_padding_tokens",
        "router_type",
        "add_router_probs",
        "feed_forward_proj",
    ),
)
