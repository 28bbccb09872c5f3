"""`LayerConfig`: one layer of a model, as data."""

import dataclasses
from typing import Literal

from moe_jax.core.errors import InputError, check_member, check_number
from moe_jax.core.formatting import short_repr
from moe_jax.experts.shapes import FFNConfig, NoFFNConfig
from moe_jax.models.attention_config import AttentionConfig
from moe_jax.models.linear_codes import LinearCodes, check_codes
from moe_jax.models.moe_config import MoEConfig
from moe_jax.models.own_parts import BLOCK, LAYERS
from moe_jax.models.recurrent_config import NoAttentionConfig, RecurrentConfig

NORM_POSITIONS = ("pre", "post", "output", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: attention, perhaps cross-attention, then an FFN or an MoE, each with its norms.

        >>> attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
        >>> moe_jax.LayerConfig(attention=attention, mlp=moe_jax.FFNConfig(dim=32)).mlp.activation
        'silu'

    Attributes:
      attention: attention of the tokens to each other; or in its place a recurrence, such as the gated delta rule, or
        nothing (`NoAttentionConfig`).
      mlp: the FFN or the MoE; or nothing (`NoFFNConfig`).
      cross: attention to the output of an encoder, between the two; its mask is `bidirectional` and it rotates nothing.
      norm_position: where norms `n` stand around a branch `f`. `pre`: `x + f(n(x))`; `post`: `n(x + f(x))` (the first
        Transformers, BERT); `output`: `x + n(f(x))` (OLMo 2); `both`: `x + n'(f(n(x)))` (Gemma 2).
      parallel: attention and FFN have the same input, and both are added to it (GPT-J, Phi).
      shared_norm: both also have the same norm (`attention_norm`).
      branch_scales: what a branch adds is first multiplied, entry by entry, by a vector of its own (LayerScale, Touvron
        et al. 2021).
      residual_scale: what a branch adds is multiplied by it (Granite).
      output_scale: what the layer returns is multiplied by a number of its own, which is not trained (Gemma 4).
      codes: linear maps outside the bank of experts whose kernels are stored in codes.
      module: `block`, or what `nn.register_layer` has added: the module of such a layer.
    """

    attention: AttentionConfig | RecurrentConfig
    mlp: FFNConfig | MoEConfig
    cross: AttentionConfig | None = None
    norm_position: Literal["pre", "post", "output", "both"] = "pre"
    parallel: bool = False
    shared_norm: bool = False
    branch_scales: bool = False
    residual_scale: float = 1.0
    output_scale: bool = False
    codes: tuple[LinearCodes, ...] = ()
    module: str = BLOCK

    __repr__ = short_repr

    def __post_init__(self) -> None:
        LAYERS.check("layer module", self.module)
        check_member("norm_position", self.norm_position, NORM_POSITIONS)
        check_codes(self.codes)
        if isinstance(self.attention, AttentionConfig) and self.attention.source_dim is not None:
            raise InputError(f"source_dim={self.attention.source_dim} is for cross-attention only")
        if self.parallel and (self.norm_position != "pre" or self.cross is not None):
            raise InputError("parallel attention and FFN go with norm_position 'pre' and without cross-attention")
        if self.branch_scales and (self.norm_position != "pre" or self.parallel):
            raise InputError("branch_scales go with norm_position 'pre', and attention and FFN one after the other")
        absent = [name for name in ("attention", "mlp") if name not in self.branches]
        if len(absent) > 1 or (absent and self.parallel):
            raise InputError("a layer needs attention, or a recurrence, or an FFN or MoE; one in parallel needs both")
        check_number(self, "residual_scale", above=0)
        if self.residual_scale != 1.0 and (self.norm_position != "pre" or self.parallel):
            raise InputError(
                f"residual_scale={self.residual_scale} goes with norm_position 'pre', and attention and FFN one after "
                "the other"
            )
        if self.norms_inside and (self.norm_position not in ("pre", "both") or self.parallel):
            raise InputError("branch_norm_eps goes with norm_position 'pre' or 'both', and with an MoE after attention")
        if self.shared_norm and not self.parallel:
            raise InputError("shared_norm is for attention and FFN in parallel")
        if self.cross is not None:
            cross = self.cross
            if cross.mask != "bidirectional" or cross.sliding_window is not None or cross.rope is not None:
                raise InputError(
                    "cross-attention sees all of the encoder's output: its mask must be 'bidirectional', and it has "
                    "neither sliding_window nor rope"
                )
            if cross.relative_bias is not None:
                raise InputError("cross-attention has no relative_bias: there is no distance between two sequences")
            if cross.nf4 or cross.lora is not None or cross.latent is not None:
                raise InputError("cross-attention has neither NF4 kernels nor LoRA nor latents")
            rotated = cross.rope_interleaved or cross.qk_norm in ("head_rotated", "head_unscaled")
            if cross.output_gate or cross.needs_positions or rotated or cross.values_are_keys or cross.value_norm:
                raise InputError(
                    "cross-attention rotates nothing and has no positions: neither output_gate nor rope_interleaved, "
                    "qk_norm of rotated heads, query_scale, block_tokens, values_are_keys or value_norm"
                )
            if self.is_recurrent:
                raise InputError("a recurrence in the place of attention goes without cross-attention")
            if self.softmax_attention.latent is not None:
                raise InputError("latent attention goes without cross-attention")

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the branches that the layer has, in their order: `attention`, `cross_attention`, `mlp`."""
        return (
            *["attention"] * (not isinstance(self.attention, NoAttentionConfig)),
            *["cross_attention"] * (self.cross is not None),
            *["mlp"] * (not isinstance(self.mlp, NoFFNConfig)),
        )

    @property
    def is_recurrent(self) -> bool:
        """Whether a recurrence stands in the place of attention."""
        return isinstance(self.attention, RecurrentConfig)

    @property
    def softmax_attention(self) -> AttentionConfig:
        """The attention of a layer that has no recurrence in its place."""
        assert isinstance(self.attention, AttentionConfig), "the layer has a recurrence"
        return self.attention

    @property
    def recurrence(self) -> RecurrentConfig:
        """The recurrence of a layer that has one."""
        assert isinstance(self.attention, RecurrentConfig), "the layer has attention"
        return self.attention

    @property
    def norms_inside(self) -> bool:
        """Whether the norms of what the FFN or MoE is given are its own, and not the layer's."""
        return isinstance(self.mlp, MoEConfig) and self.mlp.branch_norm_eps is not None
