"""The ways in which `allocate` may store a matrix of all experts of a layer, and what each changes in its outputs."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.alignment.design_matrix import aligned_kernels, mean_kernel
from moe_jax.compression.allocation.budget import Candidate
from moe_jax.compression.allocation.sensitivity_pass import output_error
from moe_jax.compression.allocation.together import Together
from moe_jax.compression.coding.coder import LeastError, LeastOutputError
from moe_jax.compression.coding.expert_coders import expert_coders, shared_base_coder
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.experts.forms import LowRank
from moe_jax.experts.forms.coding import Wanted

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
Format = Callable[..., dict[str, Any]]
"""`format(bits, added=...)`: options of `Coder.quantize` beside the bits."""


class Choice(NamedTuple):
    """How a matrix is stored.

    Attributes:
      centre: bits of the codes of a shared centre; None: there is none.
      bits: of the codes of every expert; None: it has low-rank factors, and there is a centre.
      added: of `ADDED`; the same for all matrices of an expert.
      keep: the share of numbers in these factors, see `Wanted`; likewise.
    """

    centre: int | None
    bits: int | None
    added: tuple[str, ...] = ()
    keep: float | None = None

    @property
    def format(self) -> tuple[tuple[str, ...], float | None]:
        """The part of a choice that all matrices of an expert have in common."""
        return self.added, self.keep


def rank_of(layer: SourceLayer, keep: float) -> int:
    """Returns the rank of factors with a share of the numbers; each matrix has its own, so that it is judged alone."""
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

    Args:
      layer: a calibrated layer.
      name: of the matrix.
      permutations: the order of every expert's neurons around a centre.
      choices: what is tried.
      format_: of codes.
      together: how errors add up that factors leave. Those of codes are independent.

    Raises:
      InputError: if a weight is not finite.
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
    errors, norm = np.zeros((layer.num_experts, len(choices))), 0.0
    coders = expert_coders(layer, name, permutations)
    for own, whole, coder in zip(errors, aligned_kernels(layer, name, permutations), coders, strict=True):
        assert isinstance(coder, LeastOutputError)
        kernel = whole[:, columns]
        norm += _squared(coder, kernel)
        left = _left(coder, whole - mean, ranks) if ranks else {}
        beside_mean = _squared(coder, kernel - mean[:, columns])
        of_centre = {bits: _squared(coder, made - mean[:, columns]) for bits, made in of_factors.items()}
        for number, choice in enumerate(choices):
            if choice.keep is not None:
                of_residuals = left[choice.keep] * beside_mean
                own[number] = together.centre * of_centre[choice.centre] + together.residuals * of_residuals
                continue
            assert choice.bits is not None
            residual = kernel - of_codes[choice.centre]
            made = coder.quantize(residual, bits=choice.bits, **format_(choice.bits, added=choice.added))
            own[number] = _squared(coder, np.asarray(made.approximation) - residual)
    return np.array([[output_error(error, norm) for error in own] for own in errors])


def _centres(
    coder: LeastError | LeastOutputError, mean: np.ndarray, every: Iterable[int | None], format_: Format
) -> dict[int | None, np.ndarray]:
    """Returns the centres that codes of so many bits stand for; None: zeros."""
    centres: dict[int | None, np.ndarray] = {None: np.zeros((1, 1), np.float32)}
    for bits in {*every}:
        if bits is not None:
            centres[bits] = np.asarray(coder.quantize(mean, bits=bits, **format_(bits)).approximation)
    return centres


def _left(coder: LeastOutputError, residual: np.ndarray, ranks: Mapping[float, int]) -> dict[float, float]:
    """The share of the outputs' error that factors of every rank leave."""
    values, norm = coder.spectrum(residual, max(ranks.values()))
    squares = values.astype(np.float64) ** 2
    return {keep: max(0.0, 1 - squares[:rank].sum() / norm) if norm else 0.0 for keep, rank in ranks.items()}


def _squared(coder: LeastOutputError, error: np.ndarray) -> float:
    """tr(E^T H E)."""
    return float(np.sum(error * (coder.moment @ error), dtype=np.float64))


MOST_SIZES = 16
"""Sizes of the second part that are tried for two choices."""


class Alike(NamedTuple):
    """Experts that all have one choice.

    Attributes:
      nbytes: of the layer, all experts being stored so.
      own: of these, bytes of one expert.
      more: bytes that a layer takes more if it has such a part beside another, for what the disk knows of leaves.
      errors: of every expert, float64[E]; those of experts are added up.
      choice: see `Candidate`.
    """

    nbytes: int
    own: int
    more: int
    errors: Float[np.ndarray, " E"]
    choice: tuple


class InParts(NamedTuple):
    """The choice of a layer in two parts.

    Attributes:
      parts: choices.
      part_of: of every expert, the part that it is in.
    """

    parts: tuple[tuple, tuple]
    part_of: tuple[int, ...]


def in_two_parts(some: Sequence[Alike], *, multiple: int = 1) -> list[Candidate]:
    """Every two of some choices, and of all ways to divide the experts into so many each, the one of least error.

    Experts of a part take the same room, so that those belong into the larger codes whose error falls most.

    Args:
      some: choices around the same centre, or all without one.
      multiple: the number of experts in every part is a multiple of it.
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
    """Returns the candidates that no other one equals or beats in both bytes and error."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.nbytes, c.error)):
        if not best or candidate.error < best[-1].error:
            best.append(candidate)
    return best
