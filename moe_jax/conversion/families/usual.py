"""Keys of config.json that most families have, read and written; and rows that most of their tables have."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeVar

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.rope_keys import read_rope, write_rope
from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored, Row, Table, Tied, linear, norm
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, RecurrentConfig, RopeConfig
from moe_jax.models.config import DTYPES, check_num_layers

T = TypeVar("T")
Projections = tuple[Literal["q", "k", "v", "o"], ...]

ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}

# --- reading --------------------------------------------------------------------------------------


def read_attention(config: HFConfig, *, biases: Projections = (), **kwargs: Any) -> AttentionConfig:
    """Reads numbers of heads and head widths; further keywords go to `AttentionConfig`."""
    config.require("hidden_size", "num_attention_heads")
    d_model, num_heads = config.required_size("hidden_size"), config.required_integer("num_attention_heads")
    num_kv_heads, head_dim = config.integer("num_key_value_heads"), config.integer("head_dim")
    if head_dim is None:
        if num_heads < 1 or d_model % num_heads:
            raise InputError(
                f"config.json: hidden_size={d_model} is not a multiple of num_attention_heads={num_heads}, "
                "and there is no head_dim"
            )
        head_dim = d_model // num_heads
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        biases=biases,
        **kwargs,
    )


def check_heads_fill_width(config: HFConfig, attention: AttentionConfig, family: str) -> None:
    """Raises `InputError` for heads that together are not as wide as the model.

    Transformers would rotate heads of one width and multiply heads of another.
    """
    d_model = config.required_size("hidden_size")
    if attention.num_heads * attention.head_dim != d_model:
        raise InputError(
            f"config.json: in the format of {family!r} head_dim is hidden_size / num_attention_heads = {d_model} / "
            f"{attention.num_heads}, not {attention.head_dim}"
        )


def read_biases(
    config: HFConfig, key: str = "attention_bias", projections: Projections = ("q", "k", "v", "o")
) -> Projections:
    """Reads which projections have a bias: all of these, or none."""
    return projections if config.flag(key) else ()


def read_gated_ffn(
    config: HFConfig, *, dim: str = "intermediate_size", activation: str = "hidden_act", bias: bool = False
) -> FFNConfig:
    """Reads a gated FFN; `dim` and `activation` are the keys of its hidden width and its activation."""
    config.require(dim, activation)
    act = read_activation(config, activation)
    return FFNConfig(dim=config.required_integer(dim), gated=True, activation=act, bias=bias)


def read_activation(config: HFConfig, key: str = "hidden_act") -> Any:
    """Returns our name of the activation that `key` names; raises `InputError` if it is unknown."""
    config.require(key)
    name = config.text(key) or ""
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise InputError(f"config.json: unknown {key} {shown(name)}{nearest(name, ACTIVATIONS)}; known: {known}")
    return ACTIVATIONS[name]


def read_decoder(
    config: HFConfig,
    family: str,
    layers: Sequence[LayerConfig],
    *,
    norm: Literal["rms", "rms_plus_one", "layer", "layer_unbiased"] = "rms",
    eps: str = "rms_norm_eps",
    positions: str = "max_position_embeddings",
    rope: RopeConfig | None = None,
    **kwargs: Any,
) -> ModelConfig:
    """Reads the settings that all layers share; those without a key in config.json are further keywords.

    Args:
      config: the Hugging Face config.
      family: becomes `ModelConfig.family`.
      layers: the layers, whose heads are all of one width.
      norm: kind of the norms.
      eps: key of their epsilon.
      positions: key of the context length.
      rope: rotary embedding of layers that have none of their own; None: read from the usual keys.
      **kwargs: go to `ModelConfig`.
    """
    config.require("vocab_size", "hidden_size", positions, eps)
    max_positions = config.required_integer(positions)
    vocab_size = config.required_integer("vocab_size")
    bos, eos = config.integer("bos_token_id"), read_eos(config, vocab_size)
    # A default of the family beyond a smaller vocabulary means nothing; Transformers writes it all the same.
    if config.is_default("bos_token_id") and bos is not None and bos >= vocab_size:
        bos = None
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        d_model=config.required_size("hidden_size"),
        max_positions=max_positions,
        layers=tuple(layers),
        rope=rope or read_rope(config, max_positions=max_positions, head_dim=_rotated_width(layers)),
        norm=norm,
        norm_eps=config.required_number(eps),
        tie_embeddings=config.flag("tie_word_embeddings"),
        bos_id=bos,
        eos_ids=eos,
        dtype=read_dtype(config),
        foreign=config.unread_keys(),
        **kwargs,
    )


def _rotated_width(layers: Sequence[LayerConfig]) -> int:
    return next(layer.softmax_attention.rope_dim for layer in layers if not layer.is_recurrent)


def read_eos(config: HFConfig, vocab_size: int) -> tuple[int, ...]:
    """Reads the tokens that end a text, without defaults of the family beyond a smaller vocabulary."""
    eos = config.integers("eos_token_id")
    return tuple(token for token in eos if token < vocab_size) if config.is_default("eos_token_id") else eos


def read_dtype(config: HFConfig) -> Any:
    """Reads `dtype` (Transformers 5) or `torch_dtype` (4); a config with neither means float32."""
    new, old = config.text("dtype"), config.text("torch_dtype")
    name = (new or old or "float32").removeprefix("torch.")
    if name not in DTYPES:
        hint, key, known = nearest(name, DTYPES), "dtype" if new else "torch_dtype", ", ".join(DTYPES)
        raise InputError(f"config.json: unknown dtype {shown(name)}{hint} as {key!r}; known: {known}")
    return name


def repeat_layers(config: HFConfig, attention: AttentionConfig, mlp: FFNConfig | MoEConfig) -> list[LayerConfig]:
    """Returns `num_hidden_layers` equal layers."""
    return [LayerConfig(attention=attention, mlp=mlp)] * num_layers(config)


def mixed_layers(
    config: HFConfig,
    attention: Sequence[AttentionConfig | RecurrentConfig],
    moes: Collection[int],
    read_moe: Callable[[], MoEConfig],
) -> list[LayerConfig]:
    """Returns layers with the given attention, of which those with the indices `moes` have an MoE, and others an FFN.

    What no layer has is not read, and so is written back.
    """
    moe = read_moe() if moes else None
    ffn = read_gated_ffn(config) if len(moes) < num_layers(config) else None
    mlps: list[Any] = [moe if i in moes else ffn for i in range(len(attention))]
    return [LayerConfig(attention=one, mlp=mlp) for one, mlp in zip(attention, mlps, strict=True)]


def read_moe(config: HFConfig, num_experts: int, *, dim: str = "intermediate_size", **kwargs: Any) -> MoEConfig:
    """Reads the MoE of most families; further keywords go to `MoEConfig`."""
    config.require("num_experts_per_tok", "router_aux_loss_coef")
    return MoEConfig(
        expert=read_gated_ffn(config, dim=dim),
        num_experts=num_experts,
        top_k=config.required_integer("num_experts_per_tok"),
        balance_coef=config.required_number("router_aux_loss_coef"),
        **kwargs,
    )


def read_gate(config: HFConfig) -> Literal["topk_softmax", "softmax_topk"]:
    """Reads whether the weights of the chosen experts are renormalised."""
    return "topk_softmax" if config.flag("norm_topk_prob") else "softmax_topk"


def num_layers(config: HFConfig) -> int:
    """Reads the number of layers, at least 1 and at most the largest possible number."""
    count = config.required_integer("num_hidden_layers")
    if count < 1:
        raise InputError(f"config.json: num_hidden_layers={count} must be at least 1")
    check_num_layers(count)
    return count


# --- writing --------------------------------------------------------------------------------------


def write_decoder(config: ModelConfig, *, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Writes the keys that `read_decoder` and `read_attention` read."""
    heads, kv_heads, width = same_attention(
        config,
        "choice of heads (query, key-value, width)",
        lambda attention: (attention.num_heads, attention.num_kv_heads, attention.head_dim),
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "max_position_embeddings": config.max_positions,
        eps: config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **write_tokens(config),
        "torch_dtype": config.dtype,
        **write_rope(config.rope),
    }


