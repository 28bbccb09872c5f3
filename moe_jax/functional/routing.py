"""Routing: which experts a token goes to, and with what weights. Always float32 (methods.md 1).

A gate is two small functions, registered by name: scores of all experts, and weights of the chosen ones. A bias or
groups, which restrict the choice, work with every gate. `register_gate` adds a gate, for `MoEConfig.gate` to name.
Routing is deterministic, and drops nothing unless a capacity is given. Beside the experts there may be a universal FFN,
a shared expert that sees every token (methods.md 2.4).
"""

import math
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.errors import InputError, shown
from moe_jax.core.registry import Registry
from moe_jax.functional.dense import linear


def check_shape(name: str, array: Any, expected: tuple[int | None | EllipsisType, ...]) -> None:
    """Raises `InputError`, naming both shapes, unless an array has the expected one.

    Args:
      name: of the argument.
      array: anything with a `shape`; under `jax.jit` it is checked once, when the program is traced.
      expected: sizes; None stands for any size, and `...` for any number of axes.
    """
    import chex  # Here: it takes a twentieth of a second, which commands that compute nothing need not wait for.

    try:
        chex.assert_shape(array, expected)
    except AssertionError:
        wanted = ", ".join({None: "any", ...: "..."}.get(size, str(size)) for size in expected)
        raise InputError(f"{name} has the shape {tuple(array.shape)}, expected ({wanted})") from None


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
        scores, of_chosen = scores / total, of_chosen / total
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


BALANCE_CHOICES = ("all", "first")

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


def renumbered(routing: Routing, numbers: Int[Array, " E"]) -> Routing:
    """Returns a routing to the same experts, by other numbers of theirs.

    Args:
      routing: to experts in [0, E), or others, which become `NO_EXPERT`.
      numbers: int32, the number of each of the E experts; `NO_EXPERT` leaves it out. Its weight stays.
    """
    is_one = (routing.experts >= 0) & (routing.experts < numbers.shape[0])
    experts = jnp.take(numbers, routing.experts, mode="clip").astype(routing.experts.dtype)
    return routing._replace(experts=jnp.where(is_one, experts, NO_EXPERT))


def weighted_inputs(x: Float[Array, "T d"], routing: Routing) -> tuple[Float[Array, "T*k d"], Routing]:
    """Returns the input of every assignment, times its weight, and its routing to one expert with weight 1.

    The sum over a token's k rows of what the experts return is that of experts whose inputs are weighted.
    """
    tokens, choices = routing.weights.shape
    rows = x.astype(jnp.float32)[:, None, :] * routing.weights[..., None]
    one = Routing(routing.experts.reshape(-1, 1), jnp.where(routing.experts == NO_EXPERT, 0.0, 1.0).reshape(-1, 1))
    return rows.astype(x.dtype).reshape(tokens * choices, -1), one


class RouterStats(NamedTuple):
    """Statistics of a router's decisions for a batch: means over the tokens that are not padding; float32.

    They may be stacked, and be NumPy's.

    Attributes:
      z: mean squared logsumexp of the logits.
      load: share f_i of the assignments per expert; sums to 1. It is a count, without a gradient.
      dropped: share of the assignments that are beyond the capacity.
      importance: an expert's sum of probabilities over the tokens that chose it, by the number of all tokens.
      probability: mean probability P_i per expert; sums to 1.
      gram: mean over the tokens of the product of the logits of every two experts. It has no gradient.
      tokens: the number of tokens.
      balanced_load: the load that the balance loss is of: `load`, or the share of the first choices alone.
      sequence_balance: mean over the tokens of the `balance` within each one's sequence; 0 where it was not asked for.
    """

    z: Float[Array, ""]
    load: Float[Array, " E"]
    dropped: Float[Array, ""]
    importance: Float[Array, " E"]
    probability: Float[Array, " E"]
    gram: Float[Array, "E E"]
    tokens: Float[Array, ""]
    balanced_load: Float[Array, " E"]
    sequence_balance: Float[Array, ""]

    @property
    def balance(self) -> Float[Array, ""]:
        """`E * sum_i f_i P_i` with the `balanced_load` f, 1 for uniform routing, E/k when collapsed onto k experts.

        The gradient reaches the router through the probabilities alone.
        """
        return self.load.shape[-1] * (self.balanced_load * self.probability).sum(-1)

    @property
    def cv(self) -> Float[Array, ""]:
        """Squared coefficient of variation of the importance plus that of the load, as XFT adds them; 0 if uniform."""
        return squared_cv(self.importance) + squared_cv(self.load)


def sums_of(stats: RouterStats) -> RouterStats:
    """Returns statistics as sums over the tokens, which those of several batches can be added to."""
    return _scaled(stats, stats.tokens)


