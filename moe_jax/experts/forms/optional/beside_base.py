"""Optional: experts that can stand beside a base model, as a tuned adapter does, or belong to it."""

import abc
from typing import Self


class BesideBase(abc.ABC):
    """Optional: the experts are adapters on a base model, or part of it (`ExpertForm.beside_base_model`)."""

    @property
    @abc.abstractmethod
    def why_not_merged(self) -> str:
        """Why such experts cannot be merged into the base model: the verb and its object, as in "are nonlinear"."""

    @abc.abstractmethod
    def as_part_of_base(self, of_base: bool) -> Self:
        """The form with `beside_base_model` false (`of_base`) or true."""