def write_dense(config: ModelConfig, *, eps: str = "rms_norm_eps", activation: str = "hidden_act") -> dict[str, Any]:
    """Writes what `write_decoder` and `write_ffn` write of a model whose layers all have the same FFN."""
    ffn = write_ffn(dense_ffn(config), activation=activation)
    return {**write_decoder(config, eps=eps), **ffn}


def write_tokens(config: ModelConfig) -> dict[str, Any]:
    """Writes the tokens that begin and end a text."""
    eos = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None
    return {"bos_token_id": config.bos_id, "eos_token_id": eos}


def write_ffn(ffn: FFNConfig, *, activation: str = "hidden_act") -> dict[str, Any]:
    """Writes the keys that `read_gated_ffn` reads."""
    return {"intermediate_size": ffn.dim, activation: write_activation(ffn)}


def write_moe(moe: MoEConfig, num_experts: str = "num_experts") -> dict[str, Any]:
    """Writes the keys that `read_moe` reads, and that `read_gate` reads beside `num_experts`."""
    gate = {"norm_topk_prob": moe.gate == "topk_softmax"} if num_experts == "num_experts" else {}
    top_k = {num_experts: moe.num_experts, "num_experts_per_tok": moe.top_k}
    return {**top_k, **gate, "router_aux_loss_coef": moe.balance_coef}


