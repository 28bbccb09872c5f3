"""A model that sees, trained in three stages on a small world, and asked about pictures that it has never seen.

    python benchmarks/small_world.py DATA [--work FOLDER] [--seeds 0 1 2] [--out benchmarks/results]

DATA is a folder with `weights/smollm2-135m` and `weights/dinov2-small`, programs that get models from the package
registry (the second one needs `onnx`). DINOv2-S is put before SmolLM2-135M-Instruct, and a picture becomes 16 tokens.
Stage 1 trains the projector on captions, stage 2 language model and projector on questions, stage 3 the FFNs (experts,
routers) and the projector on more questions, of the dense model and of MoEs made of it. Every one of them answers the
same 200 questions, greedily, and again with the pictures shuffled among the questions: what is then right is chance.
What the experts of the vanilla MoE have learnt is made smaller as DeRS does.

Before that, the rate of stage 3 is chosen for every kind of model: on another world with another seed, half a decade at
a time, until the lowest loss of unseen answers lies inside the rates that were tried.

FOLDER keeps the models of a seed until they are measured (5 GB); a run that was stopped goes on there, and the minutes
of what was stopped are then not written down. OUT receives `small_world.json`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import moe_jax
from evidence.results import RESULTS
from evidence.small_world import VANILLA, SmallWorldFile, tables
from moe_jax.commands.environment import ask_for_huge_pages, keep_compiled_programs
from moe_jax.demo.small_world import TEMPLATES, write_world

PICTURES, ASKED = 1600, 200
EYE = dict(size=112, features="8", projector="pixel_shuffle:2,linear,gelu,linear", placeholder="<filename>")
PROJECTOR, WHITENS, TOWER, FFNS = "vision/projector/.*", "vision/projector/1/.*", "vision/tower/.*", "layers/.*/mlp/.*"


class Stage(NamedTuple):
    """Attributes:
    data: `captions` or `train`.
    partition: the parameters that are trained.
    rate: the highest learning rate, and that of the projector.
    steps, rows, seq_len: of the training.
    max_pictures: in a row.
    """

    data: str
    partition: dict[str, tuple[str, ...]]
    rate: float
    projector_rate: float
    steps: int
    rows: int
    seq_len: int
    max_pictures: int


STAGES = {
    "stage 1": Stage("captions", {"train": (PROJECTOR,), "freeze": (WHITENS,)}, 3e-3, 3e-3, 150, 1, 200, 8),
    "stage 2": Stage("train", {"freeze": (TOWER, WHITENS)}, 2e-4, 6e-4, 180, 2, 172, 4),
    "stage 3": Stage("train", {"train": (FFNS, PROJECTOR), "freeze": (WHITENS,)}, 1e-4, 1e-4, 30, 2, 172, 4),
}
RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""Of stage 3, those that may be tried, from `FIRST` on."""
FIRST = slice(1, 4)
KINDS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    VANILLA: {"delta": "full"},
    "DeRS-LM": {"delta": "low-rank:8"},
    "DeRS-SM": {"delta": "sparse:0.99"},
}
MOE = dict(experts=4, top_k=2, every=2)
SMALLER: dict[str, dict[str, Any]] = {
    "90 % dropped": dict(method="ders-sparsify", drop=0.9),
    "99 % dropped": dict(method="ders-sparsify", drop=0.99),
    "2 bits": dict(method="ders-quantize", bits=2),
    "1 bit": dict(method="ders-quantize", bits=1),
}


class Questions:
    """The unseen pictures of the small world, each with a question."""

    def __init__(self, world: Path):
        lines = [json.loads(line) for line in (world / "test.jsonl").read_text("utf-8").splitlines()]
        self.pictures = [world / line["image"] for line in lines]
        self.asked, self.answers = zip(
            *([turn["value"] for turn in line["conversations"]] for line in lines), strict=True
        )


