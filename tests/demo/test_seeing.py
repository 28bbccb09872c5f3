"""The demo of a model that sees: its page, what it refuses, and the whole of it with small models."""

import json

import numpy as np
import pytest
import rich.console
from PIL import Image

from moe_jax import demo
from moe_jax.commands.cli import main
from moe_jax.demo import seeing
from moe_jax.demo.comparison import RESULTS
from moe_jax.demo.folder import open_folder
from moe_jax.demo.seeing_page import Asked, SeeingModel, VisionPage, finish
from moe_jax.demo.small_world import CHANCE
from moe_jax.training.recipe import load_recipe
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.tiers import long
from tests.support.vision_models import Shape, random_tower

KINDS = tuple(CHANCE)


def page_of(folder) -> VisionPage:
    """A page about two questions of each kind."""
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(folder / "one.png")
    asked = [Asked(folder / "one.png", f"Is it {kind}?", kind, "yes") for kind in KINDS] * 2
    models = [
        SeeingModel(
            name=name,
            params=256_000_000,
            nbytes=1_024_000_000 // (number + 1),
            expert_bytes=None if name == seeing.BEFORE else 640_000_000 // (number + 1),
            tokens_per_second=321.4,
            said=["yes"] * number + ["<b>no</b>"] * (10 - number),
            right=dict.fromkeys(KINDS, (number // 2, 2)),
        )
        for number, name in enumerate((seeing.BEFORE, seeing.TUNED, seeing.SMALL))
    ]
    records = [{"step": step, "loss": 3.0 / step} for step in (1, 2, 3)]
    stages = {"stage-1": records, "stage-3": records}
    return VisionPage("moe-jax demo: a model sees", models, asked[: seeing.SHOWN], stages, {"stage 1": 62.0})


def test_the_page_shows_pictures_and_what_was_said_of_them(tmp_path):
    console = rich.console.Console(width=120, record=True)
    finish(console, tmp_path, page_of(tmp_path), model="m.gguf")
    written, printed = (tmp_path / "page.html").read_text(), console.export_text()
    for cell in ("256,000,000", "1.0 GB", seeing.TUNED, seeing.SMALL, "Is it colour?", "321", "stage 1"):
        assert cell in written and cell in printed, cell
    assert written.count("data:image/png;base64,") == 2 * seeing.SHOWN  # of a light page and of a dark one
    assert "&lt;b&gt;no&lt;/b&gt;" in written and "<b>no" not in written
    assert "from 3.000 at step 1 to 1.000 at step 3" in written and "1 of 2" in written
    found = json.loads((tmp_path / RESULTS).read_text())
    assert found["model"] == "m.gguf" and [one["name"] for one in found["models"]][1] == seeing.TUNED


def test_recipes_of_a_folder_with_any_name(tmp_path):
    folder = tmp_path / "[bold]a\"b\\c {x} [/]#\n'd"
    folder.mkdir(parents=True)
    seeing._write_recipes(folder, projector_steps=7, tuning_steps=3)
    first, third = (load_recipe(folder / f"{name}.toml") for name in ("stage-1", "stage-3"))
    assert (first.run_dir, first.model.path, first.train.steps) == (f"{folder}/runs/stage-1", f"{folder}/seeing", 7)
    assert (third.model.path, third.data.chat_template) == (f"{folder}/moe", f"{folder}/train.jinja")
    assert third.train.steps == 3 and first.data.max_pictures == 8


def test_with_a_tower_it_is_the_demo_that_sees(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(demo, "run_vision_demo", lambda *places, shell, **steps: called.append((*places, steps)))
    (tmp_path / "m.gguf").touch()
    (tmp_path / "tower").mkdir()
    given = ["--model", str(tmp_path / "m.gguf"), "--tower", str(tmp_path / "tower"), "--projector-steps", "5"]
    assert main(["demo", "--dir", str(tmp_path / "d"), *given]) == 0
    [(folder, model, tower, steps)] = called
    assert (folder, model, tower) == (tmp_path / "d", tmp_path / "m.gguf", tmp_path / "tower")
    assert steps["projector"] == 5 and steps["tuning"] > 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--tower x", "add --model"),
        ("--projector-steps 5", "only with --tower"),
        ("--model m --tower twoer", "did you"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, monkeypatch, capsys, given, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "tower").mkdir()
    assert main(["demo", "--dir", "d", *given.split()]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "d").exists()


@pytest.mark.parametrize("kind", ["language model", "empty folder", "too few layers"])
def test_an_older_demo_is_kept_where_the_tower_does_not_do(tmp_path, tiny_checkpoint, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(seeing, "check_dense", lambda model: None)
    with open_folder(tmp_path / "d", {}, resume=False):
        (tmp_path / "d/page.html").write_text("precious")
    (tmp_path / "empty").mkdir()
    if kind == "too few layers":
        random_tower("dinov2", Shape(16, 2, 32, 1, 14, 4)).save_pretrained(tmp_path / "empty")
    tower = str(tiny_checkpoint) if kind == "language model" else "empty"
    assert main(["demo", "--dir", "d", "--model", str(tiny_checkpoint), "--tower", tower]) == 2
    said = capsys.readouterr()
    assert ("1 layers" if kind == "too few layers" else tower) in said.err and said.out == ""
    assert (tmp_path / "d/page.html").read_text() == "precious"


@long
def test_the_whole_demo_with_small_models(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    random_tower("dinov2", Shape(16, 2, 32, 8, 14, 4)).save_pretrained(tmp_path / "tower")
    processor = transformers.BitImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor.save_pretrained(tmp_path / "tower")
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=257,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(byte_tokenizer(tmp_path / "tokenizer.json")), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [seeing.EYE["placeholder"]]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    # Tests have eight devices, which share the rows of a batch.
    monkeypatch.setattr(seeing, "RECIPE", seeing.RECIPE.replace("batch_size = 1", "batch_size = 8"))
    monkeypatch.setattr(seeing, "LEARNT", 40)
    monkeypatch.setattr(seeing, "UNSEEN", 2 * seeing.AT_ONCE)
    steps = ("--projector-steps", "2", "--tuning-steps", "2")
    assert main(["demo", "--dir", "d", "--model", "model", "--tower", "tower", *steps]) == 0
    printed = capsys.readouterr().out
    assert printed.count("$ moe-jax generate") == 3 and "by chance 32%" in printed
    found = json.loads((tmp_path / "d" / RESULTS).read_text())
    _, tuned, small = found["models"]
    assert small["params"] == tuned["params"] and 0 < small["expert_bytes"] < small["nbytes"]
    assert (tmp_path / "d/page.html").read_text().count("data:image/png") == 2 * seeing.SHOWN
    assert main(["demo", "--dir", "d", "--model", "model", "--tower", "tower", *steps, "--resume"]) == 0
    assert "$ moe-jax generate" not in capsys.readouterr().out
