"""From logits of a router to assignments and statistics: deterministic, and nothing is dropped without a capacity."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError, check_member, is_finite, shown
from moe_jax.functional.array_shapes import check_shape
from moe_jax.functional.routing.capacity import as_large_together, within_capacity, within_padded_capacity
from moe_jax.functional.routing.gates import GATES, UNBOUNDED, Gate, Selection, choose
from moe_jax.functional.routing.router_stats import RouterStats, balance_within
from moe_jax.functional.routing.token_choices import NO_EXPERT, Routing

BALANCE_CHOICES = ("all", "first")


def route(
    logits: Float[Array, "T E"],
    top_k: int,
    gate: str | Gate,
    *,
    selection: Selection = UNBOUNDED,
    scale: float = 1.0,
    valid: Bool[Array, " T"] | None = None,
    capacity_factor: float | None = None,
    num_sequences: int = 1,
    pads_capacity: bool = False,
    balance_choices: Literal["all", "first"] = "all",
    sequences: int | Int[Array, "R n"] | None = None,
) -> tuple[Routing, RouterStats]:
    """Chooses `top_k` experts for every token.

        >>> import jax.numpy as jnp
        >>> routing, stats = moe_jax.route(jnp.array([[0.0, 1.0, 3.0]]), 2, "topk_softmax")
        >>> routing.experts.tolist(), round(float(routing.weights.sum()), 6)
        ([[2, 1]], 1.0)

    With a gate of your own, here one whose weights are those of all logits squared:

        >>> squares = moe_jax.functional.Gate(jnp.square, lambda logits, scores: scores)
        >>> moe_jax.route(jnp.array([[0.0, 1.0, 3.0]]), 2, squares)[0].weights.tolist()
        [[9.0, 1.0]]

    Args:
      logits: router logits, float32.
      top_k: experts per token.
      gate: a key of `GATES`, or a gate itself, which `register_gate` gives a name that a config can have.
      selection: restricts the choice beyond the logits: a bias, or groups of experts.
      scale: weights are multiplied by it.
      valid: tokens that are not padding. Padding goes to no expert, takes no capacity, unless `pads_capacity`, and is
        in no statistic. None: all.
      capacity_factor: None is dropless; otherwise an expert takes at most `ceil(factor * n * k / E)` assignments of a
        sequence of n valid tokens, earlier tokens first. Sequences are what GShard calls groups (Lepikhin et al. 2020,
        section 2.2): which assignments are dropped depends on neither the rest of the batch nor how it is split.
      num_sequences: the tokens are this many sequences of equal length, one after the other.
      pads_capacity: the capacity is that of DeepSpeed, `ceil(factor * S * k / E)` of a group of S tokens, padding
        among them, in which it takes room too: all first choices come before all second ones. Of a gate whose weights
        sum to 1, those that are left of a token do so again. The groups are what `num_sequences` counts.
      balance_choices: the choices that the `balanced_load` counts, all k or the first.
      sequences: those that the `sequence_balance` is taken within: a number of rows of equal length, each of which is
        one; or R rows of n tokens, with the document of every token, which lie one after the other. None: it is not
        computed.

    Raises:
      InputError: for arrays of other shapes, logits that are not float32, numbers out of range, no gate, unknown
        words, a selection that leaves too few experts, or a number of sequences that does not divide the tokens.
    """
    if not isinstance(gate, Gate):
        GATES.check("gate", gate)
        gate = GATES[gate]
    check_shape("logits", logits, (None, None))
    tokens, num_experts = logits.shape
    if logits.dtype != jnp.float32:
        raise InputError(f"logits are {logits.dtype}, expected float32")
    if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise InputError(f"top_k={top_k} must lie between 1 and the number of experts, {num_experts}")
    selection.check_fits(num_experts, top_k)
    check_member("balance_choices", balance_choices, BALANCE_CHOICES)
    if capacity_factor is not None and not (is_finite(capacity_factor) and capacity_factor > 0):
        raise InputError(f"capacity_factor={shown(capacity_factor)} must be a finite number above 0")
    rows = {"num_sequences": num_sequences, "sequences": sequences if isinstance(sequences, int) else 1}
    for name, count in rows.items():
        if tokens and (count < 1 or tokens % count):
            raise InputError(f"{name}={count} must divide the number of tokens, {tokens}")
    if sequences is not None and not isinstance(sequences, int):
        check_shape("sequences", sequences, (None, None))
        if sequences.size != tokens:
            raise InputError(
                f"sequences has the shape {sequences.shape}, expected one entry for each of {tokens} tokens"
            )
    if valid is not None:
        check_shape("valid", valid, (tokens,))
        if not pads_capacity:  # where it takes room, at the experts that it chooses
            # Whatever padding holds, it is in no statistic.
            logits = jnp.where(valid[:, None], logits, 0.0)
    experts, weights, top_probabilities, probabilities = choose(logits, top_k, gate, selection, scale)

    counted = jnp.ones(logits.shape[:1], jnp.float32) if valid is None else valid.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counted), 1.0)
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
    assigned = jnp.sum(chosen, axis=1)
    load = jnp.sum(assigned * counted[:, None], axis=0) / (total * top_k)
    balanced = load if balance_choices == "all" else jnp.sum(chosen[:, 0] * counted[:, None], axis=0) / total
    mean_probability = jnp.sum(probabilities * counted[:, None], axis=0) / total
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * counted) / total
    importance = jnp.sum(chosen * (top_probabilities * counted[:, None])[:, :, None], axis=(0, 1)) / total

    fixed = jax.lax.stop_gradient(logits)
    gram = jnp.einsum("ti,tj->ij", fixed * counted[:, None], fixed, precision="highest") / total
    dropped = jnp.zeros((), jnp.float32)
    kept = None if valid is None else jnp.broadcast_to(valid[:, None], experts.shape)
    if capacity_factor is not None and pads_capacity:
        fits = within_padded_capacity(experts, num_experts, capacity_factor, num_sequences)
        if gate.weights_sum_to_one:
            weights = as_large_together(weights, fits)
        kept = fits if kept is None else fits & kept
    elif capacity_factor is not None:
        kept = within_capacity(experts, kept, num_experts, capacity_factor, num_sequences)
    if capacity_factor is not None and kept is not None:
        dropped = 1.0 - jnp.sum(kept.astype(jnp.float32)) / (total * top_k)
    if kept is not None:
        experts, weights = jnp.where(kept, experts, NO_EXPERT), jnp.where(kept, weights, 0.0)
    count = jnp.sum(counted)
    loads = jax.lax.stop_gradient((load, balanced))
    within = jnp.zeros((), jnp.float32)
    if sequences is not None:
        within = balance_within(sequences, assigned * (counted / top_k)[:, None], probabilities, counted) / total
    stats = RouterStats(z, loads[0], dropped, importance, mean_probability, gram, count, loads[1], within)
    return Routing(experts, weights), stats
