"""`AttentionConfig`: the description of a layer's attention."""

import dataclasses
import math
from typing import Literal

from moe_jax.core.errors import InputError, check_member, check_number, check_positive, shown
from moe_jax.core.formatting import short_repr
from moe_jax.experts.shapes import LoRAConfig
from moe_jax.functional.attention import MASKS
from moe_jax.functional.position_embeddings import QueryScaleConfig, RelativeBiasConfig, RopeConfig

PROJECTIONS = ("q", "k", "v", "o")
QK_NORMS = ("none", "projection", "head", "head_rotated", "head_layer", "head_unscaled")

# Projections of latent attention that can have a bias.
LATENT_BIASES = ("q_down", "kv_down", "o")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The indexer of sparse attention: small heads, by whose scores a query chooses its keys (DeepSeek-V3.2).

    Rows of at most `top_k` tokens are attended to whole. The indexer's parameters are kept, and no loss trains them.

    Attributes:
      num_heads: heads of the indexer, which share one key per token.
      head_dim: their width, of which the first entries are rotated, as many as of the attention's heads.
      top_k: number of keys that a query chooses.
      interleaved: rotated pairs are neighbours, (2i, 2i + 1), and not (i, i + r/2) of r rotated entries.
      shared: the layer has no indexer, and takes the choice of the last layer before it that has one (GLM-5). Rows of
        more than `top_k` tokens are then refused.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    shared: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "top_k")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The part of a config that makes attention multi-head latent attention (DeepSeek-V2).

    Keys and values are computed from one small latent. A cache holds only a token's latent and one rotated key, which
    all heads share. A head's queries and keys are `head_dim` wide: first the part that is not rotated, computed from
    latents, then the rotated part.

        >>> latent = moe_jax.LatentConfig(kv_rank=16, rope_dim=4, value_dim=8)
        >>> moe_jax.AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=12, latent=latent).projections
        ('q', 'kv_down', 'kv_up', 'o')

    Attributes:
      kv_rank: width of the latent of keys and values.
      rope_dim: width of the rotated part of queries and keys.
      value_dim: width of a head's values.
      q_rank: width of a latent that queries are computed from; None: they are computed from the activations.
      interleaved: rotated pairs are neighbours, (2i, 2i + 1), and not (i, i + rope_dim/2).
      norm_eps: epsilon of the RMSNorms of latents.
      indexer: chooses the keys of a query, by the latent of that; None: queries attend to all that they see.
    """

    kv_rank: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    interleaved: bool = True
    norm_eps: float = 1e-6
    indexer: IndexerConfig | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "kv_rank", "rope_dim", "value_dim", "q_rank")
        if self.indexer is not None and self.q_rank is None:
            raise InputError("an indexer takes the latent of queries: q_rank is missing")
        if self.indexer is not None and self.indexer.head_dim < self.rope_dim:
            raise InputError(
                f"indexer.head_dim={self.indexer.head_dim} must be at least rope_dim={self.rope_dim}, which is rotated"
            )
        check_number(self, "norm_eps", at_least=0)
        if self.rope_dim % 2:
            raise InputError(f"rope_dim={self.rope_dim} must be even for rotary embeddings")

    @property
    def has_own_indexer(self) -> bool:
        """Whether the layer has the parameters of an indexer."""
        return self.indexer is not None and not self.indexer.shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention of one layer, or with `latent` multi-head latent attention.

        >>> moe_jax.AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8).qk_norm
        'none'

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key/value heads, a divisor of H.
      head_dim: width of a head, not necessarily d/H.
      biases: the `projections` that have one, in their order.
      qk_norm: on queries and keys: RMSNorm over the whole `projection` (OLMoE) or per `head` (Qwen3), or per head after
        it was rotated (`head_rotated`, Hunyuan), which may have no scales (`head_unscaled`, Llama 4); or `head_layer`,
        LayerNorm without bias per head, each with scales of its own (StableLM-2 12B); or none. An RMSNorm has factors
        `1 + scale` where the norms of the model have them.
      clip_qkv: clamps the projections to [-c, c] (OLMoE); None: no clamp.
      mask: `causal`: a token sees itself and those before it; `bidirectional`: all; `prefix`: causal, and all tokens
        see the prefix of their row.
      sliding_window: a query sees tokens less than this many positions away, itself included; None: all.
      block_tokens: a text is cut into blocks of so many tokens, and a query sees its own block only (the chunked
        attention of Llama 4); None: it is not.
      scale: of the scores; None: 1/sqrt(head_dim).
      score_soft_cap: scaled scores become `c tanh(scores / c)` (Gemma 2); None: no cap.
      query_scale: a factor of queries that grows with their position; None: there is none.
      rope: the layer's own rotary embedding; None: that of the model.
      rope_interleaved: rotated pairs are neighbours, (2i, 2i + 1), and not (i, i + r/2) of r rotated entries (ERNIE
        4.5, GLM-4, Command R); of latent attention `latent` says it.
      sinks: every query head has a learned score of a key that is not there, in the denominator of its softmax: it may
        look at nothing (gpt-oss).
      output_gate: what the heads return is multiplied, entry by entry, by the sigmoid of a linear map of the input,
        `gate`, before the last map (AFMoE).
      relative_bias: a bias for the distance of key and query is added to the scores; all layers of the stack share its
        table (T5). None: no bias.
      source_dim: in cross-attention, width of the input of keys and values, where it is not the model's.
      nf4: the kernels are kept as NF4 codes and frozen.
      lora: beside the kernels of any of the `projections`.
      latent: keys and values are computed from latents; then `num_kv_heads` is `num_heads`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    biases: tuple[Literal["q", "k", "v", "q_down", "q_up", "kv_down", "kv_up", "o", "gate"], ...] = ()
    qk_norm: Literal["none", "projection", "head", "head_rotated", "head_layer", "head_unscaled"] = "none"
    clip_qkv: float | None = None
    mask: Literal["causal", "bidirectional", "prefix"] = "causal"
    sliding_window: int | None = None
    block_tokens: int | None = None
    scale: float | None = None
    score_soft_cap: float | None = None
    query_scale: QueryScaleConfig | None = None
    rope: RopeConfig | None = None
    rope_interleaved: bool = False
    sinks: bool = False
    output_gate: bool = False
    relative_bias: RelativeBiasConfig | None = None
    source_dim: int | None = None
    nf4: bool = False
    lora: LoRAConfig | None = None
    latent: LatentConfig | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.lora is not None:
            self.lora.check_targets(self.projections)
        check_positive(self, "num_heads", "num_kv_heads", "head_dim", "sliding_window", "source_dim", "block_tokens")
        check_number(self, "clip_qkv", "scale", "score_soft_cap", above=0)
        check_member("qk_norm", self.qk_norm, QK_NORMS)
        check_member("mask", self.mask, MASKS)
        for name in self.biases:
            check_member("bias", name, self.projections)
        if tuple(name for name in self.projections if name in self.biases) != self.biases:
            # Each choice has one way to be written: layers are compared to find those that repeat.
            given, order = shown(list(self.biases)), ", ".join(self.projections)
            raise InputError(f"biases={given} must name projections once each, in the order {order}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.relative_bias is not None:
            self.relative_bias.check_fits(self.mask)
        if self.sliding_window is not None and self.mask == "prefix":
            raise InputError(f"sliding_window={self.sliding_window} does not go with mask 'prefix'")
        if self.block_tokens is not None and (self.mask != "causal" or self.sliding_window is not None):
            raise InputError(f"block_tokens={self.block_tokens} goes with mask 'causal', and without sliding_window")

    def _check_latent(self, latent: LatentConfig) -> None:
        if self.num_kv_heads != self.num_heads:
            raise InputError(
                f"latent attention makes keys and values for every head: num_kv_heads={self.num_kv_heads} must be "
                f"num_heads={self.num_heads}"
            )
        if latent.rope_dim >= self.head_dim:
            raise InputError(
                f"rope_dim={latent.rope_dim} must be below head_dim={self.head_dim}, of which it is a part"
            )
        if self.rope_interleaved or self.output_gate:
            raise InputError(
                "rope_interleaved and output_gate are for plain attention: latent attention has latent.interleaved, "
                "and no such gate"
            )
        others = (self.clip_qkv, self.score_soft_cap, self.source_dim, self.relative_bias, self.block_tokens)
        if self.qk_norm != "none" or self.sinks or any(other is not None for other in others):
            raise InputError(
                "latent attention has no qk_norm, clip_qkv, score_soft_cap, sinks, source_dim, relative_bias or "
                "block_tokens"
            )
        biased = [name for name in self.biases if name not in LATENT_BIASES]
        if biased:
            raise InputError(f"of latent attention {', '.join(LATENT_BIASES)} can have a bias, not {biased[0]}")

    def describe(self) -> str:
        """Returns the attention in words: `attention of 9 heads of 64, 3 of keys and values`."""
        words = [f"attention of {self.num_heads} heads of {self.head_dim}"]
        if self.latent is not None:
            words.append(f"latents of {self.latent.kv_rank}")
            words += [] if self.latent.indexer is None else [f"of each query to {self.latent.indexer.top_k:,} tokens"]
        elif self.num_kv_heads != self.num_heads:
            words.append(f"{self.num_kv_heads} of keys and values")
        words += [self.mask] * (self.mask != "causal") + ["NF4"] * self.nf4
        words += [] if self.sliding_window is None else [f"window of {self.sliding_window:,}"]
        words += [] if self.block_tokens is None else [f"blocks of {self.block_tokens:,}"]
        words += ["sinks"] * self.sinks
        words += [] if self.lora is None else [self.lora.describe()]
        return ", ".join(words)

    @property
    def reach(self) -> int | None:
        """Number of positions from a query back to the farthest key it may see, both included; None: all."""
        return self.sliding_window if self.block_tokens is None else self.block_tokens

    @property
    def needs_positions(self) -> bool:
        """Whether it asks for the positions of tokens in their documents, beside their rotation."""
        return self.block_tokens is not None or self.query_scale is not None

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linear maps."""
        if self.latent is None:
            return (*PROJECTIONS, *["gate"] * self.output_gate)
        return (*(("q",) if self.latent.q_rank is None else ("q_down", "q_up")), "kv_down", "kv_up", "o")

    @property
    def rope_dim(self) -> int:
        """Width of the part of a head that rotary embeddings apply to."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def score_scale(self) -> float:
        """The factor of scores."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def shapes(self, d_model: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes [in, out] of the kernels of all projections, for activations of width `d_model`."""
        latent, heads = self.latent, self.num_heads
        q_width, o_shape = heads * self.head_dim, (heads * self.value_dim, d_model)
        if latent is None:
            source = d_model if self.source_dim is None else self.source_dim
            kv_shape = (source, self.num_kv_heads * self.head_dim)
            gate = {"gate": (d_model, q_width)} if self.output_gate else {}
            return {"q": (d_model, q_width), "k": kv_shape, "v": kv_shape, "o": o_shape, **gate}
        shapes = {"q": (d_model, q_width)}
        if latent.q_rank is not None:
            shapes = {"q_down": (d_model, latent.q_rank), "q_up": (latent.q_rank, q_width)}
        return {
            **shapes,
            "kv_down": (d_model, latent.kv_rank + latent.rope_dim),
            "kv_up": (latent.kv_rank, heads * (self.head_dim - latent.rope_dim + latent.value_dim)),
            "o": o_shape,
        }
