"""Optional: a form in which experts of one layer have forms of their own."""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from moe_jax.experts.forms.protocol import KernelForm


class Own(NamedTuple):
    """The place of one expert among the stored arrays of a matrix.

    Attributes:
      form: its own.
      folder: before the names of its arrays; may be empty.
      index: its place in each of them.
    """

    form: "KernelForm"
    folder: str
    index: int

    def arrays(self, every: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of this expert, as its form names them."""
        own = {path.removeprefix(self.folder): array for path, array in every.items() if path.startswith(self.folder)}
        common = self.form.common_leaves
        return {path: array if path in common else array[self.index] for path, array in own.items()}


class ByExpert(abc.ABC):
    """Optional: which form an expert has depends on the expert."""

    @property
    @abc.abstractmethod
    def num_experts(self) -> int:
        """The number of experts that the options describe."""

    @abc.abstractmethod
    def check_count(self, num_experts: int) -> None:
        """Raises `InputError` if the options are those of another number of experts."""

    @abc.abstractmethod
    def of_expert(self, expert: int) -> Own:
        """The form of one expert, and where its arrays are."""

    @abc.abstractmethod
    def experts_with(self, leaf: str) -> list[int]:
        """The experts that have a leaf, in the order in which it has them."""


def own_of(form: "KernelForm", expert: int) -> Own:
    """The form of one expert of a layer, and where its arrays are."""
    return form.of_expert(expert) if isinstance(form, ByExpert) else Own(form, "", expert)


def experts_with(form: "KernelForm", leaf: str) -> slice | list[int]:
    """The experts that have a leaf, in the order in which it has them."""
    return form.experts_with(leaf) if isinstance(form, ByExpert) else slice(None)
