"""Small files of questions about pictures, in the layout in which the sets are published, and a model that answers."""

import base64
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

SHORT = "\nAnswer the question using a single word or phrase."
COLOURS = {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250)}


def draw(file: pathlib.Path, colour: str = "red", size: tuple[int, int] = (21, 13)) -> pathlib.Path:
    """Draws a picture of one colour, with a corner of another."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), COLOURS[colour], np.uint8)
    pixels[:3, :4] = 255
    Image.fromarray(pixels).save(file)
    return file


def write_json(file: pathlib.Path, value: Any) -> None:
    """Writes JSON; a tuple becomes JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = value if isinstance(value, tuple) else (value,)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def people(answer: str, times: int, other: str = "other") -> list[dict[str, str]]:
    """What ten people answered."""
    return [{"answer": answer}] * times + [{"answer": other}] * (10 - times)


def write_sets(root: pathlib.Path) -> pathlib.Path:
    """Writes two questions or a few more of every set whose task file is shipped, with their pictures."""
    lines = ({"question_id": 7, "image": "a.png", "text": f"What is it?{SHORT}", "category": "default"},
             {"question_id": 9, "image": "b.png", "text": f"And this?{SHORT}", "category": "default"})  # fmt: skip
    write_json(root / "vqav2/llava_vqav2_mscoco_test-dev2015.jsonl", lines)
    write_json(root / "vqav2/v2_OpenEnded_mscoco_val2014_questions.json",
               {"info": {}, "questions": [{"image_id": 3, "question": "What is it?", "question_id": 30},
                                          {"image_id": 4, "question": "And this?", "question_id": 40}]})  # fmt: skip
    write_json(root / "vqav2/v2_mscoco_val2014_annotations.json",
               {"annotations": [{"question_id": 40, "answers": people("Red car.", 2)},
                                {"question_id": 30, "answers": people("The cat", 10)}]})  # fmt: skip
    write_json(root / "vizwiz/llava_test.jsonl", lines)
    write_json(root / "vizwiz/val.json", [
        {"image": "a.png", "question": "What is it?", "answers": people("two cats", 3), "answerable": 1},
        {"image": "b.png", "question": "And this?", "answers": people("unanswerable", 9), "answerable": 0},
    ])  # fmt: skip
    ocr = "\nReference OCR token: STOP, GO"
    write_json(root / "textvqa/llava_textvqa_val_v051_ocr.jsonl", (
        {"question_id": "p1", "image": "a.png", "text": f"what does it say?{ocr}{SHORT}"},
        {"question_id": "p1", "image": "a.png", "text": f"What number is it?{ocr}{SHORT}"},
    ))  # fmt: skip
    write_json(root / "textvqa/TextVQA_0.5.1_val.json", {"data": [
        {"image_id": "p1", "question": "What number is it?", "answers": ["Two"] * 2 + ["2"] + ["x"] * 7},
        {"image_id": "p1", "question": "What does it say?", "answers": ["stop"] * 10},
    ]})  # fmt: skip
    write_json(root / "gqa/llava_gqa_testdev_balanced.jsonl", tuple(
        {**line, "question_id": str(line["question_id"])} for line in lines))  # fmt: skip
    write_json(root / "gqa/data/questions1.2/testdev_balanced_questions.json",
               {"7": {"answer": "cat", "imageId": "a"}, "9": {"answer": "dog", "imageId": "b"}})  # fmt: skip
    categories = ("adversarial", "popular", "random")
    write_json(root / "pope/llava_pope_test.jsonl", tuple(
        {"question_id": number, "image": name, "text": f"Is there a {thing} in the image?{SHORT}", "category": category}
        for number, (category, name, thing) in enumerate(
            (category, name, thing) for category in categories for name, thing in (("a.png", "cat"), ("b.png", "dog"))
        )
    ))  # fmt: skip
    for category in categories:
        write_json(root / f"pope/coco/coco_pope_{category}.json", tuple(
            {"question_id": number, "image": name, "text": "Is there?", "label": label}
            for number, (name, label) in enumerate((("a.png", "yes"), ("b.png", "no")), start=1)
        ))  # fmt: skip
    turns = [{"from": "human", "value": "Which?\nA. one\nB. two\n<image>"}, {"from": "gpt", "value": "..."}]
    write_json(root / "scienceqa/llava_test_CQM-A.json", [
        {"id": "5", "image": "5/image.png", "conversations": turns},
        {"id": "6", "conversations": [{"from": "human", "value": "No picture?"}, turns[1]]},
        {"id": "8", "image": "8/image.png", "conversations": turns},
    ])  # fmt: skip
    write_json(root / "scienceqa/problems.json", {
        name: {"choices": ["one", "two"], "answer": answer} for name, answer in (("5", 1), ("6", 0), ("8", 0))
    })  # fmt: skip
    draw(root / "drawn.png")
    picture = base64.b64encode((root / "drawn.png").read_bytes()).decode()
    table = ("index\tquestion\thint\tA\tB\tC\tD\tanswer\tcategory\timage\tsource\tl2-category\tcomment\n"
             f"241\tWhich?\tLook.\tone\ttwo\t\t\tB\tc\t{picture}\ts\tl\t\n"
             f"1000252\tWhere?\t\there\tthere\tup\tdown\tD\tc\t{picture}\ts\tl\t\n")  # fmt: skip
    (root / "mmbench").mkdir()
    (root / "mmbench/mmbench_dev_20230712.tsv").write_text(table)
    write_json(root / "mm-vet/llava-mm-vet.jsonl", lines)
    for name in ("rad", "slake", "pvqa"):
        write_json(root / f"3vqa/test_{name}.json", [
            medical(1, "Where is it?", "Left lung", "open", "a.png"),
            medical(2, "Is it there?", "no", "CLOSED", "b.png"),
            misspelt(medical(3, "What is it?", "the liver", "OPEN", "a.png")),
            medical(4, "Is it bad?", "yes", "close", None),
        ])  # fmt: skip
    for folder in ("vqav2/test2015", "vizwiz/test", "vizwiz/val", "textvqa/train_images", "gqa/data/images",
                   "pope/val2014", "mm-vet/images", "3vqa/images"):  # fmt: skip
        draw(root / folder / "a.png")
        draw(root / folder / "b.png", "blue")
    for name in (3, 4):
        draw(root / f"vqav2/val2014/COCO_val2014_{name:012d}.jpg")
    for name in (5, 8):
        draw(root / f"scienceqa/images/test/{name}/image.png")
    return root


