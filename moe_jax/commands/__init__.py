"""The commands of `moe-jax`, one module each: a frozen dataclass `Options` and `run(options)`.

A module imports JAX inside `run`, so that `moe-jax COMMAND --help` answers at once.
"""

import tyro


def optional(metavar: str, default: str = "", text: str | None = None) -> object:
    """Annotation of an option whose default is None, "not given".

    Args:
      metavar: what the help shows as its value.
      default: what the help shows as its default: the value that is used if it is not given.
      text: its help, instead of the docstring of the field.
    """
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "", help=text)
