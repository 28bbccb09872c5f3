"""Places of pictures in texts."""

import hypothesis
import hypothesis.strategies as st
import pytest

from moe_jax.core.errors import InputError
from moe_jax.images.slots import place_pictures

HERE = 9
rows_of_tokens = st.lists(st.lists(st.integers(0, HERE), max_size=12), min_size=1, max_size=4)


@hypothesis.given(rows_of_tokens, st.integers(1, 5))
def test_every_placeholder_becomes_the_features_of_its_picture(rows, per_picture):
    count = sum(row.count(HERE) for row in rows)
    placed = place_pictures(rows, count, placeholder=HERE, per_picture=per_picture)
    for given, row in zip(rows, placed, strict=True):
        pictures = given.count(HERE)
        assert row.pictures == pictures and len(row.slots) == len(row.ids)
        assert [slot for slot in row.slots if slot] == list(range(1, pictures * per_picture + 1))
        assert all((slot > 0) == (token == HERE) for token, slot in zip(row.ids, row.slots, strict=True))
        assert [token for token in row.ids if token != HERE] == [token for token in given if token != HERE]
    # What has all its placeholders stays as it is.
    again = place_pictures([row.ids for row in placed], count, placeholder=HERE, per_picture=per_picture)
    assert again == placed


@pytest.mark.parametrize(
    ("rows", "pictures"), [([[HERE, 1]], 0), ([[1, 2]], 1), ([[HERE], [HERE]], 3), ([[HERE, HERE], [HERE]], 1)]
)
def test_another_number_of_pictures_is_refused(rows, pictures):
    with pytest.raises(InputError) as error:
        place_pictures(rows, pictures, placeholder=HERE, per_picture=3)
    assert "placeholder" in str(error.value)
