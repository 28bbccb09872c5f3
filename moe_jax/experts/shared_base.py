"""A shared base plus something small per expert, `W_i = W + Δ_i` (METHODS 2.2, 2.3, 3, 4, 5)."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.bank import ExpertBank, add_stacked_biases
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.experts.deltas import DELTAS, NEURONS, Delta, JointFactor, JointLowRankDelta, draw_a
from moe_jax.experts.factored import Deltas, factored_ffn
from moe_jax.experts.linear import ffn_linears
from moe_jax.experts.parallel import SynthesisedKernels, apply_experts
from moe_jax.experts.strategy import choose_strategy
from moe_jax.functional.keys import fold_in
from moe_jax.functional.routing import Routing


class SharedBaseBank(ExpertBank):
    """`base` kernels [in, out], unless the config has none, and a `delta` of one kind for each matrix.

    Applied in one of two exact ways: *factored*, with the base products once per token, or *synthesised*, every
    kernel made tile by tile inside the grouped product. `experts.strategy` says which. No [E, in, out] array exists
    in either, forward or backward. A base with LoRA, or kept as NF4 codes, is always applied on its own, that is
    factored.
    """

    def __init__(
        self, config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        super().__init__(config, expert, num_experts)
        self._d_model = d_model
        if config.has_base:
            self.base = nnx.Dict(ffn_linears(expert, d_model, bias=False, rngs=rngs, dtype=dtype))
        if config.kind == "joint-low-rank":
            self.delta = nnx.Dict(_joint_factors(config, expert.dim, num_experts, d_model, self._shapes, rngs, dtype))
        else:
            deltas = {}
            for index, (name, shape) in enumerate(self._shapes.items()):
                own = config.for_matrix(index)
                deltas[name] = DELTAS[config.kind](own, num_experts, shape, rngs=rngs, dtype=dtype)
            self.delta = nnx.Dict(deltas)
        add_stacked_biases(self, d_model, dtype)

    @property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        # Not an attribute: NNX hashes those.
        return self.expert.shapes(self._d_model)

    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        strategy = choose_strategy(self.config, self.expert, self.num_experts, *x.shape, routing.experts.shape[1])
        if strategy == "synthesised":
            kernels = {
                name: SynthesisedKernels(self._base(name), self._delta(name), shape)
                for name, shape in self._shapes.items()
            }
            return apply_experts(x, routing, kernels, self.stacked_biases(), self.expert.activation)
        bases = {name: self._base_product(index, name, key) for index, name in enumerate(self._shapes)}
        deltas = {name: _with_form(self._delta(name), shape) for name, shape in self._shapes.items()}
        how = strategy.removeprefix("factored-")
        return factored_ffn(x, routing, bases, deltas, self.stacked_biases(), self.expert.activation, how)

    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        return {name: self._kernel(name, expert) for name in self._shapes}

    def _kernel(self, name: str, expert: int) -> Float[Array, "i o"]:
        base, delta, shape = self._base(name), self._delta(name), self._shapes[name]
        leaves = {leaf: array[expert] for leaf, array in (delta.trained() | delta.fixed()).items()}
        tile = delta.form(shape).tile(leaves, 0, shape[1])
        return tile if base is None else (base.astype(jnp.float32) + tile).astype(base.dtype)

    def _base(self, name: str) -> Float[Array, "i o"] | None:
        return self.base[name].materialise() if self.config.has_base else None

    def _base_product(self, index: int, name: str, key: Array | None) -> Callable[[Array], Array] | None:
        return partial(self.base[name], key=fold_in(key, index)) if self.config.has_base else None

    def _delta(self, name: str) -> Delta | JointLowRankDelta:
        if self.config.kind != "joint-low-rank":
            return self.delta[name]
        neurons, own = self.delta[NEURONS].factor[...], self.delta[name].factor[...]
        return JointLowRankDelta(name, neurons, own)


def _joint_factors(
    config: BankConfig,
    dim: int,
    num_experts: int,
    d_model: int,
    shapes: dict[str, tuple[int, int]],
    rngs: nnx.Rngs,
    dtype: jnp.dtype,
) -> dict[str, JointFactor]:
    """Fresh factors: random over the model's width and zero over the neurons, so that the delta is zero."""
    assert config.rank is not None
    factors = {NEURONS: JointFactor(jnp.zeros((num_experts, dim, config.rank), dtype))}
    for name in shapes:
        factors[name] = JointFactor(draw_a(rngs.params(), num_experts, d_model, config.rank).astype(dtype))
    return factors


def _with_form(delta: Delta | JointLowRankDelta, shape: tuple[int, int]) -> Deltas:
    return Deltas(delta.trained(), delta.fixed(), delta.form(shape))
