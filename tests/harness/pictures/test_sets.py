"""The shipped tasks about pictures: their files, prompts, figures and uploads."""

import json

import pytest

from moe_jax.core.errors import InputError
from moe_jax.harness.samples import samples_file
from moe_jax.harness.task_files import sandboxed_templates
from moe_jax.harness.task_run import evaluate_tasks, known_tasks, load_tasks
from tests.support.picture_questions import SHORT, misspelt, spoken, write_json, write_sets
from tests.support.tiers import one_in

BEGIN = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. USER: "
)
LETTER = "\nAnswer with the option's letter from the given choices directly."


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


def run(root, name, answers, **how):
    """Figures, the file for the set's own programs, and what the model was asked."""
    asked = []
    with sandboxed_templates():
        tasks = load_tasks([name], known_tasks(data=root))
        found = evaluate_tasks(spoken(answers, asked), tasks, **how)
    figures = {
        key.split(",")[0]: value
        for key, value in found["results"][name].items()
        if key.endswith(",none") and "_stderr" not in key
    }
    return figures, samples_file(tasks["tasks"], found).content, asked


def test_vqav2(root):
    figures, upload, asked = run(root, "vqav2_local", {"What": "Two cats.", "And": " A dog \n"})
    assert figures == {}
    assert json.loads(upload) == [{"question_id": 7, "answer": "2 cats"}, {"question_id": 9, "answer": "dog"}]
    assert asked[0][0] == f"{BEGIN}<image>\nWhat is it?{SHORT} ASSISTANT:"
    assert [one[2]["visual"] for one in asked] == [["a.png"], ["b.png"]]
    assert asked[0][1]["max_gen_toks"] == 128 and asked[0][1]["do_sample"] is False


def test_vqav2_with_its_own_files(root):
    figures, upload, asked = run(root, "vqav2_val_local", {"What": "the cat", "And": "red car"})
    # Ten people say The cat, which stays as it is; of two who say the other, one is left out in two of ten sets.
    assert figures == {"acc": pytest.approx((0 + (8 * 2 / 3 + 2 * 1 / 3) / 10) / 2)}
    assert [one["question_id"] for one in json.loads(upload)] == [30, 40]
    assert asked[1][0] == f"{BEGIN}<image>\nAnd this?{SHORT} ASSISTANT:"
    assert asked[1][2] == {"visual": ["COCO_val2014_000000000004.jpg"]}


def test_vizwiz(root):
    figures, upload, _ = run(root, "vizwiz_local", {"What": "2", "And": "no"})
    assert figures == {} and json.loads(upload)[0] == {"image": "a.png", "answer": "2"}
    figures, _, asked = run(root, "vizwiz_val_local", {"What": "two cats", "And": "Unanswerable"})
    assert figures == {"acc": pytest.approx((0 + 1) / 2)}  # people's "two cats" is not simplified, and the answer is
    unsure = "\nWhen the provided information is insufficient, respond with 'Unanswerable'."
    assert asked[0][0] == f"{BEGIN}<image>\nWhat is it?{unsure}{SHORT} ASSISTANT:"


def test_textvqa(root):
    figures, answers, _ = run(root, "textvqa_local", {"what does": "Stop.", "What number": "two"})
    assert figures == {"acc": pytest.approx((1 + (7 * 1 + 3 * 2 / 3) / 10) / 2)}
    lines = [json.loads(line) for line in answers.splitlines()]
    assert lines[0]["question_id"] == "p1" and lines[0]["text"] == "Stop." and "Reference OCR" in lines[0]["prompt"]


def test_gqa(root):
    figures, upload, _ = run(root, "gqa_local", {"What": "Cat.", "And": "a dog"})
    assert figures == {"acc": 0.5}
    assert json.loads(upload)[0] == {"questionId": "7", "prediction": "cat"}


def test_pope(root):
    figures, _, _ = run(root, "pope_local", lambda prompt: "Yes" if "cat" in prompt else "no, it is not")
    assert {figures[f"accuracy_{one}"] for one in ("adversarial", "popular", "random")} == {1.0}
    assert figures["f1"] == 1.0 and figures["yes_random"] == 0.5
    figures, _, _ = run(root, "pope_local", {"": "Yes"})
    assert (figures["precision_popular"], figures["recall_popular"]) == (0.5, 1.0)
    assert figures["f1"] == pytest.approx(2 / 3) and figures["yes_popular"] == 1.0


def test_scienceqa(root):
    figures, answers, asked = run(root, "scienceqa_img_local", {"": "The answer is B."})
    assert figures == {"acc": 0.5} and len(asked) == 2  # the one without a picture is not asked
    assert asked[0][0] == f"{BEGIN}<image>\nWhich?\nA. one\nB. two{LETTER} ASSISTANT:"
    assert asked[0][1]["max_gen_toks"] == 1024
    assert json.loads(answers.splitlines()[0]) == {
        **{"question_id": "5", "prompt": "<image>\nWhich?\nA. one\nB. two", "text": "The answer is B."}
    }


