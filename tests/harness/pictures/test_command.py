"""`moe-jax eval MODEL --tasks` with pictures, as a user runs it, on a tiny LLaVA over bytes."""

import base64
import dataclasses
import json
import re
import shutil
from typing import Any

import numpy as np
import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.harness.pictures.picture_prompts import PicturePrompts
from moe_jax.harness.pictures.task_pictures import TaskPictures, pictures_of_tasks
from moe_jax.images.picture_files import PictureFolder
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.picture_questions import draw, medical, write_json
from tests.support.task_files import write_task
from tests.support.tiers import long, one_in

pytest.importorskip("torch")

from tests.support.vision_models import made, random_llava  # noqa: E402

IMAGE = 258  # after the 256 bytes, <s> and </s>
TASK: dict[str, Any] = {
    "task": "seen",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}, "image_folder": "pictures"},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_image": "image",
    "doc_to_text": "{% if image %}<image>{% endif %}{{ text }}",
    "doc_to_target": "{{ answer }}",
    "generation_kwargs": {"until": [], "max_gen_toks": 5, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"samples": {"text": "{{ completion }}"}},
}
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"question_id": 3, "image": "red.png", "text": "What colour?", "answer": "red"},
    {"question_id": 5, "image": "inside/blue.png", "text": "And what is this?", "answer": "blue"},
    {"question_id": 8, "image": None, "text": "No picture?", "answer": "none"},
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A checkpoint over bytes, whose tokenizer knows `<image>`."""
    import tokenizers

    folder = tmp_path_factory.mktemp("seen") / "llava"
    keys = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 512}
    made(random_llava("llama", of_text=keys, image_token_index=IMAGE)).save_pretrained(folder)
    file = byte_tokenizer(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(file))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A task file, its questions, and their pictures."""
    draw(tmp_path / "pictures" / "red.png")
    draw(tmp_path / "pictures" / "inside" / "blue.png", "blue", (9, 30))
    write_json(tmp_path / "questions.jsonl", QUESTIONS)
    write_task(tmp_path, TASK)
    return tmp_path


def run(capsys, *words):
    capsys.readouterr()
    assert cli.main(["eval", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr()


def fails(capsys, *words):
    capsys.readouterr()
    assert cli.main(["eval", *map(str, words)]) == 2
    # lm-eval's own bars, which another test may have switched on, stand before it.
    lines = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err.strip()) if not re.match(r"\s*\d+%\|", line)]
    (said,) = lines
    assert said.startswith("moe-jax: error:") and "Traceback" not in said
    return said


def written(capsys, llava, folder, *more):
    """What the model wrote to every question."""
    file = folder / "samples.jsonl"
    file.unlink(missing_ok=True)
    run(capsys, llava, "--tasks", "seen", "--tasks-dir", folder, "--samples", file, "--json", *more)
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def generated(model, question, folder):
    """What `generate` makes of a question."""
    given = {} if question["image"] is None else {"image": folder / "pictures" / question["image"]}
    text = question["text"] if question["image"] is None else f"<image>{question['text']}"
    return moe_jax.generate(model, text, max_new_tokens=5, **given).text


def test_answers_are_those_of_generate(llava, folder, capsys):
    model = moe_jax.load(llava)
    expected = [generated(model, one, folder) for one in QUESTIONS]
    assert written(capsys, llava, folder) == expected and len(set(expected)) == 3
    # A cache knows pictures by what they are.
    cache = ("--cache", folder / "answers.db")
    assert written(capsys, llava, folder, *cache) == expected
    draw(folder / "pictures" / "red.png", "green")
    changed = [generated(model, QUESTIONS[0], folder), *expected[1:]]
    assert changed[0] != expected[0]
    assert written(capsys, llava, folder, *cache) == changed


@long
def test_batches_change_no_answer(llava, folder, capsys):
    assert written(capsys, llava, folder, "--batch-size", 1) == written(capsys, llava, folder, "--batch-size", 2)


def test_padding_is_asked_for(llava, folder, capsys):
    model = moe_jax.load(llava)
    vision = model.config.vision
    assert vision is not None and not vision.processing.pad
    square = written(capsys, llava, folder, "--image-aspect", "square")
    padded = written(capsys, llava, folder, "--image-aspect", "pad")
    assert square == [generated(model, one, folder) for one in QUESTIONS] and padded != square
    kwargs = {**TASK["dataset_kwargs"], "image_aspect": "pad"}
    write_task(folder, {**TASK, "dataset_kwargs": kwargs})
    assert written(capsys, llava, folder) == padded
    assert written(capsys, llava, folder, "--image-aspect", "square") == square


