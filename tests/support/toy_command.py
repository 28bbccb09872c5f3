"""A command as a contributor would write it: a spec, a verb that takes it, and what the command line does with them."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from moe_jax.api.model import open_model
from moe_jax.commands.options import command_options, given_to
from moe_jax.core.errors import InputError
from moe_jax.core.verb_spec import Shown, Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class TallySpec(Spec):
    """The options of `tally`."""

    unit: Literal["one", "thousand"] = "one"
    """What is counted."""
    below: Annotated[str | None, Shown("PATH", "everything")] = None
    """Only parameters whose path begins so; not with `unit` thousand."""
    biases: bool = True
    """Counts biases, too."""

    def __post_init__(self) -> None:
        if self.below is not None and self.unit == "thousand":
            raise InputError("--below does not go with --unit thousand")


def tally(model: str | Path, spec: TallySpec) -> float:
    """Returns how many parameters a model has."""
    specs = open_model(model).specs()
    counted = [path for path in specs if path.startswith(spec.below or "") and (spec.biases or "/bias" not in path)]
    return sum(specs[path].size for path in counted) / (1000 if spec.unit == "thousand" else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """Counts the parameters of a model.

    It stands in the folder of the tests.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory."""


Options = command_options(_Command, TallySpec)
GROUPS = {"what is counted": ("below", "no_biases")}
EXAMPLES = """
moe-jax tally moe-dir --below layers/0
"""


def run(options: _Command) -> None:
    """Counts, and prints the number."""
    print(f"{tally(options.model, given_to(TallySpec, options)):g}")
