"""A model that sees, trained in three stages on a small world, and asked about pictures that it has never seen.

    python benchmarks/small_world.py DATA [--work FOLDER] [--seeds 0 1 2] [--out benchmarks/results]

DATA is a folder with `weights/smollm2-135m` and `weights/dinov2-small`, programs that get models from the package
registry (the second one needs `onnx`). DINOv2-S is put before SmolLM2-135M-Instruct, and a picture becomes 16 tokens.
Stage 1 trains the projector on captions, stage 2 language model and projector on questions, stage 3 the FFNs (experts,
routers) and the projector on more questions, of the dense model and of MoEs made of it. Every one of them answers the
same 200 questions, greedily, and again with the pictures shuffled among the questions: what is then right is chance.
What the experts of the vanilla MoE have learnt is made smaller as DeRS does.

FOLDER keeps the models of a seed until they are measured (5 GB); a run that was stopped goes on there. OUT receives
`small_world.json`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import moe_jax
from evidence.layouts import SMALL_WORLD, SMALL_WORLD_KINDS, SMALL_WORLD_SMALLER
from evidence.results import RESULTS, Figures
from moe_jax.demo.small_world import CHANCE, write_world
from moe_jax.images.picture_files import read_picture
from moe_jax.images.processing import pixels_of
from moe_jax.nn import place_pictures, tokens_per_picture

PICTURES, ASKED = 1600, 200
EYE = dict(size=112, features="6", projector="pixel_shuffle:2,norm,linear,gelu,linear", placeholder="<filename>")
# A picture and up to five questions with their answers, or its caption.
LENGTH = 72
PROJECTOR, TOWER, FFNS = "vision/projector/.*", "vision/tower/.*", "layers/.*/mlp/.*"


class Stage(NamedTuple):
    """Attributes:
    data: `captions` or `train`.
    partition: the parameters that are trained.
    rate: the highest learning rate, and that of the projector.
    steps, rows: of the training.
    """

    data: str
    partition: dict[str, tuple[str, ...]]
    rate: float
    projector_rate: float
    steps: int
    rows: int = 8


STAGES = {
    "1": Stage("captions", {"train": (PROJECTOR,)}, 3e-4, 3e-4, 100),
    "2": Stage("train", {"freeze": (TOWER,)}, 1e-4, 3e-4, 120),
    "3": Stage("train", {"train": (FFNS, PROJECTOR)}, 1e-4, 1e-4, 40),
}
KINDS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "vanilla MoE": {"delta": "full"},
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


class Lines:
    """The conversations of a file of the small world, as rows of tokens and pixels for a model."""

    def __init__(self, world: Path, name: str, model: moe_jax.Model):
        vision = model.config.check_sees("the small world")
        assert vision.placeholder is not None and model.tokenizer is not None
        self.processing, self.placeholder, self.tokenizer = vision.processing, vision.placeholder, model.tokenizer
        self.per_picture = tokens_per_picture(vision, model.config.d_model)
        self.end = model.config.eos_ids[0]
        lines = [json.loads(line) for line in (world / f"{name}.jsonl").read_text("utf-8").splitlines()]
        self.pictures = [world / line["image"] for line in lines]
        self.kinds = [line["kinds"] for line in lines]
        turns = [[turn["value"].removeprefix("<image>\n") for turn in line["conversations"]] for line in lines]
        self.turns = [list(zip(values[::2], values[1::2], strict=True)) for values in turns]
        self.pixels = np.stack([pixels_of(read_picture(file), self.processing) for file in self.pictures])

    def prompt(self, question: str) -> list[int]:
        """The tokens of a picture and a question."""
        return [self.placeholder, *self.tokenizer.encode(question).tolist()]

    def answer(self, text: str) -> list[int]:
        """The tokens of an answer."""
        return [*self.tokenizer.encode(f" {text}").tolist(), self.end]

    def row(self, number: int) -> dict[str, np.ndarray]:
        """A conversation, of which the answers are scored."""
        ids, scored = [self.placeholder], [0.0]
        for question, answer in self.turns[number]:
            for part, weight in ((self.prompt(question)[1:], 0.0), (self.answer(answer), 1.0)):
                ids += part
                scored += [weight] * len(part)
        (placed,) = place_pictures([ids], 1, placeholder=self.placeholder, per_picture=self.per_picture)
        scored = [0.0] * (self.per_picture - 1) + scored
        assert len(placed.ids) <= LENGTH + 1, f"{len(placed.ids)} tokens do not fit into a row"
        arrays = {
            "tokens": placed.ids[:-1],
            "targets": placed.ids[1:],
            "weights": scored[1:],
            "slots": placed.slots[:-1],
            "segment_ids": [1] * (len(placed.ids) - 1),
        }
        padded = {name: np.pad(np.asarray(values), (0, LENGTH - len(values))) for name, values in arrays.items()}
        return padded | {"pixels": self.pixels[number][None]}

    def batches(self, rows: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Batches without end, every conversation once in each turn."""
        draws, kept = np.random.default_rng(seed), [self.row(number) for number in range(len(self.turns))]
        while True:
            order = draws.permutation(len(kept))
            for start in range(0, len(order) - rows + 1, rows):
                some = [kept[number] for number in order[start : start + rows]]
                yield {name: np.stack([row[name] for row in some]) for name in some[0]}


