"""Counts the copies of an MoE's experts, and says when the larger MoE computes what the smaller one does.

A copy of an expert has its kernels, and its column of the router. Let every one of N experts become c, and every token
go to c times as many. All copies of an expert have its logit, so that the c k best are all copies of the k best, and:

- `topk_softmax`, `topk_sigmoid`: weights are shares of a sum that is c times as large, and c of them belong together;
- `softmax_topk`: so is the sum over all experts, and each probability a c-th (no logit need be lowered);
- `sigmoid_topk`: scores are as they were, c of them add up, and `gate_scale` is divided by c.

Biases of selection are copied; beside probabilities, which are a c-th, so is the bias. Groups are copied as wholes, and
c times as many are chosen: copies of a group have its score, whether that is of its best expert or of its best two.

Experts that are given weighted inputs (Llama 4) are no sum of their copies, and stay as many for a token.

If a token goes to one expert and still does, it goes to a copy of the same one. Its weight is what it was, but for
`softmax_topk` and `top1`, whose probability is a c-th, and `gate_scale` makes up for it. With several experts and a k
that does not grow, copies of one expert take the place of others: no choice of logits keeps a linear router from that.
Nor is there one if experts have different numbers of copies.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from moe_jax.core.errors import InputError, flag_of, raise_if_any
from moe_jax.functional.routing.gates import GATES
from moe_jax.models import ModelConfig, MoEConfig, SelectionConfig
from moe_jax.models.own_parts import LINEAR
from moe_jax.upcycling.spec import UpcycleSpec

ROUTER_NOISE = 0.01
"""Standard deviation of the noise on the columns of copies, relative to that of the router's kernel, by default."""

_GROWS = ("topk_softmax", "softmax_topk", "sigmoid_topk", "topk_sigmoid")
_ONE_STAYS = {"topk_softmax": False, "sigmoid_topk": False, "topk_sigmoid": False, "softmax_topk": True, "top1": True}
"""Gates with which a token's one expert may become one of its copies, and whether its weight must be scaled for it."""


