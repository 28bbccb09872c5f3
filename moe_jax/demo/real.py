"""The demo on a real language model: upcycles and tunes it, makes it smaller in three ways, and asks it each time."""

import json
from pathlib import Path

from moe_jax.api.open_source import open_source
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import load_chat_template
from moe_jax.demo.comparison import WAYS, compress_in_all_ways, score_all
from moe_jax.demo.folder import check_folder, open_folder
from moe_jax.demo.page import Page, finish, training_records
from moe_jax.demo.problems import write_problems
from moe_jax.demo.questions import ask, by_question
from moe_jax.demo.shell import Shell
from moe_jax.model_io.adapter_dir import AdapterDirectory
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.training.recipe_toml import toml_value

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Ada has 6 boxes with 7 marbles each and gives 4 marbles away. How many marbles are left?",
)
DENSE, TUNED = "dense, as it came", "upcycled and tuned"
NEW_TOKENS = 32
TRAINED, HELD_OUT = 600, 16
# Tokens of a row in training, and of one when answers are scored: a problem and its answer.
SEQ_LEN, SCORED_LEN = 192, 128
# Of the calibration, which is of problems that are learnt from: held-out ones choose nothing. Few tokens are enough for
# problems that are so much alike, and `allocate` takes as much longer as there are.
CALIBRATED, SAMPLES, WINDOW = 64, 4, 128
UPCYCLED = "--experts 4 --top-k 2 --every 2 --delta full"
# Batches of conversations, short enough for two cores. All but experts and routers stays as it is: that is faster, and
# there are no moments to be kept for it.
RECIPE = """\
# Run from the folder in which `moe-jax demo` was started: paths are relative to it.
run_dir = {run}

[model]
path = {moe}

[data]
seq_len = {seq_len}
sources = [{{ path = {problems} }}]

[partition]
train = [".*/experts/.*", ".*/router/.*"]

[optimizer]
learning_rate = 3e-4

[schedule]
warmup_steps = 4
steps = {steps}

[train]
steps = {steps}
batch_size = 2

[log]
every = 4
"""


def run_real_demo(folder: Path, model: Path, *, steps: int, shell: Shell) -> None:
    """Runs the demo with a dense language model with a chat template: a GGUF file, a directory, or a name on the Hub.

    Everything goes into the folder; one made by an earlier demo is replaced, unless the shell resumes that demo. The
    steps are of the tuning, on 384 tokens each. The shell's console also gets the demo's own output.

    Raises:
      InputError: if the folder holds something else, the model has no chat template, or a command fails.
      Stopped: after a signal that ended the tuning; the demo goes on there.
    """
    check_folder(folder)
    check_dense(model)
    settings = {"model": str(model), "tuning_steps": steps}
    with open_folder(folder, settings, resume=shell.resume) as done, shell.notes():
        dense, moe, tuned = folder / "dense", folder / "moe", folder / "run/model"
        _write_inputs(folder, steps)
        answers: dict[str, list[str]] = {}

        shell.console.rule("a language model, and what it says")
        with done.timed("convert"):
            shell.make(dense, "convert", model, dense, "--dtype", "bf16")
        with done.timed("ask"):
            asked = ("--chat", "--max-new-tokens", NEW_TOKENS)
            answers[DENSE] = ask(shell, done, DENSE, dense, QUESTIONS, *asked)

        shell.console.rule("upcycle it to whole experts, and tune these on word problems")
        with done.timed("upcycle"):
            shell.make(moe, "upcycle", dense, moe, *UPCYCLED.split())
        with done.timed("tune"):
            shell.train(folder / "tune.toml", folder / "run")

        shell.console.rule("make it smaller in three ways")
        with done.timed("compress"):
            text = _write_calibration(folder, dense)
            calibration = ("--calibrate", text, "--samples", SAMPLES, "--seq-len", WINDOW)
            smaller = compress_in_all_ways(shell, tuned, folder, calibration)

        shell.console.rule("ask again")
        with done.timed("ask"):
            name = WAYS[-1].name
            answers[name] = ask(shell, done, name, smaller[name], QUESTIONS, *asked)

        shell.console.rule("compare on problems that no model learnt from")
        with done.timed("score"):
            held_out = ("--text", folder / "problems/held-out.jsonl", "--seq-len", SCORED_LEN)
            rows = score_all(shell, done, {DENSE: dense, TUNED: tuned, **smaller}, held_out)
        page = Page(
            title=f"moe-jax demo: {model.name}",
            answers=by_question(QUESTIONS, answers),
            rows=rows,
            whole=TUNED,
            records=training_records(folder / "run"),
            learnt="word problems",
            unit="token",
            seconds=done.seconds,
        )
        finish(shell.console, folder, page, model=model.name, tuning_steps=steps)


def check_dense(model: Path) -> None:
    """Raises an error for what is no dense language model that can be converted, before an older demo is removed."""
    source = open_source(model)
    if isinstance(source, ModelDirectory | AdapterDirectory):
        raise InputError(f"{model} is a model directory of moe-jax; {_EXPECTED}")
    if source.config.moe_layers:
        raise InputError(f"{model} is a Mixture-of-Experts already; {_EXPECTED}")
    source.specs()  # says which weights are missing
    if isinstance(source, HuggingFaceDirectory):
        load_chat_template(source.path / "tokenizer.json")


_EXPECTED = "expected a dense language model: a Hugging Face directory, a GGUF file, or a name on the Hub"


def _write_inputs(folder: Path, steps: int) -> None:
    (folder / "problems").mkdir(exist_ok=True)
    write_problems(folder / "problems", train=TRAINED, held_out=HELD_OUT)
    places = {"run": folder / "run", "moe": folder / "moe", "problems": folder / "problems/train.jsonl"}
    written = {name: toml_value(str(place)) for name, place in places.items()}
    (folder / "tune.toml").write_text(RECIPE.format(**written, steps=steps, seq_len=SEQ_LEN), "utf-8")


def _write_calibration(folder: Path, model: Path) -> Path:
    """Writes some of the problems that are learnt from as the model reads them, with its chat template."""
    template = load_chat_template(model / "tokenizer.json")
    lines = (folder / "problems/train.jsonl").read_text("utf-8").splitlines()[:CALIBRATED]
    file = folder / "problems/calibration.txt"
    file.write_text("".join(template(json.loads(line)["messages"]) for line in lines), "utf-8")
    return file
