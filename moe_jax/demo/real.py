"""The demo on a real language model: asks it, upcycles and tunes it, makes it smaller, exports it, and asks again."""

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import rich.console
import rich.table
from rich.markup import escape

import moe_jax
from moe_jax.api.open_source import open_source
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.demo.shell import Shell, comparison, make_folder
from moe_jax.figures.plots import Curve, DrawnTo, plot_curves
from moe_jax.peft.trained import parameter_sizes
from moe_jax.report.elements import html_page, picture, said, section, table
from moe_jax.training.metrics import Record, read_metrics


class Answers(NamedTuple):
    """A question, and what the model said before and after it was tuned."""

    question: str
    before: str
    after: str


class Row(NamedTuple):
    """One model, named by what was done to it; codes and positions are no parameters.

    `nbytes` are of its weights on the disk, the perplexity is per token of the answers to held-out problems.
    """

    name: str
    params: int
    nbytes: int
    perplexity: float
    tokens_per_second: float


COLUMNS = ("model", "parameters", "bytes", "held-out perplexity", "scored tokens/s")


def print_page(console: rich.console.Console, answers: Sequence[Answers], rows: Sequence[Row]) -> None:
    """Prints answers and table."""
    console.rule("what it said before, and says now")
    for answer in answers:
        console.print(f"\n[bold]{escape(answer.question)}[/bold]", highlight=False)
        for when, text in (("before", answer.before), ("now", answer.after)):
            console.print(f"  {when:>6}: {escape(' '.join(text.split()))}", highlight=False)
    console.print()
    console.print(comparison(COLUMNS, map(_cells, rows)))


def write_page(
    path: Path, answers: Sequence[Answers], rows: Sequence[Row], records: Sequence[Record], model: str
) -> None:
    """Writes the same as one HTML file, with the loss of the tuning of `model`."""
    compared = table("What was made of the model, and how well it does", COLUMNS, map(_cells, rows))
    first, last = records[0], records[-1]
    alt = f"training loss from {first['loss']:.3f} at step {first['step']} to {last['loss']:.3f} at step {last['step']}"
    curve = picture(lambda file: plot(file, records), alt, "Training loss on word problems")
    page = html_page(
        f"moe-jax demo: {model}",
        section("What it said before, and says now", *map(said, answers)),
        section("Models", compared),
        section("Tuning", curve),
    )
    path.write_text(page, encoding="utf-8")


def plot(file: DrawnTo, records: Sequence[Record]) -> None:
    """Draws the loss over the steps of the tuning."""
    curve = Curve("loss", [record["step"] for record in records], [record["loss"] for record in records])
    plot_curves([curve], file, label="loss, nats per token of an answer")


def _cells(row: Row) -> tuple[str, ...]:
    speed = f"{row.tokens_per_second:,.0f}"
    return (row.name, f"{row.params:,}", show_bytes(row.nbytes), f"{row.perplexity:.3f}", speed)


NAMES = ("Mia", "Noah", "Ada", "Liam", "Zoe", "Omar", "Ivy", "Hugo", "Lena", "Raj")
THINGS = ("apples", "marbles", "stickers", "books", "shells", "pencils", "coins", "cards")


def write_problems(folder: Path, *, train: int, held_out: int, seed: int = 0) -> None:
    """Writes `train.jsonl` and `held-out.jsonl`, so many lines of `{"messages": [...]}`; no problem is in both."""
    draw, seen = random.Random(seed), dict[str, str]()
    while len(seen) < train + held_out:
        question, answer = draw.choice(KINDS)(draw)
        seen.setdefault(question, answer)
    lines = [_conversation(question, answer) for question, answer in seen.items()]
    (folder / "train.jsonl").write_text("".join(lines[:train]), "utf-8")
    (folder / "held-out.jsonl").write_text("".join(lines[train:]), "utf-8")