def trained(model: Path, stage: Stage, trial: "Trial", run: Path, *, scored: bool = False) -> Path:
    """Trains a model by a recipe; returns where the trained one is. If `scored`, the unseen answers are at the end."""
    with_projector = [{"match": [PROJECTOR], "learning_rate": stage.projector_rate}]
    recipe = {
        "run_dir": str(run),
        "seed": trial.seed,
        "model": {"path": str(model)},
        "data": {
            "sources": [{"path": str(trial.world / f"{stage.data}.jsonl")}],
            "seq_len": stage.seq_len,
            "max_pictures": stage.max_pictures,
            "chat_template": str(trial.folder.parent / f"{stage.data}.jinja"),
            "feature_cache": str(trial.folder.parent / "features"),
        },
        "partition": stage.partition,
        "optimizer": {"learning_rate": stage.rate, "weight_decay": 0.0, "b2": 0.95, "groups": with_projector},
        "schedule": {"warmup_steps": max(1, stage.steps // 15)},
        "train": {"steps": stage.steps, "batch_size": stage.rows},
        "checkpoint": {"every": stage.steps},
        "log": {"every": 5},
    }
    if scored:
        recipe["eval"] = {"text": str(trial.world / "test.jsonl"), "every": stage.steps}
    moe_jax.train(recipe, resume=True, verbose=True)
    return run / "model"


class Trial:
    """What is trained with one seed; a folder keeps what took long, by its name, until all of it is measured."""

    def __init__(self, work: Path, world: Path, language_model: Path, tower: Path, seed: int):
        self.folder, self.world, self.seed = work / f"seed-{seed}", world, seed
        self.parts = language_model, tower
        for name, template in TEMPLATES.items():
            (work / f"{name}.jinja").write_text(template)

    def made(self, name: str, rates: Mapping[str, float]) -> moe_jax.Model:
        """A model, which is trained, or made smaller, unless the folder has it; `rates` are those of stage 3."""
        if name in SMALLER:
            return moe_jax.compress(self.made(VANILLA, rates), base=moe_jax.load(self.stage(2)), **SMALLER[name])
        return moe_jax.load(self.kind(name, rates[name]))

    def stage(self, number: int) -> Path:
        """Where the model is that stage 1 or 2 has trained."""
        run, begins = self.folder / f"stage-{number}", self.folder / f"begins-stage-{number}"
        if (run / "model").exists():
            return run / "model"
        if number == 2:
            begins = self.stage(1)
        elif not begins.exists():
            language_model, tower = self.parts
            pictures = self.world / "train"
            moe_jax.attach(language_model, begins, tower=tower, seed=self.seed, pictures=pictures, **EYE)
        return trained(begins, STAGES[f"stage {number}"], self, run)

    def kind(self, name: str, rate: float, *, scored: bool = False) -> Path:
        """Where the model of a kind is that stage 3 has trained with a rate."""
        run = self.folder / f"{name.replace(' ', '-')}-{rate:g}"
        if (run / "model").exists():
            return run / "model"
        begins, options = self.folder / f"begins-{name.replace(' ', '-')}", KINDS[name]
        if options is None:
            begins = self.stage(2)
        elif not begins.exists():
            moe_jax.upcycle(self.stage(2), begins, **MOE, **options)
        stage = STAGES["stage 3"]._replace(rate=rate, projector_rate=rate)
        return trained(begins, stage, self, run, scored=scored)

    def loss(self, name: str, rate: float) -> float:
        """Nats per token of the unseen answers that a kind loses when it was trained with a rate; it is not kept."""
        run = self.kind(name, rate, scored=True).parent
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        shutil.rmtree(run)
        return [line["eval_loss"] for line in lines if "eval_loss" in line][-1]

    def forget(self) -> None:
        """Removes what is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def right(self, model: moe_jax.Model, *, shuffled: bool = False) -> list[bool]:
        """Whether every question is answered with its word and nothing else."""
        asked = Questions(self.world)
        order = np.arange(len(asked.asked))
        if shuffled:
            order = np.random.default_rng(self.seed).permutation(order)
        found = []
        for start in range(0, len(order), AT_ONCE):
            few = slice(start, start + AT_ONCE)
            pictures = [asked.pictures[number] for number in order[few]]
            prompts = [[{"role": "user", "content": question}] for question in asked.asked[few]]
            said = moe_jax.generate(model, prompts, image=pictures, max_new_tokens=4)
            for one, answer in zip(said, asked.answers[few], strict=True):
                found.append(one.text is not None and one.text.strip() == answer and one.stopped)
        return found


AT_ONCE = 50


def made_models(data: Path, work: Path) -> tuple[Path, Path]:
    """The language model and the image encoder, as the programs of DATA make them."""
    found = []
    for name, more in (("smollm2-135m", ("--dtype", "float32")), ("dinov2-small", ())):
        if not (work / name / "config.json").exists():
            subprocess.run([sys.executable, data / "weights" / name / "make.py", work / name, *more], check=True)
        found.append(work / name)
    return found[0], found[1]


def choose_rates(trial: Trial, results: SmallWorldFile) -> dict[str, float]:
    """Returns the best rate of every kind, after trying those that are not in the results yet."""
    chosen = {}
    for kind in KINDS:
        waiting = list(RATES[FIRST])
        while waiting:
            rate = waiting.pop()
            if results.get("rates", kind, f"{rate:g}") is None:
                results.put("rates", kind, f"{rate:g}", value=trial.loss(kind, rate))
            losses = {float(tried): loss for tried, loss in results.get("rates", kind).items()}
            best = min(losses, key=losses.__getitem__)
            if not waiting:
                place = RATES.index(best)
                waiting = [one for one in RATES[max(0, place - 1) : place + 2] if one not in losses]
        chosen[kind] = best
    trial.forget()
    return chosen


def measure(trial: Trial, rates: Mapping[str, float], results: SmallWorldFile) -> None:
    """Trains and asks all models of a seed that are not in the results yet; `rates` are those of stage 3."""
    minutes: dict[str, float] = {}
    is_whole = not trial.folder.exists()
    missing = [name for name in (*KINDS, *SMALLER) if results.get("answers", name, str(trial.seed)) is None]
    for name in ("stage 1", "stage 2", *missing) if missing else ():
        start = time.monotonic()
        if name in STAGES:
            trial.stage(int(name[-1]))
        else:
            model = trial.made(name, rates)
            right = {"seen": trial.right(model)}
            if name in KINDS:
                right["shuffled"] = trial.right(model, shuffled=True)
            results.put_answers(name, trial.seed, **right)
            print(name, trial.seed, {how: float(np.mean(answers)) for how, answers in right.items()}, flush=True)
        minutes[name] = (time.monotonic() - start) / 60
    if missing and is_whole:
        results.put("minutes", str(trial.seed), value=minutes)
    trial.forget()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, help="folder that keeps what is trained; by default none is kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    results = SmallWorldFile(options.out / "small_world.json", writes=True)
    with tempfile.TemporaryDirectory() as name:
        work = options.work or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        parts = made_models(options.data, work)
        rates = choose_rates(Trial(work, drawn(work, CHOOSING), *parts, CHOOSING), results)
        for seed in options.seeds:
            measure(Trial(work, drawn(work, WORLD), *parts, seed), rates, results)
    print(*tables(results).values(), sep="\n\n")


def drawn(work: Path, seed: int) -> Path:
    """The small world of a seed, which is drawn unless the folder has it."""
    world = work / f"world-{seed}"
    if not world.exists():
        write_world(world, seed=seed, train=PICTURES, test=ASKED)
    return world


# Steps and the rates of the first two stages were chosen on a third world, of seed 0.
WORLD, CHOOSING = 1, 9


if __name__ == "__main__":
    # As the commands do.
    ask_for_huge_pages()
    keep_compiled_programs()
    main()
