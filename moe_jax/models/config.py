"""`ModelConfig`: a frozen, complete description of a decoder.

The tree of parameters can be built from it alone. What a layer consists of is said
per layer, so that "every second block is an MoE", "the first layer is dense" and "the top 24
of 32 layers are compressed" are the same mechanism.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from moe_jax.errors import InputError, nearest

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
GATES = ("softmax_topk", "topk_softmax", "top1")
ROPE_SCALINGS = ("none", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its published scalings.

    Attributes:
      theta: base of the frequencies.
      fraction: share of each head that is rotated (1.0 in Llama).
      scaling: one of `ROPE_SCALINGS`; the fields below belong to some of them.
      factor: stretch of the context (linear, dynamic, yarn, llama3; longrope where it is given).
      original_max_positions: context length before stretching.
      attention_factor: multiplies cos and sin (yarn, longrope); None: the published formula.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
      low_freq_factor, high_freq_factor: llama3.
      short_factor, long_factor: longrope, one number per rotated pair.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    scaling: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3"] = "none"
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _member("rope scaling", self.scaling, ROPE_SCALINGS)
        if self.scaling == "longrope" and (self.short_factor is None or self.long_factor is None):
            raise InputError("rope scaling 'longrope' needs short_factor and long_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention of one layer.

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key/value heads, a divisor of H.
      head_dim: width of a head, not necessarily d/H.
      qkv_bias, out_bias: biases on the projections.
      qk_norm: RMSNorm on queries and keys: over the whole `projection` (OLMoE), per `head` (Qwen3), or none.
      clip_qkv: clamps the projections to [-c, c] (OLMoE); None: no clamp.
      sliding_window: a query sees this many positions, itself included; None: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "projection", "head"] = "none"
    clip_qkv: float | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "num_kv_heads", "head_dim")
        _member("qk_norm", self.qk_norm, ("none", "projection", "head"))
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InputError(f"sliding_window={self.sliding_window} must be at least 1, or null for none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNConfig:
    """A feed-forward network: gated (gate, up, down) or plain (up, down).

    Attributes:
      dim: hidden width f.
      gated: `act(x G) * (x U) D` if true, else `act(x U) D`.
      activation: one of `ACTIVATIONS`.
      bias: biases on every matrix.
    """

    dim: int
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        _positive(self, "dim")
        _member("activation", self.activation, ACTIVATIONS)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of use."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """`[in, out]` shape of every kernel for model width `d_model`."""
        return {name: (self.dim, d_model) if name == "down" else (d_model, self.dim) for name in self.matrices}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankConfig:
    """What the experts of a layer are made of (METHODS 2.1-2.3).

    Attributes:
      kind: `full` kernels, or a shared base plus `low-rank` or `sparse` deltas.
      rank: rank r of low-rank deltas.
      rate: share of entries that a sparse delta leaves out, in [0, 1).
      train_base: whether the shared base is trained.
    """

    kind: Literal["full", "low-rank", "sparse"] = "full"
    rank: int | None = None
    rate: float | None = None
    train_base: bool = True

    def __post_init__(self) -> None:
        _member("bank kind", self.kind, ("full", "low-rank", "sparse"))
        if (self.kind == "low-rank") != (self.rank is not None):
            raise InputError(f"rank={self.rank} does not go with bank kind {self.kind!r}: only 'low-rank' has a rank")
        if (self.kind == "sparse") != (self.rate is not None):
            raise InputError(f"rate={self.rate} does not go with bank kind {self.kind!r}: only 'sparse' has a rate")
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rank={self.rank} must be at least 1")
        if self.rate is not None and not 0.0 <= self.rate < 1.0:
            raise InputError(f"rate={self.rate} must lie in [0, 1): it is the share of entries left out")

    def nonzeros(self, shape: tuple[int, int]) -> int:
        """Entries that a sparse delta keeps of a kernel of `shape`: round(d * f * (1 - rate))."""
        assert self.rate is not None
        return round(math.prod(shape) * (1.0 - self.rate))

    def check_fits(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raises `InputError` if a delta of this kind makes no sense for kernels of these shapes."""
        for name, shape in shapes.items():
            if self.rank is not None and self.rank > min(shape):
                raise InputError(f"rank {self.rank} is above min(d, f) = {min(shape)} of the {name} kernel {shape}")
            if self.rate is not None and self.nonzeros(shape) < 1:
                raise InputError(f"rate {self.rate} leaves no entry of the {name} kernel {shape}; lower it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A Mixture-of-Experts layer.

    Attributes:
      expert: shape of one expert.
      num_experts: E.
      top_k: experts per token k.
      gate: one of `GATES` (METHODS 1).
      bank: what the experts are made of.
      balance_coef, z_coef: coefficients of the auxiliary losses; 0 leaves a loss out.
      capacity_factor: None is dropless; otherwise an expert takes at most
        `ceil(capacity_factor * T * k / E)` assignments and the rest pass through the residual only.
    """

    expert: FFNConfig
    num_experts: int
    top_k: int
    gate: Literal["softmax_topk", "topk_softmax", "top1"] = "topk_softmax"
    bank: BankConfig = BankConfig()
    balance_coef: float = 0.01
    z_coef: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "num_experts", "top_k")
        _member("gate", self.gate, GATES)
        if self.top_k > self.num_experts:
            raise InputError(f"top_k={self.top_k} is above num_experts={self.num_experts}")
        if self.gate == "top1" and self.top_k != 1:
            raise InputError(f"gate 'top1' routes to one expert, top_k={self.top_k}")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise InputError(f"capacity_factor={self.capacity_factor} must be above 0, or null for dropless")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: attention, then an FFN or an MoE."""

    attention: AttentionConfig
    mlp: FFNConfig | MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model.

    Attributes:
      family: the foreign format it came from and goes back to (`convert/families/`).
      vocab_size, d_model: V and d.
      max_positions: the context length it was trained for.
      layers: one description per layer.
      rope: rotary embedding, shared by all layers.
      norm: `rms` or `layer` (LayerNorm with bias).
      norm_eps: epsilon inside the norms.
      tie_embeddings: the output head is the transposed embedding.
      head_bias: a bias on the output head.
      bos_id, eos_ids: special tokens, where they are known.
      dtype: dtype of the parameters when they are made anew (a checkpoint keeps its own).
      foreign: keys of the source's config.json that mean nothing here, given back on export.
    """

    family: str
    vocab_size: int
    d_model: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig = RopeConfig()
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    head_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    foreign: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "d_model", "max_positions")
        _member("norm", self.norm, ("rms", "layer"))
        _member("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        if not self.layers:
            raise InputError("a model needs at least one layer")
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mlp, MoEConfig):
                try:
                    layer.mlp.bank.check_fits(layer.mlp.expert.shapes(self.d_model))
                except InputError as error:
                    raise InputError(f"layer {i}: {error}") from None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold an MoE."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoEConfig))


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value!r} must be a positive integer")


def _member(what: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise InputError(f"unknown {what} {value!r}{nearest(str(value), options)}; known: {', '.join(options)}")