def test_pictures_in_another_folder_in_lists_and_in_documents(llava, folder, capsys):
    red, blue = ((folder / "pictures" / QUESTIONS[index]["image"]).read_bytes() for index in (0, 1))
    two = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in (blue, red)]
    write_json(folder / "questions.jsonl", ({"image": ["red.png", "inside/blue.png"], "text": "a", "answer": "b"},))
    write_task(folder, {**TASK, "doc_to_text": "<image><image>{{ text }}"})
    (folder / "elsewhere").mkdir()
    (folder / "pictures").rename(folder / "elsewhere" / "other")
    with_names = written(capsys, llava, folder, "--image-folder", folder / "elsewhere" / "other")
    write_json(folder / "questions.jsonl", ({"image": two[::-1], "text": "a", "answer": "b"},))
    write_task(folder, {**TASK, "doc_to_text": "<image><image>{{ text }}",
                        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}})  # fmt: skip
    assert written(capsys, llava, folder) == with_names
    write_json(folder / "questions.jsonl", ({"image": two, "text": "a", "answer": "b"},))
    assert written(capsys, llava, folder) != with_names  # their order matters


@long
def test_a_chat_template_that_takes_pictures_as_parts(llava, folder, capsys):
    seen = shutil.copytree(llava, folder / "chats")
    (seen / "chat_template.jinja").write_text(
        "{% for message in messages %}U: {% for part in message.content %}{% if part.type == 'image' %}<image>\n"
        "{% else %}{{ part.text }}{% endif %}{% endfor %} A:{% endfor %}"
    )
    write_json(folder / "questions.jsonl", QUESTIONS[:2])
    model = moe_jax.load(seen)
    expected = [
        moe_jax.generate(
            model, f"U: <image>\n{one['text']} A:", max_new_tokens=5, image=folder / "pictures" / one["image"]
        ).text
        for one in QUESTIONS[:2]
    ]
    assert written(capsys, seen, folder, "--apply-chat-template") == expected


def test_a_set_is_scored_and_its_answers_written(llava, folder, capsys):
    write_json(folder / "3vqa/test_rad.json", [
        medical(1, "Where is it?", "left lung", "open", "red.png"), medical(2, "Is it there?", "", "CLOSED", "red.png"),
    ])  # fmt: skip
    file, output = folder / "answers.jsonl", folder / "results.json"
    options = (llava, "--tasks", "vqa_rad_local", "--data-dir", folder, "--image-folder", folder / "pictures")
    said = fails(capsys, *options, "--samples", file)
    assert "example 2" in said and "its 'value' is ''" in said and not file.exists()
    write_json(folder / "3vqa/test_rad.json", [medical(1, "Where is it?", "left lung", "open", "red.png")])
    said = fails(capsys, *options)
    assert "1,024 tokens to generate do not fit into 512" in said
    own = {**TASK, "dataset_kwargs": {"data_files": {"test": "3vqa/test_rad.json"}, "scoring": "medical"}}
    del own["metric_list"], own["metadata"]
    write_task(folder, own)
    out = run(capsys, llava, "--tasks", "seen", "--tasks-dir", folder, "--image-folder", folder / "pictures",
              "--samples", file, "--output", output).out  # fmt: skip
    assert "recall_open" in out and "0" in out
    assert json.loads(output.read_text())["results"]["seen"]["recall_open,none"] == 0.0
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["question_id"] == 1 and line["prompt"] == "<image>\nWhere is it?"


def test_sets_that_are_not_judged_need_a_place_for_their_answers(llava, folder, capsys):
    write_json(folder / "mm-vet/llava-mm-vet.jsonl", ({"question_id": 1, "image": "red.png", "text": "x"},))
    (folder / "mm-vet/images").mkdir()
    options = (llava, "--tasks", "mmvet_local", "--data-dir", folder)
    assert "mmvet_local is not judged here" in fails(capsys, *options)
    several = (llava, "--tasks", "mmvet_local,seen", "--data-dir", folder, "--tasks-dir", folder)
    assert "a file has the answers to one set" in fails(capsys, *several, "--samples", folder / "x")


