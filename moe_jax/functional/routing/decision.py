"""Routing: which experts a token goes to, and with what weights. Always float32 (methods.md 1).

It is deterministic, and drops nothing unless a capacity is given. A universal FFN's part of it is in `universal`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.functional.array_checks import check_shape
from moe_jax.functional.routing.gates import UNBOUNDED, Selection, choose

# Stands in place of an expert for padding, and for an assignment beyond the capacity: nothing is computed for it.
NO_EXPERT = -1


class Routing(NamedTuple):
    """The decision for T tokens.

    Attributes:
      experts: chosen experts, best first; `NO_EXPERT` for padding and for an assignment that is dropped.
      weights: their weights, float32; zero for `NO_EXPERT`.
    """

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


class RouterStats(NamedTuple):
    """Statistics of a router's decisions for a batch, over the tokens that are not padding; float32.

    Attributes:
      balance: `E * sum_i f_i P_i`, 1 for uniform routing, E/k when collapsed onto k experts.
      z: mean squared logsumexp of the logits.
      load: share f_i of the assignments per expert; sums to 1.
      dropped: share of the assignments that are beyond the capacity.
      cv: squared coefficient of variation of the importance (an expert's sum of probabilities over the tokens that
        chose it) plus that of the load, as XFT adds them; 0 for uniform routing.
      probability: mean probability per expert; sums to 1.
      gram: mean over the tokens of the product of the logits of every two experts. It has no gradient.
    """

    balance: Float[Array, ""]
    z: Float[Array, ""]
    load: Float[Array, " E"]
    dropped: Float[Array, ""]
    cv: Float[Array, ""]
    probability: Float[Array, " E"]
    gram: Float[Array, "E E"]


def route(
    logits: Float[Array, "T E"],
    top_k: int,
    gate: str,
    *,
    selection: Selection = UNBOUNDED,
    scale: float = 1.0,
    valid: Bool[Array, " T"] | None = None,
    capacity_factor: float | None = None,
    num_sequences: int = 1,
) -> tuple[Routing, RouterStats]:
    """Chooses `top_k` experts for every token.

        >>> import jax.numpy as jnp
        >>> routing, stats = moe_jax.route(jnp.array([[0.0, 1.0, 3.0]]), 2, "topk_softmax")
        >>> routing.experts.tolist(), round(float(routing.weights.sum()), 6)
        ([[2, 1]], 1.0)

    Args:
      logits: router logits, float32.
      top_k: experts per token.
      gate: a key of `gates.GATES`.
      selection: restricts the choice beyond the logits: a bias, or groups of experts.
      scale: weights are multiplied by it.
      valid: tokens that are not padding. Padding goes to no expert, takes no capacity and is in no statistic. None:
        all.
      capacity_factor: None is dropless; otherwise an expert takes at most `ceil(factor * n * k / E)` assignments of a
        sequence of n valid tokens, earlier tokens first. Sequences are what GShard calls groups (Lepikhin et al. 2020,
        section 2.2): which assignments are dropped depends on neither the rest of the batch nor how it is split.
      num_sequences: the tokens are this many sequences of equal length, one after the other.

    Raises:
      InputError: for arrays of other shapes, logits that are not float32, or `top_k` out of range.
    """
    check_shape("logits", logits, (None, None))
    tokens, num_experts = logits.shape
    if logits.dtype != jnp.float32:
        raise InputError(f"logits are {logits.dtype}, expected float32")
    if not 1 <= top_k <= num_experts:
        raise InputError(f"top_k={top_k} must lie between 1 and the number of experts, {num_experts}")
    if valid is not None:
        check_shape("valid", valid, (tokens,))
    experts, weights, top_probabilities, probabilities = choose(logits, top_k, gate, selection, scale)

    counted = jnp.ones(logits.shape[:1], jnp.float32) if valid is None else valid.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counted), 1.0)
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
    assigned = jnp.sum(chosen, axis=1)
    load = jnp.sum(assigned * counted[:, None], axis=0) / (total * top_k)
    mean_probability = jnp.sum(probabilities * counted[:, None], axis=0) / total
    # The load is a count and has no gradient; the gradient reaches the router through the probabilities alone.
    balance = num_experts * jnp.sum(jax.lax.stop_gradient(load) * mean_probability)
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * counted) / total
    importance = jnp.sum(chosen * (top_probabilities * counted[:, None])[:, :, None], axis=(0, 1)) / total
    cv = squared_cv(importance) + squared_cv(jax.lax.stop_gradient(load))

    fixed = jax.lax.stop_gradient(logits)
    gram = jnp.einsum("ti,tj->ij", fixed * counted[:, None], fixed, precision="highest") / total
    dropped = jnp.zeros((), jnp.float32)
    kept = None if valid is None else jnp.broadcast_to(valid[:, None], experts.shape)
    if capacity_factor is not None:
        kept = _within_capacity(experts, kept, num_experts, capacity_factor, num_sequences)
        dropped = 1.0 - jnp.sum(kept.astype(jnp.float32)) / (total * top_k)
    if kept is not None:
        experts, weights = jnp.where(kept, experts, NO_EXPERT), jnp.where(kept, weights, 0.0)
    stats = RouterStats(balance, z, load, dropped, cv, mean_probability, gram)
    return Routing(experts, weights), stats


def squared_cv(x: Float[Array, " E"]) -> Float[Array, ""]:
    """Returns the squared coefficient of variation: sample variance, as in XFT, over squared mean.

    It is 0 where all entries are equal, and E/k * (E - k)/(E - 1) where k of E entries are equal and the others 0.
    """
    mean = jnp.mean(x)
    variance = jnp.sum(jnp.square(x - mean)) / max(1, x.size - 1)
    return variance / (jnp.square(mean) + 1e-10)


def _within_capacity(
    experts: Int[Array, "T k"], valid: Bool[Array, "T k"] | None, num_experts: int, factor: float, num_sequences: int
) -> Bool[Array, "T k"]:
    """Returns which assignments are valid and within the capacity; earlier tokens and better choices come first."""
    valid = jnp.ones(experts.shape, bool) if valid is None else valid
    # [sequences, assignments in their order, E]
    chosen = jax.nn.one_hot(jnp.where(valid, experts, NO_EXPERT), num_experts, dtype=jnp.int32)
    chosen = chosen.reshape(num_sequences, -1, num_experts)
    earlier = jnp.sum((jnp.cumsum(chosen, axis=1) - chosen) * chosen, axis=2)
    # The capacity follows from the number of valid assignments and is tabulated here: on the device, rounding could add
    # one to a whole number.
    most = chosen.shape[1]
    capacities = jnp.asarray(np.ceil(factor * np.arange(most + 1) / num_experts).clip(max=most), jnp.int32)
    capacity = jnp.take(capacities, jnp.sum(chosen, axis=(1, 2)))
    return (earlier < capacity[:, None]).reshape(experts.shape) & valid
