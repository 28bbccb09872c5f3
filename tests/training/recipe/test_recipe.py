"""Recipes: strict, with every problem named; overrides; what may change between a run and its continuation."""

import dataclasses

import pytest

from moe_jax.core.errors import InputError
from moe_jax.data.sections import SourceSection
from moe_jax.training import recipe_toml
from moe_jax.training.recipe import EvalSection, MeshSection, ModelSection, Recipe, load_recipe
from moe_jax.training.recipe_toml import shipped_recipes
from moe_jax.training.run_directory import check_continues
from tests.support.training_models import recipe_of

GOOD = """
run_dir = "runs/a"
[model]
path = "model"
[data]
seq_len = 64
[[data.sources]]
path = "a.txt"
weight = 2
[[data.sources]]
path = "b.jsonl"
weight = 1.5
[optimizer]
learning_rate = 1e-3
[eval]
text = "held_out.txt"
"""


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def test_a_recipe_is_read_with_defaults(good):
    recipe = load_recipe(good)
    assert recipe.run_dir == "runs/a"
    assert recipe.model == ModelSection(path="model")
    assert [source.weight for source in recipe.data.sources] == [2.0, 1.5]
    assert [source.form for source in recipe.data.sources] == ["text", "jsonl"]
    assert recipe.optimizer.learning_rate == 1e-3
    assert recipe.mesh == MeshSection()
    assert recipe.eval == EvalSection(text="held_out.txt")


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("a.jsonl", "jsonl"),
        ("data/*.jsonl", "jsonl"),
        ("data/part.jsonl*", "jsonl"),
        ("data/part.jsonl.*", "jsonl"),
        ("data/part.jsonl*.gz", "jsonl"),
        ("a.jsonl.gz", "jsonl"),
        ("a.jsonl.zst", "jsonl"),
        ("a.parquet", "parquet"),
        ("data/train-*.parquet*", "parquet"),
        ("a.feather", "arrow"),
        ("data/*.array_record", "tokens"),
        ("a.txt", "text"),
        ("a.txt.gz", "text"),
        ("a.jsonl.txt", "text"),
        ("notes", "text"),
        ("data.jsonl/*", "text"),
        ("*", "text"),
    ],
)
def test_the_suffix_says_what_a_file_or_a_pattern_holds(path, form):
    assert SourceSection(path=path).form == form
    assert SourceSection(path=path, format="arrow").form == "arrow"


def test_a_recipe_written_as_toml_reads_back_equal(good, tmp_path):
    recipe = load_recipe(good, ['run_dir=odd "name"\\', "optimizer.clip_norm=0", "data.epochs=2"])
    assert recipe.run_dir == 'odd "name"\\'
    written = tmp_path / "written.toml"
    written.write_text(recipe_toml.to_toml(recipe))
    assert load_recipe(written) == recipe