def test_mmbench(root):
    figures, upload, asked = run(root, "mmbench_local", {"Which": "B. two", "Where": "C"})
    assert figures == {"acc": 0.5}
    assert asked[0][0] == f"{BEGIN}<image>\nLook.\nWhich?\nA. one\nB. two{LETTER} ASSISTANT:"
    assert asked[1][0] == f"{BEGIN}<image>\nWhere?\nA. here\nB. there\nC. up\nD. down{LETTER} ASSISTANT:"
    rows = [line.split("\t") for line in upload.splitlines()]
    assert rows[0] == ["index", "question", "A", "B", "C", "D", "prediction", "answer"]
    assert rows[1] == ["241", "Which?", "one", "two", "", "", "B. two", "B"]


def test_mmvet(root):
    figures, upload, _ = run(root, "mmvet_local", {"What": "x", "And": "y"})
    assert figures == {} and json.loads(upload) == {"v1_7": "x", "v1_9": "y"}


@one_in(3)
@pytest.mark.parametrize("name", ["vqa_rad_local", "slake_local", "pathvqa_local"])
def test_medical_sets(root, name):
    said = {"Where": "left left", "there": "I do not know", "What": "liver", "bad": "No"}
    figures, _, asked = run(root, name, said)
    assert figures == {"recall_open": pytest.approx((2 / 3 + 1) / 2), "acc_closed": 0.5}
    assert asked[0][0] == f"{BEGIN}<image>\nWhere is it? ASSISTANT:"
    assert asked[3][0] == f"{BEGIN}Is it bad? ASSISTANT:" and asked[3][2] == {"visual": []}


def test_a_chat_template_writes_its_own_conversation(root):
    _, _, asked = run(root, "gqa_local", {"": "x"}, apply_chat_template=True)
    assert asked[0][0] == f"<<image>\nWhat is it?{SHORT}>"


def test_no_examples_before_questions(root):
    with sandboxed_templates():
        tasks = load_tasks(["gqa_local"], known_tasks(data=root))
        tasks["tasks"]["gqa_local"].set_config("num_fewshot", 2)
        with pytest.raises(InputError, match="no pictures"):
            evaluate_tasks(spoken({"": "x"}), tasks)


UNKNOWN = {"question_id": "p1", "text": "x"}
QUESTION = {"id": 1, "image": "a.png", "answer_type": "open",
            "conversations": [{"value": "Where?"}, {"value": "there"}]}  # fmt: skip


@one_in(4)
@pytest.mark.parametrize(
    ("name", "file", "value", "message"),
    [
        ("vqa_rad_local", "3vqa/test_rad.json", [{**QUESTION, "answer_type": "maybe"}], "answer_type is 'maybe'"),
        ("vqa_rad_local", "3vqa/test_rad.json", [{**QUESTION, "conversations": []}], "example 1: its conversations"),
        ("vqa_rad_local", "3vqa/test_rad.json", [misspelt({**QUESTION, "conversations": None})], "its conversations"),
        ("vqa_rad_local", "3vqa/test_rad.json", [], "holds no examples"),
        ("gqa_local", "gqa/llava_gqa_testdev_balanced.jsonl", ({"question_id": "8"},), "line 1: question '8' is not"),
        ("gqa_local", "gqa/data/questions1.2/testdev_balanced_questions.json", {}, "an object of questions"),
        ("vqav2_val_local", "vqav2/v2_mscoco_val2014_annotations.json", {"annotations": []}, "there are none"),
        ("vqav2_val_local", "vqav2/v2_mscoco_val2014_annotations.json", {"answers": []}, "as 'annotations'"),
        ("vqav2_val_local", "vqav2/v2_mscoco_val2014_annotations.json", [{"answers": []}], "its 'question_id' None"),
        ("vizwiz_val_local", "vizwiz/val.json", [{"image": "a.png", "question": "x", "answers": []}], "those of 10"),
        ("textvqa_local", "textvqa/TextVQA_0.5.1_val.json", {"data": [{}]}, "expected an image_id"),
        ("textvqa_local", "textvqa/llava_textvqa_val_v051_ocr.jsonl", (UNKNOWN,), "no question that can be told"),
        ("pope_local", "pope/coco/coco_pope_random.json", ({"image": "a.png", "label": "yes"},), "fewer labels"),
        ("pope_local", "pope/llava_pope_test.jsonl", ({"category": "random", "image": "b.png"},), "the same order"),
        ("pope_local", "pope/llava_pope_test.jsonl", ({"category": "rare"},), "its category is 'rare', and there"),
        ("scienceqa_img_local", "scienceqa/problems.json", {"5": {"choices": [], "answer": 0}}, "its problem is"),
        ("mmvet_local", "mm-vet/llava-mm-vet.jsonl", ([1],), "expected an object"),
        ("mmbench_local", "mmbench/mmbench_dev_20230712.tsv", "index\tquestion\nx\ty", "its index is"),
    ],
)  # fmt: skip
def test_files_with_mistakes_are_named(tmp_path, name, file, value, message):
    root = write_sets(tmp_path / "sets")
    if isinstance(value, str):
        (root / file).write_text(value)
    else:
        write_json(root / file, value)
    with pytest.raises(InputError) as error:
        run(root, name, {"": "x"})
    said = str(error.value)
    assert message in said and "\n" not in said and str(root) in said
