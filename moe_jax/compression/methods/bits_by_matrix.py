"""`allocate`: codes for every matrix of every layer, around a shared centre or not, of as many bits as it is worth.

See methods.md 5. Some matrices of a layer may share a centre while others do not; the neurons of an expert then have
the order of those that do. Where all of them do, experts may have low-rank factors around the centre instead of codes,
which take less than the one bit that a code has at least. The divergence of the model's predictions is predicted as the
sum over matrices of *sensitivity* times the error of their outputs (`calibration.sensitivities`), which is measured
for all candidates (`choices`). Zero points and row scales, where they are asked for, are tried beside codes
without them: a layer has what is worth it.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from moe_jax.compression.budget import (
    Budget,
    Candidate,
    expert_weights,
    smallest,
    total_bytes,
    total_error,
    ways,
)
from moe_jax.compression.calibration.map_analysis import BITS, MapAnalysis
from moe_jax.compression.calibration.recording import NOT_YET_RECORDED
from moe_jax.compression.coding.storage import LEAF_OVERHEAD, disk_bytes_by_matrix
from moe_jax.compression.coding.write_experts import write_experts
from moe_jax.compression.linear_maps import usual_codes
from moe_jax.compression.methods.choices import (
    ADDED,
    CHOICES,
    FACTORED,
    Alike,
    Choice,
    InParts,
    errors_of_choices,
    in_two_parts,
    rank_of,
    together,
    without_worse,
)
from moe_jax.compression.methods.interface import (
    EXPERTS,
    Analysis,
    Base,
    Method,
    Plan,
    Rest,
    Tick,
    check_calibrated,
)
from moe_jax.compression.methods.resmoe import aligned
from moe_jax.compression.options.around_centre import AllocateOptions
from moe_jax.compression.report import BARYCENTER, LayerFigures
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.code_options import TABLE_BITS
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import count_bytes
from moe_jax.experts import BankConfig, BaseCodes, Mixed
from moe_jax.experts.forms import KernelForm, LowRank, Matrix, Quantized
from moe_jax.experts.forms.coding import Layout, own_of
from moe_jax.models import MoEConfig


def _sensitivities_of(layer: SourceLayer) -> Mapping[str, float]:
    """Returns what an error of the outputs of every matrix costs; raises `InputError` if the calibration has it not."""
    assert layer.calibration is not None
    if layer.calibration.sensitivities is None:
        raise InputError(f"layer {layer.index}: the calibration does not say how much depends on it")
    return layer.calibration.sensitivities


def map_candidates(rest: Rest, analysis: MapAnalysis, options: Mapping[str, Any]) -> dict[int, list[Candidate]]:
    """Returns the candidates of every linear map, whole ones last, under the keys -1, -2, ...; choices are codes."""
    found: dict[int, list[Candidate]] = {}
    for number, (one, errors, sensitivity) in enumerate(zip(rest.maps, *analysis, strict=True)):
        some = []
        for bits, error in zip(BITS, errors, strict=True):
            codes = usual_codes(one, bits, options)
            leaves = codes.form.leaves(Matrix("", one.shape), (), jnp.dtype(jnp.float32)).values()
            nbytes = count_bytes(leaves) + LEAF_OVERHEAD * len(leaves)
            some.append(Candidate(nbytes, float(sensitivity * error), codes))
        whole = math.prod(one.shape) * rest.itemsizes[one.path] + LEAF_OVERHEAD
        found[-1 - number] = [*some, Candidate(whole, 0.0, None)]
    return found


def _together(some: Sequence[Candidate]) -> Candidate:
    """Candidates of all matrices as one of their layer: sums of bytes and errors, and a tuple of choices."""
    return Candidate(sum(c.nbytes for c in some), sum(c.error for c in some), tuple(c.choice for c in some))


def _alike(by_matrix: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The candidates with the same choice for all matrices, in the order in which they are tried."""
    return [_together(same) for same in zip(*by_matrix, strict=True)]


