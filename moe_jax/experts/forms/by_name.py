"""The registry of forms: a form is found by its name."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError, check_member, nearest, shown
from moe_jax.experts.forms.matrix import Split
from moe_jax.experts.forms.optional.coding import CodedJointly, Encodable
from moe_jax.experts.forms.protocol import ExpertForm, KernelForm

_FORMS: dict[str, type[ExpertForm]] = {}
_Form = TypeVar("_Form", bound=ExpertForm)
_SPLITS: tuple[Split, ...] = ("out", "in")


def register(kind: str) -> Callable[[type[_Form]], type[_Form]]:
    """Registers the decorated form, so that `BankConfig(kind=kind, ...)` has it.

    Raises:
      ValueError: if the name is taken, or if another form has a leaf of the same name that is sharded differently.
    """

    def add(form: type[_Form]) -> type[_Form]:
        if kind in _FORMS:
            raise ValueError(f"a form {kind!r} is registered already")
        if issubclass(form, KernelForm) and form.over_base:
            for split in _SPLITS:
                known = dict(_specs(split))
                for name, spec in form.stored_specs(split).items():
                    if known.get(name, spec) != spec:
                        raise ValueError(f"leaf {name!r} of form {kind!r} is {spec}, and in another form {known[name]}")
        form.kind = kind
        _FORMS[kind] = cast(type[ExpertForm], form)
        return form

    return add


def unregister(kind: str) -> None:
    """Removes a form from the registry."""
    del _FORMS[kind]


def form_named(kind: str) -> type[ExpertForm]:
    """The form with this name.

    Raises:
      InputError: if there is none.
    """
    check_member("bank kind", kind, _FORMS)
    return _FORMS[kind]


def registered() -> tuple[type[ExpertForm], ...]:
    """All forms, in the order in which they were registered."""
    return tuple(_FORMS.values())


def delta_options() -> dict[str, str]:
    """The values of `upcycle --delta`, such as `low-rank:R`, by kind."""
    return {kind: form.delta_option for kind, form in _FORMS.items() if form.delta_option is not None}


def form_of_option(text: str) -> ExpertForm:
    """Reads a value of `upcycle --delta`, such as `low-rank:16`.

    Raises:
      InputError: if it is none of `delta_options`, or its number cannot be read or is out of range.
    """
    kind, colon, number = text.partition(":")
    offered = delta_options()
    if kind not in offered or bool(colon) != (":" in offered[kind]) or bool(number) != bool(colon):
        hint = "" if kind in offered else nearest(kind, offered)
        raise InputError(f"unknown --delta {shown(text)}{hint}; it is one of {', '.join(offered.values())}")
    form = _FORMS[kind]
    if form.delta_number is None:
        return form()
    name, read = form.delta_number
    try:
        value = read(number)
    except ValueError:
        expected = "a whole number" if read is int else "a number"
        raise InputError(f"--delta {shown(text)}: expected {expected} after the colon") from None
    return form(**{name: value})


def option_of_form(form: str | ExpertForm) -> str:
    """Returns the value of `upcycle --delta` that means a form; a text is returned as it is.

    Raises:
      InputError: if upcycling does not offer the form, or the form has options that no value of `--delta` has.
    """
    if isinstance(form, str):
        return form
    if not isinstance(form, ExpertForm) or form.delta_option is None:
        offered = ", ".join(delta_options().values())
        raise InputError(f"delta={shown(form)}: upcycling makes no such experts; it is one of {offered}")
    named, _, number = form.delta_option.partition(":")
    text = f"{named}:{getattr(form, form.delta_number[0])}" if number and form.delta_number else named
    if form_of_option(text) != form:
        raise InputError(f"delta={shown(form)}: upcycling sets no other options than {form.delta_option} has")
    return text


def encodable_forms() -> tuple[type[Encodable], ...]:
    """The forms that residuals around a shared base can be encoded in, in the order in which they were registered."""
    return tuple(form for form in _FORMS.values() if issubclass(form, Encodable) and form.over_base)


def kinds_with(option: str) -> list[str]:
    """The kinds whose forms have an option of this name."""
    return [kind for kind, form in _FORMS.items() if option in {field.name for field in dataclasses.fields(form)}]


def delta_specs(split: Split) -> dict[str, P]:
    """How the leaves [E, ...] of all forms over a base are sharded, by path below `experts/delta/MATRIX`."""
    return dict(_specs(split))


def shared_delta_specs() -> dict[str, P]:
    """How leaves are sharded that the matrices of an expert have in common, by path below `experts/delta`."""
    joint = (form for form in _deltas() if issubclass(form, CodedJointly))
    return {name: spec for form in joint for name, spec in form.shared_stored_specs().items()}


def _specs(split: Split) -> Iterator[tuple[str, P]]:
    for form in _deltas():
        yield from form.stored_specs(split).items()


def _deltas() -> Iterator[type[KernelForm]]:
    return (form for form in _FORMS.values() if issubclass(form, KernelForm) and form.over_base)
