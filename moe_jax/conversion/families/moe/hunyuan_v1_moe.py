"""Hunyuan-A13B: q/k norms after the rotation, and an expert that every token sees beside those that are chosen."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.table import linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ModelConfig, MoEConfig, RopeConfig

# What published configs say of choices that Transformers has made for all of them.
_AS_PUBLISHED = {
    "group_limited_greedy": False,
    "mlp_bias": False,
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "routed_scaling_factor": 1.0,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}


def _read(config: HFConfig) -> ModelConfig:
    for key, value in _AS_PUBLISHED.items():
        config.must_be(key, value)
    if _one_of(config, "num_shared_expert", 1) != 1:
        raise InputError("config.json: in the format of 'hunyuan_v1_moe' num_shared_expert is 1")
    attention = usual.read_attention(config, biases=usual.read_biases(config), qk_norm="head_rotated")
    expert = usual.read_gated_ffn(config)
    width = _one_of(config, "moe_intermediate_size", expert.dim)
    if width != expert.dim:
        raise InputError(
            f"config.json: moe_intermediate_size={width} must be intermediate_size={expert.dim}, which is what counts"
        )
    moe = MoEConfig(
        expert=expert,
        num_experts=_one_of(config, "num_experts", 1),
        top_k=_one_of(config, "moe_topk", 1),
        gate="topk_softmax",
        balance_coef=0.0,
        universal="one",
        universal_dim=expert.dim,
    )
    layers = usual.repeat_layers(config, attention, moe)
    return usual.read_decoder(config, "hunyuan_v1_moe", layers, rope=_read_rope(config, attention.head_dim))


def _one_of(config: HFConfig, key: str, default: int) -> int:
    """Reads a number that may be given for every layer, and then is the same for all."""
    given = set(config.integers(key))
    if len(given) > 1:
        raise InputError(f"config.json: {key} differs between layers, {shown(sorted(given))}, which is not supported")
    return given.pop() if given else default


def _read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rotary embedding; one of type `dynamic` with an `alpha` has a base that is larger at every length."""
    values = {**(config.mapping("rope_parameters") or {}), **(config.mapping("rope_scaling") or {})}
    alpha = values.pop("alpha", None)
    theta = values.pop("rope_theta", config.required_number("rope_theta"))
    if alpha is None or "dynamic" not in (values.get("type"), values.get("rope_type")):
        parts = {"rope_scaling": values or None, "rope_theta": theta}
        max_positions = config.required_integer("max_position_embeddings")
        return read_rope(HFConfig(parts, {}), max_positions=max_positions, head_dim=head_dim)
    plain = RopeConfig(theta=HFConfig({"rope_theta": theta}, {}).required_number("rope_theta"))
    factor = HFConfig({"alpha": alpha}, {}).required_number("alpha")
    if factor <= 0 or head_dim <= 2:
        raise InputError(f"config.json: rope alpha is {factor}, expected a number above 0, for heads of more than 2")
    return replace(plain, theta=plain.theta * factor ** (head_dim / (head_dim - 2)))


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    return {
        **usual.write_decoder(config),
        **usual.write_biases(config),
        **usual.write_ffn(moe.expert),
        "moe_intermediate_size": moe.expert.dim,
        "num_experts": moe.num_experts,
        "moe_topk": moe.top_k,
        "num_shared_expert": 1,
        **_AS_PUBLISHED,
    }


HUNYUAN_V1_MOE = Family(
    name="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "intermediate_size": 11008,
        "attention_bias": False,
        "num_experts": 1,
        "moe_topk": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Of layers that share keys, which none do; of training; of tokens and pictures of other models of the maker's.
    harmless=(
        "cla_share_factor",
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
        "capacity_factor",
        "n_group",
        "topk_group",
        "eod_token_id",
        "text_start_id",
        "text_end_id",
        "mask_init_id",
        "pad_id",
        "im_start_id",
        "im_end_id",
        "im_newline_id",
        "image_token_id",
        "video_start_id",
        "video_end_id",
        "org_vocab_size",
        "num_media_embeds",
        "class_num",
        "pool_type",
        "add_classification_head",
        "skip_cls_token",
        "dense_list",
        "position_embedding_xdrope",
    ),
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *usual.PLAIN_ATTENTION,
        *norm("model.layers.{i}.self_attn.query_layernorm", "layers/{i}/attention/q_norm"),
        *norm("model.layers.{i}.self_attn.key_layernorm", "layers/{i}/attention/k_norm"),
        *linear("model.layers.{i}.mlp.gate.wg", "layers/{i}/mlp/router"),
        *usual.gated_experts(),
        *usual.gated_ffn("model.layers.{i}.mlp.shared_mlp", "layers/{i}/mlp/universal"),
        *usual.HEAD,
    ),
)