def trained(model: moe_jax.Model, stage: Stage, world: Path, seed: int) -> moe_jax.Model:
    """A model after a stage of training."""
    with_projector = [{"match": [PROJECTOR], "learning_rate": stage.projector_rate}]
    recipe = {
        "seed": seed,
        "partition": stage.partition,
        "optimizer": {"learning_rate": stage.rate, "weight_decay": 0.0, "groups": with_projector},
        "schedule": {"warmup_steps": max(1, stage.steps // 15)},
        "train": {"steps": stage.steps, "batch_size": stage.rows},
    }
    return moe_jax.train(recipe, model, Lines(world, stage.data, model).batches(stage.rows, seed))


class Trial:
    """What is trained with one seed; a folder keeps what took long, by its name, until all of it is measured."""

    def __init__(self, work: Path, world: Path, language_model: Path, tower: Path, seed: int):
        self.folder, self.world, self.seed = work / f"seed-{seed}", world, seed
        self.parts = language_model, tower

    def made(self, name: str) -> moe_jax.Model:
        """A model, which is trained, or made smaller, unless the folder has it."""
        if name in SMALLER:
            return moe_jax.compress(self.made("vanilla MoE"), base=self.made("stage 2"), **SMALLER[name])
        path = self.folder / name.replace(" ", "-")
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            moe_jax.save(self._trained(name), path)
        return moe_jax.load(path)

    def _trained(self, name: str) -> moe_jax.Model:
        if name == "stage 2":
            language_model, tower = self.parts
            seeing = moe_jax.attach(language_model, tower=tower, seed=self.seed, **EYE)
            for number in ("1", "2"):
                seeing = trained(seeing, STAGES[number], self.world, self.seed)
            return seeing
        begun, options = self.made("stage 2"), KINDS[name]
        begun = begun if options is None else moe_jax.upcycle(begun, **MOE, **options)
        return trained(begun, STAGES["3"], self.world, self.seed)

    def forget(self) -> None:
        """Removes what is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def right(self, name: str, *, shuffled: bool = False) -> dict[str, list[bool]]:
        """Whether every question is answered with its word and nothing else, by kinds."""
        model = self.made(name)
        lines = Lines(self.world, "test", model)
        order = np.arange(len(lines.turns))
        if shuffled:
            order = np.random.default_rng(self.seed).permutation(order)
        found: dict[str, list[bool]] = {kind: [] for kind in CHANCE}
        questions, answers = zip(*(turns[0] for turns in lines.turns), strict=True)
        for start in range(0, len(order), AT_ONCE):
            few = slice(start, start + AT_ONCE)
            prompts = [lines.prompt(question) for question in questions[few]]
            pictures = [lines.pictures[number] for number in order[few]]
            said = moe_jax.generate(model, prompts, image=pictures, max_new_tokens=4)
            for kinds, one, answer in zip(lines.kinds[few], said, answers[few], strict=True):
                found[kinds[0]].append(one.text is not None and one.text.strip() == answer and one.stopped)
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


def share(right: dict[str, list[bool]]) -> float:
    return 100 * float(np.mean([one for answers in right.values() for one in answers]))


def measure(trial: Trial, figures: Figures) -> None:
    """Trains and asks all models of a seed that are not in the results yet."""
    known = {str(row[0]) for row in figures.rows(SMALL_WORLD.name) if row[1] == trial.seed}
    for name in KINDS:
        if name in known:
            continue
        right, blind = trial.right(name), trial.right(name, shuffled=True)
        for kind, answers in right.items():
            shares = [100 * float(np.mean(answers)), 100 * float(np.mean(blind[kind])), 100 * CHANCE[kind]]
            figures.put_row(SMALL_WORLD_KINDS.name, f"{name}, {trial.seed}, {kind}", [name, trial.seed, kind, *shares])
        figures.put_row(SMALL_WORLD.name, f"{name}, {trial.seed}", [name, trial.seed, share(right), share(blind)])
        print(name, trial.seed, {kind: float(np.mean(answers)) for kind, answers in right.items()}, flush=True)
    known = {str(row[0]) for row in figures.rows(SMALL_WORLD_SMALLER.name) if row[1] == trial.seed}
    for name in SMALLER:
        if name not in known:
            cells = [name, trial.seed, share(trial.right(name))]
            figures.put_row(SMALL_WORLD_SMALLER.name, f"{name}, {trial.seed}", cells)
    trial.forget()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, help="folder that keeps what is trained; by default none is kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    figures = Figures("small_world", options.out, writes=True)
    with tempfile.TemporaryDirectory() as name:
        work = options.work or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        parts = made_models(options.data, work)
        world = work / "world"
        if not world.exists():
            write_world(world, seed=WORLD, train=PICTURES, test=ASKED)
        for seed in options.seeds:
            measure(Trial(work, world, *parts, seed), figures)
    for table in (SMALL_WORLD, SMALL_WORLD_KINDS, SMALL_WORLD_SMALLER):
        print(table.text(figures))


# Rates and steps were chosen on another world, of seed 0.
WORLD = 1


if __name__ == "__main__":
    main()
