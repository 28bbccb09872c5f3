"""Gates: which experts are chosen, and their weights.

A gate is two small functions, registered by name: scores of all experts, and weights of the chosen ones. A bias or
groups, which restrict the choice, work with every gate. `register_gate` adds a gate, for `MoEConfig.gate` to name.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.core.registry import Registry
from moe_jax.functional.array_shapes import check_shape

GROUP_SCORES = ("best", "best_two")
# Of the gate `sparse_mixer`, as published.
MIXER_JITTER = 0.01


class Gate(NamedTuple):
    """How experts are scored and weighted.

    Attributes:
      scores: logits [T, E] -> scores, 0 or above; larger logits have larger scores.
      weights: logits and scores of the chosen experts [T, k], best first -> their weights.
      weights_among_all: logits of all experts, and the indices of the chosen ones, best first -> their weights, in
        place of `weights`, for a gate whose weights depend on experts that were not chosen.
      scores_sum_to_one: whether the scores of a token sum to 1.
      weights_sum_to_one: whether the weights of a token sum to 1.
    """

    scores: Callable[[Float[Array, "T E"]], Float[Array, "T E"]]
    weights: Callable[[Float[Array, "T k"], Float[Array, "T k"]], Float[Array, "T k"]]
    scores_sum_to_one: bool = False
    weights_sum_to_one: bool = False
    weights_among_all: Callable[[Float[Array, "T E"], Int[Array, "T k"]], Float[Array, "T k"]] | None = None


class Selection(NamedTuple):
    """Restricts the choice of experts; weights are computed from logits and scores alone.

    Attributes:
      bias: added to the scores that the choice is made by (DeepSeek-V3); it has no gradient.
      groups: number of groups of consecutive experts.
      top_groups: only experts of this many best groups are chosen.
      group_score: a group's score is that of its `best` expert (DeepSeek-V2), or the sum of its `best_two` (V3).
    """

    bias: Float[Array, " E"] | None = None
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"

    def check_fits(self, num_experts: int, top_k: int) -> None:
        """Raises `InputError` unless `top_k` of this many experts can be chosen in this way."""
        if self.bias is not None:
            check_shape("the bias of selection", self.bias, (num_experts,))
        check_member("group_score", self.group_score, GROUP_SCORES)
        if self.groups < 1 or num_experts % self.groups:
            raise InputError(f"groups={self.groups} must divide the number of experts, {num_experts}")
        size = num_experts // self.groups
        if self.groups > 1 and self.group_score == "best_two" and size < 2:
            raise InputError(f"groups={self.groups} leave one expert in each, and group_score 'best_two' needs two")
        if self.groups > 1 and not (1 <= self.top_groups <= self.groups and top_k <= size * self.top_groups):
            raise InputError(
                f"top_k={top_k} experts cannot be chosen from top_groups={self.top_groups} of {self.groups} groups of "
                f"{size}"
            )


UNBOUNDED = Selection()


class Choice(NamedTuple):
    """A gate's decision for T tokens.

    Attributes:
      experts: chosen experts, best first.
      weights: of the chosen experts.
      scores: of the chosen experts, taken from `probabilities`.
      probabilities: scores of all experts, normalised to sum to 1 where the gate's scores do not.
    """

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    scores: Float[Array, "T k"]
    probabilities: Float[Array, "T E"]


def choose(
    logits: Float[Array, "T E"], top_k: int, gate: str | Gate, selection: Selection = UNBOUNDED, scale: float = 1.0
) -> Choice:
    """Chooses `top_k` experts for every token.

    Args:
      logits: of the router, float32.
      top_k: experts per token.
      gate: a key of `GATES`, or a gate itself.
      selection: restricts the choice.
      scale: weights are multiplied by it.
    """
    assert logits.dtype == jnp.float32, logits.dtype
    gate = GATES[gate] if isinstance(gate, str) else gate
    scores = gate.scores(logits)
    if selection.bias is None and selection.groups == 1:
        # Scores of two unequal logits can be rounded to the same number.
        _, experts = jax.lax.top_k(logits, top_k)
    else:
        _, experts = jax.lax.top_k(_selection_scores(scores, selection), top_k)
    of_chosen = jnp.take_along_axis(scores, experts, axis=-1)
    if gate.weights_among_all is None:
        weights = gate.weights(jnp.take_along_axis(logits, experts, axis=-1), of_chosen)
    else:
        weights = gate.weights_among_all(logits, experts)
    if scale != 1.0:
        weights = weights * jnp.float32(scale)
    if not gate.scores_sum_to_one:
        total = jnp.sum(scores, axis=-1, keepdims=True)
        # Where all are zero, experts are equally probable; nothing is divided by zero, for the sake of the gradient.
        some = total > 0
        total = jnp.where(some, total, 1.0)
        scores, of_chosen = (jnp.where(some, array / total, 1.0 / scores.shape[-1]) for array in (scores, of_chosen))
    return Choice(experts, weights, of_chosen, scores)


def _selection_scores(scores: Float[Array, "T E"], selection: Selection) -> Float[Array, "T E"]:
    """Returns the scores to choose by: with the bias, and -inf for experts outside the best groups."""
    scores = jax.lax.stop_gradient(scores)
    if selection.bias is not None:
        scores = scores + jax.lax.stop_gradient(selection.bias)[None, :]
    if selection.groups == 1:
        return scores
    grouped = scores.reshape(scores.shape[0], selection.groups, -1)
    best = jax.lax.top_k(grouped, 1 if selection.group_score == "best" else 2)[0]
    _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), selection.top_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(selection.groups)[None, None, :], axis=1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _softmax(logits: Float[Array, "T E"]) -> Float[Array, "T E"]:
    return jax.nn.softmax(logits, axis=-1)


def _scores_unchanged(logits: Float[Array, "T k"], scores: Float[Array, "T k"]) -> Float[Array, "T k"]:
    return scores


def _softmax_of_chosen(logits: Float[Array, "T k"], scores: Float[Array, "T k"]) -> Float[Array, "T k"]:
    weights = jax.nn.softmax(logits, axis=-1)
    if logits.shape[1] == 2:
        # Rounded separately, the two would not quite sum to 1. As computed here, the weighted sum of two equal experts
        # is one of them to the last bit, and an upcycled model starts as its dense model (methods.md 2.5).
        weights = jnp.stack([weights[:, 0], 1.0 - weights[:, 0]], axis=1)
    return weights


def _coder_weights(logits: Float[Array, "T k"], scores: Float[Array, "T k"]) -> Float[Array, "T k"]:
    first = scores[:, :1]
    others = (jax.nn.softmax(scores, axis=-1) * first)[:, 1:]
    # The best expert gets p_1 minus the others' weights, for the same reason: together with 1 - p_1 all sum to 1.
    return jnp.concatenate([first - jnp.sum(others, axis=1, keepdims=True), others], axis=1)


def _share_of_near_ones(logits: Float[Array, "T E"], experts: Int[Array, "T k"]) -> Float[Array, "T k"]:
    """Returns the probability of each chosen expert among those that are near it and were not chosen before it.

    SparseMixer (arXiv 2310.00811) as Phi-3.5-MoE applies it outside of training: near an expert of the logit l are
    those with a logit m for which `(l - m) / max(|m|, l)` is at most 2 * 0.01.
    """
    left, shares = jnp.ones(logits.shape, bool), []
    for expert in jnp.moveaxis(experts, -1, 0):
        own = jnp.take_along_axis(logits, expert[:, None], axis=-1)
        distance = (own - logits) / jnp.maximum(jnp.abs(logits), own)
        near = left & ~(jax.lax.stop_gradient(distance) > 2 * MIXER_JITTER)
        shares.append(jnp.exp(own[:, 0] - jax.nn.logsumexp(jnp.where(near, logits, -jnp.inf), axis=-1)))
        left = left & (jnp.arange(logits.shape[-1])[None, :] != expert[:, None])
    return jnp.stack(shares, axis=-1)


def _renormalised(logits: Float[Array, "T k"], scores: Float[Array, "T k"]) -> Float[Array, "T k"]:
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


GATES: Registry[Gate] = Registry(
    "gate",
    {
        # Probabilities of the full softmax, not renormalised (OLMoE; DeRS eq. 1).
        "softmax_topk": Gate(_softmax, _scores_unchanged, scores_sum_to_one=True),
        # Softmax over the kept logits, which is the full one renormalised (Mixtral, PESC).
        "topk_softmax": Gate(_softmax, _softmax_of_chosen, scores_sum_to_one=True, weights_sum_to_one=True),
        # p_1 of the full softmax (Switch): `softmax_topk` with one expert per token.
        "top1": Gate(_softmax, _scores_unchanged, scores_sum_to_one=True),
        # Softmax over the kept probabilities, times p_1 (XFT, beside a universal FFN).
        "coder": Gate(_softmax, _coder_weights, scores_sum_to_one=True),
        # Every expert by itself, not renormalised (Llama 4).
        "sigmoid_topk": Gate(jax.nn.sigmoid, _scores_unchanged),
        # The same, renormalised over the kept ones (DeepSeek-V3).
        "topk_sigmoid": Gate(jax.nn.sigmoid, _renormalised, weights_sum_to_one=True),
        # Each one's share of those that are near it, and not better (Phi-3.5-MoE).
        "sparse_mixer": Gate(
            _softmax, _scores_unchanged, scores_sum_to_one=True, weights_among_all=_share_of_near_ones
        ),
    },
)


def register_gate(name: str, gate: Gate) -> None:
    """Registers a gate, for `MoEConfig.gate` to name.

    Raises:
      InputError: if the name is one of the library's, or no name, or `gate` is no `Gate`. The name is best the import
        path of the gate, which is in the config of every model with it.
    """
    if not isinstance(gate, Gate):
        raise InputError(f"gate {name!r} would be {shown(gate)}, expected functional.Gate(scores, weights)")
    GATES.register(name, gate)


def weights_are_constant(gate: str, top_k: int, num_experts: int) -> bool:
    """Whether the chosen expert always has weight 1, whatever the logits are, although there is a choice.

    A single weight that is normalised to sum to 1 is 1: the router gets no gradient from the task, only from auxiliary
    losses.
    """
    return GATES[gate].weights_sum_to_one and top_k == 1 < num_experts
