"""Options of the command are the fields of the methods."""

import dataclasses
from typing import ClassVar, Literal

import pytest

from moe_jax.commands import compress
from moe_jax.commands.compress import command_fields, given_options, one_method, swept_methods
from moe_jax.compression import spec
from moe_jax.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Keeps a share.

    Attributes:
      keep: how much stays,
        in (0, 1].
      fit: fits the rest.
      room_bytes: a budget.
    """

    swept: ClassVar = ("keep", (0.1, 0.2))
    needs_calibration: ClassVar = False
    keep: float | None = None
    fit: bool = True
    room_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Keeps places.

    Attributes:
      count, keep: how many, and which.
    """

    swept: ClassVar = ("count", (1, 2))
    needs_calibration: ClassVar = False
    count: int
    keep: Literal["first", "last"] = "first"


@pytest.fixture(autouse=True)
def two_methods(monkeypatch):
    for module in (compress, spec):
        monkeypatch.setattr(module, "METHOD_OPTIONS", {"shares": Shares, "places": Places})


def given(**options):
    made = dataclasses.make_dataclass("Options", command_fields(), kw_only=True)
    return given_options(made(**options))


def test_fields_have_the_texts_of_the_docstrings():
    fields = {name: kind.__metadata__[0] for name, kind, _ in command_fields()}
    assert list(fields) == ["keep", "no_fit", "room_bytes", "count"]
    assert fields["keep"].help == "shares: how much stays, in (0, 1].\nplaces: how many, and which."
    assert fields["keep"].metavar == "X|first|last" and fields["count"].metavar == "N"
    assert fields["room_bytes"].metavar == "BYTES" and "fits the rest" in fields["no_fit"].help


def test_values_have_the_types_of_the_method():
    assert one_method("shares", given(keep="0.5", no_fit=True, room_bytes="2kB")) == Shares(
        keep=0.5, fit=False, room_bytes=2000
    )
    assert one_method("places", given(keep="last", count="3")) == Places(keep="last", count=3)
    assert given() == {}


def test_a_sweep_gives_every_method_what_it_can_read():
    """`keep` is a number for one of them, and a word for the other."""
    made = swept_methods([], given(keep="0.5,0.7", count="1,2"))
    assert made == [
        ("shares", Shares(keep=0.5)), ("shares", Shares(keep=0.7)),
        ("places", Places(count=1)), ("places", Places(count=2)),
    ]  # fmt: skip
    assert swept_methods([], given(count="4", keep="last")) == [("places", Places(count=4, keep="last"))]
    assert [name for name, _ in swept_methods([], given())] == ["shares", "shares", "places", "places"]
    assert swept_methods(["shares"], given(no_fit=True, keep="1")) == [("shares", Shares(keep=1.0, fit=False))]


def test_a_sweep_of_all_leaves_out_what_needs_a_text(monkeypatch):
    monkeypatch.setattr(Places, "needs_calibration", True)
    assert [name for name, _ in swept_methods([], given())] == ["shares", "shares"]
    assert {name for name, _ in swept_methods([], given(), calibrated=True)} == {"shares", "places"}
    assert [name for name, _ in swept_methods(["places"], given())] == ["places", "places"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["shares"], {"count": "2"}, "--count does .* with shares: it .* places"),
        (["shares"], {"keep": "much"}, "--keep 'much': expected numbers, separated"),
        (["places"], {"count": "1.5"}, "--count '1.5': expected whole numbers"),
        (["places"], {"keep": "fist"}, "unknown keep 'fist' .did you mean 'first'"),
        (["share"], {}, "unknown method 'share' .did you mean 'shares'"),
        (["shares", "places"], {"room_bytes": "lots"}, "--room-bytes 'lots': expected bytes"),
    ],
)
def test_what_no_method_can_read(names, options, message):
    with pytest.raises(InputError, match=message):
        swept_methods(names, given(**options))


def test_several_values_are_for_a_sweep():
    with pytest.raises(InputError, match="--count 1,2: several values need --sweep"):
        one_method("places", given(count="1,2"))
    with pytest.raises(InputError, match="unknown method 'place'"):
        one_method("place", given(count="1"))
