"""Routers, and what they report: the auxiliary loss and the load of every layer."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.layout.config import LoRAConfig
from moe_jax.experts.variables import Fixed, Leaves
from moe_jax.functional.routing import RouterStats, add_noise, coder_logits
from moe_jax.models.config import ModelConfig, MoEConfig
from moe_jax.models.segments import segments_of
from moe_jax.nn.layers import Linear


class LinearRouter(Linear):
    """Computes logits `x W`; kernel [d, E], perhaps with LoRA beside it.

    With `selection_bias` it has such a bias, [E], float32, zero at first and trained by no gradient. With
    `weighs_universal` another kernel, `universal` [d, 1], computes the logit of a universal FFN's weight.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        lora: LoRAConfig | None = None,
        selection_bias: bool = False,
        weighs_universal: bool = False,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        super().__init__((d_model, num_experts), lora=lora, rngs=rngs, dtype=dtype)
        if selection_bias:
            self.selection_bias = Fixed(jnp.zeros(num_experts, jnp.float32))
        if weighs_universal:
            self.universal = Linear((d_model, 1), rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T d"], key: Array | None = None) -> Float[Array, "T E"]:
        """Returns logits, float32; the key is for LoRA's dropout in training."""
        with jax.default_matmul_precision("highest"):
            return super().__call__(x.astype(jnp.float32), key)

    def universal_logit(self, x: Float[Array, "T d"]) -> Float[Array, " T"]:
        """Returns the logit of the universal FFN's weight, float32."""
        with jax.default_matmul_precision("highest"):
            return self.universal(x.astype(jnp.float32))[:, 0]


class CoderRouter(nnx.Module):
    """The gate network of XFT (methods.md 2.4): `hidden` [d, E], tanh, `out` [E, E]; `noise` [d, E], zero at first."""

    def __init__(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.hidden = Linear((d_model, num_experts), rngs=rngs, dtype=dtype)
        self.out = Linear((num_experts, num_experts), rngs=rngs, dtype=dtype)
        self.noise = Leaves({"kernel": jnp.zeros((d_model, num_experts), dtype)})

    def __call__(self, x: Float[Array, "T d"], key: Array | None = None) -> Float[Array, "T E"]:
        """Returns logits, float32; with a key, that is in training, noise of a learned size is added."""
        x = x.astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            logits = coder_logits(x, self.hidden.kernel[...], self.out.kernel[...])
            return logits if key is None else add_noise(logits, x, self.noise.arrays()["kernel"], key)


StackedStats = tuple[RouterStats, ...]
"""One entry per router of every MoE position of every segment, in order; its arrays are stacked over the repeats. The
router of a position's PEFT experts, if they have one, comes after the MoE's.
"""


class RouterStatistics(NamedTuple):
    """Statistics of one router over all tokens of a text.

    Attributes:
      usage: share of the assignments that every expert got; float64, sums to 1.
      score: mean probability of every expert, over all tokens; float64, sums to 1.
      similarity: cosine between the logits of two experts over the tokens; float64.
    """

    usage: Float[np.ndarray, " E"]
    score: Float[np.ndarray, " E"]
    similarity: Float[np.ndarray, "E E"]


class RouterSums:
    """Accumulates the statistics of a router over batches; in float64, on the host."""

    def __init__(self) -> None:
        self._tokens = 0
        self._load, self._probability, self._gram = np.zeros(()), np.zeros(()), np.zeros(())

    def add(self, stats: RouterStats, tokens: int) -> None:
        """Adds the means of a batch, with the number of tokens that they are over."""
        self._tokens += tokens
        self._load = self._load + tokens * np.asarray(stats.load, np.float64)
        self._probability = self._probability + tokens * np.asarray(stats.probability, np.float64)
        self._gram = self._gram + tokens * np.asarray(stats.gram, np.float64)

    def statistics(self) -> RouterStatistics:
        """Returns the statistics over all batches."""
        norms = np.sqrt(np.outer(np.diag(self._gram), np.diag(self._gram)))
        # The cosine with logits that are always zero is undefined; such an expert counts as similar to no other.
        similarity = np.divide(self._gram, norms, out=np.zeros_like(norms), where=norms > 0)
        return RouterStatistics(self._load / self._tokens, self._probability / self._tokens, similarity)


def auxiliary_loss(config: ModelConfig, router: StackedStats) -> Float[Array, ""]:
    """Sums `balance_coef * balance + z_coef * z + cv_coef * cv` over all routers (methods.md 1), float32."""
    return _weighted([position.coefficients for position in _routers(config)], router)


def router_losses(moe: MoEConfig, stats: Sequence[RouterStats]) -> Float[Array, ""]:
    """Returns the sum of auxiliary losses over the routers of one MoE layer."""
    return _weighted(_coefficients(moe), stats)


def load_per_layer(config: ModelConfig, router: StackedStats) -> dict[int, Float[Array, " E"]]:
    """Returns the share of the assignments per expert, by layer index."""
    return {layer: stats.load for layer, stats in stats_per_layer(config, router).items()}


def stats_per_layer(config: ModelConfig, router: StackedStats, *, of_perft: bool = False) -> dict[int, RouterStats]:
    """Returns the statistics of every MoE's router by layer index, or with `of_perft` of its PEFT experts' router.

    The arrays are unstacked, and may be NumPy's.
    """
    per_layer = {}
    for position, stats in zip(_routers(config), router, strict=True):
        if position.of_perft == of_perft:
            for repeat, layer in enumerate(position.layers):
                per_layer[layer] = RouterStats(*(field[repeat] for field in stats))
    return dict(sorted(per_layer.items()))


class _Router(NamedTuple):
    """A router, perhaps stacked over several layers, and these layers."""

    layers: list[int]
    of_perft: bool
    coefficients: "_Coefficients"


class _Coefficients(NamedTuple):
    """Coefficients of the auxiliary losses of a router."""

    balance: float
    z: float
    cv: float


def _coefficients(moe: MoEConfig) -> list[_Coefficients]:
    """Returns the coefficients of every router of an MoE layer, in the order in which they report."""
    found = [_Coefficients(moe.balance_coef, moe.z_coef, moe.cv_coef)]
    if moe.perft is not None and moe.perft.variant == "routed":
        found.append(_Coefficients(moe.perft.balance_coef, moe.perft.z_coef, 0.0))
    return found


def _weighted(coefficients: Sequence[_Coefficients], routers: Sequence[RouterStats]) -> Float[Array, ""]:
    total = jnp.zeros((), jnp.float32)
    for coefficient, stats in zip(coefficients, routers, strict=True):
        losses = coefficient.balance * stats.balance + coefficient.z * stats.z + coefficient.cv * stats.cv
        total = total + jnp.sum(losses)
    return total


def _routers(config: ModelConfig) -> list[_Router]:
    """Returns the routers of every MoE position of every segment, in the order in which they report."""
    routers = []
    for segment in segments_of(config.layers):
        for position, layer in enumerate(segment.pattern):
            if not isinstance(layer.mlp, MoEConfig):
                continue
            layers = [segment.layer(repeat, position) for repeat in range(segment.repeats)]
            for index, coefficients in enumerate(_coefficients(layer.mlp)):
                routers.append(_Router(layers, index > 0, coefficients))
    return routers
