"""Command R7B and Command A: attention and FFN in parallel, and layers of which only those with a window rotate."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import SHARED_EXPERTS, listed_as_sparse, write_sparse
from moe_jax.conversion.families.windows import (
    FULL,
    SLIDING,
    UNROTATED,
    read_layer_types,
    read_windows,
    slides_but_every,
    write_layer_types,
)
from moe_jax.conversion.table import Table, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "intermediate_size": 22528,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
# What published configs say of choices that Transformers has made for all of them.
_AS_PUBLISHED = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
_ATTENTION: Table = (*norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"), *usual.PROJECTIONS)


def _attention(config: HFConfig, window: int | None, *, rotates: bool) -> AttentionConfig:
    return usual.read_attention(
        config,
        biases=usual.read_biases(config),
        sliding_window=window,
        rope_interleaved=True,
        rope=None if rotates else UNROTATED,
    )


def _write(config: ModelConfig, *, eps: str = "layer_norm_eps") -> dict[str, Any]:
    return {
        **usual.write_decoder(config, eps=eps),
        **usual.write_biases(config),
        "logit_scale": config.logit_scale,
        # Written even if no layer has one, as a window that is left out would be the default.
        "sliding_window": config.max_positions,
        **write_layer_types(config),
    }


# --- dense ----------------------------------------------------------------------------------------


def _read_cohere2(config: HFConfig) -> ModelConfig:
    for key, value in _AS_PUBLISHED.items():
        config.must_be(key, value)
    slides = (lambda i: False) if config.given("layer_types") else slides_but_every(config, "sliding_window_pattern", 4)
    ffn = usual.read_gated_ffn(config)
    attention = [
        _attention(config, window, rotates=window is not None) for window in read_windows(config, slides=slides)
    ]
    usual.check_heads_fill_width(config, attention[0], "cohere2")
    layers = [LayerConfig(attention=one, mlp=ffn, parallel=True, shared_norm=True) for one in attention]
    scale = config.required_number("logit_scale")
    return usual.read_decoder(config, "cohere2", layers, norm="layer_unbiased", eps="layer_norm_eps", logit_scale=scale)


COHERE2 = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults=_DEFAULTS,
    harmless=("cache_implementation", "order_of_interleaved_layers", "use_parallel_embedding"),
    read=_read_cohere2,
    write=lambda config: _write(config) | usual.write_ffn(usual.dense_ffn(config)),
    table=(*usual.EMBEDDING, *_ATTENTION, *usual.GATED_FFN, *usual.HEAD),
)

# --- MoEs above some dense layers, of a width of their own, which may rotate without a window -----

_PREFIX = "prefix_dense_sliding_window_pattern"
# By what chooses them, and whether their weights sum to 1, which those of a softmax do anyway.
_GATES = {
    ("softmax", True): "topk_softmax",
    ("softmax", False): "topk_softmax",
    ("sigmoid", True): "topk_sigmoid",
    ("sigmoid", False): "sigmoid_topk",
}


def _read_cohere2_moe(config: HFConfig) -> ModelConfig:
    count, first = usual.num_layers(config), config.integer("first_k_dense_replace") or 0
    moes = listed_as_sparse(config)
    moes = list(range(first, count)) if moes is None else moes
    types = read_layer_types(config)
    if types is None:
        before, after = slides_but_every(config, _PREFIX), slides_but_every(config, "sliding_window_pattern")
        types = [SLIDING if (before(i) if i < first else after(i - first)) else FULL for i in range(count)]
    window, moe = config.integer("sliding_window"), _read_moe(config) if moes else None
    forced = config.required_integer(_PREFIX) == 1
    layers = []
    for i, kind in enumerate(types):
        own = window if kind == SLIDING else None
        attention = _attention(config, own, rotates=own is not None or (forced and i not in moes))
        mlp = moe if i in moes and moe is not None else _read_dense(config)
        layers.append(LayerConfig(attention=attention, mlp=mlp, parallel=True, shared_norm=True))
    rms, scale = config.given("rms_norm_eps"), config.required_number("logit_scale")
    kind, eps = ("rms", "rms_norm_eps") if rms else ("layer_unbiased", "layer_norm_eps")
    return usual.read_decoder(config, "cohere2_moe", layers, norm=kind, eps=eps, logit_scale=scale)


def _read_dense(config: HFConfig) -> FFNConfig:
    key = "prefix_dense_intermediate_size"
    return usual.read_gated_ffn(config, dim=key if config.given(key) else "intermediate_size")


def _read_moe(config: HFConfig) -> MoEConfig:
    expert, shared = usual.read_gated_ffn(config), config.integer("num_shared_experts") or 0
    chosen = config.text("expert_selection_fn"), config.flag("norm_topk_prob")
    if chosen not in _GATES:
        raise InputError(f"config.json: expert_selection_fn is {shown(chosen[0])}, expected 'softmax' or 'sigmoid'")
    if shared < 0:
        raise InputError(f"config.json: num_shared_experts={shared} must not be negative")
    if shared:
        config.must_be("shared_expert_combination_strategy", "sum")
    return MoEConfig(
        expert=expert,
        num_experts=config.required_integer("num_experts"),
        top_k=config.required_integer("num_experts_per_tok"),
        gate=_GATES[chosen[0] or "", chosen[1]],
        balance_coef=0.0,
        universal="one" if shared else "none",
        universal_dim=shared * expert.dim if shared else None,
    )


def _write_cohere2_moe(config: ModelConfig) -> dict[str, Any]:
    dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    forced = any(
        config.layers[i].softmax_attention.sliding_window is None and config.layers[i].softmax_attention.rope is None
        for i in dense
    )
    keys = _write(config, eps="rms_norm_eps" if config.norm == "rms" else "layer_norm_eps")
    keys |= {**write_sparse(config), _PREFIX: 1 if forced else 2}
    if dense:
        usual.same_in_all_layers(config, "FFN of dense layers", lambda layer: layer.mlp, among=dense)
        keys |= usual.write_ffn(config.ffn(dense[0])) | {"prefix_dense_intermediate_size": config.ffn(dense[0]).dim}
    if config.moe_layers:
        moe = usual.uniform_moe(config, among=config.moe_layers)
        shared, rest = divmod(moe.universal_ffn.dim if moe.universal_beside else 0, moe.expert.dim)
        if rest:
            raise InputError("in the format of 'cohere2_moe' shared experts are a whole number of experts wide")
        chosen = next((chosen for chosen, gate in _GATES.items() if gate == moe.gate), None)
        if chosen is None:
            raise InputError(f"the format of 'cohere2_moe' has no gate {moe.gate!r}")
        keys |= {
            **usual.write_ffn(moe.expert),
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "num_shared_experts": shared,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": chosen[0],
            "norm_topk_prob": chosen[1],
        }
    return keys


COHERE2_MOE = Family(
    name="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    defaults={
        **_DEFAULTS,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        _PREFIX: 1,
        "sliding_window_pattern": 4,
    },
    # Read where they are given and mean something.
    harmless=("prefix_dense_intermediate_size", "rms_norm_eps"),
    read=_read_cohere2_moe,
    write=_write_cohere2_moe,
    table=(
        *usual.EMBEDDING,
        *_ATTENTION,
        *usual.ROUTER,
        *usual.gated_experts(),
        *SHARED_EXPERTS,
        *usual.GATED_FFN,
        *usual.HEAD,
    ),
)
