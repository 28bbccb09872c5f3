"""Llama 4: blocks of tokens that see themselves alone, layers that rotate nothing, and experts of weighted inputs."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.windows import FULL, UNROTATED, read_rotating
from moe_jax.conversion.table import linear
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig, QueryScaleConfig

_CHUNKED = "chunked_attention"


def _read(config: HFConfig) -> ModelConfig:
    moes = _read_moe_layers(config)
    attention = _read_attention(config)
    moe = _read_moe(config) if moes else None
    ffn = usual.read_gated_ffn(config, dim="intermediate_size_mlp") if len(moes) < len(attention) else None
    mlps: list[Any] = [moe if i in moes else ffn for i in range(len(attention))]
    layers = [LayerConfig(attention=one, mlp=mlp) for one, mlp in zip(attention, mlps, strict=True)]
    return usual.read_decoder(config, "llama4_text", layers)


# --- attention ------------------------------------------------------------------------------------


def _read_attention(config: HFConfig) -> list[AttentionConfig]:
    """Reads the attention of every layer: those that rotate nothing see all, and their queries may grow."""
    rotates = read_rotating(config)
    size, types = config.integer("attention_chunk_size"), _read_types(config, rotates)
    if size is None and _CHUNKED in types:
        raise InputError(f"config.json: layer_types has {_CHUNKED!r}, which needs an attention_chunk_size")
    scale = None
    coefficient, length = config.required_number("attn_scale"), config.required_integer("floor_scale")
    if config.flag("attn_temperature_tuning") and coefficient:
        scale = QueryScaleConfig(coefficient=coefficient, length=length, from_one=True)
    same = usual.read_attention(config, biases=usual.read_biases(config))
    normed = config.flag("use_qk_norm")
    rotating = replace(same, rope_interleaved=True, qk_norm="head_unscaled" if normed else "none")
    unrotated = replace(same, rope=UNROTATED, query_scale=scale)
    return [
        replace(rotating if one else unrotated, block_tokens=size if kind == _CHUNKED else None)
        for one, kind in zip(rotates, types, strict=True)
    ]


def _read_types(config: HFConfig, rotates: list[bool]) -> list[str]:
    types = config.texts("layer_types")
    if types is None:
        return [_CHUNKED if one else FULL for one in rotates]
    if len(types) != len(rotates) or not set(types) <= {_CHUNKED, FULL}:
        raise InputError(
            f"config.json: layer_types has {len(types)} entries {shown(sorted(set(types)))}, expected {len(rotates)} "
            f"(num_hidden_layers), each {FULL!r} or {_CHUNKED!r}"
        )
    return list(types)


def _write_attention(config: ModelConfig) -> dict[str, Any]:
    every = [layer.softmax_attention for layer in config.layers]
    rotates = [config.rope_of(layer) != UNROTATED for layer in config.layers]
    keys: dict[str, Any] = {
        "no_rope_layers": [int(one) for one in rotates],
        "layer_types": [FULL if one.block_tokens is None else _CHUNKED for one in every],
        "use_qk_norm": any(one.qk_norm == "head_unscaled" for one in every),
    }
    scale = next((one.query_scale for one in every if one.query_scale is not None), None)
    keys["attn_temperature_tuning"] = scale is not None
    if scale is not None:
        keys |= {"attn_scale": scale.coefficient, "floor_scale": scale.length}
    sizes = sorted({one.block_tokens for one in every if one.block_tokens is not None})
    if len(sizes) > 1:
        raise InputError(f"the format of {config.family!r} has one attention_chunk_size, and the layers have {sizes}")
    return {**keys, "attention_chunk_size": sizes[0]} if sizes else keys


# --- experts --------------------------------------------------------------------------------------


def _read_moe_layers(config: HFConfig) -> set[int]:
    """Reads which layers are MoEs: those in a list, or every n-th."""
    count = usual.num_layers(config)
    if not config.given("moe_layers"):
        step = config.required_integer("interleave_moe_layer_step")
        if step < 1:
            raise InputError(f"config.json: interleave_moe_layer_step={step} must be at least 1")
        return set(range(step - 1, count, step))
    config.integer("interleave_moe_layer_step")
    listed = config.integers("moe_layers", lists_only=True)
    if not all(0 <= layer < count for layer in listed):
        raise InputError(f"config.json: moe_layers names layers that are not there, of {count}: {shown(list(listed))}")
    return set(listed)


def _read_moe(config: HFConfig) -> MoEConfig:
    return usual.read_moe(
        config,
        config.required_integer("num_local_experts"),
        gate="sigmoid_topk",
        weighs_inputs=True,
        universal="one",
        universal_dim=config.required_integer("intermediate_size"),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    keys = {**usual.write_decoder(config), **usual.write_biases(config), **_write_attention(config)}
    dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    if dense:
        usual.same_in_all_layers(config, "FFN of dense layers", lambda layer: layer.mlp, among=dense)
        ffn = usual.write_ffn(config.ffn(dense[0]))
        keys |= {"intermediate_size_mlp": ffn.pop("intermediate_size"), **ffn}
    if config.moe_layers:
        moe = usual.uniform_moe(config, among=config.moe_layers)
        keys |= usual.write_moe(moe, "num_local_experts") | usual.write_ffn(moe.expert)
    step = config.moe_layers[0] + 1 if config.moe_layers else config.num_layers + 1
    if config.moe_layers == tuple(range(step - 1, config.num_layers, step)):
        keys["interleave_moe_layer_step"] = step
    return {**keys, "moe_layers": list(config.moe_layers)}


_BLOCK = "model.layers.{i}.feed_forward"

LLAMA4_TEXT = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "interleave_moe_layer_step": 1,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    harmless=("cache_implementation", "for_llm_compressor"),
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *usual.PLAIN_ATTENTION,
        *linear(f"{_BLOCK}.router", "layers/{i}/mlp/router"),
        *usual.fused_experts(f"{_BLOCK}.experts", as_kernels=True),
        *usual.gated_ffn(f"{_BLOCK}.shared_expert", "layers/{i}/mlp/universal"),
        *usual.gated_ffn(_BLOCK, "layers/{i}/mlp"),
        *usual.HEAD,
    ),
)
