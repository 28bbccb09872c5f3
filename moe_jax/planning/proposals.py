"""Proposes how to train by a recipe on some chips: mesh, remat, microbatches, dtypes; for `plan --propose`.

Every mesh of the chips that training would accept is tried, from shapes alone (`planned_training.RunInShapes`). On each
the recipe gets the fewest microbatches with which it fits, and `remat` as is fastest then. Dtypes are the recipe's
unless nothing fits with them.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from moe_jax.core.errors import InputError, shown
from moe_jax.distributed.mesh_axes import AXES
from moe_jax.distributed.sharding import (
    batch_shards,
    check_batch_divides,
    check_sequence_divides,
    mesh_sizes,
    undivided_experts,
)
from moe_jax.functional.attention import Placement
from moe_jax.models import ModelConfig
from moe_jax.planning.compile_only import is_tight
from moe_jax.planning.expected_step import ExpectedStep, WholeStep, expected_step
from moe_jax.planning.planned_devices import PlannedDevices, planned_devices
from moe_jax.planning.planned_training import USUAL_PROGRAM, PlannedTraining, RunInShapes
from moe_jax.planning.slice_names import larger_slices
from moe_jax.training.recipe import MeshSection, Recipe

# `full` is first: it needs no tracing, and what is no faster than it is not traced.
Remat = Literal["full", "none", "dots"]
_REMATS: tuple[Remat, ...] = get_args(Remat)
MOST = 8
"""Proposals that are shown."""
# Times and bytes that differ by no more count as equal: estimates of a least time, and of bytes within a tenth, tell no
# more. Of equal ones, that which sends least is the better.
_EQUAL_TIMES = 0.01
_EQUAL_BYTES = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """A way to train by a recipe.

    Attributes:
      mesh: sizes of its axes.
      remat: `model.remat` of the recipe.
      accumulation: microbatches of a step, `train.accumulation`.
      param_dtype, moments: of the trained parameters and of the optimizer's first moments.
      settings: what differs from the recipe, each as `--set` takes it.
      bytes: of the memory of a chip, as `PlannedTraining.total`.
      fits: whether a chip has that memory.
      tight: whether it is more than nine tenths of the memory: another version of the compiler may need more.
      seconds: of a step, at least (`StepRoofline`).
      bound: what takes this time: `matrix units`, `memory` or `links`.
      links: seconds of what a chip sends meanwhile; None: the links of the chip are unknown.
      tokens_per_second: of all chips, at most.
      run_seconds: of all steps of the recipe, at least.
    """

    mesh: dict[str, int]
    remat: str
    accumulation: int
    param_dtype: str
    moments: str
    settings: tuple[str, ...]
    bytes: int
    fits: bool
    tight: bool
    seconds: float
    bound: str
    links: float | None
    tokens_per_second: float
    run_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposals:
    """The ways to train by a recipe on a platform.

    Attributes:
      platform: such as `v5p:2x2x2`.
      devices: number of its chips.
      memory: bytes of a chip.
      meshes: number of meshes that were tried: those that divide the model and the batch.
      proposals: those that fit, the best first, of ways with the same time and bytes one. What leaves a tenth of the
        memory comes before what does not, then the least time of a step (within 1%), then the least memory (within 5%),
        then the least time of links.
      nearest: where nothing fits, the one that needs least memory; None: no mesh divides the model and the batch.
      smallest_platform: where nothing fits, or only just, the smallest larger slice on which something does; None: none
        was found.
      on_smallest: the best proposal there.
    """

    platform: str
    devices: int
    memory: int
    meshes: int
    proposals: tuple[Proposal, ...]
    nearest: Proposal | None = None
    smallest_platform: str | None = None
    on_smallest: Proposal | None = None


def propose(
    recipe: Recipe, config: ModelConfig, platform: str, *, teacher: ModelConfig | None = None, most: int = MOST
) -> Proposals:
    """Proposes at most `most` ways to train by a recipe on a slice or on GPUs, without compiling; takes seconds.

    Args:
      recipe: its mesh, `remat`, `accumulation` and dtypes are what the proposals may change.
      platform: with its number of chips, such as `v5p-16`, `v5e:4x4` or `h100:2x8`.
      teacher: config of the model that the recipe's `distill` names, if it does.

    Raises:
      InputError: a platform without a number of chips or memory, or a recipe that does not fit the model.
    """
    target = _target(platform)
    dtypes = [_Dtypes(one, config, teacher) for one in _with_dtypes(recipe)]
    found = _Search(dtypes, config, target).best(most)
    if any(not one.tight for one in found.proposals):
        return found
    for larger in larger_slices(target.name, target.count):
        there = _Search(dtypes, config, _target(larger)).best(1)
        if there.proposals and not there.proposals[0].tight:
            return dataclasses.replace(found, smallest_platform=larger, on_smallest=there.proposals[0])
    return found


def _target(platform: str) -> PlannedDevices:
    one = MeshSection(data=1, fsdp=1)
    target = planned_devices(one, platform, compiles=False) if platform != "cpu" else None
    if target is None or ":" not in target.name or target.chip is None or target.chip.memory is None:
        examples = "v5p-16, v5e:4x4 or h100:2x8"
        raise InputError(f"platform {shown(platform)}: proposals need a number of chips, as in {examples}")
    return target


def _with_dtypes(recipe: Recipe) -> Iterator[Recipe]:
    """Yields the recipe, then with dtypes that take less memory: of the moments, then of the parameters too."""
    yield recipe
    if recipe.optimizer.kind != "adafactor" and recipe.optimizer.moments != "bfloat16":
        recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, moments="bfloat16"))
        yield recipe
    if recipe.model.param_dtype != "bfloat16":
        yield dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, param_dtype="bfloat16"))


class _Dtypes:
    """A recipe with some dtypes, in shapes, on whatever mesh; `given` is the recipe as it was given."""

    def __init__(self, recipe: Recipe, config: ModelConfig, teacher: ModelConfig | None):
        self.recipe, self._config, self._teacher = recipe, config, teacher
        self._traced: dict[str, dict[int, WholeStep]] = {}

    @functools.cached_property
    def shapes(self) -> RunInShapes:
        return RunInShapes(self.recipe, self._config, self._teacher)

    @functools.cached_property
    def least(self) -> WholeStep:
        """The numbers of a step as if nothing were kept for the backward pass."""
        full = dataclasses.replace(self.recipe, model=dataclasses.replace(self.recipe.model, remat="full"))
        return self.shapes.whole_step(full)

    def whole_step(self, recipe: Recipe) -> WholeStep:
        """Returns the numbers of a step; traced for two sizes of microbatches, between which bytes grow with rows."""
        if recipe.model.remat == "full":
            return self.least
        traced = self._traced.setdefault(recipe.model.remat, {})
        rows = recipe.train.batch_size // recipe.train.accumulation
        if rows not in traced and len(traced) < 2:
            traced[rows] = self.shapes.whole_step(recipe)
        if rows in traced:
            return traced[rows]
        (few, less), (many, more) = sorted((rows, step.kept) for rows, step in traced.items())
        kept = less + (more - less) * (rows - few) / (many - few)
        return self.least._replace(kept=round(kept))


class _Candidate(NamedTuple):
    """A recipe that was tried, with its step; `total` bytes are held by a chip."""

    recipe: Recipe
    mesh: dict[str, int]
    total: int
    step: ExpectedStep


class _Search:
    """The search on one platform."""

    def __init__(self, dtypes: Sequence[_Dtypes], config: ModelConfig, target: PlannedDevices):
        assert target.chip is not None and target.chip.memory is not None
        self._dtypes, self._config, self._target = dtypes, config, target
        self._chip, self._memory = target.chip, target.chip.memory

    def best(self, most: int) -> Proposals:
        """Returns the best proposals, or the nearest."""
        meshes = list(self._meshes(self._dtypes[0].recipe))
        tried: list[tuple[_Dtypes, list[_Candidate]]] = []
        for dtypes in self._dtypes:
            ways = [self._on_mesh(dtypes, mesh) for mesh in meshes]
            tried.append((dtypes, sorted((one for one in ways if one is not None), key=self._order)))
            if not tried[-1][1] or not is_tight(tried[-1][1][0].total, self._memory):
                break
        # Of dtypes with which all is tight, or nothing fits, those that need least: first in the order of its best.
        dtypes, found = min(tried, key=lambda one: self._order(one[1][0]) if one[1] else ())
        fitting = [one for one in _distinct(found) if one.total <= self._memory][:most]
        shown = [self._proposal(dtypes, one) for one in fitting or found[:1]]
        return Proposals(
            platform=self._target.name,
            devices=self._target.count,
            memory=self._memory,
            meshes=len(found),
            proposals=tuple(shown if fitting else ()),
            nearest=None if fitting or not shown else shown[0],
        )

    def _meshes(self, recipe: Recipe) -> Iterator[dict[str, int]]:
        """Yields the meshes of all chips on which a batch, sequences, heads and experts are divided."""
        for sizes in _factors(self._target.count, len(AXES)):
            mesh: dict[str, int] = dict(zip(AXES, sizes, strict=True))
            try:
                check_batch_divides(mesh, recipe.train.batch_size, 1)
                check_sequence_divides(mesh, recipe.data.seq_len)
                self._config.check_whole_sequences(mesh["sequence"])
            except InputError:
                continue
            if self._divides_heads(mesh) and self._divides_experts(mesh):
                yield mesh

    def _divides_heads(self, mesh: Mapping[str, int]) -> bool:
        """Whether attention is divided over `tensor`; else all devices would compute all heads."""
        if mesh["tensor"] == 1:
            return True
        parts = Placement(self._chip.platform, parts=mesh["tensor"] * mesh["sequence"])
        layers = self._config.layers
        of_attention = {layer.softmax_attention for layer in layers if not layer.is_recurrent}
        of_recurrences = {layer.recurrence.num_splits for layer in layers if layer.is_recurrent}
        return all(parts.divides_heads(one.num_heads, one.num_kv_heads) for one in of_attention) and not any(
            count % mesh["tensor"] for count in of_recurrences
        )

    def _divides_experts(self, mesh: Mapping[str, int]) -> bool:
        """Whether `expert` divides the experts; where there are none, it would do what `data` does."""
        if mesh["expert"] == 1:
            return True
        return bool(self._config.moe_layers) and not undivided_experts(self._config.expert_counts, mesh)

    def _on_mesh(self, dtypes: _Dtypes, mesh: dict[str, int]) -> _Candidate | None:
        """Returns the best way on a mesh, or the one that needs least memory; None: a parameter is not divided."""
        try:
            leaves, held = dtypes.shapes.placed(dtypes.recipe, mesh)
        except InputError:
            return None
        counts = _microbatches(dtypes.recipe.train.batch_size, batch_shards(mesh))

        def tried(remat: Remat, count: int, whole: WholeStep | None = None) -> _Candidate:
            recipe = _changed(dtypes.recipe, mesh, remat, count)
            whole = dtypes.whole_step(recipe) if whole is None else whole
            step = expected_step(
                recipe, self._config, whole, leaves, mesh, self._chip, held.changed, self._target.per_host
            )
            return _Candidate(recipe, mesh, held.total + step.temporaries + USUAL_PROGRAM, step)

        # Of many microbatches gradients may take more, and all else takes less.
        least = min((tried("full", count) for count in {counts[0], counts[-1]}), key=lambda one: one.total)
        if least.total > self._memory:
            return least
        found: list[_Candidate] = []
        for remat in _REMATS:
            for count in counts:
                if remat != "full":
                    # As if nothing were kept for the backward pass: to know better takes a second.
                    bound = tried(remat, count, dtypes.least)
                    if bound.total > self._memory:
                        continue
                    if any(self._is_as_good(other, bound) for other in found):
                        break
                found.append(tried(remat, count))
                if not is_tight(found[-1].total, self._memory):
                    break
        return min(found, key=self._order)

    def _is_as_good(self, one: _Candidate, other: _Candidate) -> bool:
        """Whether one that leaves room takes as little time as the other, whatever that one will need."""
        return not is_tight(one.total, self._memory) and _rounded_time(one) <= _rounded_time(other)

    def _order(self, one: _Candidate) -> tuple:
        """Sorts candidates: the best first."""
        links = one.step.roofline.links or 0.0
        if one.total > self._memory:
            return True, True, one.total, links
        tight = is_tight(one.total, self._memory)
        return False, tight, _rounded_time(one), _rounded(one.total, _EQUAL_BYTES), links, one.total

    def _proposal(self, dtypes: _Dtypes, one: _Candidate) -> Proposal:
        """Returns a proposal, with all that was estimated between two sizes of microbatches now traced."""
        return _of_plan(dtypes.shapes.planned(one.recipe, self._target), one.recipe, self._dtypes[0].recipe)


def _rounded_time(one: _Candidate) -> int:
    """Returns the same number for times that are equal."""
    return _rounded(one.step.roofline.seconds, _EQUAL_TIMES)


def _rounded(number: float, share: float) -> int:
    return round(math.log(number) / share)


def _distinct(ordered: Iterable[_Candidate]) -> Iterator[_Candidate]:
    """Yields the first of those that take as much time and exactly as many bytes."""
    seen = set()
    for one in ordered:
        key = one.total, _rounded_time(one)
        if key not in seen:
            yield one
        seen.add(key)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write a number as a product of `count` numbers, in their order."""
    if count == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factors(number // first, count - 1):
            yield first, *rest


def _microbatches(batch_size: int, shards: int) -> list[int]:
    """Returns the numbers of microbatches that leave every part of a mesh as many rows, the fewest first."""
    return _divisors(batch_size // shards)


def _divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending; of any batch size in a moment."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _changed(recipe: Recipe, mesh: Mapping[str, int], remat: Remat, accumulation: int) -> Recipe:
    return dataclasses.replace(
        recipe,
        mesh=MeshSection(**mesh),
        model=dataclasses.replace(recipe.model, remat=remat),
        train=dataclasses.replace(recipe.train, accumulation=accumulation),
    )


def _settings(recipe: Recipe, given: Recipe, devices: int) -> Iterator[str]:
    """Yields what a recipe has otherwise than the one that was given, as `--set` takes it."""
    sections = ["model", "optimizer", "train"]
    try:
        is_same = mesh_sizes(dataclasses.asdict(given.mesh), devices) == dataclasses.asdict(recipe.mesh)
    except InputError:
        is_same = False
    for section in sections if is_same else ["mesh", *sections]:
        for field in dataclasses.fields(getattr(recipe, section)):
            value = getattr(getattr(recipe, section), field.name)
            if value != getattr(getattr(given, section), field.name):
                yield f"{section}.{field.name}={value}"


def _of_plan(planned: PlannedTraining, recipe: Recipe, given: Recipe) -> Proposal:
    assert planned.roofline is not None and planned.run_tokens is not None and planned.run_seconds is not None
    assert planned.memory is not None
    return Proposal(
        mesh=planned.mesh,
        remat=recipe.model.remat,
        accumulation=recipe.train.accumulation,
        param_dtype=recipe.model.param_dtype,
        moments=recipe.optimizer.moments,
        settings=tuple(_settings(recipe, given, planned.devices)),
        bytes=planned.total,
        fits=planned.total <= planned.memory,
        tight=planned.tight,
        seconds=planned.roofline.seconds,
        bound=planned.roofline.bound,
        links=planned.roofline.links,
        tokens_per_second=planned.run_tokens / planned.run_seconds,
        run_seconds=planned.run_seconds,
    )
