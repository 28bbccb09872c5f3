"""The quick demo: trains a small model on text that every Python has, upcycles it, and compares."""

import json
import time
from pathlib import Path

from moe_jax.core.errors import InputError
from moe_jax.demo.results import Result, median_speed, plot, table
from moe_jax.demo.shell import Shell, make_folder
from moe_jax.demo.text import byte_tokenizer, write_text
from moe_jax.training.log.metrics import read_metrics

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

RECIPE = """\
# Run from the folder in which `moe-jax demo` was started: paths are relative to it.
run_dir = "{folder}/runs/{name}"

[model]
{model}

[data]
seq_len = 256
tokenizer = "{folder}/tokenizer.json"
sources = [{{ path = "{folder}/text/train/*.txt" }}]

[optimizer]
learning_rate = {learning_rate}

[schedule]
warmup_steps = 10

[train]
steps = {steps}
batch_size = 8

[log]
every = 20

[eval]
text = "{folder}/text/held-out.txt"
every = {eval_every}
seq_len = 256
"""

HELD_OUT_BYTES = 24 * 1024


def run_quick_demo(folder: Path, *, dense_steps: int, more_steps: int, shell: Shell) -> None:
    """Runs the demo.

    Args:
      folder: everything goes there; a folder made by an earlier demo is replaced.
      dense_steps: steps of the dense model's training.
      more_steps: steps that every model gets after it.
      shell: runs the commands; its console also gets the demo's own output.

    Raises:
      InputError: if the folder holds something else, or a command fails.
      Stopped: after a signal that ended a training.
    """
    began, console = time.monotonic(), shell.console
    make_folder(folder)
    trained, held_out = write_text(folder / "text", HELD_OUT_BYTES)
    console.print(f"text: the standard library's source, {trained:,} bytes to train on, {held_out:,} held out")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    dense_model = f'config = "{folder}/config.json"\ninit = "random"'
    common = {"folder": folder}
    (folder / "dense.toml").write_text(
        RECIPE.format(**common, name="dense", model=dense_model, learning_rate=3e-3, steps=dense_steps, eval_every=40)
    )
    (folder / "continue.toml").write_text(
        RECIPE.format(
            **common,
            name="dense-longer",
            model=f'path = "{folder}/dense"',
            learning_rate=1e-3,
            steps=more_steps,
            eval_every=10,
        )
    )

    console.rule("a small dense model, as a Hugging Face directory")
    shell.train(folder / "dense.toml")
    shell.type("export", folder / "runs/dense/model", folder / "hf-dense")

    console.rule("convert, and upcycle it in two ways")
    shell.type("convert", folder / "hf-dense", folder / "dense")
    moe = ("--experts", "4", "--top-k", "2", "--every", "2")
    shell.type("upcycle", folder / "dense", folder / "vanilla", *moe, "--delta", "full")
    shell.type("upcycle", folder / "dense", folder / "ders-lm", *moe, "--delta", "low-rank:8")

    console.rule("train all three on the same text, as long")
    names = {"dense-longer": folder / "dense", "vanilla": folder / "vanilla", "ders-lm": folder / "ders-lm"}
    runs = {name: folder / "runs" / name for name in names}
    for name, model in names.items():
        shell.train(folder / "continue.toml", f"model.path={model}", f"run_dir={runs[name]}")

    console.rule("evaluate on held-out text")
    models = {"dense": folder / "dense", **{name: run / "model" for name, run in runs.items()}}
    text = ("--text", folder / "text/held-out.txt", "--seq-len", "256", "--json")
    scores = {name: shell.json("eval", model, *text) for name, model in models.items()}
    plans = {name: shell.json("plan", model, "--json") for name, model in models.items()}

    console.rule("merge the deltas, export, reload")
    shell.type("export", runs["ders-lm"] / "model", folder / "hf-ders-lm")
    merged = shell.json("eval", folder / "hf-ders-lm", *text)
    _check_equal(merged["nll"], scores["ders-lm"]["nll"])
    console.print("the exported model (Mixtral's format) gives the same held-out loss as the one that was trained")
    shell.type("generate", folder / "hf-ders-lm", "--prompt", "def read(self, ", "--max-new-tokens", "80")

    dense_params = plans["dense"]["total_params"]
    results = []
    for name in models:
        records = read_metrics(folder / "runs" / name / "metrics.jsonl")
        params = plans[name]["total_params"]
        results.append(Result(name, params, params - dense_params, scores[name]["perplexity"], median_speed(records)))
    plot(folder / "curves.png", folder / "runs/dense", runs)
    console.print()
    console.print(table(results, held_out))
    console.print(f"curves: {folder / 'curves.png'}   everything: {folder}/   {time.monotonic() - began:.0f} s")


def _check_equal(merged: float, trained: float) -> None:
    if abs(merged - trained) > 1e-4:
        raise InputError(
            f"the exported model scores {merged} nats per byte, the trained one {trained}: a fault of moe_jax"
        )