def mistake(folder, change):
    """Makes one mistake in the folder of a task."""
    pictures = folder / "pictures"
    if change == "gone":
        (pictures / "red.png").unlink()
    elif change == "damaged":
        (pictures / "red.png").write_bytes((pictures / "red.png").read_bytes()[:-30])
    elif change == "folder":
        pictures.rename(folder / "else")
    elif change == "link":
        (pictures / "red.png").rename(folder / "out.png")
        (pictures / "red.png").symlink_to(folder / "out.png")
    elif change == "lines":
        (folder / "questions.jsonl").write_text('{"question_id": 3,')
    else:
        write_json(folder / "questions.jsonl", ({**QUESTIONS[0], **change},))


@one_in(3)
@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ("gone", ["question_id 3", "no picture at", "pictures/red.png"]),
        ("damaged", ["seen, document 0 (from 0), question_id 3", "pictures/red.png is a damaged picture"]),
        ("folder", ["no folder of pictures at", "--image-folder DIR"]),
        ("link", ["question_id 3", "red.png"]),
        ("lines", ["questions.jsonl", "line 1"]),
        ({"image": "../questions.jsonl"}, ["question_id 3", "'..'"]),
        ({"image": "/etc/passwd"}, ["question_id 3", "an absolute path"]),
        ({"image": "data:image/png;base64,%%"}, ["questions.jsonl, line 1", "not base64"]),
        ({"image": "data:image/png;base64,AAAA"}, ["question_id 3", "its picture is not a picture that can be read"]),
        ({"image": "data:image/png,x"}, ["questions.jsonl, line 1", "expected data:image/...;base64"]),
        ({"image": ["red.png", "red.png"]}, ["question_id 3", "it has 2 pictures, and another number of places"]),
        ({"image": [3]}, ["questions.jsonl, line 1", "its picture is 3, expected the name"]),
        ({"text": "<image> again"}, ["it has 1 pictures, and another number"]),
        ({"text": "x" * 600}, ["does not fit into 507"]),
    ],
)
def test_mistakes_are_one_line(llava, folder, capsys, change, messages):
    mistake(folder, change)
    said = fails(capsys, llava, "--tasks", "seen", "--tasks-dir", folder, "--samples", folder / "x.jsonl")
    assert all(one in said for one in messages), said
    assert not (folder / "x.jsonl").exists()


def test_bad_pictures_are_skipped_and_counted(llava, folder, capsys):
    mistake(folder, "damaged")
    model = moe_jax.load(llava)
    found = written(capsys, llava, folder, "--bad-documents", "skip")
    assert found == [generated(model, one, folder) for one in QUESTIONS[1:]]


def test_a_model_that_sees_nothing_is_refused_by_name(tiny_llama, folder, capsys):
    said = fails(capsys, tiny_llama, "--tasks", "seen", "--tasks-dir", folder, "--samples", folder / "x")
    assert "task 'seen' asks about pictures" in said and "'llama'" in said and "no vision" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "list", "--image-folder", "absent"], "no folder of pictures at absent"),
        (["--text", "x", "--image-aspect", "pad"], "--image-aspect goes with --tasks"),
        (
            ["--tasks", "said", "--tasks-dir", "{folder}", "--image-aspect", "pad"],
            "none of the tasks is about pictures",
        ),
    ],
)
def test_options_that_do_not_fit(llava, folder, capsys, words, message):
    said = {key: value for key, value in TASK.items() if key not in ("doc_to_image", "metadata")}
    write_task(folder, {**said, "task": "said", "doc_to_text": "{{ text }}"})
    assert message in fails(capsys, llava, *[word.format(folder=folder) for word in words])


def asked_of(text, names):
    """A request of lm-eval."""
    from lm_eval.api.instance import Instance

    args: Any = (text, {"max_gen_toks": 5}, {"visual": names})
    return Instance("generate_until", {}, args, 0, metadata=("seen", 0, 1))


