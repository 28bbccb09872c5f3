"""What messages repeat is short and printable, and checks are of what they say."""

import math
import types

import numpy as np
import pytest

from moe_jax.core.errors import (
    MAX_LINE,
    MAX_SHOWN,
    MAX_SIZE,
    InputError,
    check_member,
    check_number,
    check_positive,
    clipped,
    first_line,
    first_sentence,
    flag_of,
    is_finite,
    nearest,
    printable,
    raise_if_any,
    shown,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1,), "(1,)"),
        ((), "()"),
        ({}, "{}"),
        ({1}, "{1}"),
        (b"a\n", "b'a\\n'"),
        ([[[[1]]]], "[[[...]]]"),
        ({"a": {"b": {"c": {}}}}, "{'a': {'b': {'c': ...}}}"),
        (2**400, "an integer of 401 bits"),
        (10**60, str(10**60)),
        ([2**400, True], "[an integer of 401 bits, True]"),
        ([*range(20)], str([*range(20)])),
        ([0] * 21, "[" + "0, " * 20 + "...]"),
        ("x" * 78, repr("x" * 78)),
        ("x" * 79, "'" + "x" * 76 + "..."),
    ],
)
def test_what_is_shown(value, expected):
    assert shown(value) == expected and len(shown(value)) <= MAX_SHOWN


def test_what_is_large_is_shown_without_the_work_for_the_rest():
    class Endless(list):
        def __len__(self):
            return 10**9

        def __iter__(self):
            return iter(lambda: "x" * 10**6, None)

    for value in ("x" * 10**8, Endless(), {"a" * 10**8: 1}, [[["x" * 10**7] * 99] * 99] * 99):
        assert len(shown(value)) == MAX_SHOWN and shown(value).endswith("...")
    assert (
        clipped("x" * MAX_SHOWN) == "x" * MAX_SHOWN and clipped("x" * (MAX_SHOWN + 1)) == "x" * (MAX_SHOWN - 3) + "..."
    )


def test_what_a_terminal_gets_is_printable():
    assert printable("a é\nb\x1b[2J\x00c") == "a é\nb\\x1b[2J\\x00c"
    long = "x" * MAX_LINE
    assert printable(f"{long}\n{long}y") == f"{long}\n{long[:-3]}..."


def test_all_problems_are_listed_up_to_a_limit():
    raise_if_any([], "it")
    for problems, expected in (
        (["one"], "it: one"),
        (["one", "two"], "it: 2 problems\n  - one\n  - two"),
        (["one", "two", "three"], "it: 3 problems\n  - one\n  - two\n  - and 1 more"),
    ):
        with pytest.raises(InputError) as error:
            raise_if_any(problems, "it", limit=2)
        assert str(error.value) == expected


def test_sizes_are_positive_integers():
    def check(value, **options):
        check_positive(types.SimpleNamespace(other=0, size=value), "size", **options)

    for good in (1, MAX_SIZE, None):
        check(good)
    check(7, at_most=7)
    for bad in (0, -1, 1.0, True, "1", math.nan):
        with pytest.raises(InputError, match="^size=.* positive"):
            check(bad)
    for bad, most in ((8, 7), (MAX_SIZE + 1, MAX_SIZE)):
        with pytest.raises(InputError, match=f"^size={bad} must .* {most:,}$"):
            check(bad, at_most=most)


def test_numbers_are_finite_and_in_their_range():
    def check(value, **options):
        check_number(types.SimpleNamespace(other="x", share=value), "share", **options)

    for good in (0, -1.5, None, np.float32(2), 3.4e38):
        check(good)
    for bad in (math.nan, math.inf, -math.inf, "1", True, 1e39, -1e39, 10**400):
        assert not is_finite(bad)
        with pytest.raises(InputError, match="finite"):
            check(bad)
    check(0, at_least=0), check(1e-9, above=0), check(None, above=0, at_least=0)
    for bad, options, said in ((0, {"above": 0}, "above 0"), (-1, {"at_least": 0}, "at least 0")):
        with pytest.raises(InputError, match=f"^share={bad} must be {said}$"):
            check(bad, **options)


def test_a_name_that_is_none_has_the_nearest_beside_it():
    check_member("colour", "red", ("red", "blue"))
    for value, said in (
        ("bleu", "^unknown colour 'bleu' \\(did you mean 'blue'\\?\\); known: red, blue$"),
        ("xyzzy", "^unknown colour 'xyzzy'; known"),
        (["red"], "^unknown colour \\['red'\\]; known"),
    ):
        with pytest.raises(InputError, match=said):
            check_member("colour", value, ("red", "blue"))
    assert "'Blue'" in nearest("BLUE", ["Blue"]), "upper and lower case are alike"
    assert nearest("bleu", ["blue"], cutoff=0.9) == "" and nearest("x" * (MAX_SHOWN + 1), ["x" * MAX_SHOWN]) == ""
    assert flag_of("max_shard_size") == "--max-shard-size"


def test_of_what_libraries_say_the_beginning_is_repeated():
    assert first_line(ValueError("\n a\nb")) == "a" and first_line(KeyError()) == "KeyError"
    words = "word " * 30
    for said, expected in (
        ("short. And more.\nrest", "short. And more."),
        (f"First. Second. {words}", "First. Second"),
        (words, ("word " * 15).strip() + "..."),
        ("x" * 100, "x" * (MAX_SHOWN - 3) + "..."),
    ):
        assert first_sentence(ValueError(said)) == expected and len(expected) <= MAX_SHOWN
