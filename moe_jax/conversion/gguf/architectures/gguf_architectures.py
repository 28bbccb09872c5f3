"""The architectures of GGUF files, read and written: keys that not all of them have, and their tensors.

A GGUF file has the same numbers as the config.json that it was made from, under other names. So its metadata become a
config.json, which the families read, and the other way round (`gguf_config`, `gguf_metadata`); only the tables of
tensors differ.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from moe_jax.conversion.families import family_named
from moe_jax.conversion.gguf.architectures.gguf_deepseek import DEEPSEEK
from moe_jax.conversion.gguf.architectures.gguf_description import (
    ATTENTION,
    EMBEDDING_ROW,
    EXPERTS,
    FFN,
    HEAD,
    LAYER_NORM,
    LLAMA_LIKE,
    LLAMA_LIKE_MOE,
    OUTPUT_BIAS,
    RMS_NORM,
    SHARED_EXPERT,
    SHARED_GATE,
    Architecture,
    Metadata,
)
from moe_jax.conversion.gguf.architectures.gguf_gemma import GEMMA
from moe_jax.conversion.table import FUSED, PER_EXPERT, joined_qkv, linear, norm
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.models import ModelConfig

ARCHITECTURE = "general.architecture"


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Returns the keys of Llama, Mistral and Mixtral, which share an architecture and differ in experts and windows."""
    window = metadata.get("attention.sliding_window") or None
    if metadata.get("expert_count", 0):
        return {
            "model_type": "mixtral",
            "num_local_experts": metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
            "sliding_window": window,
        }
    metadata.must_be("expert_used_count", 0)
    if window is not None:
        return {"model_type": "mistral", "sliding_window": window}
    return {
        "model_type": "llama",
        "attention_bias": metadata.has("attn_q.bias", "attn_output.bias"),
        "mlp_bias": metadata.has("ffn_up.bias"),
    }


