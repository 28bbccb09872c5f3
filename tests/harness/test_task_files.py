"""What a task file may say, and that nothing it says is executed."""

import gzip
import json
import subprocess
import sys

import pytest

from moe_jax.core.errors import InputError
from moe_jax.harness.documents import read_examples
from moe_jax.harness.task_files import SHIPPED, read_task_folder, sandboxed_templates
from moe_jax.harness.task_run import known_tasks, load_tasks
from tests.support.environment import ROOT
from tests.support.task_files import CHOICE, QUESTIONS, WRITTEN, write_task
from tests.support.tiers import one_in

METRIC = CHOICE["metric_list"][0]


def load(folder, name="choice"):
    with sandboxed_templates():
        return load_tasks([name], known_tasks(folder))["tasks"]


def plant(folder):
    """A Python file that says that it ran."""
    (folder / "planted.py").write_text("import sys\nsys.planted = True\ndef f(*_, **__):\n    sys.planted = True\n")


@one_in(3)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class": "planted.f"}, "Python class"),
        ({"custom_dataset": "planted.f"}, "custom_dataset names a function"),
        ({"process_docs": "planted.f"}, "process_docs names a function"),
        ({"process_results": "planted.f"}, "process_results names a function"),
        ({"use_prompt": "promptsource:x"}, "use_prompt"),
        ({"doc_to_image": "x"}, "doc_to_image: only what is written"),
        ({"doc_to_image": 3}, "doc_to_image 3: expected the name of a field"),
        ({"doc_to_image": "x", "output_type": "generate_until", "num_fewshot": 1}, "num_fewshot: examples"),
        ({"dataset_kwargs": {"data_files": {"test": "a"}, "scoring": "gpa"}}, "scoring 'gpa' (did you mean 'gqa'?)"),
        ({"dataset_kwargs": {"data_files": {"test": "a"}, "scoring": "gqa"}}, "metric_list and doc_to_choice do not"),
        ({"dataset_kwargs": {"data_files": {"test": "a"}, "annotations": "b"}}, "annotations go with scoring"),
        ({"dataset_kwargs": {"data_files": {"test": "a"}, "annotations": [1]}}, "annotations [1]: expected a file"),
        ({"dataset_kwargs": {"data_files": {"test": "a"}, "image_aspect": "wide"}}, "expected pad or square"),
        ({"dataset_kwargs": {"data_files": {"test": "a"}, "image_folder": 1}}, "image_folder 1: expected a path"),
        ({"unsafe_code": True}, "unsafe_code: the task would"),
        ({"dataset_kwargs": {"trust_remote_code": True}}, "trust_remote_code: code of a"),
        ({"dataset_path": "planted.py"}, "local data only 'json'"),
        ({"dataset_path": "/somewhere"}, "local data only 'json'"),
        ({"dataset_kwargs": {"data_files": {"test": "a"}, "cache_dir": "x"}}, "'cache_dir' is no key"),
        ({"test_split": "dev"}, "test_split 'dev' is none of the splits of data_files: test"),
        ({"test_split": None}, "neither test_split nor validation_split"),
        ({"metric_list": [{"metric": "./planted.py"}]}, "'./planted.py' is no metric"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "loads a metric"),
        ({"metric_list": [{**METRIC, "aggregation": "meen"}]}, "no aggregation of lm-eval (did you mean 'mean'?)"),
        ({"filter_list": [{"name": "x", "filter": [{"function": "custom"}]}]}, "task file may"),
        ({"fewshot_config": {"process_docs": "planted.f"}}, "'process_docs' is no key of fewshot_config"),
        ({"doc_to_txt": "x"}, "'doc_to_txt' is no key of a task (did you mean 'doc_to_text'?)"),
        ({"include": "../other.yaml"}, "leads out of"),
    ],
)
def test_what_executes_or_is_unknown_is_refused(folder, changes, message):
    plant(folder)
    write_task(folder, {**CHOICE, **changes})
    with pytest.raises(InputError, match="choice") as error:
        load(folder)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not hasattr(sys, "planted")
    assert load(folder, "said").keys() == {"said"}  # its neighbours are in nobody's way