def means_of(sums: RouterStats) -> RouterStats:
    """Returns the statistics of sums over tokens."""
    return _scaled(sums, 1.0 / jnp.maximum(sums.tokens, 1.0))


def _scaled(stats: RouterStats, factor: Array) -> RouterStats:
    scaled = (field * factor.reshape(factor.shape + (1,) * (field.ndim - factor.ndim)) for field in stats)
    return RouterStats(*scaled)._replace(tokens=stats.tokens)


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
      InputError: for arrays of other shapes, logits that are not float32, `top_k` out of range, or no gate.
    """
    if not isinstance(gate, Gate):
        GATES.check("gate", gate)
        gate = GATES[gate]
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
    balanced = load if balance_choices == "all" else jnp.sum(chosen[:, 0] * counted[:, None], axis=0) / total
    mean_probability = jnp.sum(probabilities * counted[:, None], axis=0) / total
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * counted) / total
    importance = jnp.sum(chosen * (top_probabilities * counted[:, None])[:, :, None], axis=(0, 1)) / total

    fixed = jax.lax.stop_gradient(logits)
    gram = jnp.einsum("ti,tj->ij", fixed * counted[:, None], fixed, precision="highest") / total
    dropped = jnp.zeros((), jnp.float32)
    kept = None if valid is None else jnp.broadcast_to(valid[:, None], experts.shape)
    if capacity_factor is not None and pads_capacity:
        fits = _within_padded_capacity(experts, num_experts, capacity_factor, num_sequences)
        if gate.weights_sum_to_one:
            weights = _as_large_together(weights, fits)
        kept = fits if kept is None else fits & kept
    elif capacity_factor is not None:
        kept = _within_capacity(experts, kept, num_experts, capacity_factor, num_sequences)
    if capacity_factor is not None and kept is not None:
        dropped = 1.0 - jnp.sum(kept.astype(jnp.float32)) / (total * top_k)
    if kept is not None:
        experts, weights = jnp.where(kept, experts, NO_EXPERT), jnp.where(kept, weights, 0.0)
    count = jnp.sum(counted)
    loads = jax.lax.stop_gradient((load, balanced))
    within = jnp.zeros((), jnp.float32)
    if sequences is not None:
        within = _balance_within(sequences, assigned * (counted / top_k)[:, None], probabilities, counted) / total
    stats = RouterStats(z, loads[0], dropped, importance, mean_probability, gram, count, loads[1], within)
    return Routing(experts, weights), stats


def _balance_within(
    sequences: int | Int[Array, "R n"],
    shares: Float[Array, "T E"],
    probabilities: Float[Array, "T E"],
    counted: Float[Array, " T"],
) -> Float[Array, ""]:
    """Returns the sum over sequences of their tokens times `E * sum_i f_i P_i`, both taken within the sequence.

    Of sequences of equal length, its mean over the tokens is DeepSeek-V3's complementary loss (arXiv:2412.19437,
    equations 17 to 20) without the coefficient: the mean over the sequences. A longer one counts by its tokens.

    Args:
      sequences: as in `route`.
      shares: of every token's one assignment, split over its k experts; zeros for padding.
      probabilities: scores, normalised over the experts.
      counted: 1 for tokens that are not padding, 0 for padding.
    """
    rows = sequences if isinstance(sequences, int) else sequences.shape[0]
    parts = (jax.lax.stop_gradient(shares), probabilities * counted[:, None], counted[:, None])
    parts = [part.reshape(rows, -1, part.shape[-1]) for part in parts]
    if isinstance(sequences, int):
        load, probability, tokens = (jnp.sum(part, axis=1) for part in parts)
    else:
        # Which of its row's documents a token belongs to, counted from 0; there are no more of them than tokens.
        begins = jnp.diff(sequences, axis=1, prepend=sequences[:, :1]) != 0
        document = jnp.cumsum(begins.astype(jnp.int32), axis=1)
        sums = jax.vmap(lambda part, at: jax.ops.segment_sum(part, at, num_segments=at.shape[0]))
        load, probability, tokens = (sums(part, document) for part in parts)
    return shares.shape[-1] * jnp.sum(load * probability / jnp.maximum(tokens, 1.0))


def squared_cv(x: Float[Array, "*S E"]) -> Float[Array, "*S"]:
    """Returns the squared coefficient of variation: sample variance, as in XFT, over squared mean.

    It is 0 where all entries are equal, and E/k * (E - k)/(E - 1) where k of E entries are equal and the others 0.
    """
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).sum(-1) / max(1, x.shape[-1] - 1)
    return variance / (mean[..., 0] ** 2 + 1e-10)


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


def _within_padded_capacity(
    experts: Int[Array, "T k"], num_experts: int, factor: float, num_groups: int
) -> Bool[Array, "T k"]:
    """Returns which assignments are within the capacity of their group; first choices of earlier tokens come first."""
    tokens, top_k = experts.shape
    size = tokens // num_groups
    chosen = jax.nn.one_hot(experts.reshape(num_groups, size, top_k), num_experts, dtype=jnp.int32)
    in_turn = chosen.transpose(0, 2, 1, 3).reshape(num_groups, top_k * size, num_experts)
    earlier = jnp.sum((jnp.cumsum(in_turn, axis=1) - in_turn) * in_turn, axis=2)
    fits = earlier < math.ceil(size / num_experts * (factor * top_k))
    return fits.reshape(num_groups, top_k, size).transpose(0, 2, 1).reshape(tokens, top_k)


def _as_large_together(weights: Float[Array, "T k"], kept: Bool[Array, "T k"]) -> Float[Array, "T k"]:
    """Returns the weights of what is kept, which sum to what all did; of a token that keeps nothing, zeros."""
    left = jnp.where(kept, weights, 0.0)
    total = jnp.sum(left, axis=-1, keepdims=True)
    return left * jnp.sum(weights, axis=-1, keepdims=True) / jnp.where(total == 0, 1.0, total)


UNIVERSAL = ("none", "coder", "med", "one", "sigmoid")
# Universal FFNs that fix the gate of the experts beside them: Coder-MoE (XFT) has a gate of its own, Med-MoE takes the
# probabilities of the full softmax. The others work with any gate.
GATE_BESIDE = {"coder": "coder", "med": "softmax_topk"}
NOISE_FLOOR = 1e-2


def universal_weight(
    logits: Float[Array, "T E"], universal: str, own_logit: Float[Array, " T"] | None = None
) -> Float[Array, " T"]:
    """Returns the weight of the universal FFN.

    `coder`: 1 - p_1, where p_1 is the largest probability. The weights of the routed experts sum to p_1, so all weights
    together sum to 1: if all FFNs are equal, the layer returns what one of them would. `med` and `one`: always 1.
    `sigmoid`: the sigmoid of a logit of its own.

    Args:
      logits: router logits, float32.
      universal: one of `UNIVERSAL` except `none`.
      own_logit: for `sigmoid`, float32.
    """
    if universal == "sigmoid":
        assert own_logit is not None, "universal 'sigmoid' has a logit of its own"
        return jax.nn.sigmoid(own_logit)
    if universal == "coder":
        return 1.0 - jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
    return jnp.ones(logits.shape[:1], jnp.float32)


def add_choice(
    routing: Routing, expert: int, weight: Float[Array, " T"], valid: Bool[Array, " T"] | None = None
) -> Routing:
    """Adds a last choice to every token: `expert`, with the given weight.

    Args:
      routing: the choices so far.
      expert: index of the expert in its bank.
      weight: float32.
      valid: tokens that are not padding; the last choice of padding is `NO_EXPERT`. None: all.
    """
    last = jnp.full(weight.shape, expert, jnp.int32)
    if valid is not None:
        last, weight = jnp.where(valid, last, NO_EXPERT), jnp.where(valid, weight, 0.0)
    experts = jnp.concatenate([routing.experts, last[:, None]], axis=1)
    return Routing(experts, jnp.concatenate([routing.weights, weight[:, None]], axis=1))


def add_weighted(
    y: Float[Array, "T d"], universal: Float[Array, "T d"], weight: Float[Array, " T"]
) -> Float[Array, "T d"]:
    """Returns `y + weight * universal`, computed in float32 and rounded once to the dtype of `y`."""
    return (y.astype(jnp.float32) + weight[:, None] * universal.astype(jnp.float32)).astype(y.dtype)


def coder_logits(x: Float[Array, "T d"], hidden: Float[Array, "d E"], out: Float[Array, "E E"]) -> Float[Array, "T E"]:
    """Returns the logits of XFT's gate network: a linear map, tanh and another linear map, without biases."""
    return linear(jnp.tanh(linear(x, hidden)), out)


def add_noise(
    logits: Float[Array, "T E"], x: Float[Array, "T d"], noise: Float[Array, "d E"], key: Array
) -> Float[Array, "T E"]:
    """Returns `logits + n * (softplus(x W) + 0.01)`, n standard normal: XFT's training noise (Shazeer et al. 2017)."""
    scale = jax.nn.softplus(linear(x, noise)) + NOISE_FLOOR
    return logits + scale * jax.random.normal(key, logits.shape, jnp.float32)
