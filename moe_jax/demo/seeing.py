"""The demo of a model that sees: an eye for a language model, experts, fewer bytes, and another program's format."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_jax.api.generate import continue_prompts, prompt_ids, with_pictures_apart
from moe_jax.api.model import Loading, Model
from moe_jax.api.open_source import open_source
from moe_jax.conversion.hugging_face_dir import processing_keys_of
from moe_jax.core.errors import InputError
from moe_jax.demo.comparison import stored_bytes
from moe_jax.demo.folder import Steps, check_folder, is_number, open_folder
from moe_jax.demo.page import training_records
from moe_jax.demo.real import check_dense
from moe_jax.demo.seeing_page import Asked, SeeingModel, VisionPage, finish
from moe_jax.demo.shell import Shell
from moe_jax.demo.small_world import TEMPLATES, write_world
from moe_jax.generation.spec import GenerateSpec
from moe_jax.peft.trained import parameter_sizes
from moe_jax.training.recipe_toml import toml_value
from moe_jax.upcycling.attach_spec import AttachSpec
from moe_jax.upcycling.attached_tower import seeing_config

BEFORE, TUNED, SMALL = "with an eye", "upcycled and tuned", "4 bits, as a LLaVA"
# Pictures to learn from; those that are asked about come in kinds of questions by turns, so that the first five are one
# of each kind.
WORLD_SEED, LEARNT, UNSEEN, SHOWN = 1, 700, 30, 5
# Updates are what counts: a batch is one row, of so many tokens for so many pictures and what is said of them.
STAGE_1, STAGE_3 = dict(seq_len=200, pictures=8, rate=3e-3), dict(seq_len=172, pictures=4, rate=3e-4)
# So many are asked at once; the first of them compile.
AT_ONCE = 10
NEW_TOKENS = 6
EYE: dict[str, Any] = {"size": 56, "features": "8", "projector": "linear,gelu,linear", "placeholder": "<filename>"}
UPCYCLED = "--experts 4 --top-k 2 --every 2 --delta low-rank:16"
COMPRESSED = "--method quantize --bits 4"
# The first linear map of the projector is made from pictures, and stays as it is.
RECIPE = """\
# Run from the folder in which `moe-jax demo` was started: paths are relative to it.
run_dir = {run}

[model]
path = {model}

[data]
seq_len = {seq_len}
max_pictures = {pictures}
chat_template = {template}
feature_cache = {features}
sources = [{{ path = {data} }}]

[partition]
train = {trained}
freeze = ["vision/projector/0/.*"]

[optimizer]
learning_rate = {rate}
weight_decay = 0.0
b2 = 0.95

[schedule]
warmup_steps = {warmup}

[train]
steps = {steps}
batch_size = 1

