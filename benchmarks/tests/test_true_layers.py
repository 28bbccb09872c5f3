"""Layers of true shapes: how commands are measured, and the rows of those that look at a text, on a tiny layer."""

import jax
import numpy as np
import pytest

from evidence.layouts import TRUE_CALIBRATED
from evidence.results import Figures
from moe_jax.data.tokenizer import Tokenizer
from tests.support.tiers import long
from true_size import calibrated, programs
from true_size.layers import WORDS, Shape, layer_config, write_layer, write_words
from true_size.measured import run_program

TINY = Shape(4, 32, 16)


def test_a_program_is_measured_and_its_failure_is_not_a_figure() -> None:
    measured = run_program("-c", "print(6 * 7)")
    assert measured.printed == "42\n"
    assert measured.seconds > 0
    with pytest.raises(SystemExit):
        run_program("-c", "raise SystemExit(3)")


def test_words_of_the_text_are_tokens_of_the_layer(tmp_path) -> None:
    write_layer(tmp_path / "layer", TINY, planted=True)
    text = write_words(tmp_path / "words.txt", 300).read_text()
    ids = Tokenizer(tmp_path / "layer" / "tokenizer.json", layer_config(TINY)).encode(text)
    np.testing.assert_array_equal(ids, [int(word[1:]) for word in text.split()])
    assert len(ids) == 300 and len(np.unique(ids)) > 200 and max(ids) < WORDS


@long
@pytest.mark.parametrize("processes", [1, 2])
def test_rows_of_a_tiny_layer(tmp_path, monkeypatch, processes: int) -> None:
    monkeypatch.setattr(calibrated, "SHAPES", {"tiny": TINY._replace(of_experts=8)})
    figures = Figures("true_layers", tmp_path / "out", writes=True)
    cases = ["recording", "GPTQ, 4 bits", "GPTQ, 4 bits, squared gradients"]
    for _ in range(2):  # what is there is not measured again
        calibrated.measure_all(figures, tmp_path, ["tiny"], cases[processes - 1 :], processes=processes)
    rows = figures.rows(TRUE_CALIBRATED.name)
    assert [row[1] for row in rows] == cases[processes - 1 :]
    assert all(row[2] > 0 and row[6] > 0 for row in rows)
    assert all(row[5] == pytest.approx(2 * row[2]) for row in rows)
    assert 0 < rows[-1][-1] < 0.2 and rows[-1][-2] > 0
    assert not (tmp_path / "true layers").exists()


@long
def test_programs_of_methods_are_those_that_they_call() -> None:
    """Each can be lowered for the arguments that it is given here; none has a name twice."""
    every = list(programs.programs())
    assert len({(one.method, one.name) for one in every}) == len(every)
    for one in every:
        assert jax.tree.leaves(one.function.lower(*one.arguments).out_info)
