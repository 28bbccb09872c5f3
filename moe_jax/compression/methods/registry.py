"""The table of the methods of compression. Nothing else knows a method by name."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_jax.compression.methods.bits_by_matrix import Allocate
from moe_jax.compression.methods.deltas import D2MoE, Quantize, Sparsify
from moe_jax.compression.methods.expert_merging import MEO, GitReBasin, HCSMoE, MSMoE
from moe_jax.compression.methods.expert_pruning import REAP
from moe_jax.compression.methods.interface import Method
from moe_jax.compression.methods.mobe import MoBE
from moe_jax.compression.methods.narrower import MLPFusion, StructuredPruning
from moe_jax.compression.methods.resmoe import ResMoE
from moe_jax.compression.methods.without_base import HQQ, NF4, SVD, PlainQuantize, UnstructuredPruning
from moe_jax.core.errors import InputError, check_member, flag_of, shown

METHODS: dict[str, type[Method]] = {
    "ders-sparsify": Sparsify,
    "ders-quantize": Quantize,
    "resmoe": ResMoE,
    "up": UnstructuredPruning,
    "sp": StructuredPruning,
    "svd": SVD,
    "msmoe": MSMoE,
    "meo": MEO,
    "git-rebasin": GitReBasin,
    "mlp-fusion": MLPFusion,
    "quantize": PlainQuantize,
    "reap": REAP,
    "hc-smoe": HCSMoE,
    "d2-moe": D2MoE,
    "hqq": HQQ,
    "nf4": NF4,
    "mobe": MoBE,
    "allocate": Allocate,
}
# What other libraries have as methods of their own.
_NAMES_ELSEWHERE = {
    "awq": "quantize with --calibrate, --row-scales and --no-feedback",
    "gptq": "quantize with --calibrate",
    "rtn": "quantize without --calibrate",
    "wanda": "up with --calibrate",
}


def check_method(name: str) -> None:
    """Raises `InputError` for an unknown method; it says what is nearest, or how what others call so is asked for."""
    if isinstance(name, str) and (asked := _NAMES_ELSEWHERE.get(name.lower())):
        raise InputError(f"unknown method {shown(name)}: here it is {asked}")
    check_member("method", name, tuple(METHODS))


def option_names() -> tuple[str, ...]:
    """Options of all methods."""
    return tuple(dict.fromkeys(name for method in METHODS for name in options_of(method)))


def make_method(name: str, options: Mapping[str, Any]) -> Method:
    """Makes a method, by its key in `METHODS`, from the options that the user gave, by name.

    Raises:
      InputError: for an unknown method, an option of another one, one that is missing, or a value out of range.
    """
    check_method(name)
    check_options([name], options)
    for field in dataclasses.fields(METHODS[name]):
        if field.default is dataclasses.MISSING and field.name not in options:
            raise InputError(f"{name} needs {flag_of(field.name)}")
    return METHODS[name](**options)


def make_swept_methods(names: Sequence[str], options: Mapping[str, Any]) -> list[tuple[str, Method]]:
    """Makes the methods that a sweep tries: one for every method and value, by name.

    Args:
      names: keys of `METHODS`; none: those whose swept option is given, or else all.
      options: by name; of a swept option all the values to try, by default the method's own.

    Raises:
      InputError: see `make_method`.
    """
    for name in names:
        check_method(name)
    names = names or [name for name, method in METHODS.items() if method.swept[0] in options] or list(METHODS)
    check_options(names, options)
    made = []
    for name in dict.fromkeys(names):
        swept, values = METHODS[name].swept
        fixed = {option: value for option, value in options.items() if option in options_of(name)}
        for value in dict.fromkeys(fixed.pop(swept, values)):
            made.append((name, make_method(name, fixed | {swept: value})))
    return made


def check_options(names: Sequence[str], options: Iterable[str]) -> None:
    """Raises `InputError` for an option that none of the methods takes."""
    for option in options:
        takers = [method for method in METHODS if option in options_of(method)]
        if not set(takers) & set(names):
            belongs = f"it belongs to {', '.join(takers)}" if takers else "no method takes it"
            raise InputError(f"{flag_of(option)} does not go with {', '.join(names)}: {belongs}")


def options_of(method: str) -> tuple[str, ...]:
    """The options of a method."""
    return tuple(field.name for field in dataclasses.fields(METHODS[method]))
