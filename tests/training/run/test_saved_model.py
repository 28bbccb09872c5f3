"""`RUN@STEP`: the models of checkpoints, wherever a model is taken."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.checkpoints.saved_state import SavedState
from moe_jax.commands import cli
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.training.run_directory import describe_run
from tests.support.tiers import long
from tests.support.training_models import BANKS, config_of, moe, write_config

# Two equal layers, which are stacked in memory; frozen parameters in another dtype, and another one at the end.
STACKED = """
run_dir = "stacked"
seed = 3
[model]
config = "config.json"
init = "random"
frozen_dtype = "bfloat16"
output_dtype = "float16"
[data]
seq_len = 16
tokenizer = "words/bytes.json"
sources = [{ path = "text/*.txt" }]
[partition]
freeze = ["embed/.*", ".*_norm/.*"]
[train]
steps = 2
batch_size = 8
"""


def assert_same_model(saved, model) -> None:
    """The same leaves, bit for bit, in the same dtypes."""
    assert saved.config == model.config and saved.specs().keys() == model.specs().keys()
    for path, spec in model.specs().items():
        one, other = saved.read(path), model.read(path)
        assert (one.dtype, one.shape) == (other.dtype, other.shape) == (spec.dtype, spec.shape), path
        assert one.tobytes() == other.tobytes(), path
        assert saved.specs()[path].dtype == spec.dtype
    assert saved.fingerprint() == model.fingerprint()


def test_the_last_checkpoint_is_the_model_that_the_run_left(folder):
    saved, model = open_source(Path("run@4")), ModelDirectory(Path("run/model"))
    assert_same_model(saved, model)
    assert {file.name: file.read_bytes() for file in saved.tokenizer_files} == {
        file.name: file.read_bytes() for file in model.tokenizer_files
    }
    entry, written = json.loads(json.dumps(saved.lineage[-1])), model.lineage[-1]
    assert (entry["command"], entry["options"]) == (written["command"], written["options"])
    assert [source["fingerprint"] for source in entry["sources"]] == [
        source["fingerprint"] for source in written["sources"]
    ]
    assert entry["measured"] == {"steps": 4} and len(saved.lineage) == len(model.lineage)
    assert open_source(Path("run@2")).fingerprint() != saved.fingerprint()


@long
def test_stacked_layers_and_drawn_frozen_parameters_are_as_the_run_writes_them(folder):
    config = config_of(moe(BANKS["low-rank"]), moe(BANKS["low-rank"]))
    write_config(folder / "config.json", config)
    (folder / "stacked.toml").write_text(STACKED)
    assert cli.main(["train", "stacked.toml"]) == 0
    saved = open_source(Path("stacked@2"))
    assert_same_model(saved, ModelDirectory(Path("stacked/model")))
    kernels = [saved.read(f"layers/{layer}/attention/q/kernel") for layer in (0, 1)]
    assert kernels[0].dtype == np.float16 and (kernels[0] != kernels[1]).any()
    assert cli.main(["compress", "stacked@2", "small", "--method", "resmoe", "--keep", "0.5"]) == 0
    assert open_source(Path("small")).lineage[-1]["sources"][0]["fingerprint"] == saved.fingerprint()
    # A layer is read without the others: it lies in a piece of its own.
    state = SavedState(folder / "stacked/checkpoints/2")
    stored = state._opened("params.stack.segments.0.blocks.0.attention.q.kernel.value")
    assert stored.shape == (2, 16, 16) and stored.chunk_layout.read_chunk.shape[0] == 1


def test_a_model_leaves_training_in_the_dtypes_in_which_it_came(folder):
    assert cli.main(["export", "model", "narrow", "--dtype", "bf16"]) == 0
    train = ["train", "recipe.toml", "--set", "model.path=narrow", "train.steps=2", "checkpoint.every=2"]
    assert cli.main([*train, "run_dir=like"]) == 0
    model = ModelDirectory(Path("like/model"))
    assert {str(spec.dtype) for spec in model.specs().values()} == {"bfloat16"} and model.config.dtype == "bfloat16"
    assert_same_model(open_source(Path("like@2")), model)
    # The optimizer works on float32 all the same.
    held = SavedState(folder / "like/checkpoints/2").spec("params.lm_head.kernel.value")
    assert held.dtype == np.float32
    assert cli.main([*train, "run_dir=wide", "model.output_dtype=fp32"]) == 0
    wide = ModelDirectory(Path("wide/model"))
    assert {str(spec.dtype) for spec in wide.specs().values()} == {"float32"} and wide.config.dtype == "float32"


@long
def test_every_command_takes_it(folder, capsys):
    text = ["--text", str(folder / "text" / "a.txt"), "--seq-len", "32", "--json"]
    for model in ("run@4", "run/model"):
        assert cli.main(["eval", model, *text]) == 0
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["nll"] == other["nll"]
    assert cli.main(["generate", "run@2", "--prompt", "the 3", "--max-new-tokens", "2"]) == 0
    assert cli.main(["plan", "run@2"]) == 0
    assert cli.main(["inspect", "run@2"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main(["export", "run@4", "hf"]) == 0
    again = open_source(Path("hf"))
    assert again.read("lm_head/kernel").tobytes() == open_source(Path("run@4")).read("lm_head/kernel").tobytes()
    upcycled = ["upcycle", "run@2", "moe", "--experts", "2", "--every", "1", "--no-step0-check"]
    assert cli.main(upcycled) == 0
    assert open_source(Path("moe")).lineage[-1]["sources"][0]["path"] == "run@2"
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=next", "model.path=run@2", "train.steps=1"]) == 0
    assert (folder / "next" / "model").is_dir()


def test_what_the_run_was_begun_with_may_have_moved(folder, capsys, tmp_path):
    """Together with the run it is found; alone it has to be named."""
    record = json.loads((folder / "run/run.json").read_text())
    # The folder is itself a copy, and where it came from the model still is.
    record["source"]["absolute"] = str(tmp_path / "nowhere")
    (folder / "run/run.json").write_text(json.dumps(record))
    moved = shutil.move(folder, tmp_path / "moved")
    assert open_source(moved / "run@4").fingerprint() == ModelDirectory(moved / "run/model").fingerprint()
    elsewhere = shutil.move(moved / "model", tmp_path / "elsewhere")
    capsys.readouterr()
    assert cli.main(["inspect", str(moved / "run@4")]) == 2
    assert "was begun with" in (err := capsys.readouterr().err) and "say with --base where it is" in err
    assert cli.main(["inspect", str(moved / "run@4"), "--base", str(elsewhere)]) == 0
    assert cli.main(["inspect", str(moved / "run@4"), "--base", str(moved / "run/model")]) == 2
    assert "not the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("run@3", "3; it has 2, 4"),
        ("run@", "no model at run@"),
        ("text@3", "text: there is no run.json"),
        ("run", "run is a training run and not a model; give run/model, or run@STEP for a checkpoint of step 2, 4"),
        ("run@" + "9" * 40, "no model at run@999"),
    ],
)
def test_what_is_no_checkpoint_is_one_clear_line(folder, capsys, model, message):
    capsys.readouterr()
    assert cli.main(["eval", model, "--text", "text/a.txt"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_run_that_did_not_end_has_no_model_to_give(tmp_path):
    for name in ("recipe.toml", "run.json"):
        (tmp_path / name).touch()
    start = f"{tmp_path} is a training run and not a model; give {tmp_path}"
    assert describe_run(tmp_path) == f"{start}/model"
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    assert describe_run(tmp_path) == f"{start}@STEP for a checkpoint of step 2"


def test_adapters_do_not_stand_on_a_checkpoint(folder, capsys):
    """Later checkpoints of the run would replace it."""
    adapt = ["adapt", "run@4", "tuned", "--method", "lora", "--adapter", "lora:2", "--targets", "q", "--no-step0-check"]
    assert cli.main(adapt) == 2
    assert "run@4 is no directory that tuned could refer to; save it as one first" in capsys.readouterr().err
    assert not Path("tuned").exists()


def test_a_damaged_checkpoint_is_one_clear_line(folder, capsys):
    for file in (folder / "run/checkpoints/4/state").rglob("*"):
        if file.is_file() and file.name == "manifest.ocdbt":
            file.write_bytes(b"broken")
    assert cli.main(["eval", "run@4", "--text", "text/a.txt"]) == 2
    err = capsys.readouterr().err
    assert "run/checkpoints/4" in err and err.count("moe-jax: error") == 1 and len(err) < 600
