"""Experts of which some have one form and some another: never stored, made of those of several layers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from moe_jax.experts.devices import Cost, Platform
from moe_jax.experts.forms.coding import ByExpert, Own, below, folder_of_part
from moe_jax.experts.forms.never_stored import NeverStored
from moe_jax.experts.forms.optional import Factored, costs_of
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.shapes import BASE, Arrays, FFNConfig, GroupSizes, Load, Matrix, Part, Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralForms(ByExpert, Factored, NeverStored):
    """Parts of the experts, each with a form of its own: leaves `part0/codes` [E_0, bytes, out] and so on.

    The experts of a part have consecutive numbers, so that their rows are consecutive too where rows are sorted by
    expert: each part multiplies its own.

    Attributes:
      forms: of the parts; all are added to a base, if there is one.
      counts: experts of every part.
    """

    kind: ClassVar[str] = "several forms"
    paths: ClassVar[tuple[str, ...]] = ()

    forms: tuple[KernelForm, ...]
    counts: tuple[int, ...]

    @property
    def num_experts(self) -> int:
        return sum(self.counts)

    def check_count(self, num_experts: int) -> None:
        """Does nothing: `num_experts` of a bank are those of a layer, and these are the experts of all."""

    def describe(self) -> str:
        return " and ".join(dict.fromkeys(form.describe() for form in self.forms))

    def of_expert(self, expert: int) -> Own:
        part = 0
        while expert >= self.counts[part]:
            expert, part = expert - self.counts[part], part + 1
        return Own(self.forms[part], folder_of_part(part), expert)

    def experts_with(self, leaf: str) -> list[int]:
        part = next(part for part in range(len(self.forms)) if leaf.startswith(folder_of_part(part)))
        first = sum(self.counts[:part])
        return list(range(first, first + self.counts[part]))

    def of_matrix(self, matrix: Matrix) -> "SeveralForms":
        return dataclasses.replace(self, forms=tuple(form.of_matrix(matrix) for form in self.forms))

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        every = enumerate(zip(self.forms, self.counts, strict=True))
        return {
            folder_of_part(part) + path: leaf
            for part, (form, count) in every
            for path, leaf in form.fresh(rngs, matrix, (count,), dtype).items()
        }

    # ---- how it is applied ------------------------------------------------------------------------------------------

    def grouped(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, part: Part | None = None
    ) -> Rows:
        def product(form: KernelForm, rows: Rows, own: dict[str, Array], sizes: GroupSizes) -> Rows:
            return form.grouped(rows, own, sizes, matrix, part)

        return self._part_by_part(rows, arrays, group_sizes, product)

    def grouped_delta(
        self, rows: Rows, arrays: Arrays, group_sizes: GroupSizes, matrix: Matrix, way: str, part: Part | None = None
    ) -> Rows:
        def product(form: KernelForm, rows: Rows, own: dict[str, Array], sizes: GroupSizes) -> Rows:
            if isinstance(form, Factored):
                return form.grouped_delta(rows, own, sizes, matrix, way, part)
            return form.grouped(rows, own, sizes, matrix, part)

        return self._part_by_part(rows, arrays, group_sizes, product)

    def _part_by_part(
        self,
        rows: Rows,
        arrays: Mapping[str, Array],
        group_sizes: GroupSizes,
        product: Callable[[KernelForm, Rows, dict[str, Array], GroupSizes], Rows],
    ) -> Rows:
        common = {BASE: arrays[BASE]} if BASE in arrays else {}
        ends, first, sums = jnp.cumsum(group_sizes), 0, []
        for part, (form, count) in enumerate(zip(self.forms, self.counts, strict=True)):
            own, start = below(arrays, folder_of_part(part)), ends[first - 1] if first else 0
            # Products begin with the first row, and give zeros for those behind their last.
            y = product(form, jnp.roll(rows, -start, axis=0), common | own, group_sizes[first : first + count])
            sums.append(jnp.roll(y, start, axis=0))
            first += count
        return sum(sums[1:], start=sums[0])

    # ---- what it costs: the mean over experts -----------------------------------------------------------------------

    def multiplied_entries(self, expert: FFNConfig, d_model: int) -> int:
        return round(self._mean(lambda form: form.multiplied_entries(expert, d_model)))

    def own_bytes(self, matrices: Sequence[Matrix], itemsize: int) -> float:
        return self._mean(lambda form: costs_of(form).own_bytes(matrices, itemsize))

    def making(self, matrices: Sequence[Matrix], platform: Platform) -> float:
        return self._mean(lambda form: costs_of(form).making(matrices, platform))

    def delta_costs(self, matrices: Sequence[Matrix], load: Load, platform: Platform) -> dict[str, Cost]:
        """The ways of any part but `side-by-side`; a part that has no such way is `grouped`.

        What one takes is the most that it would take a part that had all experts.
        """
        costs = [costs_of(form).delta_costs(matrices, load, platform) for form in self.forms]
        ways = dict.fromkeys(way for of_form in costs for way in of_form if way != "side-by-side")
        each = {way: [of_form.get(way, of_form["grouped"]) for of_form in costs] for way in ways}
        return {way: max(of_forms, key=lambda cost: cost.total) for way, of_forms in each.items()}

    def _mean(self, of_form: Callable[[KernelForm], float]) -> float:
        each = zip(self.forms, self.counts, strict=True)
        return sum(count * of_form(form) for form, count in each) / self.num_experts