def numbers_of_copies(demand: Float[np.ndarray, " N"] | None, experts: int, total: int) -> Int[np.ndarray, " N"]:
    """Returns how many experts each of N becomes, at least one, `total` in all.

    Args:
      demand: how much each expert calls for copies. One copy after the other is of the expert with the most for each
        that it has (D'Hondt's method), which makes the largest share of a copy as small as it can be; of equal ones,
        of the one with the fewest copies, then the first. None: all alike, and N divides `total`.
      experts: N.
      total: M, above N.
    """
    if demand is None:
        return np.full(experts, total // experts)
    counts = np.ones(experts, np.int64)
    for _ in range(total - experts):
        counts[np.lexsort((np.arange(experts), counts, -demand / counts))[0]] += 1
    return counts


def origins(counts: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """Returns the original of every expert: all once in their order, then those with a second copy, and so on."""
    rounds = (np.flatnonzero(counts > done) for done in range(int(counts.max())))
    return np.concatenate(list(rounds)).astype(np.int64)


def larger_config(source: ModelConfig, spec: UpcycleSpec) -> ModelConfig:
    """Returns the config of the larger MoE: `spec.experts` experts in every MoE layer, by default twice as many.

    Raises:
      InputError: if the options do not fit the model; all problems are listed.
    """
    problems = [f"{flag_of(name)} is for a dense model, and this is an MoE already" for name in spec.of_dense()]
    if spec.copies_by != "even" and spec.text is None:
        problems.append(f"--copies-by {spec.copies_by} needs a text to measure it on: --text")
    if spec.copies_by == "even" and spec.text is not None:
        problems.append("--text goes with --copies-by use or gradient")
    raise_if_any(problems, "upcycling an MoE")
    layers = list(source.layers)
    for i in source.moe_layers:
        try:
            layers[i] = dataclasses.replace(layers[i], mlp=_larger(source.moe(i), spec))
        except InputError as error:
            raise InputError(f"layer {i}: {error}") from None
    return dataclasses.replace(source, layers=tuple(layers))


def _larger(moe: MoEConfig, spec: UpcycleSpec) -> MoEConfig:
    total = 2 * moe.num_experts if spec.experts is None else spec.experts
    _check(moe, spec, total)
    times = total // moe.num_experts if spec.copies_by == "even" else None
    top_k = spec.top_k
    if top_k is None:
        top_k = moe.top_k * (times if times is not None and _adds_up(moe) else 1)
    scale, selection = moe.gate_scale, moe.selection
    if times is not None:
        if top_k == times * moe.top_k and moe.weighting == "sigmoid_topk" and _adds_up(moe):
            scale = scale / times
        if top_k == moe.top_k == 1 and _ONE_STAYS.get(moe.weighting, False):
            scale = scale * times
        if selection.groups > 1:
            groups = {"groups": times * selection.groups, "top_groups": times * selection.top_groups}
            selection = dataclasses.replace(selection, **groups)
    shared = {} if spec.shared_from is None else {"universal": "one"}
    return dataclasses.replace(moe, num_experts=total, top_k=top_k, gate_scale=scale, selection=selection, **shared)


def _adds_up(moe: MoEConfig) -> bool:
    """Whether the copies of an expert, all of which a token goes to, can give together what the expert gave."""
    return moe.weighting in _GROWS and not moe.weighs_inputs


def _check(moe: MoEConfig, spec: UpcycleSpec, total: int) -> None:
    """Raises `InputError` with all problems of the options with an MoE."""
    experts, problems = moe.num_experts, []
    if total <= experts:
        problems.append(f"--experts {total} must be above the {experts} experts that there are")
    elif spec.copies_by == "even" and total % experts:
        problems.append(
            f"--experts {total} is no multiple of the {experts} experts that there are; choose one, or give "
            "--copies-by use or gradient"
        )
    if moe.universal == "coder":
        problems.append("universal 'coder' has a gate network, of which no output can be copied")
    if moe.router != LINEAR:
        problems.append(f"columns of linear routers can be copied, and its router is {moe.router!r}")
    if moe.merged_experts is not None:
        problems.append("its experts are merged, so that several outputs of the router share one")
    if moe.perft is not None:
        problems.append("it has PEFT experts beside it; merge the model first")
    if spec.copies_by != "even" and moe.selection != SelectionConfig(bias=moe.selection.bias):
        problems.append(f"--copies-by {spec.copies_by} would make its groups={moe.selection.groups} unequal")
    if spec.shared_from is not None and moe.universal != "none":
        problems.append(f"--shared-from: it has a shared expert already (universal {moe.universal!r})")
    for option in ("noise", "shared_from"):
        if getattr(spec, option) and not moe.bank.has_own_kernels:
            problems.append(f"{flag_of(option)} needs full experts, and these are {moe.bank.kind}")
    raise_if_any(problems, "upcycling an MoE")


def why_different(source: ModelConfig, larger: ModelConfig, spec: UpcycleSpec) -> str | None:
    """Returns why the larger MoE is not meant to begin with the logits of the smaller one; None: it is meant to."""
    reasons = []
    if spec.copies_by != "even":
        reasons.append("experts have different numbers of copies")
    else:
        reasons += sorted({why for i in source.moe_layers if (why := _why_other_choice(source.moe(i), larger.moe(i)))})
    if noise := relative_router_noise(spec):
        reasons.append(f"noise {noise:g} on the router's columns of copies")
    if spec.noise:
        reasons.append(f"noise {spec.noise:g} on the copies")
    if spec.shared_from is not None:
        reasons.append("a shared expert is added")
    return " and ".join(reasons) or None


def _why_other_choice(moe: MoEConfig, larger: MoEConfig) -> str | None:
    times, gate = larger.num_experts // moe.num_experts, moe.weighting
    if larger.top_k == times * moe.top_k and _adds_up(moe):
        return None
    if larger.top_k == moe.top_k == 1 and gate in _ONE_STAYS and moe.selection.groups == 1:
        return None
    inputs = " and weighted inputs" * moe.weighs_inputs
    choice = f"top_k={larger.top_k} of {larger.num_experts} with gate {gate!r}{inputs}"
    return f"copies of one expert stand for others, {choice}"


def factor_of_selection_bias(moe: MoEConfig, larger: MoEConfig) -> float:
    """Returns what biases of selection are multiplied by, as the scores are that they are added to."""
    return moe.num_experts / larger.num_experts if GATES[moe.weighting].scores_sum_to_one else 1.0


def relative_router_noise(spec: UpcycleSpec) -> float:
    """Returns the noise on the router's columns of copies, relative to the standard deviation of its kernel."""
    return ROUTER_NOISE if spec.router_noise is None else spec.router_noise