def test_overrides_are_toml_values_or_bare_strings(good):
    overrides = [
        "run_dir=other place",
        "train.steps=7",
        "optimizer.weight_decay=0",
        "data.shuffle=false",
        'partition.freeze=["embed/.*"]',
        'data.sources=[{path="c.txt"}]',
        "model.remat=full",
    ]
    recipe = load_recipe(good, overrides)
    assert recipe.run_dir == "other place" and recipe.train.steps == 7 and recipe.data.shuffle is False
    assert recipe.optimizer.weight_decay == 0.0 and isinstance(recipe.optimizer.weight_decay, float)
    assert recipe.partition.freeze == ("embed/.*",)
    assert recipe.data.sources == (SourceSection(path="c.txt"),)
    assert recipe.model.remat == "full"
    assert recipe.optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stpes=3", "unknown key 'train.stpes' (did you mean 'train.steps'?)"),
        ("optimiser.b1=0.5", "unknown key 'optimiser' (did you mean 'optimizer'?)"),
        ("train.steps=many", 'train.steps: expected an integer, got the string "many"'),
        ("train.steps=true", "train.steps: expected an integer"),
        ("train.steps=1.5", "train.steps: expected an integer, got the number 1.5"),
        ("data.shuffle=1", "data.shuffle: expected true or false, got the integer 1"),
        ("run_dir=5", "run_dir: expected a string, got the integer 5"),
        ("data=5", "data: expected a table, got the integer 5"),
        ("data.sources=a.txt", 'data.sources: expected an array, each item a table, got the string "a.txt"'),
        ('data.sources=[{pth="a"}]', "unknown key 'data.sources[0].pth' (did you mean 'data.sources[0].path'?)"),
        ("model.remat=ful", "model.remat: expected one of 'none', 'full', 'dots', got the string \"ful\""),
        ("model.config=c.json", "model: give either path (a model with weights) or config"),
        ("optimizer.b1=1.0", "optimizer: b1 = 1.0 must lie in [0, 1)"),
        ("train.accumulation=3", "train: batch_size = 8 is not a multiple of accumulation = 3"),
        ('data.sources=[{path="a",weight=1},{path="b"}]', "data: some sources"),
        ("train.steps", "--set train.steps: expected KEY=VALUE"),
        ("run_dir.x=1", "run_dir is a value"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(good, override, message):
    with pytest.raises(InputError) as error:
        load_recipe(good, [override])
    assert message in str(error.value)


def test_all_problems_are_listed_together(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[model]\npath = 3\n[train]\nsteps = 0\nbtach_size = 2\n[data]\nseq_len = "long"\n')
    with pytest.raises(InputError) as error:
        load_recipe(path)
    text = str(error.value)
    assert text.startswith(f"{path}: 4 problems")
    for problem in (
        "model.path: expected a string",
        "unknown key 'train.btach_size' (did you mean 'train.batch_size'?)",
        'data.seq_len: expected an integer, got the string "long"',
        "key 'run_dir' is missing, expected a string",
    ):
        assert problem in text


def test_a_file_that_is_missing_or_not_toml_is_clear(tmp_path):
    with pytest.raises(FileNotFoundError, match="no recipe at .*none.toml"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_text("steps = = 3")
    with pytest.raises(InputError, match="a.toml is not TOML: .*line 1"):
        load_recipe(tmp_path / "a.toml")


def test_only_harmless_keys_may_change_when_a_run_is_continued():
    before = recipe_of(steps=4)
    harmless = dataclasses.replace(
        before,
        train=dataclasses.replace(before.train, steps=9),
        checkpoint=dataclasses.replace(before.checkpoint, every=3, keep=5),
        log=dataclasses.replace(before.log, every=2),
        mesh=MeshSection(data=-1, fsdp=1),
        eval=EvalSection(text="t"),
    )
    check_continues(before, harmless)
    harmful = dataclasses.replace(before, seed=3, optimizer=dataclasses.replace(before.optimizer, learning_rate=1.0))
    with pytest.raises(InputError) as error:
        check_continues(before, harmful)
    assert "optimizer.learning_rate (was 0.0003, is 1.0)" in str(error.value)
    assert "seed (was 0, is 3)" in str(error.value)


def test_every_recipe_that_comes_with_the_library_is_valid():
    recipes = sorted(shipped_recipes().values())
    assert len(recipes) >= 3
    for path in recipes:
        assert isinstance(load_recipe(path), Recipe)
        assert path.read_text().startswith("#"), f"{path} has no header that says how to run it"


def test_what_would_exhaust_a_reader_is_refused_at_once(tmp_path):
    """Python's parser takes time that grows with the square of a key's parts, and fails by recursion in deep values."""
    path = tmp_path / "a.toml"
    for text in (".".join("a" * 50_000) + " = 1", "a = " + "[" * 50_000, GOOD + "[train]\nsteps = " + "9" * 5000):
        path.write_text(text)
        with pytest.raises(InputError) as error:
            load_recipe(path)
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)
    path.write_text(GOOD)
    for override in (".".join("a" * 50_000) + "=1", "train.steps=" + "[" * 50_000, "train.steps=" + "9" * 5000):
        with pytest.raises(InputError) as error:
            load_recipe(path, [override])
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"train.steps: expected .* string \"1\\ntrain.batch"):
        load_recipe(path, ["train.steps=1\ntrain.batch_size=2"])


@pytest.mark.parametrize("value", ["inf", "nan", "1e39", "-1.0"])
@pytest.mark.parametrize(
    "key",
    ["optimizer.learning_rate", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.b1",
     "optimizer.b2", "schedule.final_ratio"],
)  # fmt: skip
def test_numbers_are_finite_and_in_range(good, key, value):
    with pytest.raises(InputError, match=key.split(".")[1]):
        load_recipe(good, [f"{key}={value}"])


@pytest.mark.parametrize(
    "key",
    ["train.steps", "train.batch_size", "data.seq_len", "data.epochs", "data.prefetch", "mesh.fsdp", "seed",
     "schedule.warmup_steps", "checkpoint.every", "log.every", "eval.batch_size", "eval.seq_len"],
)  # fmt: skip
def test_counts_have_a_size_that_can_be(good, key):
    for value in (2**31 if key != "seed" else 2**32, 2**63, -2):
        with pytest.raises(InputError, match=key.split(".")[-1]):
            load_recipe(good, [f"{key}={value}"])