def write_mixed(config: ModelConfig, moe_keys: Callable[[MoEConfig], dict[str, Any]]) -> dict[str, Any]:
    """Writes the FFN that all dense layers share, and the experts and further keys of the MoE that all others share."""
    keys: dict[str, Any] = {}
    dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    if dense:
        same_in_all_layers(config, "FFN of dense layers", lambda layer: layer.mlp, among=dense)
        keys |= write_ffn(config.ffn(dense[0]))
    if config.moe_layers:
        moe = uniform_moe(config, among=config.moe_layers)
        keys |= {"moe_intermediate_size": moe.expert.dim, "hidden_act": write_activation(moe.expert), **moe_keys(moe)}
    return keys


def write_activation(ffn: FFNConfig) -> str:
    """Returns the name in Transformers of an FFN's activation; raises `InputError` if it has none."""
    for theirs, ours in ACTIVATIONS.items():
        if ours == ffn.activation:
            return theirs
    raise InputError(f"Hugging Face formats have no activation {ffn.activation!r}; keep the model as a model directory")


def write_biases(config: ModelConfig, key: str = "attention_bias", what: str = "attention bias") -> dict[str, Any]:
    """Writes the key that `read_biases` reads; `what` is the name for messages."""
    return {key: same_attention(config, what, lambda attention: bool(attention.biases))}


def same_in_all_layers(
    config: ModelConfig, what: str, get: Callable[[LayerConfig], T], *, among: Sequence[int] | None = None
) -> T:
    """Returns the one value of `get(layer)` over all layers, or over those whose indices are `among`.

    Raises `InputError` if layers differ, naming two that do.
    """
    indices = range(config.num_layers) if among is None else among
    first = get(config.layers[indices[0]])
    for i in indices:
        here = get(config.layers[i])
        if here != first:
            raise InputError(
                f"the format of {config.family!r} has one {what} for all layers, "
                f"but layer {indices[0]} has {first} and layer {i} has {here}"
            )
    return first


def same_attention(config: ModelConfig, what: str, get: Callable[[AttentionConfig], T]) -> T:
    """Returns the one value of `get(attention)` over all layers that have attention; see `same_in_all_layers`."""
    return same_in_all_layers(config, what, lambda layer: get(layer.softmax_attention), among=config.softmax_layers)


def dense_ffn(config: ModelConfig) -> FFNConfig:
    """Returns the FFN that all layers share; raises `InputError` if a layer is an MoE, or layers differ."""
    if config.moe_layers:
        raise InputError(f"layer {config.moe_layers[0]} is an MoE, which the format of {config.family!r} cannot hold")
    same_in_all_layers(config, "FFN", lambda layer: layer.mlp)
    return config.ffn(0)