def _conversation(question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def _given_away(draw: random.Random) -> tuple[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    boxes, each, given = draw.randint(2, 9), draw.randint(3, 12), draw.randint(1, 5)
    has = boxes * each
    return (
        f"{name} has {boxes} boxes with {each} {thing} each and gives {given} {thing} away. How many {thing} are left?",
        f"{name} has {boxes} * {each} = {has} {thing}. After giving {given} away, {has} - {given} = {has - given} are "
        f"left.\n#### {has - given}",
    )


def _shared(draw: random.Random) -> tuple[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    friends, each, kept = draw.randint(2, 8), draw.randint(2, 9), draw.randint(1, 9)
    shared = friends * each
    total = shared + kept
    return (
        f"{name} has {total} {thing}, keeps {kept} and shares the others equally among {friends} friends. How many "
        f"{thing} does each friend get?",
        f"{name} shares {total} - {kept} = {shared} {thing}. Each friend gets {shared} / {friends} = {each}.\n"
        f"#### {each}",
    )


def _paid(draw: random.Random) -> tuple[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    count, price, paid = draw.randint(2, 9), draw.randint(2, 6), draw.choice((60, 80, 100))
    cost = count * price
    return (
        f"{name} buys {count} {thing} for ${price} each and pays with ${paid}. How much change does {name} get?",
        f"The {thing} cost {count} * {price} = ${cost}. The change is {paid} - {cost} = ${paid - cost}.\n#### "
        f"{paid - cost}",
    )


def _saved(draw: random.Random) -> tuple[str, str]:
    name = draw.choice(NAMES)
    week, weeks, has = draw.randint(2, 9), draw.randint(3, 9), draw.randint(5, 30)
    return (
        f"{name} has ${has} and saves ${week} every week. How much money does {name} have after {weeks} weeks?",
        f"In {weeks} weeks {name} saves {weeks} * {week} = ${weeks * week}. Together that is {has} + {weeks * week} = "
        f"${has + weeks * week}.\n#### {has + weeks * week}",
    )


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_given_away, _shared, _paid, _saved)


QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Ada has 6 boxes with 7 marbles each and gives 4 marbles away. How many marbles are left?",
)
MODELS = {
    "dense, as it came": "dense",
    "upcycled and tuned": "run/model",
    "the same, exported": "hf",
    "tuned, ResMoE": "resmoe",
    "tuned, 4-bit experts": "4-bit",
}
"""The models that are compared, and where they lie in the folder of the demo."""
NEW_TOKENS = 48
TRAINED, HELD_OUT = 600, 16
# Tokens of a row, in training and when answers are scored: a problem and its answer.
SEQ_LEN = 192
# Batches of conversations, short enough for two cores. Embeddings and attention stay as they are: that is faster, and
# there are no moments to be kept for them.
RECIPE = """\
# Run from the folder in which `moe-jax demo` was started: paths are relative to it.
run_dir = "{folder}/run"

[model]
path = "{folder}/moe"

[data]
seq_len = {seq_len}
sources = [{{ path = "{folder}/problems/train.jsonl" }}]

[partition]
freeze = ["embed/.*", "layers/.*/attention/.*", ".*norm.*"]

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

    Everything goes into the folder; one made by an earlier demo is replaced. The steps are of the tuning, on 384 tokens
    each. The shell's console also gets the demo's own output.

    Raises:
      InputError: if the folder holds something else, the model has no chat template, or a command fails.
      Stopped: after a signal that ended the tuning.
    """
    began, console = time.monotonic(), shell.console
    make_folder(folder)
    (folder / "problems").mkdir()
    write_problems(folder / "problems", train=TRAINED, held_out=HELD_OUT)
    (folder / "tune.toml").write_text(RECIPE.format(folder=folder, steps=steps, seq_len=SEQ_LEN), "utf-8")
    paths = {name: folder / name for name in ("dense", "moe", "resmoe", "4-bit", "hf")}
    tuned = folder / "run/model"

    console.rule("a language model, and what it says")
    shell.type("convert", model, paths["dense"], "--dtype", "bf16")
    before = _ask(shell, paths["dense"])

    console.rule("upcycle it (DeRS: one shared FFN, low-rank deltas), and tune it on word problems")
    shell.type("upcycle", paths["dense"], paths["moe"], *"--experts 4 --top-k 2 --every 6 --delta low-rank:16".split())
    shell.train(folder / "tune.toml")

    console.rule("make it smaller in two ways")
    # The deltas of DeRS are small already: residuals of low rank are what can be smaller than they are.
    shell.type("compress", tuned, paths["resmoe"], *"--method resmoe --residual svd --keep 0.02".split())
    shell.type("compress", tuned, paths["4-bit"], "--method", "quantize", "--bits", "4")

    console.rule("export it, load the export, and ask it the same")
    shell.type("export", tuned, paths["hf"])
    after = _ask(shell, paths["hf"])

    console.rule("compare on problems that it was not tuned on")
    problems = folder / "problems/held-out.jsonl"
    rows = []
    for name, place in MODELS.items():
        console.print(f"scoring {folder / place} on {problems}", highlight=False)
        rows.append(_row(name, folder / place, problems))
    by_name = {row.name: row for row in rows}
    exported, trained = (by_name[name].perplexity for name in ("the same, exported", "upcycled and tuned"))
    if abs(exported / trained - 1) > 0.02:
        raise InputError(f"the exported model has perplexity {exported}, the tuned one {trained}: a fault of moe_jax")
    records = read_metrics(folder / "run/metrics.jsonl")
    plot(folder / "curves.png", records)
    answers = [Answers(*three) for three in zip(QUESTIONS, before, after, strict=True)]
    write_page(folder / "page.html", answers, rows, records, model.name)
    print_page(console, answers, rows)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    console.print(f"this page: {folder / 'page.html'}   everything: {folder}/   {minutes} min {seconds} s")


def _ask(shell: Shell, model: Path) -> list[str]:
    """The answers to `QUESTIONS`, in one batch."""
    prompts = [word for question in QUESTIONS for word in ("--prompt", question)]
    answers = shell.json("generate", model, "--chat", *prompts, "--max-new-tokens", NEW_TOKENS, "--json", shows=False)
    return [answer["text"].strip() for answer in answers]


def _row(name: str, path: Path, problems: Path) -> Row:
    """Scores the answers of the held-out problems twice: the second time shows the speed without compiling."""
    model = moe_jax.load(path)
    score = moe_jax.evaluate(model, problems, seq_len=SEQ_LEN)
    began = time.monotonic()
    moe_jax.evaluate(model, problems, seq_len=SEQ_LEN)
    seconds = time.monotonic() - began
    source = open_source(path)
    return Row(
        name=name,
        params=sum(parameter_sizes(source.config).values()),
        nbytes=sum(map(source.stored_bytes, source.specs())),
        perplexity=score.perplexity,
        tokens_per_second=score.tokens / seconds,
    )