def medical(name: int, question: str, answer: str, kind: str, image: str | None) -> dict[str, Any]:
    """A question of Med-MoE's form."""
    turns = [{"from": "human", "value": f"{question}\n<image>"}, {"from": "gpt", "value": answer}]
    return {"id": name, "conversations": turns, "answer_type": kind, **({} if image is None else {"image": image})}


def spoken(answers: Mapping[str, str] | Callable[[str], str], asked: list[Any] | None = None) -> Any:
    """A model of lm-eval that answers a prompt with what a text in it is answered with, and notes what it is asked."""
    from lm_eval.api.model import LM

    class Spoken(LM):
        MULTIMODAL = True

        @property
        def tokenizer_name(self):
            return "none"

        def loglikelihood(self, requests):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

        def apply_chat_template(self, messages, add_generation_prompt=True):
            return f"<{messages[-1]['content']}>"

        def generate_until(self, requests):
            if asked is not None:
                asked.extend(request.args for request in requests)
            if callable(answers):
                return [answers(request.args[0]) for request in requests]
            return [next(said for part, said in answers.items() if part in request.args[0]) for request in requests]

    return Spoken()


def misspelt(question: dict[str, Any]) -> dict[str, Any]:
    """The question with the mistake that some of the published files make."""
    return {"conversatons" if key == "conversations" else key: value for key, value in question.items()}