def _of_llama(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.get("sliding_window")
    experts = _experts_of(config) if config.moe_layers else {}
    return experts if window is None else experts | {"attention.sliding_window": window}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3", "attention_bias": metadata.has("attn_q.bias")}


def _moe(metadata: Metadata) -> dict[str, Any]:
    """Returns the keys of models with an MoE in every layer."""
    return {
        "attention_bias": metadata.has("attn_q.bias"),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
    }


def _experts_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the numbers of experts; of layers that differ in them, those of the first."""
    moe = config.moe(config.moe_layers[0])
    return {"expert_count": moe.num_experts, "expert_used_count": moe.top_k}


def _wide_experts_of(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {**_experts_of(config), "expert_feed_forward_length": keys["moe_intermediate_size"]}


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    experts = _moe(metadata)
    biases = experts.pop("attention_bias")  # not of the output
    return {
        "model_type": "qwen2_moe",
        **experts,
        "qkv_bias": biases,
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _of_qwen2_moe(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    shared = keys["shared_expert_intermediate_size"]
    return {**_wide_experts_of(config, keys), "expert_shared_feed_forward_length": shared}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    width = metadata.number("expert_feed_forward_length")
    return {"model_type": "qwen3_moe", **_moe(metadata), "moe_intermediate_size": width, "norm_topk_prob": True}


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    clip = metadata.get("attention.clamp_kqv") or None
    return {"model_type": "olmoe", **_moe(metadata), "clip_qkv": clip, "norm_topk_prob": False}


def _of_olmoe(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    clip = keys.get("clip_qkv")
    return _experts_of(config) if clip is None else {**_experts_of(config), "attention.clamp_kqv": float(clip)}


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    metadata.get("use_parallel_residual")  # set in some files of models with a second norm, which have none
    return {
        "model_type": "stablelm",
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has("ffn_norm.weight"),
    }


def _of_stablelm(config: ModelConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": keys["use_parallel_residual"]}


ARCHITECTURES = {
    "llama": Architecture(
        config=_llama,
        metadata=_of_llama,
        families=("llama", "mistral", "mixtral"),
        keys=RMS_NORM,
        interleaved=True,
        scales_frequencies=True,
        ignored=("attention.sliding_window",),
        table=(*EMBEDDING_ROW, *ATTENTION, *FFN, *EXPERTS, *HEAD),
    ),
    "qwen2": Architecture(
        config=lambda _: {"model_type": "qwen2"},
        families=("qwen2",),
        keys=RMS_NORM,
        square_heads=True,
        table=LLAMA_LIKE,
    ),
    "qwen2moe": Architecture(
        config=_qwen2_moe,
        metadata=_of_qwen2_moe,
        families=("qwen2_moe",),
        keys=RMS_NORM,
        vectors=(SHARED_GATE,),
        head_apart=True,
        square_heads=True,
        table=(*EMBEDDING_ROW, *ATTENTION, *EXPERTS, *SHARED_EXPERT, *HEAD),
    ),
    "qwen3": Architecture(config=_qwen3, families=("qwen3",), keys=RMS_NORM, unread=(OUTPUT_BIAS,), table=LLAMA_LIKE),
    "qwen3moe": Architecture(
        config=_qwen3_moe,
        metadata=_wide_experts_of,
        families=("qwen3_moe",),
        keys=RMS_NORM,
        unread=(OUTPUT_BIAS,),
        table=LLAMA_LIKE_MOE,
    ),
    "olmoe": Architecture(
        config=_olmoe,
        metadata=_of_olmoe,
        families=("olmoe",),
        keys=RMS_NORM,
        head_apart=True,
        square_heads=True,
        own_keys=True,
        ignored=("attention.clamp_kqv",),
        unread=(OUTPUT_BIAS,),
        table=LLAMA_LIKE_MOE,
    ),
    **GEMMA,
    **DEEPSEEK,
    "stablelm": Architecture(
        config=_stablelm,
        metadata=_of_stablelm,
        families=("stablelm",),
        keys=LAYER_NORM,
        partial=True,
        head_apart=True,
        square_heads=True,
        table=LLAMA_LIKE,
    ),
    "phi2": Architecture(
        config=lambda _: {"model_type": "phi", "hidden_act": "gelu_new"},
        families=("phi",),
        keys=LAYER_NORM,
        partial=True,
        head_apart=True,
        square_heads=True,
        table=(
            *EMBEDDING_ROW,
            *norm("blk.{i}.attn_norm", "layers/{i}/attention_norm"),
            *linear("blk.{i}.attn_q", "layers/{i}/attention/q", PER_EXPERT),
            *linear("blk.{i}.attn_k", "layers/{i}/attention/k", PER_EXPERT),
            *linear("blk.{i}.attn_v", "layers/{i}/attention/v", PER_EXPERT),
            *joined_qkv("blk.{i}.attn_qkv", FUSED),
            *linear("blk.{i}.attn_output", "layers/{i}/attention/o"),
            *linear("blk.{i}.ffn_up", "layers/{i}/mlp/up"),
            *linear("blk.{i}.ffn_down", "layers/{i}/mlp/down"),
            *HEAD,
        ),
    ),
}


def architecture_of(data: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Returns name and description of the architecture that metadata name; raises `InputError` if it is unknown."""
    name = data.get(ARCHITECTURE)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        hint = nearest(name, ARCHITECTURES) if isinstance(name, str) else ""
        raise InputError(f"{ARCHITECTURE} is {shown(name)}{hint}; known: {', '.join(ARCHITECTURES)}")
    if data.get("general.type", "model") != "model":
        raise InputError(f"general.type is {shown(data['general.type'])}, only a whole model can be read")
    return name, ARCHITECTURES[name]


def architecture_for(config: ModelConfig) -> tuple[str, Architecture]:
    """Returns the architecture that a model is written in; raises `InputError` if its family has none."""
    for name, architecture in ARCHITECTURES.items():
        if config.family in architecture.families:
            return name, architecture
    _refuse(config.family)


def check_written(config: ModelConfig) -> None:
    """Raises `InputError` if neither a model's family nor any that its MoE layers may move it to has an architecture.

    Said before the model is brought into the form of a format, whose demands would be beside the point.
    """
    family = family_named(config.family)
    moves = config.moe_layers and not family.holds_experts
    formats = family.moe_formats if moves else (family.name,)
    known = {name for architecture in ARCHITECTURES.values() for name in architecture.families}
    if formats and not known.intersection(formats):
        _refuse(formats[0])


def _refuse(family: str) -> NoReturn:
    known = (name for architecture in ARCHITECTURES.values() for name in architecture.families)
    raise InputError(
        f"GGUF files of the family {family!r} are not written, known: {', '.join(known)}; llama.cpp's own "
        "script may convert an exported checkpoint"
    )


def only_moe(family: str) -> bool:
    """Whether GGUF files of a family have no dense layers beside MoEs; not if there are no files of it."""
    found = [one for one in ARCHITECTURES.values() if family in one.families]
    return bool(found) and not any(one.leading_dense for one in found)
