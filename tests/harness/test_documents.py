"""Documents of tasks, good and bad, without a model."""

import collections
import functools
import json

import pytest

from moe_jax.core.bad_documents import BadDocument, Skipped
from moe_jax.core.errors import InputError
from moe_jax.harness.documents import LocalData, check_document, good_documents
from moe_jax.harness.task_files import sandboxed_templates
from moe_jax.harness.task_run import evaluate_tasks, known_tasks, load_tasks
from tests.support.task_files import CHOICE, QUESTIONS, SAID, write_task

# A line, and what is wrong with it.
BAD = [
    ("{", "not valid JSON"),
    ("[1]", "expected an object"),
    (json.dumps({**QUESTIONS[0], "gold": "1"}), "'gold' is '1'"),
    (json.dumps({**QUESTIONS[0], "a": ["x", "", "y"]}), "answers is empty"),
    (json.dumps({**QUESTIONS[0], "a": []}), "doc_to_choice is []"),
    (json.dumps({**QUESTIONS[0], "gold": 3}), "right answer 3"),
    (json.dumps({**QUESTIONS[0], "gold": -1}), "right answer -1"),
    (json.dumps({"q": None, "a": ["x", "y"], "gold": 0}), "no 'q'"),
]
SKIP = functools.partial(collections.defaultdict, lambda: Skipped("skip"))


def loaded(folder, lines, skipped=None, name="choice"):
    (folder / "questions.jsonl").write_text("\n".join(lines))
    with sandboxed_templates():
        return load_tasks([name], known_tasks(folder), skipped)


def good(tasks, skipped, limit=None, name="choice"):
    with sandboxed_templates():
        places = tasks["places"][name]
        return good_documents(tasks["tasks"][name], lambda *_: None, skipped, places=places, limit=limit)


def test_bad_documents_are_skipped_wherever_they_are(folder):
    lines = list(map(json.dumps, QUESTIONS))
    mixed = [BAD[3][0], BAD[5][0], lines[0], *(line for line, _ in BAD), *lines[1:]]
    skipped = SKIP()
    tasks = loaded(folder, mixed, skipped)
    kept = good(tasks, skipped["choice"])
    documents = list(tasks["tasks"]["choice"].eval_docs)
    assert [documents[index]["q"] for index in kept] == [one["q"] for one in QUESTIONS]
    assert skipped["choice"].count == 2 + len(BAD) and len(skipped["choice"].problems) == 5
    assert good(tasks, Skipped("skip"), limit=2) == kept[:2]


def test_the_first_bad_document_is_named_unless_it_is_skipped(folder):
    file = folder / "questions.jsonl"
    for place, (line, message) in enumerate(BAD):
        is_read = place < 3  # before lm-eval has it
        file.write_text("\n".join([*map(json.dumps, QUESTIONS), line] if is_read else [line]))
        with sandboxed_templates(), pytest.raises(BadDocument) as error:
            LocalData(CHOICE).read(data_files={"test": str(file)})
        assert f"{file}, line {5 if is_read else 1}" in str(error.value) and message in str(error.value)
    for content, message in (("{", "documents are bad"), ("\n".join([BAD[5][0]] * 2), "of its first")):
        file.write_text(content)
        with sandboxed_templates(), pytest.raises(InputError, match=message):
            LocalData(CHOICE, Skipped("skip")).read(data_files={"test": str(file)})


def test_a_task_that_can_use_no_document_is_not_tried_on_all(folder):
    skipped, file = Skipped("skip"), folder / "questions.jsonl"
    file.write_text("\n".join([json.dumps(QUESTIONS[0])] * 120))
    with sandboxed_templates(), pytest.raises(InputError, match="of its first"):
        LocalData({**CHOICE, "doc_to_text": "{{ absent }}"}, skipped).read(data_files={"test": str(file)})
    assert skipped.count == 100


def test_documents_of_other_kinds_of_tasks(folder):
    write_task(folder, {**SAID, "doc_to_target": "gold"})
    tasks = loaded(folder, [json.dumps(QUESTIONS[0]), '{"q": "a"}'], name="said")
    with pytest.raises(BadDocument, match="no 'gold'"):
        good(tasks, Skipped(), name="said")
    check_document(object(), {}, is_local=True)  # a class of lm-eval's own: it has its own rules


class Model:
    """Says that all is equally likely, and that a question of "where" cannot be asked."""

    rank, world_size = 0, 1

    def loglikelihood(self, requests):
        return [(0.0, True)] * len(requests)

    def check_request(self, request):
        if "where" in request.args[0]:
            raise BadDocument("nobody knows")


def test_what_the_model_cannot_score_is_skipped_and_no_bad_example_is_given(folder):
    lines = [*map(json.dumps, QUESTIONS), BAD[4][0]]
    skipped = SKIP()
    tasks = loaded(folder, lines, skipped)
    with sandboxed_templates():
        found = evaluate_tasks(Model(), tasks, num_fewshot=4, skipped=skipped)
        assert [sample["doc_id"] for sample in found["samples"]["choice"]] == [0, 2, 3]
        assert [problem.rsplit(": ", 1)[1] for problem in skipped["choice"].problems][0] == "nobody knows"
        assert skipped["choice"].count == 2
        with pytest.raises(InputError, match="num_fewshot is 5"):
            evaluate_tasks(Model(), tasks, num_fewshot=5, skipped=SKIP())


def test_examples_of_the_evaluated_split_are_one_fewer_and_bad_ones_are_named(folder):
    """lm-eval draws one more than are wanted, and takes out those that equal the question."""
    write_task(folder, {**CHOICE, "fewshot_split": "test"})
    for lines, most in ((QUESTIONS, 3), ([*QUESTIONS, QUESTIONS[0]], 3)):
        tasks = loaded(folder, list(map(json.dumps, lines)))
        with sandboxed_templates():
            evaluate_tasks(Model(), tasks, num_fewshot=most, limit=1)
            with pytest.raises(InputError, match=f"num_fewshot is {most + 1}, but there are {most} "):
                evaluate_tasks(Model(), tasks, num_fewshot=most + 1, limit=1)
    tasks = loaded(folder, [*map(json.dumps, QUESTIONS), BAD[4][0]])
    with sandboxed_templates(), pytest.raises(BadDocument, match="choice, an example"):
        evaluate_tasks(Model(), tasks, num_fewshot=1, limit=1)
