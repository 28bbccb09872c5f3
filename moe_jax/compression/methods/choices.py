"""The ways in which `allocate` may store a matrix of all experts of a layer, and what each changes in its outputs.

Errors of codes are nearly independent: what each matrix of each expert does to the outputs adds up as squares. Not so
where experts lose what they do not share (`together`). The error of a centre is the same in all experts of a token, so
that its outputs are added before they are squared; and what was learnt together, by all matrices of an expert and by
the experts of a token, is also lost together. See methods.md 5.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.compression.budget import Candidate
from moe_jax.compression.calibration.sensitivities import output_error
from moe_jax.compression.coding.coder import LeastError, LeastOutputError, expert_coders, shared_base_coder
from moe_jax.compression.source_layer import SourceLayer, aligned_biases, aligned_experts, aligned_kernels, mean_kernel
from moe_jax.experts.forms import LowRank
from moe_jax.experts.forms.coding import Wanted
from moe_jax.functional.dense import ffn_hidden

TOKENS = 512
"""For which outputs are computed, at most, evenly from the text."""


class Together(NamedTuple):
    """The error of all experts and matrices together, divided by the sum of what each makes on its own."""

    centre: float  # for an error of the centre, which each matrix makes independently of the others
    residuals: float  # for all residuals left out: every expert becomes the mean


def together(layer: SourceLayer, permutations: Int[np.ndarray, "E f"]) -> Together:
    """Measures both on the calibration text, with the neurons of every expert in an order around their mean."""
    rows = layer.rows
    assert rows is not None
    picked = np.linspace(0, len(rows.experts) - 1, min(TOKENS, len(rows.experts))).astype(int)
    x, given = np.asarray(rows.inputs[picked], np.float32), np.asarray(rows.weights[picked], np.float32)
    # Router weights of all experts; 1 of one that every token goes to, and 0 of those that a token does not.
    weights = np.ones((len(picked), layer.num_experts), np.float32)
    for expert in range(layer.moe.bank_experts):
        weights[:, expert] = np.where(rows.experts[picked] == expert, given, 0).sum(axis=1)
    of_one = float(np.sum(weights**2, dtype=np.float64))
    centre = float(np.sum(weights.sum(axis=1) ** 2, dtype=np.float64)) / of_one if of_one else 1.0

    names = tuple(layer.shapes)
    means = {name: jnp.asarray(mean_kernel(aligned_kernels(layer, name, permutations))) for name in names}
    biases = {name: own for name in names if (own := aligned_biases(layer, name, permutations)) is not None}
    all_together, alone = jnp.zeros(x.shape), 0.0
    for expert, own in enumerate(aligned_experts(layer, permutations)):
        lost, of_matrices = _lost(
            {name: jnp.asarray(kernel) for name, kernel in own.items()},
            means,
            {name: jnp.asarray(stacked[expert], jnp.float32) for name, stacked in biases.items() if name != "down"},
            jnp.asarray(x),
            jnp.asarray(weights[:, expert]),
            activation=layer.moe.expert.activation,
        )
        all_together, alone = all_together + lost, alone + float(of_matrices)
    return Together(centre, float(jnp.sum(all_together**2)) / alone if alone > 0 else 1.0)


@partial(jax.jit, static_argnames="activation")
def _lost(
    own: dict[str, Array],
    means: dict[str, Array],
    biases: dict[str, Array],
    x: Float[Array, "n d"],
    weights: Float[Array, " n"],
    *,
    activation: str,
) -> tuple[Float[Array, "n d"], Float[Array, ""]]:
    """How the mean of all matrices changes weighted outputs, and the sum of squares for each mean alone."""

    def change(kernels: dict[str, Array]) -> Float[Array, "n d"]:
        return weights[:, None] * (ffn_hidden(x, kernels, biases, activation) @ kernels["down"]) - outputs

    with jax.default_matmul_precision("highest"):
        outputs = weights[:, None] * (ffn_hidden(x, own, biases, activation) @ own["down"])
        alone = [jnp.sum(change({**own, name: mean}) ** 2) for name, mean in means.items()]
        return change(means), jnp.sum(jnp.stack(alone))


CHOICES: tuple[tuple[int | None, int], ...] = (
    *((None, bits) for bits in (2, 3, 4, 8)),
    *((2, bits) for bits in (1, 2)),
    *((3, bits) for bits in (1, 2)),
    *((4, bits) for bits in (1, 2, 3, 4)),
    *((8, bits) for bits in (2, 3, 4)),
)
"""Bits of the centre of a matrix, None without one, and bits of the codes of every expert."""
FACTORED: tuple[tuple[int, float], ...] = tuple((centre, keep) for centre in (2, 3, 4, 8) for keep in (0.01, 0.04))
"""Bits of the centre of a matrix, and the share of numbers in low-rank factors of every expert."""
ADDED = ("zero_points", "row_scales")
"""Options of `forms.Quantized` that codes of experts may have beside scales of groups. A centre has none of them."""
_COLUMNS = 128
_MOST_INPUTS_OF_TWO = 4096
Format = Callable[..., dict[str, Any]]
"""`format(bits, added=...)`: options of `Coder.quantize` beside the bits."""


class Choice(NamedTuple):
    """How a matrix is stored."""

    centre: int | None  # bits of the codes of a shared centre; None: there is none
    bits: int | None  # of the codes of every expert; None: it has low-rank factors, and there is a centre
    added: tuple[str, ...] = ()  # of `ADDED`; the same for all matrices of an expert
    keep: float | None = None  # the share of numbers in these factors, see `Wanted`; likewise

    @property
    def format(self) -> tuple[tuple[str, ...], float | None]:
        """The part of a choice that all matrices of an expert have in common."""
        return self.added, self.keep


def rank_of(layer: SourceLayer, keep: float) -> int:
    """The rank of factors with a share of the numbers; each matrix has its own, so that it is judged alone."""
    form = layer.wanted(Wanted(form=LowRank, keep=keep, design="separate"))
    assert isinstance(form, LowRank)
    return form.rank


def errors_of_choices(
    layer: SourceLayer,
    name: str,
    permutations: Int[np.ndarray, "E f"],
    choices: Sequence[Choice],
    format_: Format,
    together: Together,
) -> Float[np.ndarray, "E c"]:
    """Returns what every expert adds to the error of a matrix's outputs, relative and squared, for every choice.

    Codes are tried on some columns: with error feedback, too, the columns of a kernel are coded each on its own.
    Factors are made of whole kernels. They also take up some of what codes of the centre leave, which is not counted.

    `together` says how errors add up that factors leave. Those of codes, in a format, are independent.
    """
    width = layer.shapes[name][1]
    columns = np.unique(np.linspace(0, width - 1, min(width, _COLUMNS)).astype(int))
    mean = mean_kernel(aligned_kernels(layer, name, permutations))
    # Codes of every entry make up for the error of a centre; factors do not.
    of_codes = _centres(LeastError(), mean[:, columns], (c.centre for c in choices if c.bits is not None), format_)
    ranks = {choice.keep: rank_of(layer, choice.keep) for choice in choices if choice.keep is not None}
    # Moments of all experts are summed for it, which takes a while.
    shared = shared_base_coder(layer, name, permutations) if ranks else LeastError()
    of_factors = _centres(shared, mean[:, columns], (c.centre for c in choices if c.bits is None), format_)
    errors = np.zeros((layer.num_experts, len(choices)))
    next_coder = expert_coders(layer, name, permutations).__next__

    def of_expert(own: np.ndarray, whole: np.ndarray, coder: LeastError | LeastOutputError) -> float:
        """Fills in the errors of an expert, and returns the square of its outputs."""
        assert isinstance(coder, LeastOutputError)
        kernel = whole[:, columns]
        left = _left(coder, whole - mean, ranks) if ranks else {}
        beside_mean = coder.squared(kernel - mean[:, columns])
        of_centre = {bits: coder.squared(made - mean[:, columns]) for bits, made in of_factors.items()}
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, choice in enumerate(choices):
            if choice.bits is None:
                assert choice.keep is not None
                of_residuals = left[choice.keep] * beside_mean
                own[number] = together.centre * of_centre[choice.centre] + together.residuals * of_residuals
            else:
                alike.setdefault((choice.bits, choice.added), []).append(number)
        for (bits, added), numbers in alike.items():
            residuals = [kernel - of_codes[choices[number].centre] for number in numbers]
            own[numbers] = _errors_in_codes(coder, residuals, bits, format_(bits, added=added))
        return coder.squared(kernel)

    # Small programs leave cores idle: two experts are tried at a time, unless what is known of their inputs is large.
    at_a_time = 2 if layer.shapes[name][0] <= _MOST_INPUTS_OF_TWO else 1
    norm, every = 0.0, zip(errors, aligned_kernels(layer, name, permutations), strict=True)
    with ThreadPoolExecutor(at_a_time) as threads:
        while some := list(itertools.islice(every, at_a_time)):
            coders = [next_coder() for _ in some]
            norm += sum(threads.map(of_expert, *zip(*some, strict=True), coders))
            del coders  # with their moments, which are large, before the next ones are made
    return np.array([[output_error(error, norm) for error in own] for own in errors])


def _centres(
    coder: LeastError | LeastOutputError, mean: np.ndarray, every: Iterable[int | None], format_: Format
) -> dict[int | None, np.ndarray]:
    """The centres that codes of so many bits stand for; None: zeros."""
    centres: dict[int | None, np.ndarray] = {None: np.zeros((1, 1), np.float32)}
    for bits in {*every}:
        if bits is not None:
            centres[bits] = np.asarray(coder.quantize(mean, bits=bits, **format_(bits)).approximation)
    return centres


def _errors_in_codes(
    coder: LeastOutputError, residuals: Sequence[np.ndarray], bits: int, options: Mapping[str, Any]
) -> list[float]:
    """The squared errors that codes of the same options make of several residuals."""
    has_more = options.get("table") or options.get("row_scales") or options["scale_bits"] < 16
    if len(residuals) > 1 and not (has_more or options["group_size"] is None):
        # Columns have nothing in common: one program for all of them is faster than one for each residual.
        made = coder.quantize(every := np.concatenate(residuals, axis=1), bits=bits, **options)
        columns = coder.squared_columns(np.asarray(made.approximation) - every)
        return [float(np.sum(some, dtype=np.float64)) for some in np.split(columns, len(residuals))]
    each = (coder.quantize(residual, bits=bits, **options).approximation for residual in residuals)
    return [coder.squared(np.asarray(made) - residual) for made, residual in zip(each, residuals, strict=True)]


def _left(coder: LeastOutputError, residual: np.ndarray, ranks: Mapping[float, int]) -> dict[float, float]:
    """The share of the outputs' error that factors of every rank leave."""
    values, norm = coder.spectrum(residual, max(ranks.values()))
    squares = values.astype(np.float64) ** 2
    return {keep: max(0.0, 1 - squares[:rank].sum() / norm) if norm else 0.0 for keep, rank in ranks.items()}