def test_models_without_a_token_for_pictures(llava, folder):
    """Those of MoE-LLaVA: the pieces around a picture are tokenised apart; over bytes, they are what they are else."""
    model = moe_jax.load(llava)
    config, tokenizer = model.config, model.tokenizer
    assert config.vision is not None and tokenizer is not None
    blind = dataclasses.replace(config, vision=dataclasses.replace(config.vision, placeholder=None))
    pictures = {"seen": TaskPictures(PictureFolder(folder / "pictures"))}
    asked = [asked_of("a<image>b<image>", ["red.png", "inside/blue.png"]), asked_of("no picture", [])]
    made = []
    for one in (config, blind):
        prompts = PicturePrompts(one, Tokenizer(tokenizer.path, one), pictures)
        found = [prompts.prompt(request, begins=True) for request in asked]
        made.append(([each.ids for each in found], prompts.seen(asked, [each.slots for each in found])))
    (rows, seen), (rows_of_blind, seen_by_blind) = made
    assert seen is not None and seen_by_blind is not None
    assert seen.slots == seen_by_blind.slots and max(seen.slots[0]) == 8
    np.testing.assert_array_equal(seen.pixels, seen_by_blind.pixels)
    for row, slots, other in zip(rows, seen.slots, rows_of_blind, strict=True):
        assert [token for token, slot in zip(row, slots, strict=True) if not slot] == [
            token for token, slot in zip(other, slots, strict=True) if not slot
        ]
        assert min(other) >= 0


@long
def test_a_model_without_a_token_for_pictures_answers_too(llava, folder, capsys):
    moe_jax.convert(llava, folder / "ours")
    expected = written(capsys, folder / "ours", folder)
    file = folder / "ours" / "config.json"
    config = json.loads(file.read_text())
    assert IMAGE in found_in(config, "placeholder")
    file.write_text(json.dumps(replaced(config, "placeholder", None)))
    assert moe_jax.load(folder / "ours").config.vision.placeholder is None  # type: ignore[union-attr]
    assert written(capsys, folder / "ours", folder) == expected


def replaced(value, key, by):
    """JSON in which everything under a key is something else."""
    if isinstance(value, dict):
        return {name: by if name == key else replaced(one, key, by) for name, one in value.items()}
    return [replaced(one, key, by) for one in value] if isinstance(value, list) else value


def found_in(value, key):
    """Everything under a key of JSON."""
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [one for part in inside for one in found_in(part, key)] + (
        [value[key]] if isinstance(value, dict) and key in value else []
    )


class OfHub:
    """A task of lm-eval's own."""

    MULTIMODAL = True

    def __init__(self, output_type="generate_until", **config):
        self.OUTPUT_TYPE, self._config = output_type, config

    def get_config(self, key):
        return self._config.get(key)


def test_tasks_of_the_hub_that_cannot_be_evaluated():
    assert pictures_of_tasks({"a": OfHub()}, None, None)["a"].pad is None
    assert pictures_of_tasks({"a": OfHub(dataset_kwargs={"image_aspect": "pad"})}, None, None)["a"].pad is True
    with pytest.raises(InputError, match="about sounds"):
        pictures_of_tasks({"a": OfHub(doc_to_audio="x")}, None, None)
    with pytest.raises(InputError, match="is multiple_choice"):
        pictures_of_tasks({"a": OfHub("multiple_choice")}, None, None)


def test_the_cache_knows_pictures_by_their_content_and_padding(llava, folder):
    pictures = folder / "pictures"
    shutil.copyfile(pictures / "red.png", pictures / "copy.png")
    config = moe_jax.load(llava).config
    tokenizer = Tokenizer(llava / "tokenizer.json", config)
    keys = [
        PicturePrompts(config, tokenizer, {"seen": TaskPictures(PictureFolder(pictures), pad)}).key_of(
            asked_of("a", [name])
        )
        for name, pad in (("red.png", None), ("copy.png", None), ("inside/blue.png", None), ("red.png", True))
    ]
    assert keys[0] == keys[1] and keys[0] != keys[2] and keys[0] != keys[3]


def test_pictures_of_the_hub_are_decoded_already():
    from PIL import Image

    source, picture = TaskPictures(), Image.new("L", (4, 3), 7)
    assert source.picture(picture).tolist() == np.full((3, 4, 3), 7).tolist()
    # As those of files: over white where they are transparent.
    assert source.picture(Image.new("RGBA", (4, 3))).tolist() == np.full((3, 4, 3), 255).tolist()
    assert source.digest(picture) == source.digest(picture.copy()) != source.digest(Image.new("L", (3, 4), 7))