[log]
every = 5
"""


def run_vision_demo(folder: Path, model: Path, tower: Path, *, projector: int, tuning: int, shell: Shell) -> None:
    """Runs the demo with a dense language model, such as SmolLM2, and an image encoder, such as DINOv2-S.

    Everything goes into the folder; one made by an earlier demo is replaced, unless the shell resumes that demo. The
    shell's console also gets the demo's own output. `projector` steps are of the first stage, and `tuning` steps of the
    third.

    Raises:
      InputError: if the folder holds something else, a model is none that the demo can take, or a command fails.
      Stopped: after a signal that ended a training; the demo goes on there.
    """
    check_folder(folder)
    check_dense(model)
    _check_eye(model, tower)
    steps = {"projector_steps": projector, "tuning_steps": tuning}
    settings = {"model": str(model), "tower": str(tower), **steps}
    with open_folder(folder, settings, resume=shell.resume) as done, shell.notes():
        language_model, seeing, moe = folder / "language-model", folder / "seeing", folder / "moe"
        small, exported = folder / "small", folder / "llava"
        tuned = folder / "runs/stage-3/model"
        _write_recipes(folder, **steps)
        models: list[SeeingModel] = []

        shell.console.rule("a language model, an image encoder, and a small world to look at")
        with done.timed("convert"):
            shell.make(language_model, "convert", model, language_model)
        with done.timed("draw"):
            _draw(shell, folder / "world")
        with done.timed("attach"):
            given = {"tower": tower, **EYE, "pictures": folder / "world/train"}
            words = [word for name, value in given.items() for word in (f"--{name}", value)]
            shell.make(seeing, "attach", language_model, seeing, *words)
        questions = Questions(folder / "world")
        with done.timed("ask"):
            models.append(_asked(shell, done, BEFORE, seeing, questions))

        shell.console.rule("stage 1: the projector learns what pictures mean, on captions")
        with done.timed("stage 1"):
            shell.train(folder / "stage-1.toml", folder / "runs/stage-1")

        shell.console.rule("experts that share a base, and stage 3: they learn to answer")
        with done.timed("upcycle"):
            shell.make(moe, "upcycle", folder / "runs/stage-1/model", moe, *UPCYCLED.split())
        with done.timed("stage 3"):
            shell.train(folder / "stage-3.toml", folder / "runs/stage-3")
        with done.timed("ask"):
            models.append(_asked(shell, done, TUNED, tuned, questions))

        shell.console.rule("fewer bytes, and the format of LLaVA")
        with done.timed("compress"):
            shell.make(small, "compress", tuned, small, *COMPRESSED.split())
        with done.timed("export"):
            shell.make(exported, "export", small, exported)
        with done.timed("ask"):
            models.append(_asked(shell, done, SMALL, exported, questions, numbers=tuned, stored=small))

        page = VisionPage(
            title=f"moe-jax demo: {model.name} sees",
            models=models,
            questions=questions.asked[:SHOWN],
            stages={name: training_records(folder / "runs" / name) for name in ("stage-1", "stage-3")},
            seconds=done.seconds,
        )
        finish(shell.console, folder, page, **settings)


def _check_eye(model: Path, tower: Path) -> None:
    """Raises an error for an image encoder that cannot be attached, before an older demo is removed."""
    source = open_source(tower, towers=True)
    if source.config.patches is None:
        raise InputError(
            f"--tower {tower} is a {source.config.family!r} model; expected an image encoder: DINOv2, CLIP"
        )
    source.specs()  # says which weights are missing
    preprocessor = processing_keys_of(source)
    seeing_config(open_source(model).config, source.config, AttachSpec(tower=tower, **EYE), preprocessor=preprocessor)


class Questions:
    """The unseen pictures of a small world, each with a question.

    Attributes:
      asked: picture, question, kind and answer of each.
      file: of prompts for `moe-jax generate --prompts-file`.
    """

    def __init__(self, world: Path):
        self.file = world / "questions.jsonl"
        self.asked: list[Asked] = []
        prompts = []
        for line in map(json.loads, (world / "test.jsonl").read_text("utf-8").splitlines()):
            question, answer = (turn["value"] for turn in line["conversations"])
            text = question.removeprefix("<image>\n")
            self.asked.append(Asked(world / line["image"], text, line["kinds"][0], answer))
            prompts.append({"messages": _conversation(line["image"], text)})
        self.file.write_text("".join(f"{json.dumps(one)}\n" for one in prompts), "utf-8")


def _conversation(picture: Path | str, question: str) -> list[dict[str, object]]:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def _draw(shell: Shell, world: Path) -> None:
    options = ("--seed", WORLD_SEED, "--train", LEARNT, "--test", UNSEEN)
    shell.show("python -m moe_jax.demo.small_world", world, *options)
    if not world.exists():
        write_world(world, seed=WORLD_SEED, train=LEARNT, test=UNSEEN)


def _write_recipes(folder: Path, *, projector_steps: int, tuning_steps: int) -> None:
    stages = {
        "stage-1": dict(
            model=folder / "seeing",
            data=folder / "world/captions.jsonl",
            template=folder / "captions.jinja",
            trained=["vision/projector/.*"],
            steps=projector_steps,
            **STAGE_1,
        ),
        "stage-3": dict(
            model=folder / "moe",
            data=folder / "world/train.jsonl",
            template=folder / "train.jinja",
            trained=["layers/.*/mlp/.*", "vision/projector/.*"],
            steps=tuning_steps,
            **STAGE_3,
        ),
    }
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template, "utf-8")
    for name, stage in stages.items():
        warmup = max(1, int(str(stage["steps"])) // 15)
        more: dict[str, object] = dict(run=folder / "runs" / name, features=folder / "features", warmup=warmup)
        written = {key: _written(value) for key, value in (stage | more).items()}
        (folder / f"{name}.toml").write_text(RECIPE.format(**written), "utf-8")


def _written(value: object) -> str:
    return toml_value(str(value) if isinstance(value, Path) else value)


def _asked(
    shell: Shell,
    done: Steps,
    name: str,
    model: Path,
    questions: Questions,
    *,
    numbers: Path | None = None,
    stored: Path | None = None,
) -> SeeingModel:
    """Asks a model all questions, unless that was done before, and returns what it is and says.

    The same model in two other forms may say how large it is: `numbers`, which has none in codes, how many it has, and
    `stored` how many bytes these take.
    """
    command = ("generate", model, "--chat", "--prompts-file", questions.file, "--max-new-tokens", NEW_TOKENS, "--json")

    def ask() -> dict[str, object]:
        shell.show("moe-jax", *command)
        said, speed = _answers(model, questions)
        right = sum(text == one.answer for text, one in zip(said, questions.asked, strict=True))
        shell.console.print(f"{right} of {len(said)} right", highlight=False)
        return {"said": said, "tokens_per_second": speed}

    kept = done.kept(f"answers of {name}", ask, lambda kept: _are_answers(kept, len(questions.asked)))
    nbytes, of_experts = stored_bytes(stored or model)
    return SeeingModel(
        name=name,
        params=sum(parameter_sizes(open_source(numbers or model).config).values()),
        nbytes=nbytes,
        expert_bytes=of_experts,
        tokens_per_second=kept["tokens_per_second"],
        said=kept["said"],
        right=_by_kind(kept["said"], questions.asked),
    )


def _answers(path: Path, questions: Questions) -> tuple[list[str], float]:
    """Returns what a model says to all questions, some at once, and the tokens that it reads and writes in a second.

    An answer that does not end is none: it has "..." behind it.
    """
    source = open_source(path)
    model = Model.of_source(source, Loading.for_generation(source))
    said, tokens, seconds = [], 0, 0.0
    for start in range(0, len(questions.asked), AT_ONCE):
        few = [_conversation(one.picture, one.question) for one in questions.asked[start : start + AT_ONCE]]
        prompts, wanted = with_pictures_apart(few, GenerateSpec(max_new_tokens=NEW_TOKENS))
        ids = [prompt_ids(one, model, pictures=True) for one in prompts]
        began = time.monotonic()
        results, _ = continue_prompts(model, ids, wanted, chat=True)
        if start:
            seconds += time.monotonic() - began
            tokens += sum(len(one.prompt_ids) + len(one.ids) for one in results)
        said += (f"{(one.text or '').strip()}{'' if one.stopped else '...'}" for one in results)
    return said, tokens / seconds


def _are_answers(kept: object, count: int) -> bool:
    if not isinstance(kept, dict) or not is_number(kept.get("tokens_per_second")):
        return False
    said = kept.get("said")
    return isinstance(said, list) and len(said) == count and all(isinstance(text, str) for text in said)


def _by_kind(said: Sequence[str], asked: Sequence[Asked]) -> dict[str, tuple[int, int]]:
    """By kind of question, how many answers are right, and how many there are."""
    found: dict[str, tuple[int, int]] = {}
    for text, one in zip(said, asked, strict=True):
        right, count = found.get(one.kind, (0, 0))
        found[one.kind] = right + (text == one.answer), count + 1
    return found