MOST_SIZES = 16
"""Sizes of the second part that are tried for two choices."""


class Alike(NamedTuple):
    """Experts that all have one choice."""

    nbytes: int  # of the layer, all experts being stored so
    own: int  # of these, bytes of one expert
    more: int  # bytes that a layer takes more if it has such a part beside another, for what the disk knows of leaves
    errors: Float[np.ndarray, " E"]  # of every expert, float64[E]; those of experts are added up
    choice: tuple  # see `Candidate`


class InParts(NamedTuple):
    """The choice of a layer in two parts."""

    parts: tuple[tuple, tuple]  # choices
    part_of: tuple[int, ...]  # of every expert, the part that it is in


def in_two_parts(some: Sequence[Alike], *, multiple: int = 1) -> list[Candidate]:
    """Every two of some choices, and of all ways to divide the experts into so many each, the one of least error.

    Experts of a part take the same room, so that those belong into the larger codes whose error falls most. The choices
    are around the same centre, or all without one; the number of experts in every part is a multiple of `multiple`.
    """
    found = []
    for few, many in itertools.permutations(some, 2):
        if many.own <= few.own:
            continue
        order = np.argsort(few.errors - many.errors, kind="stable")[::-1]
        gained = np.cumsum((few.errors - many.errors)[order])
        experts = len(order)
        sizes = [n for n in range(multiple, experts, multiple) if (experts - n) % multiple == 0]
        for size in sizes[:: -(-len(sizes) // MOST_SIZES) or 1]:
            if gained[size - 1] <= 0:
                continue
            part_of = np.zeros(experts, int)
            part_of[order[:size]] = 1
            nbytes = few.nbytes + size * (many.own - few.own) + many.more
            error = float(few.errors.sum() - gained[size - 1])
            found.append(Candidate(nbytes, error, InParts((few.choice, many.choice), tuple(part_of.tolist()))))
    return found


def without_worse(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one equals or beats in both bytes and error."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.nbytes, c.error)):
        if not best or candidate.error < best[-1].error:
            best.append(candidate)
    return best