@pytest.mark.parametrize(
    "line",
    [
        "doc_to_text: !function planted.f",
        "metric_list: [{metric: !function planted.f}]",
        "fewshot_config: {sampler: !function planted.f}",
        "doc_to_text: !!python/name:os.system",
        "doc_to_text: !!python/object/apply:os.system [true]",
    ],
)
def test_tags_are_refused(folder, line):
    plant(folder)
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in CHOICE.items() if key not in line)
    (folder / "choice.yaml").write_text(f"{text}\n{line}\n")
    with pytest.raises(InputError, match="task 'choice' is refused: .*which lm-eval would execute"):
        load(folder)
    assert not hasattr(sys, "planted")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ undefined_name }}",
        "{{ 'x' * 99999999999 }}",
    ],
)
def test_templates_are_rendered_in_a_sandbox(folder, template):
    write_task(folder, {**CHOICE, "doc_to_text": template})
    with pytest.raises(InputError, match="line 1: the template .* fails: "):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a", "task file"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("task: {x: 1}\ndataset_path: json", "is none: expected a text"),
        (b"\xff\xfe\x00", "is not YAML"),
    ],
)
def test_files_that_are_none(folder, content, message):
    (folder / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        read_task_folder(folder)


def test_includes_groups_and_tags(folder):
    base = {key: value for key, value in CHOICE.items() if key != "task"}
    write_task(folder, base, "base")
    write_task(folder, {"include": "base.yaml", "task": "first", "tag": ["both"], "task_alias": "1st"})
    write_task(folder, {"include": "base.yaml", "task": "second", "tag": "both", "doc_to_text": "{{ q }}"})
    aggregated = [{"metric": "acc", "weight_by_size": True}]
    write_task(folder, {"group": "all", "task": ["first", "choice"], "aggregate_metric_list": aggregated}, "all")
    write_task(folder, {"group": "hidden", "task": ["first", "refused"]}, "hidden")
    write_task(folder, {**CHOICE, "task": "refused", "process_docs": "x"})
    assert load(folder, "both").keys() == {"first", "second"}
    assert load(folder, "all").keys() == {"first", "choice"}
    assert load(folder, "second")["second"].doc_to_text(QUESTIONS[0]) == "what is it?"
    for name in ("hidden", "refused"):
        with pytest.raises(InputError, match="'refused' is refused: .*process_docs"):
            load(folder, name)
    write_task(folder, CHOICE, "again")
    with pytest.raises(InputError, match="task 'choice' is in another"):
        read_task_folder(folder)


def test_data_files_begin_at_the_task_file_or_where_data_is(folder, tmp_path):
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    assert len(load(folder)["choice"].eval_docs) == len(QUESTIONS)
    (elsewhere / "questions.jsonl").write_text(json.dumps(QUESTIONS[0]))
    with sandboxed_templates():
        loaded = load_tasks(["choice"], known_tasks(folder, data=elsewhere))["tasks"]["choice"]
    assert len(loaded.eval_docs) == 1 and loaded.get_config("custom_dataset") is None
    assert loaded.dump_config()["dataset_kwargs"] == {"data_files": {"test": str(elsewhere / "questions.jsonl")}}
    (folder / "questions.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="no data at .*questions.jsonl"):
        load(folder)


def test_examples_are_read_from_lines_lists_and_gzip(tmp_path):
    lines, whole, packed = tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "a.jsonl.gz"
    lines.write_text("\n\n".join(map(json.dumps, QUESTIONS)))
    whole.write_text(json.dumps(QUESTIONS, indent=1))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    found = [read_examples(path) for path in (lines, whole, packed)]
    assert all(list(one.values()) == QUESTIONS for one in found)
    assert [list(one)[1] for one in found] == [f"{lines}, line 3", f"{whole}, example 2", f"{packed}, line 3"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n[2]', "line 2: expected .* a JSON list"),
        ("a.jsonl", b"{", "line 1 is not valid JSON"),
        ("a.json", b"[1]", "example 1: expected .* a JSON int"),
        ("a.json", b"", "holds no examples"),
        ("a.jsonl.gz", b"abc", "gzip file"),
        # Without the time, which would be in the names of tests: all processes must find the same ones.
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-4], "gzip file"),
    ],
)
def test_data_that_is_none(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_examples(tmp_path / name)


def test_examples_must_be_alike(folder):
    (folder / "questions.jsonl").write_text('{"q": 1}\n{"q": ["a"]}')
    with pytest.raises(InputError, match="line 2: 'q' is .* a number"):
        load(folder)
    (folder / "questions.jsonl").write_text('{"q": [1]}\n{"q": ["a"]}')
    with pytest.raises(InputError, match="examples are not"):
        load(folder)


def test_the_shipped_tasks(data_dir):
    """Their prompts over the data that they are for: every one parses, and its answer is among the choices."""
    found = known_tasks(data=data_dir / "eval")
    assert not found.refused and len(found.tasks) >= 10
    assert {path.stem for path in SHIPPED.rglob("*.yaml") if path.stem[0] != "_"} == found.tasks.keys()
    with sandboxed_templates():
        (task,) = load_tasks(["arc_easy_local"], found)["tasks"].values()
        for index in (0, 1, 1000):
            example = task.eval_docs[index]
            question, choices = task.doc_to_text(example), task.doc_to_choice(example)
            assert question.startswith("Question: ") and question.endswith("\nAnswer:") and "Answer1" not in question
            assert len(choices) == 4 and not any("Answer" in choice for choice in choices)
            assert f"{example['answer'].capitalize()}: {choices[task.doc_to_target(example)]}" in example["instruction"]


def test_a_task_that_samples_from_a_temperature_is_told_so():
    from moe_jax.generation.spec import GenerateSpec
    from moe_jax.harness.language_model import _settings

    wanted = GenerateSpec(stop=("\n\n", "q"), max_new_tokens=12, temperature=0.0)
    assert _settings(WRITTEN["generation_kwargs"]) == wanted
    assert _settings({"until": "a", "do_sample": True, "top_p": 0.5}).temperature == 1.0
    with pytest.raises(InputError, match="'temprature' is not known .did you mean 'temperature'"):
        _settings({"temprature": 1})


def test_last_words_of_a_text(folder, tmp_path):
    """The example makes the data of a task that ships."""
    filler = [f"word{i}" for i in range(60)]
    text = tmp_path / "text.txt"
    text.write_text(" = Title = \n" + " ".join(["garden", *filler, "Garden", "and", "more"]) + "\nshort line\n")
    out = tmp_path / "data" / "last_words" / "test.jsonl"
    script = ROOT / "examples" / "last_words.py"
    subprocess.run([sys.executable, script, text, out], check=True)
    with sandboxed_templates():
        (task,) = load_tasks(["last_word_local"], known_tasks(data=tmp_path / "data"))["tasks"].values()
    (example,) = task.eval_docs
    assert task.doc_to_target(example) == " Garden" and task.doc_to_text(example).endswith("word59")
