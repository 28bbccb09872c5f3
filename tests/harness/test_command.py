"""`moe-jax eval MODEL --tasks`, as a user runs it."""

import json
import re
import sqlite3

import pytest

from moe_jax.commands import cli
from tests.support.task_files import CHOICE, QUESTIONS, WRITTEN, write_task
from tests.support.tiers import long


def run(capsys, *arguments):
    assert cli.main(["eval", *map(str, arguments)]) == 0
    return capsys.readouterr()


def fails(capsys, *arguments):
    assert cli.main(["eval", *map(str, arguments)]) == 2
    return capsys.readouterr().err.strip()


@long
def test_table_json_and_cache(tiny_llama, folder, tmp_path, capsys, monkeypatch):
    output, cache = tmp_path / "results.json", tmp_path / "answers.db"
    options = (tiny_llama, "--tasks", "choice,written", "--tasks-dir", folder, "--cache", cache)
    out = run(capsys, *options, "--output", output).out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert rows[0][:1] == ["Tasks"] and rows[0][-1] == "Stderr"
    results = json.loads(output.read_text())
    figures = results["results"]["choice"]
    row = next(row for row in rows if row[0] == "choice")
    assert row[-2] == "±"
    assert [float(row[-3]), float(row[-1])] == pytest.approx(
        [figures["acc,none"], figures["acc_stderr,none"]], abs=1e-4
    )
    assert results["n-samples"]["choice"] == {"original": 4, "effective": 4}
    assert "samples" not in results and results["config"]["model"] == "moe-jax"
    assert results["configs"]["choice"]["doc_to_text"] == CHOICE["doc_to_text"]

    # What is kept is not asked again.
    monkeypatch.setattr("moe_jax.harness.likelihood.Likelihoods.__call__", None)
    monkeypatch.setattr("moe_jax.harness.language_model.stream_texts", None)
    again = json.loads(run(capsys, *options, "--json").out)
    assert again["results"] == results["results"]
    # Another file of the tokenizer may say that texts begin or end otherwise.
    settings = tiny_llama / "tokenizer_config.json"
    settings.write_text(json.dumps({"bos_token": None}))
    with pytest.raises(TypeError):
        run(capsys, *options, "--json")
    settings.unlink()
    with sqlite3.connect(cache) as database:
        database.execute("UPDATE answers SET answer = '[1]'")
    assert "holds no answers" in fails(capsys, *options)
    cache.write_text("something else, and long enough to be no database" * 99)
    assert "cannot be used as a cache" in fails(capsys, *options)


@long
def test_limit_and_fewshot(tiny_llama, folder, capsys):
    options = (tiny_llama, "--tasks", "choice", "--tasks-dir", folder, "--limit", 2, "--num-fewshot", 1, "--json")
    found = json.loads(run(capsys, *options).out)
    assert found["n-samples"]["choice"] == {"original": 4, "effective": 2} and found["n-shot"] == {"choice": 1}


def test_a_model_without_a_chat_template(tiny_llama, folder, capsys):
    options = (tiny_llama, "--tasks", "choice", "--tasks-dir", folder, "--apply-chat-template")
    assert "has no chat template" in fails(capsys, *options)


