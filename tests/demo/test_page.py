"""The table, the page and the results that a demo ends with."""

import pytest
import rich.console

import moe_jax
from moe_jax.demo.comparison import BUDGET, WAYS, Row, compress_in_all_ways, measured_row, read_results
from moe_jax.demo.page import Page, finish, print_page, write_page
from moe_jax.demo.questions import Answers
from moe_jax.demo.real import DENSE, TUNED
from moe_jax.demo.shell import Shell


def page_of(rows: list[Row], answers: list[Answers]) -> Page:
    records = [{"step": step, "loss": 3.0 - 0.5 * step} for step in (1, 2)]
    return Page("moe-jax demo: model", answers, rows, TUNED, records, "word problems", "token", {"tune": 62.4})


def all_rows() -> list[Row]:
    smaller = [
        Row(way.name, 253_988_928, 230_000_000 + number, 40_000_000 + number, 4.1, 1.25, 0.223, 590)
        for number, way in enumerate(WAYS)
    ]
    whole = Row(TUNED, 253_988_928, 507_977_856, 318_000_000, 16.0, 1.234, 0.21, 590)
    return [Row(DENSE, 134_515_008, 269_030_016, None, None, 3.799, 1.335, 590), whole, *smaller]


def test_the_page_shows_what_was_said_and_measured(tmp_path):
    page = page_of(all_rows(), [Answers("1 < 2?", {TUNED: "No & [bold]no[/bold]", WAYS[-1].name: "<b>yes</b>"})])
    console = rich.console.Console(width=120, record=True)
    print_page(console, page)
    write_page(tmp_path / "page.html", page)
    written, printed = (tmp_path / "page.html").read_text(), console.export_text()
    for cell in ("253,988,928", "1.234", "508.0 MB", "4.1", TUNED, WAYS[-1].name, "508.0 MB became 230.0 MB (45%)"):
        assert cell in written and cell in printed, cell
    assert "changed by +1.3%" in printed and "tune 1:02" in printed
    assert "&lt;b&gt;yes&lt;/b&gt;" in written and "<b>yes" not in written
    assert "training loss from 2.500 at step 1 to 2.000 at step 2" in written
    assert "4 bits, GPTQ: 230.0 MB, 1.250" in written, "the picture has no text in its place"
    assert "[bold]no[/bold]" in printed and "<b>yes</b>" in printed


def test_the_table_fits_a_terminal():
    console = rich.console.Console(width=80, record=True)
    print_page(console, page_of(all_rows(), []))
    printed = [line for line in console.export_text().splitlines() if "253,988,928" in line]
    assert len(printed) == 4 and printed[0].startswith(f"{TUNED} ")


def test_results_are_what_the_table_is_made_from(tmp_path):
    rows = all_rows()
    finish(rich.console.Console(quiet=True), tmp_path, page_of(rows, []), model="m.gguf")
    found = read_results(tmp_path)
    assert found["rows"] == rows and found["seconds"] == {"tune": 62.4}
    assert (found["whole"], found["model"], found["unit"]) == (TUNED, "m.gguf", "token")


@pytest.fixture(scope="module")
def small_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    whole = moe_jax.save(moe_jax.tiny_model(experts=4), folder / "whole")
    moe_jax.compress(whole, folder / "small", method="quantize", bits=4)
    return folder


def test_codes_stand_for_the_numbers_that_they_were_made_of(small_models):
    scored = {"perplexity": 2.0, "nll": 0.69, "tokens": 9}
    whole, small = (
        measured_row(name, small_models / name, scored, whole=small_models / "whole") for name in ("whole", "small")
    )
    assert whole.params == small.params and whole.nbytes > small.nbytes
    assert whole.expert_bytes and small.expert_bytes and small.expert_bits
    assert whole.nbytes - small.nbytes == whole.expert_bytes - small.expert_bytes > 0
    assert whole.expert_bits == pytest.approx(32, rel=0.05) and 4 <= small.expert_bits < 16
    dense = measured_row("dense", moe_jax.save(moe_jax.tiny_model(), small_models / "dense"), scored,
                         whole=small_models / "dense")  # fmt: skip
    assert (dense.expert_bytes, dense.expert_bits) == (None, None)


def test_every_way_is_a_command_and_a_text_is_given_where_it_is_needed(tmp_path):
    ran = []
    shell = Shell(rich.console.Console(quiet=True), lambda words: ran.append(words) or 0)
    made = compress_in_all_ways(shell, tmp_path / "moe", tmp_path, ("--calibrate", "t.txt"))
    assert list(made) == ["4 bits", "4 bits, GPTQ", f"whole model, {BUDGET} bits"]
    assert [words[-2:] == ["--calibrate", "t.txt"] for words in ran] == [False, True, True]
    assert [words[:3] for words in ran] == [["compress", str(tmp_path / "moe"), str(path)] for path in made.values()]
