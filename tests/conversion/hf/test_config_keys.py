"""What is read of a key, and what is left."""

import math

import pytest

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.core.errors import InputError

LONG = 2**63  # an integer of more than 64 bits


def read(how: str, value: object, **options: object) -> object:
    return getattr(HFConfig({"key": value}, {}), how)("key", **options)


@pytest.mark.parametrize(
    ("how", "good", "bad"),
    [
        ("integer", [(3, 3), (-1, -1), (0, 0), (None, None), (LONG - 1, LONG - 1)], [True, 1.0, "1", [1], LONG]),
        ("required_integer", [(3, 3), (0, 0)], [None, False, 1.5]),
        ("number", [(3, 3.0), (0.5, 0.5), (None, None)], [True, "1", math.nan, math.inf, 1e39, [1.0]]),
        ("required_number", [(3, 3.0), (0.0, 0.0)], [None, True]),
        ("flag", [(True, True), (False, False), (None, False)], [0, 1, "true", []]),
        ("text", [("a", "a"), ("", ""), (None, None)], [1, ["a"], True]),
        ("mapping", [({"a": 1}, {"a": 1}), ({}, {}), (None, None)], [[], "a", 1]),
        ("integers", [([1, 2], (1, 2)), (3, (3,)), ([], ()), (None, ())], [[1, "2"], [True], "1", 1.0, [[1]], [LONG]]),
        ("texts", [(["a", "b"], ("a", "b")), ([], ()), (None, None)], ["a", ["a", 1], {"a": 1}]),
    ],
)
def test_a_key_has_the_type_that_it_must_have(how, good, bad):
    for value, expected in good:
        found = read(how, value)
        assert found == expected and type(found) is type(expected)
    for value in bad:
        with pytest.raises(InputError, match="^config.json: .*'key'"):
            read(how, value)


def test_where_only_a_list_will_do():
    assert read("integers", [4], lists_only=True) == (4,) and read("integers", None, lists_only=True) == ()
    with pytest.raises(InputError, match="expected a list"):
        read("integers", 4, lists_only=True)


def test_what_is_left_out_has_its_default_and_null_is_none():
    config = HFConfig({"heads": None, "layers": 2}, {"heads": 8, "layers": 3, "width": 16})
    assert (config.integer("heads"), config.integer("layers"), config.integer("width")) == (None, 2, 16)
    assert config.integer("other") is None
    assert [config.given(key) for key in ("heads", "layers", "width")] == [False, True, False]
    assert [config.is_default(key) for key in ("heads", "layers", "width", "other")] == [False, False, True, True]
    config.require("layers", "width")
    with pytest.raises(InputError) as error:
        config.require("heads", "layers", "other")
    assert "'heads'" in str(error.value) and "'other'" in str(error.value) and "'layers'" not in str(error.value)


def test_a_key_that_must_have_a_value_is_checked_and_written_back():
    config = HFConfig({"a": 1, "b": 2}, {"c": 3})
    for key, value in (("a", 1), ("c", 3), ("d", 4)):  # given, by default, and nothing said
        config.must_be(key, value)
    for key, value in (("b", 1), ("c", 4)):
        with pytest.raises(InputError, match=f"only {value} is"):
            config.must_be(key, value)
    assert config.unread_keys() == {"a": 1, "b": 2}
    config.check_all_known((), ())  # what was checked is known


def test_keys_that_were_not_read_are_kept_or_refused():
    config = HFConfig({"model_type": "x", "a": 1, "b": 2, "dtype": "float32", "c": 3}, {})
    config.integer("a")
    config.keep("a", 5)
    assert config.unread_keys() == {"b": 2, "dtype": "float32", "c": 3, "a": 5}
    config.check_all_known(["b"], ["c"])
    with pytest.raises(InputError, match="'b' and 1 more .* --ignore-keys b,c$"):
        config.check_all_known((), ())
    config.unknown_inside("rope", ["x", "y"])
    with pytest.raises(InputError, match="'rope.x' may .* --ignore-keys rope.x$"):
        config.check_all_known(["b", "c"], ["rope.y"])