def test_samples_are_written_and_not_run(tiny_llama, folder, tmp_path, capsys):
    templates = {"task_id": "T/{{ gold }}", "solution": "{{ q }}{{ completion }}"}
    bypass = [{"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}]
    write_task(folder, {**WRITTEN, "task": "code", "metric_list": bypass, "metadata": {"samples": templates}})
    options = (tiny_llama, "--tasks-dir", folder, "--tasks", "code")
    assert "code is not judged here, but written for another program: give --samples" in fails(capsys, *options)
    samples = tmp_path / "samples.jsonl"
    captured = run(capsys, *options, "--samples", samples, "--json")
    assert not any(key.startswith("bypass") for key in json.loads(captured.out)["results"]["code"])
    assert f"4 samples in {samples}" in captured.err
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [line["task_id"] for line in lines] == [f"T/{one['gold']}" for one in QUESTIONS]
    assert all(line["solution"].startswith(one["q"]) for line, one in zip(lines, QUESTIONS, strict=True))
    assert "exists already" in fails(capsys, *options, "--samples", samples)
    twice = {"metric_list": bypass, "metadata": {"samples": templates}, "repeats": 2}
    write_task(folder, {**WRITTEN, "task": "code", **twice})
    assert "8 samples in" in run(capsys, *options, "--samples", tmp_path / "twice.jsonl").err
    for option in ("--samples", "--output"):  # said before anything is computed
        absent = tmp_path / "absent"
        assert f"{option} {absent}/x: there is no directory {absent}" in fails(capsys, *options, option, absent / "x")
        below = samples / "x"
        assert f"there is no directory {samples}" in fails(capsys, *options, option, below)
    assert "/proc/x cannot be made: /proc cannot be written" in fails(capsys, *options, "--output", "/proc/x")
    other = (tiny_llama, "--tasks-dir", folder, "--tasks", "choice", "--samples", tmp_path / "x.jsonl")
    assert "none of the tasks says what its samples are" in fails(capsys, *other)


def test_list(tiny_llama, folder, capsys):
    write_task(folder, {**CHOICE, "task": "bad", "process_docs": "x"})
    out = run(capsys, tiny_llama, "--tasks", "list", "--tasks-dir", folder).out
    assert "choice" in out and "piqa_local" in out and "refused: bad: " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "choice", "--text", "x"], "give one of --text FILE, --classify FILE and --tasks"),
        (["--text", "x", "--limit", "3"], "--limit goes with --tasks"),
        (["--text", "x", "--num-fewshot", "0"], "--num-fewshot goes with --tasks"),
        (["--tasks", "choice", "--output", "a.json", "--cache", "b/../a.json"], "one file each"),
        (["--tasks", ",", "--tasks-dir", "{folder}"], "--tasks names no task"),
        (["--tasks", "choice", "--tasks-dir", "{folder}", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--tasks", "choice", "--tasks-dir", "absent"], "no folder of task files at absent"),
        (["--tasks", "choice", "--data-dir", "absent"], "no directory of data at absent"),
        (["--tasks", "piqa_local"], "no data at .*piqa/test.json"),
    ],
)
def test_bad_options(tiny_llama, folder, capsys, options, message):
    assert re.search(message, fails(capsys, tiny_llama, *[one.format(folder=folder) for one in options]))


@pytest.mark.parametrize(
    ("told", "reached", "message"),
    [(False, False, "the Hugging Face Hub, which cannot"), (True, True, "the Hugging Face Hub, which cannot"),
     (False, True, "remote: ConnectionError: no answer")],
    ids=["it cannot be reached", "HF_HUB_OFFLINE", "it does not answer"],
)  # fmt: skip
def test_data_on_the_hub_that_are_not_there_are_one_line(
    tiny_llama, folder, capsys, monkeypatch, told, reached, message
):
    """Where there is no network, none is asked for."""
    import datasets
    from huggingface_hub import constants

    def load(*arguments, **options):
        offline.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("no answer")

    offline, asks_nobody = [], told or not reached
    remote = {**CHOICE, "task": "remote", "dataset_path": "nobody/nothing-of-the-kind", "dataset_kwargs": {}}
    write_task(folder, remote)
    monkeypatch.setattr("moe_jax.harness.task_run._reaches_hub", lambda endpoint: reached)
    monkeypatch.setattr(datasets, "load_dataset", load)
    for settings in (constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", told)
    said = fails(capsys, tiny_llama, "--tasks", "remote", "--tasks-dir", folder)
    assert message in said and "\n" not in said
    assert offline == [(asks_nobody, asks_nobody)]
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (told, told)


def test_bad_documents_end_it_or_are_skipped_and_counted(tiny_llama, folder, capsys):
    lines = [json.dumps({**QUESTIONS[0], "a": ["x" * 99, "y"]}), *map(json.dumps, QUESTIONS), '{"q": "a?", "a": ["b"]}']
    (folder / "questions.jsonl").write_text("\n".join(lines))
    options = (tiny_llama, "--tasks", "choice", "--tasks-dir", folder)
    said = fails(capsys, *options)
    assert f"choice, {folder / 'questions.jsonl'}, line 6: it has no 'gold'" in said
    assert said.count("\n") == 0 and said.startswith("moe-jax: error:")
    output = folder / "results.json"
    captured = run(capsys, *options, "--bad-documents", "skip", "--output", output)
    assert "choice; 2 bad documents were skipped" in captured.out
    results = json.loads(output.read_text())
    assert results["n-samples"]["choice"] == {"original": 6, "effective": 4}
    assert results["skipped"]["choice"]["count"] == 2
    for problem, line in zip(results["skipped"]["choice"]["problems"], (1, 6), strict=True):
        assert f"line {line}: " in problem and problem in captured.err
