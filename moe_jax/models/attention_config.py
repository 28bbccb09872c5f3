"""`AttentionConfig`: what the attention of a layer is."""

import dataclasses
from typing import Literal

from moe_jax.errors import InputError, check_member, check_number, check_positive, shown
from moe_jax.experts.config import LoRAConfig
from moe_jax.functional.attention import MASKS
from moe_jax.functional.relative_bias import RelativeBiasConfig
from moe_jax.functional.rope import RopeConfig

PROJECTIONS = ("q", "k", "v", "o")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention of one layer.

        >>> moe_jax.AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8).qk_norm
        'none'

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key/value heads, a divisor of H.
      head_dim: width of a head, not necessarily d/H.
      biases: which of the projections `q`, `k`, `v` and `o` have one.
      qk_norm: on queries and keys: RMSNorm over the whole `projection` (OLMoE) or per `head` (Qwen3); or `head_layer`,
        LayerNorm without bias per head, each with scales of its own (StableLM-2 12B); or none. An RMSNorm has factors
        `1 + scale` where the norms of the model have them.
      clip_qkv: clamps the projections to [-c, c] (OLMoE); None: no clamp.
      mask: `causal`: a token sees those before it and itself; `bidirectional`: all; `prefix`: causal, and all see the
        prefix of their row.
      sliding_window: a query sees tokens less than this many positions away, itself included; None: all.
      scale: of the scores; None: 1/sqrt(head_dim).
      score_soft_cap: scores become `c tanh(scores / c)` after that (Gemma 2); None: they stay.
      rope: the layer's own rotary embedding; None: that of the model.
      relative_bias: a bias for the distance of key and query is added to the scores; its table is that of all layers of
        the stack (T5). None: none is.
      source_dim: width of the activations that keys and values are made of, where it is not the model's: in
        cross-attention.
      nf4: the kernels are kept as NF4 codes and frozen.
      lora: beside any of the kernels q, k, v and o.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    biases: tuple[Literal["q", "k", "v", "o"], ...] = ()
    qk_norm: Literal["none", "projection", "head", "head_layer"] = "none"
    clip_qkv: float | None = None
    mask: Literal["causal", "bidirectional", "prefix"] = "causal"
    sliding_window: int | None = None
    scale: float | None = None
    score_soft_cap: float | None = None
    rope: RopeConfig | None = None
    relative_bias: RelativeBiasConfig | None = None
    source_dim: int | None = None
    nf4: bool = False
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        if self.lora is not None:
            self.lora.check_targets(PROJECTIONS)
        check_positive(self, "num_heads", "num_kv_heads", "head_dim", "sliding_window", "source_dim")
        check_number(self, "clip_qkv", "scale", "score_soft_cap", above=0)
        check_member("qk_norm", self.qk_norm, ("none", "projection", "head", "head_layer"))
        check_member("mask", self.mask, MASKS)
        for name in self.biases:
            check_member("bias", name, PROJECTIONS)
        if tuple(name for name in PROJECTIONS if name in self.biases) != self.biases:
            # One way to write each choice: layers are compared to find those that repeat.
            given = shown(list(self.biases))
            raise InputError(f"biases={given} must name projections once each, in the order q, k, v, o")
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.relative_bias is not None:
            self.relative_bias.check_fits(self.mask)
        if self.sliding_window is not None and self.mask == "prefix":
            raise InputError(f"sliding_window={self.sliding_window} does not go with mask 'prefix'")
