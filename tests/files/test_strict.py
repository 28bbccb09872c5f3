"""Dataclasses from files: what is taken, and that everything else is named. (Recipes test the words for TOML.)"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import parse, without_format


@dataclasses.dataclass(frozen=True)
class Wheel:
    size: float
    spokes: int = 32

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise InputError(f"size {self.size} must be above 0")


@dataclasses.dataclass(frozen=True)
class Cart:
    wheels: tuple[Wheel, ...]
    spare: Wheel | None = None
    load: int | tuple[int, ...] | None = None
    paint: Literal["red", "green"] = "red"
    papers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read(**table) -> Cart:
    return parse(Cart, table, where="cart.json", language="JSON")


@dataclasses.dataclass(frozen=True)
class Numbers:
    kind: Literal["float32", "bfloat16"] | None = None


def test_dtypes_have_short_names():
    assert parse(Numbers, {"kind": "bf16"}, where="x", language="TOML") == Numbers("bfloat16")
    with pytest.raises(InputError, match="kind: expected one of 'float32', 'bfloat16', got the string \"fp16\""):
        parse(Numbers, {"kind": "fp16"}, where="x", language="TOML")


def test_what_is_taken():
    cart = read(wheels=[{"size": 2}, Wheel(3.0)], spare=None, load=[1, 2], papers={"any": [None, {}]})
    assert cart == Cart((Wheel(2.0), Wheel(3.0)), None, (1, 2), papers={"any": [None, {}]})
    assert isinstance(cart.wheels[0].size, float)
    assert read(wheels=[], load=7).load == 7


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "key 'wheels' is missing, expected a list, each item an object"),
        ({"wheels": None}, "wheels: expected a list, each item an object, got null"),
        ({"wheels": [None]}, "wheels[0]: expected an object, got null"),
        ({"wheels": {"size": 1}}, "wheels: expected a list, each item an object, got an object"),
        ({"wheels": [{"size": True}]}, "wheels[0].size: expected a number, got the boolean true"),
        ({"wheels": [{"size": -1}]}, "wheels[0]: size -1.0 must be above 0"),
        ({"wheels": [], "spare": 3}, "spare: expected an object, got the integer 3"),
        ({"wheels": [], "load": 1.5}, "load: expected an integer or a list, each item an integer, got the number 1.5"),
        ({"wheels": [], "load": [1, "2"]}, 'load[1]: expected an integer, got the string "2"'),
        ({"wheels": [], "paint": "gren"}, "paint: expected one of 'red', 'green', got the string \"gren\" (did you"),
        ({"wheels": [], "papers": [1]}, "papers: expected an object, got the list [1]"),
        ({"wheels": [{"size": 1, "spokes": 2**63}]}, "wheels[0].spokes: expected an integer of at most 64 bits"),
        ({"wheels": [{"size": 10**400}]}, "wheels[0].size: expected an integer of at most 64 bits, got the integer an"),
        ({"wheels": [{"size": float("inf")}]}, "wheels[0].size: expected a finite number, got the number inf"),
        ({"wheels": [{"size": float("nan")}]}, "wheels[0].size: expected a finite number, got the number nan"),
        ({"wheels": [], "wheel": 1}, "unknown key 'wheel' (did you mean 'wheels'?)"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(table, message):
    with pytest.raises(InputError) as error:
        read(**table)
    assert str(error.value).startswith(f"cart.json: {message}")


def test_all_problems_are_listed_together():
    with pytest.raises(InputError, match="^cart.json: 3 problems") as error:
        read(wheels=[{"spokes": 1.5}], color="red")
    assert all(problem in str(error.value) for problem in ("wheels[0].spokes: ", "'wheels[0].size' is", "'color'"))


def test_what_is_large_is_not_repeated():
    """Neither a long key, nor a long value, nor a long list of problems."""
    for table in ({"x" * 9_000_000: 1}, {"paint": "x" * 9_000_000}, {"papers": ["x" * 99] * 100_000}):
        with pytest.raises(InputError) as error:
            read(**{"wheels": [], **table})
        assert len(str(error.value)) < 250
    with pytest.raises(InputError, match="100 problems") as error:
        read(wheels=[1] * 1_000_000)
    assert str(error.value).count("\n") == 41 and "and 60 more" in str(error.value)


def test_formats_and_versions():
    assert without_format({"format": "cart", "version": 2, "a": 1}, "cart", 2, where="x") == {"a": 1}
    with pytest.raises(InputError, match="^x has no format 'cart'"):
        without_format({"version": 2}, "cart", 2, where="x")
    for version in (3, 2.0, True, None):
        with pytest.raises(InputError, match=f"^x has version {version}, .* 2"):
            without_format({"format": "cart", "version": version}, "cart", 2, where="x")
