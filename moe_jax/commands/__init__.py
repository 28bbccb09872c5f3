"""The commands of `moe-jax`, one module each: a frozen dataclass `Options` and `run(options)`.

A module imports JAX inside `run`, so that `moe-jax COMMAND --help` answers at once.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from moe_jax.model_io.model_source import ModelSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseFlag:
    """The option `--base`, for models that need another one."""

    base: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: where it was)")] = None
    """The present path of the model that this one needs, if it was moved: the base of an adapter directory, or the
    model that the run of a checkpoint was begun with."""

    def open(self, path: Path) -> "ModelSource":
        """Opens a model with its base, as `open_source` does."""
        from moe_jax.api.open_source import open_source

        return open_source(path, base=self.base)


def optional(metavar: str, default: str = "", text: str | None = None) -> object:
    """Returns the annotation of an option whose default is None, "not given".

    Args:
      metavar: the placeholder for its value in the help.
      default: the default in the help: the value that is used if the option is not given.
      text: its help, instead of the docstring of the field.
    """
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "", help=text)
