"""README.md and the quick start: short, whole, and what they tell a reader to type is typed, with a tiny model."""

import re
from pathlib import Path

import pytest

import moe_jax
from moe_jax.training.recipe import Recipe
from moe_jax.training.recipe_toml import recipe_keys
from tests.support.environment import ROOT
from tests.support.tiers import long
from tests.support.walkthroughs import blocks_of, read_by_parsers, run_document

QUICK_START = "docs/quick-start.md"
# Those that are written by hand.
PAGES = sorted(
    str(page.relative_to(ROOT)) for folder in ("docs", "docs/guides") for page in (ROOT / folder).glob("*.md")
)
TEXT = "Once upon a time there was a small model that wanted to be a mixture of experts. " * 40


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    return read(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def recipe() -> str:
    """The recipe of the quick start; batches are split over the eight devices of the tests."""
    (block,) = [block for block in blocks_of(read(QUICK_START)) if block.kind == "toml"]
    return block.text.replace("batch_size = 2", "batch_size = 8").replace("steps = 20", "steps = 3")


def test_the_readme_is_read_in_two_minutes():
    assert 600 <= len(read("README.md").split()) <= 900


@pytest.mark.parametrize("page", ["README.md", QUICK_START])
def test_every_command_could_be_typed(page):
    typed = [command for block in blocks_of(read(page)) if block.kind == "sh" for command in read_by_parsers(block)]
    assert {"plan", "upcycle", "train", "eval", "compress", "export"} <= {name for name, *_ in typed}


@pytest.mark.parametrize("page", ["README.md", QUICK_START])
def test_a_dense_model_of_your_own_is_six_commands(page):
    (block,) = blocks_of(section(page, "A dense model of your own"))
    assert len(read_by_parsers(block)) == 6


@long
@pytest.mark.parametrize("page", ["README.md", QUICK_START])
def test_what_is_said_for_a_model_of_your_own_works(page, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("llama-dir").symlink_to(tiny_checkpoint)
    for name in ("my.txt", "text.txt", "held-out.txt"):
        Path(name).write_text(TEXT, encoding="utf-8")
    Path("my-recipe.toml").write_text(recipe(), encoding="utf-8")
    # The tiny model has one layer.
    text = section(page, "A dense model of your own").replace("--every 2", "--every 1")
    ran = list(run_document(text, kinds=("sh",)))
    assert not [each for each in ran if each.code]
    assert [each.command.words[1] for each in ran] == ["plan", "upcycle", "train", "eval", "compress", "export"]


@long
def test_the_first_run_of_the_quick_start_works(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("moe-jax-demo").mkdir()
    moe_jax.upcycle(tiny_checkpoint, "moe-jax-demo/moe", experts=4, top_k=2, every=1)
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    text = section(QUICK_START, "A first run of your own")
    text = text.replace("batch_size = 2", "batch_size = 8").replace("steps = 20", "steps = 3")
    ran = list(run_document(text, kinds=("sh",)))
    assert not [each for each in ran if each.code] and Path("my-run.html").is_file()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_could_be_typed(page):
    for block in blocks_of(read(page)):
        if block.kind in ("sh", "console"):
            read_by_parsers(block)


# Keys of the config of a MoE-LLaVA, and the folder of a calibration.
OTHERS = {"moe.meta_moe", "moe.gate_bias", "moe.calibration"}


def test_every_key_of_a_recipe_that_a_page_names_exists():
    names = [key.name for key in recipe_keys(Recipe)]
    known = {*names, *(name.partition("[]")[0] for name in names)}
    sections = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    pages = "".join(map(read, PAGES))
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)(?=[` ])", pages))
    assert len(named) > 15 and named <= known | OTHERS


def test_a_reader_finds_every_page_of_the_guides():
    linked = set(re.findall(r"\]\((docs/[^)#]+\.md)", read("README.md")))
    assert {str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "guides").glob("*.md")} <= linked