def uniform_moe(config: ModelConfig, *, among: Sequence[int] | None = None) -> MoEConfig:
    """Returns the MoE that all layers share, in the fields that formats with one kind of MoE layer store.

    Raises `InputError` if one of the layers, or of those whose indices are `among`, is dense, or they differ in number,
    size or routing of their experts.
    """
    indices = range(config.num_layers) if among is None else among
    for i in indices:
        if not isinstance(config.layers[i].mlp, MoEConfig):
            raise InputError(f"layer {i} is dense, but in the format of {config.family!r} every layer is an MoE")
    for what, get in (
        ("number of experts", lambda layer: layer.mlp.num_experts),
        ("number of experts per token", lambda layer: layer.mlp.top_k),
        ("gate", lambda layer: layer.mlp.gate),
        ("expert", lambda layer: layer.mlp.expert),
    ):
        same_in_all_layers(config, what, get, among=indices)
    return config.moe(indices[0])


# --- rows -----------------------------------------------------------------------------------------

EMBEDDING: Table = (Row("model.embed_tokens.weight", "embed/embedding"),)

PROJECTIONS: Table = tuple(
    row
    for name in "qkvo"
    for row in linear(f"model.layers.{{i}}.self_attn.{name}_proj", f"layers/{{i}}/attention/{name}")
)

QK_NORMS: Table = (
    *norm("model.layers.{i}.self_attn.q_norm", "layers/{i}/attention/q_norm"),
    *norm("model.layers.{i}.self_attn.k_norm", "layers/{i}/attention/k_norm"),
)

PLAIN_ATTENTION: Table = (
    *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
    *PROJECTIONS,
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
)

ATTENTION: Table = (*PLAIN_ATTENTION, *QK_NORMS)


def gated_ffn(theirs: str, ours: str) -> Table:
    """Returns the rows of a gated FFN, of the module `theirs` in the checkpoint."""
    return tuple(row for name in ("gate", "up", "down") for row in linear(f"{theirs}.{name}_proj", f"{ours}/{name}"))


GATED_FFN = gated_ffn("model.layers.{i}.mlp", "layers/{i}/mlp")

JOINED_FFN: Table = (
    Row("model.layers.{i}.mlp.gate_up_proj.weight", ("layers/{i}/mlp/gate/kernel", "layers/{i}/mlp/up/kernel"), True),
    *linear("model.layers.{i}.mlp.down_proj", "layers/{i}/mlp/down"),
)

LM_HEAD: Table = (
    *linear("lm_head", "lm_head"),
    Tied("lm_head.weight", equals="model.embed_tokens.weight"),
    Ignored(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", "RoPE frequencies, recomputed from the config"),
)

HEAD: Table = (*norm("model.norm", "final_norm"), *LM_HEAD)


def gated_experts(
    block: str = "mlp",
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    fused_block: str = "mlp",
) -> Table:
    """Returns the rows of the experts of an MoE layer, in both layouts in use.

    In the per-expert layout, they are in the module `block`, and their linear maps have the names given.
    """
    theirs, ours = f"model.layers.{{i}}.{block}.experts.{{e}}", "layers/{i}/mlp/experts"
    return (
        *linear(f"{theirs}.{gate}", f"{ours}/gate", PER_EXPERT),
        *linear(f"{theirs}.{up}", f"{ours}/up", PER_EXPERT),
        *linear(f"{theirs}.{down}", f"{ours}/down", PER_EXPERT),
        # Transformers 5 keeps the experts of a layer in two tensors.
        *fused_experts(f"model.layers.{{i}}.{fused_block}.experts", layout=FUSED),
    )


def fused_experts(theirs: str, *, layout: str | None = None, as_kernels: bool = False) -> Table:
    """Returns the rows of the gated experts of a layer in two tensors of the module `theirs`.

    They are [E, 2f, d] and [E, d, f], or `as_kernels` [E, d, 2f] and [E, f, d].
    """
    ours = "layers/{i}/mlp/experts"
    both = (f"{ours}/gate/kernel", f"{ours}/up/kernel")
    how: Any = {"transpose": not as_kernels, "layout": layout}
    return (
        Row(f"{theirs}.gate_up_proj", both, side_by_side=as_kernels, **how),
        Row(f"{theirs}.down_proj", f"{ours}/down/kernel", **how),
    )


ROUTER = linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router")
