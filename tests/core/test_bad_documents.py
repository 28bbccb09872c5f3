"""Documents that are skipped are counted, and the first of them named."""

import pytest

from moe_jax.core.bad_documents import MOST_NAMED, BadDocument, Skipped, naming, skipped_lines, skipped_words
from moe_jax.core.errors import InputError


def test_the_first_are_named_and_all_are_counted():
    skipped = Skipped("skip")
    for number in range(MOST_NAMED + 2):
        with skipped.passed_over(), naming(f"line {number}"):
            raise BadDocument("no answer")
    assert skipped_lines(skipped.count, skipped.problems) == [
        f"note: {MOST_NAMED + 2} bad documents were skipped:",
        *(f"  line {number}: no answer" for number in range(MOST_NAMED)),
        "  and 2 more",
    ]
    assert skipped_words(1) == "1 bad document was skipped" and "1,200 bad documents" in skipped_words(1200)
    skipped.check_any_left(1, "a set")
    with pytest.raises(InputError, match="a set: all 7 documents are bad; .* line 0: no answer"):
        skipped.check_any_left(0, "a set")


def test_what_is_not_to_be_skipped_ends_the_block():
    for skipped, error in ((Skipped(), BadDocument("no answer")), (Skipped("skip"), InputError("no file"))):
        with pytest.raises(InputError) as told, skipped.passed_over(), naming(""):
            raise error
        assert str(told.value) == str(error) and skipped.count == 0
