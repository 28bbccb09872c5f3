"""Nemotron-H and Nemotron 3: layers of one branch each, which is Mamba-2, attention, an FFN or an MoE."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.hybrid.mamba2_layers import beside_mamba, mamba_rows, mamba_shapes
from moe_jax.conversion.families.moe.usual_moe import read_balanced, write_balanced
from moe_jax.conversion.families.windows import UNROTATED
from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored, Row, Table, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import (
    FFNConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    MoEConfig,
    NoAttentionConfig,
    NoFFNConfig,
)
from moe_jax.models.config import check_num_layers

# A letter of published configs for every kind of layer, with its names in lists: before Transformers 5, and since.
_KINDS = {
    "M": ("mamba", "linear_attention"),
    "*": ("attention", "full_attention"),
    "-": ("mlp",),
    "E": ("moe",),
}
_PATTERN, _LIST = "hybrid_override_pattern", "layers_block_type"
_EPS = "layer_norm_epsilon"
_ROTARY = ("rope_theta", "rope_scaling", "partial_rotary_factor")

# --- keys -----------------------------------------------------------------------------------------


def _read(config: HFConfig) -> ModelConfig:
    # The convolutions have this activation.
    config.must_be("mamba_hidden_act", "silu")
    # Transformers never ties them, whatever this says.
    config.must_be("tie_word_embeddings", False)
    config.must_be("sliding_window", None)
    kinds = _read_kinds(config)
    read = {"M": _read_mamba, "*": _read_attention, "-": _read_ffn, "E": _read_moe}
    layers = {kind: read[kind](config) for kind in dict.fromkeys(kinds)}
    if "*" not in layers or "M" not in layers:
        raise InputError(
            f"config.json: the layers {shown(''.join(kinds))} are without Mamba-2 ('M') or without attention ('*'), of "
            "which they must have both"
        )
    every = [layers[kind] for kind in kinds]
    return usual.read_decoder(config, "nemotron_h", every, eps=_EPS, rope=UNROTATED)


def _read_kinds(config: HFConfig) -> list[str]:
    """Reads the letter of every layer, from the pattern of letters or the list of names."""
    pattern, names = config.text(_PATTERN), config.texts(_LIST)
    letters = {name: letter for letter, every in _KINDS.items() for name in every}
    said = [[*pattern]] if pattern is not None else []
    said += [[letters.get(name, name) for name in names]] if names is not None else []
    if not said:
        raise InputError(f"config.json: it has neither {_PATTERN!r} nor {_LIST!r}, which cannot be guessed")
    kinds = said[0]
    if said[-1] != kinds:
        raise InputError(f"config.json: {_PATTERN} and {_LIST} say different kinds of layers; keep one")
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise InputError(
            f"config.json: unknown kind of layer {shown(unknown[0])}; known: M, *, - and E in {_PATTERN}, and "
            f"{', '.join(letters)} in {_LIST}"
        )
    check_num_layers(len(kinds))
    count = config.integer("num_hidden_layers")
    if count not in (None, len(kinds)):
        raise InputError(f"config.json: num_hidden_layers={count}, but {len(kinds)} kinds of layers are given")
    return kinds


def _read_mamba(config: HFConfig) -> LayerConfig:
    mamba = Mamba2Config(
        num_heads=config.required_integer("mamba_num_heads"),
        head_dim=config.required_integer("mamba_head_dim"),
        num_groups=config.required_integer("n_groups"),
        state_dim=config.required_integer("ssm_state_size"),
        conv_width=config.required_integer("conv_kernel"),
        conv_bias=config.flag("use_conv_bias"),
        bias=config.flag("use_bias"),
        # The only bound of steps that Transformers looks at.
        least_step=config.required_number("time_step_min"),
        norm_eps=config.required_number(_EPS),
    )
    return LayerConfig(attention=mamba, mlp=NoFFNConfig())


def _read_attention(config: HFConfig) -> LayerConfig:
    # Transformers makes no biases, whatever this says.
    config.must_be("attention_bias", False)
    attention = usual.read_attention(config)
    # The first checkpoints say it by another name, which Transformers does not know.
    config.must_be("attention_head_dim", attention.head_dim)
    return LayerConfig(attention=attention, mlp=NoFFNConfig())


def _read_ffn(config: HFConfig) -> LayerConfig:
    return LayerConfig(
        attention=NoAttentionConfig(), mlp=_ffn(config, "intermediate_size", bias=config.flag("mlp_bias"))
    )


def _ffn(config: HFConfig, dim: str, *, bias: bool = False) -> FFNConfig:
    activation = usual.read_activation(config, "mlp_hidden_act")
    return FFNConfig(dim=config.required_integer(dim), gated=False, activation=activation, bias=bias)


def _read_moe(config: HFConfig) -> LayerConfig:
    # Biases would be of the shared expert alone, and latents between experts and the model.
    config.must_be("mlp_bias", False)
    config.must_be("moe_latent_size", None)
    config.must_be("n_shared_experts", 1)
    moe = MoEConfig(
        expert=_ffn(config, "moe_intermediate_size"),
        num_experts=config.required_integer("n_routed_experts"),
        top_k=config.required_integer("num_experts_per_tok"),
        universal="one",
        universal_dim=config.required_integer("moe_shared_expert_intermediate_size"),
        balance_coef=0.0,  # the published code has no balance loss
        **read_balanced(config),
    )
    return LayerConfig(attention=NoAttentionConfig(), mlp=moe)


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [_kind(config, i) for i in range(config.num_layers)]
    missing = [words for letter, words in (("M", "Mamba-2"), ("*", "attention")) if letter not in kinds]
    if missing:
        raise InputError(f"in the format of {config.family!r} at least one layer has {missing[0]}")
    if config.rope.fraction:
        raise InputError(f"in the format of {config.family!r} attention rotates nothing, and here it does")
    keys = usual.write_decoder(config, eps=_EPS)
    return {
        **{key: value for key, value in keys.items() if key not in _ROTARY},
        _PATTERN: "".join(kinds),
        **_write_mamba(config, [i for i, kind in enumerate(kinds) if kind == "M"]),
        **_write_ffns(config, [i for i, kind in enumerate(kinds) if kind == "-"]),
    }


def _kind(config: ModelConfig, i: int) -> str:
    layer = config.layers[i]
    if len(layer.branches) > 1:
        raise InputError(
            f"layer {i} has both attention, or a recurrence, and an FFN or MoE; in the format of {config.family!r} a "
            "layer has one of them"
        )
    if "mlp" in layer.branches:
        return "E" if isinstance(layer.mlp, MoEConfig) else "-"
    return "M" if layer.is_recurrent else "*"


def _write_mamba(config: ModelConfig, among: list[int]) -> dict[str, Any]:
    mamba = usual.same_in_all_layers(config, "Mamba-2", lambda layer: layer.attention, among=among)
    if not isinstance(mamba, Mamba2Config):
        raise InputError(f"the format of {config.family!r} has Mamba-2, not a {mamba.describe()}")
    return {
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.num_groups,
        "ssm_state_size": mamba.state_dim,
        "conv_kernel": mamba.conv_width,
        "use_conv_bias": mamba.conv_bias,
        "use_bias": mamba.bias,
        "time_step_min": mamba.least_step,
    }


def _write_ffns(config: ModelConfig, dense: list[int]) -> dict[str, Any]:
    """Writes the keys of FFNs, if there are any, and of MoEs."""
    keys: dict[str, Any] = {}
    if dense:
        usual.same_in_all_layers(config, "FFN", lambda layer: layer.mlp, among=dense)
        ffn = config.ffn(dense[0])
        keys |= {"intermediate_size": ffn.dim, "mlp_bias": ffn.bias, "mlp_hidden_act": usual.write_activation(ffn)}
    if config.moe_layers:
        moe = usual.uniform_moe(config, among=config.moe_layers)
        if not moe.universal_beside:
            raise InputError(f"in the format of {config.family!r} an FFN stands beside the experts, and here is none")
        keys |= {
            "moe_intermediate_size": moe.expert.dim,
            "mlp_hidden_act": usual.write_activation(moe.expert),
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_shared_expert_intermediate_size": moe.universal_ffn.dim,
            **write_balanced(config),
        }
    return keys


# --- tensors --------------------------------------------------------------------------------------


def _in_layout(model: str, layout: str) -> Table:
    """Returns the rows of all but the head, under the name that the model has in this layout."""
    layer, mixer = f"{model}.layers.{{i}}", f"{model}.layers.{{i}}.mixer"
    ours = "layers/{i}/mlp"
    experts: Table = (
        Row(f"{mixer}.experts.{{e}}.up_proj.weight", f"{ours}/experts/up/kernel", transpose=True),
        Row(f"{mixer}.experts.{{e}}.down_proj.weight", f"{ours}/experts/down/kernel", transpose=True),
    )
    if layout == FUSED:
        experts = tuple(
            Row(f"{mixer}.experts.{name}_proj", f"{ours}/experts/{name}/kernel", transpose=True)
            for name in ("up", "down")
        )
    rows = (
        Row(f"{model}.embeddings.weight", "embed/embedding"),
        *norm(f"{layer}.norm", "layers/{i}/attention_norm"),
        *norm(f"{layer}.norm", "layers/{i}/mlp_norm"),
        *mamba_rows(mixer),
        *beside_mamba(
            tuple(row for name in "qkvo" for row in linear(f"{mixer}.{name}_proj", f"layers/{{i}}/attention/{name}"))
        ),
        *(row for name in ("up", "down") for row in linear(f"{mixer}.{name}_proj", f"{ours}/{name}")),
        *linear(f"{mixer}.gate", f"{ours}/router"),
        Row(f"{mixer}.gate.e_score_correction_bias", f"{ours}/router/selection_bias"),
        *experts,
        *(
            row
            for name in ("up", "down")
            for row in linear(f"{mixer}.shared_experts.{name}_proj", f"{ours}/universal/{name}")
        ),
        *norm(f"{model}.norm_f", "final_norm"),
    )
    return tuple(replace(row, layout=layout) for row in rows if isinstance(row, Row))


# Of checkpoints, and in memory of Transformers, which adapters name.
_PUBLISHED, _IN_MEMORY = "backbone", "model"

NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    defaults={
        "hidden_size": 4096,
        "vocab_size": 131072,
        "max_position_embeddings": 4096,
        _EPS: 1e-5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Initial values, how the scan is cut into pieces, rotations that no layer does, layers that are left out, and what
    # MoEs must have where there are any.
    harmless=(
        *("chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_logits_to_keep", "num_nextn_predict_layers"),
        *("rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_limit", "time_step_max"),
        *("norm_eps", "use_mamba_kernels", "moe_latent_size", "n_shared_experts", *_ROTARY),
    ),
    read=_read,
    write=_write,
    table=(
        *_in_layout(_PUBLISHED, PER_EXPERT),
        *_in_layout(_IN_MEMORY, FUSED),
        *linear("lm_head", "lm_head"),
        Ignored(r"mtp\..*", "of layers that predict tokens after the next, which are no part of the decoder"),
    ),
    shapes=lambda config: {
        **mamba_shapes(config, f"{_PUBLISHED}.layers.{{i}}.mixer"),
        **mamba_shapes(config, f"{_IN_MEMORY}.layers.{{i}}.mixer"),
    },
    recurrent=True,
    one_branch=True,
    # Their code passes it by in its fused kernels.
    without_lora=("out_proj",),
)
