"""The quick demo: trains a small model on text that every Python has, upcycles it, and compares."""

import json
import statistics
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import rich.table
import tokenizers

from moe_jax.core.errors import InputError
from moe_jax.demo.shell import Shell, comparison, make_folder
from moe_jax.figures.plots import new_figure
from moe_jax.training.metrics import Record, read_metrics


class Result(NamedTuple):
    """One model of the comparison."""

    name: str
    params: int
    added: int
    perplexity: float
    tokens_per_second: float


def median_speed(records: list[Record]) -> float:
    """Training tokens per second: the median over the steps, which leaves out compilation."""
    return statistics.median(record["tokens_per_second"] for record in records)


def table(results: list[Result], held_out_bytes: int) -> rich.table.Table:
    """A table of the results, with one row per model."""
    columns = ("model", "parameters", "added", "held-out perplexity", "training tokens/s")
    rows = [
        (one.name, f"{one.params:,}", f"{one.added:,}", f"{one.perplexity:.3f}", f"{one.tokens_per_second:,.0f}")
        for one in results
    ]
    return comparison(columns, rows, f"held-out text: {held_out_bytes:,} bytes; perplexity is per byte")


def plot(path: Path, dense: Path, others: dict[str, Path]) -> None:
    """Draws the loss over steps as a PNG: of the dense model's run, and of those by name that began with its result."""
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    curves = {name: read_metrics(run / "metrics.jsonl") for name, run in {"dense": dense, **others}.items()}
    first, begin = curves["dense"], curves["dense"][-1]["step"]
    for index, (name, records) in enumerate(curves.items()):
        offset, style = 0 if name == "dense" else begin, {"label": name, "linewidth": 1.2, "color": f"C{index}"}
        left.plot([offset + r["step"] for r in records], [r["loss"] for r in records], **style)
        held_out = [(offset + r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
        if name != "dense":
            held_out.insert(0, (begin, next(r["eval_loss"] for r in reversed(first) if "eval_loss" in r)))
            right.plot(*zip(*held_out, strict=True), marker="o", markersize=3, **style)
    left.set(title="training loss", xlabel="step", ylabel="nats per byte")
    right.set(title="held-out loss after the dense model's training", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


BOS, EOS = "<bos>", "<eos>"
# One in this many files is held out.
HELD_OUT_EVERY = 10


def write_text(folder: Path, held_out_bytes: int) -> tuple[int, int]:
    """Copies the standard library's top-level modules: `train/*.txt`, and `held-out.txt` made of other files.

    Returns the bytes of training and of held-out text, of which there are about `held_out_bytes`.
    """
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    (folder / "train").mkdir(parents=True)
    trained, held_out = 0, ""
    for index, module in enumerate(modules):
        text = module.read_text(encoding="utf-8", errors="replace")
        if index % HELD_OUT_EVERY != 0:
            trained += (folder / "train" / f"{module.stem}.txt").write_bytes(text.encode())
        elif len(held_out) < held_out_bytes:
            held_out += text[: held_out_bytes - len(held_out)]
    return trained, (folder / "held-out.txt").write_bytes(held_out.encode())


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are the 256 bytes, after BOS (id 0) and EOS (id 1)."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [BOS, EOS, *alphabet]
    model = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


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
    """Runs the demo: `dense_steps` of the dense model's training, and then `more_steps` of every model.

    Everything goes into the folder; one made by an earlier demo is replaced. The shell's console also gets the demo's
    own output.

    Raises:
      InputError: if the folder holds something else, or a command fails.
      Stopped: after a signal that ended a training.
    """
    began, console = time.monotonic(), shell.console
    make_folder(folder)
    trained, held_out = write_text(folder / "text", HELD_OUT_BYTES)
    console.print(f"text: the standard library's source, {trained:,} bytes to train on, {held_out:,} held out")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), "utf-8")
    new, trained_model = f'config = "{folder}/config.json"\ninit = "random"', f'path = "{folder}/dense"'
    dense = dict(name="dense", model=new, learning_rate=3e-3, steps=dense_steps, eval_every=40)
    longer = dict(name="dense-longer", model=trained_model, learning_rate=1e-3, steps=more_steps, eval_every=10)
    (folder / "dense.toml").write_text(RECIPE.format(folder=folder, **dense), "utf-8")
    (folder / "continue.toml").write_text(RECIPE.format(folder=folder, **longer), "utf-8")

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
    if abs(merged["nll"] - scores["ders-lm"]["nll"]) > 1e-4:
        losses = f"{merged['nll']} nats per byte, the trained one {scores['ders-lm']['nll']}"
        raise InputError(f"the exported model scores {losses}: a fault of moe_jax")
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