def best_combinations(by_matrix: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """One candidate of every matrix, in all ways that are not both larger and worse than another way."""
    return without_worse([_together(some) for some in itertools.product(*by_matrix)])


def best_of_one_format(by_matrix: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """`best_combinations` of those whose choices have the same format, and of these again the best."""
    found = []
    for format_ in dict.fromkeys(candidate.choice.format for candidate in by_matrix[0]):
        found += best_combinations([[c for c in own if c.choice.format == format_] for own in by_matrix])
    return without_worse(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocate(AllocateOptions, Method):
    """The method with the options `AllocateOptions`."""

    # Factors have sizes of their own, which no option names.
    layouts: ClassVar[tuple[Layout, ...]] = Quantized.layouts()
    origin: ClassVar[str | None] = BARYCENTER
    planned_centre_bits: ClassVar[int | None] = 4  # the middle of what it chooses from
    needs_sensitivities: ClassVar[bool] = True

    @property
    def tried_plans(self) -> int:
        return self.tries

    @functools.cached_property
    def _budget(self) -> Budget:
        return Budget(target_bytes=self.target_bytes, budget_bits=self.budget_bits)

    @functools.cached_property
    def _formats(self) -> tuple[tuple[str, ...], ...]:
        """All combinations of `ADDED` that codes may have, the empty one first."""
        asked_for = [name for name in ADDED if getattr(self, name)]
        return tuple(some for n in range(len(asked_for) + 1) for some in itertools.combinations(asked_for, n))

    @functools.cached_property
    def _choices(self) -> tuple[Choice, ...]:
        """All that are tried."""
        in_codes = [Choice(*bits, added) for added in self._formats for bits in CHOICES]
        return (*in_codes, *(Choice(centre, None, keep=keep) for centre, keep in FACTORED))

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Also that it is known how much depends on layers, and that the smallest candidates are within the budget."""
        check_calibrated(layers)
        for layer in layers:
            if layer.calibration is not NOT_YET_RECORDED:
                _sensitivities_of(layer)
        if self.of != "experts":
            return
        chosen = smallest(self._layers_without_errors(layers))
        budget, least = self._budget.nbytes(layers), total_bytes(chosen)
        if least > budget:
            raise InputError(
                f"a budget of {budget:,} bytes is too small for the experts of {len(layers)} layers: they take at "
                f"least {least:,}, {8 * least / expert_weights(layers):.2f} bits per weight, with "
                f"{self._in_words(layers, chosen)}; raise it, or compress fewer layers"
            )

    def check_model(self, layers: Sequence[SourceLayer], rest: Rest) -> None:
        if not rest.maps:
            return
        chosen = smallest(self._layers_without_errors(layers) | self._maps_without_errors(rest))
        least = total_bytes(chosen) + rest.fixed_bytes
        if least > self._room(rest) + rest.fixed_bytes:
            of_experts = f", and for its experts {self._in_words(layers, chosen)}," if layers else ""
            raise InputError(
                f"a budget of {self._room(rest) + rest.fixed_bytes:,} bytes is too small for the model: with "
                f"{min(BITS)} bits for every linear map{of_experts} it takes {least:,}, "
                f"{8 * least / rest.weights:.2f} bits per weight, of which {rest.fixed_bytes:,} bytes stay as they are"
            )

    def _layers_without_errors(self, layers: Sequence[SourceLayer], formats: int = 1) -> dict[int, list[Candidate]]:
        """Candidates with the bytes of every choice of the first formats, and without errors."""
        found = {}
        for layer in layers:
            no_errors = np.zeros((len(layer.shapes), len(self._choices)))
            found[layer.index] = _alike(self._by_matrix(layer, no_errors, self._formats[:formats]))
        return found

    def _in_words(self, layers: Sequence[SourceLayer], chosen: Mapping[int, Candidate]) -> str:
        """The choices for experts, each once."""
        return "; ".join(dict.fromkeys(moe.bank.describe() for moe in self._banks(layers, chosen).values()))

    def _maps_without_errors(self, rest: Rest) -> dict[int, list[Candidate]]:
        """Candidates of linear maps with the bytes of every choice, and without errors."""
        nothing = MapAnalysis(np.zeros((len(rest.maps), len(BITS))), np.zeros(len(rest.maps)))
        return map_candidates(rest, nothing, self.codes_of_maps)

    def extreme_plans(self, layers: Sequence[SourceLayer], rest: Rest) -> tuple[Plan, Plan]:
        candidates = self._layers_without_errors(layers, len(self._formats)) | self._maps_without_errors(rest)
        most = {key: max(some, key=lambda one: one.nbytes) for key, some in candidates.items()}
        return self._plan(layers, rest, smallest(candidates)), self._plan(layers, rest, most)

    @property
    def codes_of_maps(self) -> Mapping[str, Any]:
        own = {name: getattr(self, name) for name in ("scale_bits", "zero_points", "row_scales")}
        return {"group_size": self.group_size, "table": self.levels == "fitted", **own}

    def _room(self, rest: Rest) -> int:
        """Bytes for experts and linear maps together."""
        if self.target_bytes is not None:
            return self.target_bytes - rest.fixed_bytes
        assert self.budget_bits is not None
        return int(self.budget_bits * rest.weights / 8) - rest.fixed_bytes

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """Aligns the experts, and tries all choices on some columns of their matrices."""
        began = time.monotonic()
        found = aligned(layer, self.solver, tick)
        orders = found["permutations"]
        adding_up = together(layer, orders)
        errors = np.stack(
            [errors_of_choices(layer, name, orders, self._choices, self._format, adding_up) for name in layer.shapes]
        )
        return found | {"errors": errors, "seconds": np.asarray(time.monotonic() - began)}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """With all formats of codes, or with the first alone, whichever is better."""
        best = self._ways(layers, analyses, {}, self._budget.nbytes(layers), 1.0)[0]
        return self._banks(layers, best)

    def plans(
        self,
        layers: Sequence[SourceLayer],
        analyses: Mapping[int, Analysis],
        rest: Rest,
        factors: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Plan]:
        of_maps, room = {}, self._budget.nbytes(layers) if not rest.maps else self._room(rest)
        if rest.maps:
            assert rest.analysis is not None
            by_map = [factors.get(one.part, 1.0) for one in rest.maps]
            analysis = rest.analysis._replace(sensitivities=rest.analysis.sensitivities * np.array(by_map))
            of_maps = map_candidates(rest, analysis, self.codes_of_maps)
        every = self._ways(layers, analyses, of_maps, room, factors.get(EXPERTS, 1.0))
        return [self._plan(layers, rest, chosen) for chosen in every]

    def _plan(self, layers: Sequence[SourceLayer], rest: Rest, chosen: Mapping[int, Candidate]) -> Plan:
        """The plan of these choices, under the keys of `ways`."""
        expected: dict[str, float] = {}
        codes = {}
        for key, candidate in chosen.items():
            one = rest.maps[-1 - key] if key < 0 else None
            part = EXPERTS if one is None else one.part
            expected[part] = expected.get(part, 0.0) + candidate.error
            if one is not None and candidate.choice is not None:
                codes[one.path] = candidate.choice
        return Plan(banks=self._banks(layers, chosen), codes=codes, expected=expected)

    def _banks(self, layers: Sequence[SourceLayer], chosen: Mapping[int, Candidate]) -> dict[int, MoEConfig]:
        return {layer.index: layer.target(self._bank(layer, chosen[layer.index].choice)) for layer in layers}

    def _ways(
        self,
        layers: Sequence[SourceLayer],
        analyses: Mapping[int, Analysis],
        of_maps: Mapping[int, Sequence[Candidate]],
        room: int,
        factor: float,
    ) -> list[dict[int, Candidate]]:
        """Returns choices for all layers and linear maps, the best expected ones first, and none of them twice.

        Codes have any of the formats, or the first alone; experts are alike, or where that is asked for in parts.
        """
        divergences = {layer.index: factor * self._divergences(layer, analyses[layer.index]) for layer in layers}
        found: list[dict[int, Candidate]] = []
        for formats in dict.fromkeys((self._formats, self._formats[:1])):
            candidates, alike, in_parts = {}, {}, {}
            for layer in layers:
                errors = divergences[layer.index]
                by_matrix = self._by_matrix(layer, errors.sum(axis=1), formats)
                candidates[layer.index], alike[layer.index] = best_of_one_format(by_matrix), _alike(by_matrix)
                if self.experts == "own":
                    in_parts[layer.index] = self._in_parts(layer, by_matrix, candidates[layer.index], errors)
            found += ways(candidates, alike, room, of_maps)
            found += ways(in_parts, alike, room, of_maps) if in_parts else []
        different = {str([candidate.choice for candidate in chosen.values()]): chosen for chosen in reversed(found)}
        return sorted(reversed(different.values()), key=total_error)

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        shared = target.bank.has_base
        orders = analysis["permutations"] if shared else None
        measure = write_experts(layer, target.bank, write, permutations=orders)
        return measure.figures(
            analysed=analysis["seconds"],
            choice=target.bank.describe(),
            predicted_divergence=sum(
                float(own[self._choices.index(_choice(layer, target.bank, layer.matrices[name], expert))])
                for name, of_experts in zip(layer.shapes, self._divergences(layer, analysis), strict=True)
                for expert, own in enumerate(of_experts)
            ),
        )

    def _divergences(self, layer: SourceLayer, analysis: Analysis) -> Float[np.ndarray, "m E c"]:
        """Returns what every choice for every matrix of every expert adds to the divergence of the predictions.

        Raises `InputError` if the calibration does not say how much depends on the layer.
        """
        sensitivities = _sensitivities_of(layer)
        return np.array([[[sensitivities[name]]] for name in layer.shapes]) * analysis["errors"]

    def _bank(self, layer: SourceLayer, choice: Sequence[Choice] | InParts) -> BankConfig:
        """The bank of a layer with a choice for every matrix; for experts in two parts, one for each part."""
        parts = choice.parts if isinstance(choice, InParts) else (choice,)
        centres = dict(zip(layer.shapes, (one.centre for one in parts[0]), strict=True))
        if isinstance(choice, InParts):
            form = Mixed(parts=tuple(self._codes(layer, part) for part in parts), part_of=choice.part_of)
        else:
            form = self._form(layer, choice)
        if not any(centres.values()):
            return BankConfig(form, base="none")
        of_centre = self._format(*centres.values())
        code = str(centres["up"] or max(filter(None, centres.values())))
        own = {f"{name}_bits": bits or 0 for name, bits in centres.items() if str(bits) != code}
        return BankConfig(form, base_codes=BaseCodes(code=code, **of_centre, **own))  # type: ignore[arg-type]

    def _form(self, layer: SourceLayer, choices: Sequence[Choice]) -> KernelForm:
        keep = choices[0].keep
        return self._codes(layer, choices) if keep is None else LowRank(rank=rank_of(layer, keep))

    def _codes(self, layer: SourceLayer, choices: Sequence[Choice]) -> Quantized:
        bits = {name: choice.bits or 0 for name, choice in zip(layer.shapes, choices, strict=True)}
        others: Any = {f"{name}_bits": own for name, own in bits.items() if own != bits["up"]}
        return Quantized(bits=bits["up"], **self._format(*bits.values(), added=choices[0].added), **others)

    def _in_parts(
        self,
        layer: SourceLayer,
        by_matrix: Sequence[Sequence[Candidate]],
        candidates: Sequence[Candidate],
        errors: Float[np.ndarray, "m E c"],
    ) -> list[Candidate]:
        """These candidates, and those in two parts of any codes around one of their centres."""
        every = []
        in_codes = [candidate for candidate in candidates if candidate.choice[0].keep is None]
        for centres in {tuple(choice.centre for choice in candidate.choice) for candidate in in_codes}:
            pairs = zip(by_matrix, centres, strict=True)
            same = [[c for c in own if c.choice.centre == centre and c.choice.keep is None] for own, centre in pairs]
            every.append([self._alike(layer, candidate, errors) for candidate in best_of_one_format(same)])
        split = (in_two_parts(some, multiple=self.experts_multiple) for some in every)
        return without_worse([*candidates, *itertools.chain.from_iterable(split)])

    def _alike(self, layer: SourceLayer, candidate: Candidate, errors: Float[np.ndarray, "m E c"]) -> Alike:
        choice, form = candidate.choice, self._form(layer, candidate.choice)
        numbers = map(self._choices.index, choice)
        of_experts = np.sum([own[:, number] for own, number in zip(errors, numbers, strict=True)], axis=0)
        matrices = layer.matrices.values()
        leaves = [leaf for matrix in matrices for leaf in self._leaves(form.of_matrix(matrix), matrix)]
        return Alike(candidate.nbytes, count_bytes(leaves), LEAF_OVERHEAD * len(leaves), of_experts, choice)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def _leaves(form: KernelForm, matrix: Matrix) -> list[Any]:
        """The leaves of one expert; codes and scales have dtypes of their own."""
        return list(form.leaves(matrix, (1,), jnp.dtype(jnp.float32)).values())

    def _format(self, *bits: int | None, added: Sequence[str] = ()) -> dict[str, Any]:
        """How codes of so many bits, or if there are several some of them, are stored, with some of `ADDED`."""
        table = self.levels == "fitted" and not {*bits}.isdisjoint(TABLE_BITS)
        options = {"group_size": self.group_size, "table": table, "scale_bits": self.scale_bits}
        return options | dict.fromkeys(added, True)

    def _by_matrix(
        self, layer: SourceLayer, errors: Float[np.ndarray, "m c"], formats: Sequence[tuple[str, ...]]
    ) -> list[list[Candidate]]:
        """For every matrix, all choices of some formats."""
        names, d_model, dtype = list(layer.shapes), layer.shapes["up"][0], layer.dtype("up")
        found: list[list[Candidate]] = [[] for _ in names]
        for number, choice in enumerate(self._choices):
            if choice.added not in formats:
                continue
            sizes = disk_bytes_by_matrix(layer.target(self._bank(layer, [choice] * len(names))), d_model, dtype)
            for own, name, error in zip(found, names, errors[:, number], strict=True):
                own.append(Candidate(sizes[name], float(error), choice))
        return found


def _choice(layer: SourceLayer, bank: BankConfig, matrix: Matrix, expert: int) -> Choice:
    """The choice that `Allocate._bank` was given for a matrix of an expert."""
    assert isinstance(bank.form, KernelForm)
    form, centre = own_of(bank.form, expert).form, None
    if bank.base_codes is not None and bank.has_base_of(matrix.name):
        codes = bank.base_codes.form.of_matrix(matrix).codes
        assert isinstance(codes, Quantized)
        centre = codes.bits
    if not form.has_codes:
        assert isinstance(form, LowRank)  # shares of one rank are the same
        keep = next(keep for _, keep in FACTORED if rank_of(layer, keep) == form.rank)
        return Choice(centre, None, keep=keep)
    assert isinstance(form, Quantized)
    return Choice(centre, form.of_matrix(matrix).bits, tuple(name for name in ADDED if getattr(form, name)))
