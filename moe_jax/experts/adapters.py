"""Adapters as experts: after a shared FFN in PESC, beside an MoE in PERFT (methods.md 6, 7)."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError
from moe_jax.experts.bank import ExpertBank
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.devices import Platform, current_chip, current_mesh, token_axes
from moe_jax.experts.forms.protocol import BesideBase, ExpertForm, register
from moe_jax.experts.linear import apply_ffn, ffn_linears, of_one_layer
from moe_jax.experts.shapes import AdapterConfig, FFNConfig, uniform_factor
from moe_jax.functional.adapters import all_adapters, cheaper_way, routed_adapters
from moe_jax.functional.keys import dropout, fold_in
from moe_jax.functional.routing.token_choices import Routing, renumbered


class Adapters(nnx.Module):
    """M adapters: `down` [M, d, r], drawn as LoRA's A, and `up` [M, r, d], zero at first, so that they give 0.

    While a model generates, those of all its layers may lie in these arrays (`arrangements`): the leaf `places`,
    int32[M], then says which of them are the layer's own. They follow one another.
    """

    places: nnx.Variable | None = None

    def __init__(self, config: AdapterConfig, num_adapters: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        self.num_adapters = num_adapters
        self.down = nnx.Param(uniform_factor(rngs, (num_adapters,), d_model, config.rank, dtype))
        self.up = nnx.Param(jnp.zeros((num_adapters, config.rank, d_model), dtype))

    def __call__(
        self, x: Float[Array, "T d"], routing: Routing | None, key: Array | None = None
    ) -> Float[Array, "T d"]:
        """The weighted sum of the chosen adapters.

        Args:
          x: tokens.
          routing: chosen adapters and weights; None: all adapters with weight 1.
          key: random key for dropout in training; None: no dropout.
        """
        x, config = dropout(x, self.config.dropout, key), self.config
        if routing is None:
            return all_adapters(x, *self._own(), config.activation, config.scale)
        platform = Platform.of(current_chip(), x.dtype.itemsize)
        way = cheaper_way(self.num_adapters, config.rank, routing.experts.shape[1], platform.operations_per_byte)
        down, up = (self.down[...], self.up[...]) if way == "grouped" else self._own()
        if self.places is not None and way == "grouped":
            routing = renumbered(routing, self.places[...])
        apply = partial(routed_adapters, activation=config.activation, scale=config.scale, way=way)
        mesh = current_mesh()
        if way == "side-by-side" or mesh is None:
            return apply(x, routing, down, up)
        tokens = P(token_axes(mesh, x.shape[0]), None)
        # Every device sorts its own tokens and has all adapters: left to the compiler, a sort gathers all tokens.
        return jax.shard_map(
            apply, in_specs=(tokens, Routing._make((tokens, tokens)), P(), P()), out_specs=tokens, check_vma=False
        )(x, routing, down, up)

    def _own(self) -> tuple[Float[Array, "M d r"], Float[Array, "M r d"]]:
        """Returns the adapters of the layer alone."""
        down, up = self.down[...], self.up[...]
        if self.places is None:
            return down, up
        return of_one_layer(down, self.places[...]), of_one_layer(up, self.places[...])


class AdapterBank(ExpertBank):
    """PESC: `y = sum_i w_i (h + s act(h Down_i) Up_i)` with `h = FFN(x)`, computed once (Wu et al. 2024, section 3).

        >>> from flax import nnx
        >>> config = moe_jax.BankConfig(kind="adapter", adapter=moe_jax.AdapterConfig(rank=4, activation="gelu"))
        >>> bank = moe_jax.make_bank(config, moe_jax.FFNConfig(dim=32), 4, 16, rngs=nnx.Rngs(0))
        >>> isinstance(bank, moe_jax.AdapterBank), bank.adapters.down[...].shape
        (True, (4, 16, 4))

    `MoEConfig` makes sure that the weights sum to 1. So `h` counts once, and before training the layer equals its FFN
    to the last bit.
    """

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts, d_model)
        assert isinstance(config.form, AdapterExperts)
        self.base = nnx.Dict(ffn_linears(expert, d_model, bias=expert.bias, rngs=rngs, dtype=dtype))
        self.adapters = Adapters(config.form.adapter, num_experts, d_model, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        linears = {name: self.base[name] for name in self.expert.matrices}
        h = apply_ffn(linears, x, self.expert.activation, fold_in(key, 0))
        return h + self.adapters(h, routing, fold_in(key, 1))

    def _kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        raise InputError("adapter experts come after an FFN and have no kernels that could stand in its place")

    def stacked_biases(self) -> dict[str, Float[Array, "E o"]]:
        """Empty: the biases belong to the shared FFN."""
        return {}


@register("adapter")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterExperts(BesideBase, ExpertForm):
    """The experts are adapters after the base, an FFN that is applied once; see `AdapterBank`.

    Attributes:
      adapter: the shape of an adapter.
    """

    allowed_bases: ClassVar[tuple[str, ...]] = ("shared",)
    bank: ClassVar[type | None] = AdapterBank
    has_expert_kernels: ClassVar[bool] = False
    needs_unit_weights: ClassVar[bool] = True

    adapter: AdapterConfig

    def check_base(self, base: str) -> None:
        super().check_base(base)
        if base == "none":
            raise InputError("adapter experts come after a shared FFN, and base 'none' leaves it out")

    @property
    def beside_base_model(self) -> bool:
        return not self.adapter.of_base

    @property
    def why_not_merged(self) -> str:
        if self.adapter.activation == "none":
            return "come after the FFN that all experts share, so that they would need kernels of their own"
        return f"come after the FFN that all experts share and are nonlinear ({self.adapter.activation})"

    def as_part_of_base(self, of_base: bool) -> "AdapterExperts":
        return AdapterExperts(adapter=dataclasses.replace(self.adapter, of_base=of_base))

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        return 2 * d_model * self.adapter.rank
