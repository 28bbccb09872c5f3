"""Two processes that answer the requests of tasks together."""

import json
import sqlite3

import pytest

from moe_jax.commands import cli
from tests.support.jobs import job, run
from tests.support.task_files import WRITTEN, write_task
from tests.support.tiers import long

NAMES = "choice,said,rolling,written"

# Notes how many continuations a process scores, and how many texts it writes.
PROGRAM = """
import os, sys
from pathlib import Path
from moe_jax.commands import cli
from moe_jax.harness import language_model, likelihood

notes = Path("asked" + os.environ["MOE_JAX_DISTRIBUTED"][-1])
score, write = likelihood.Likelihoods.__call__, language_model.stream_texts

def noting(what, do, rows):
    def noted(*arguments, **named):
        with notes.open("a") as file:
            file.write(f"{what} {len(arguments[rows])}\\n")
        return do(*arguments, **named)
    return noted

likelihood.Likelihoods.__call__ = noting("score", score, 1)
language_model.stream_texts = noting("write", write, 1)
sys.exit(cli.main(sys.argv[1:]))
"""


def evaluated(tiny_llama, folder, name, *options, **how) -> dict:
    """lm-eval's results."""
    output = folder / f"{name}.json"
    given = ("eval", tiny_llama, "--tasks-dir", folder, "--output", output, *options)
    first, second = run(folder, *map(str, given), **how)
    assert second == "" and "choice" in first
    return json.loads(output.read_text())


def check_same(found: dict, expected: dict) -> None:
    assert found["results"].keys() == expected["results"].keys() and found["n-samples"] == expected["n-samples"]
    for task, figures in expected["results"].items():
        for name, value in figures.items():
            close = pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
            assert found["results"][task][name] == close, (task, name)


def alone(tiny_llama, folder, names, *options) -> dict:
    output = folder / "one.json"
    given = ("eval", tiny_llama, "--tasks-dir", folder, "--output", output, "--tasks", names, *options)
    assert cli.main([str(word) for word in given]) == 0
    return json.loads(output.read_text())


def answers(cache) -> dict:
    with sqlite3.connect(cache) as database:
        return {key: json.loads(text) for key, text in database.execute("SELECT request, answer FROM answers")}


@long
def test_two_processes_share_the_requests_and_give_the_figures_of_one(tiny_llama, folder):
    options = ("--tasks", NAMES, "--cache", folder / "answers.db")
    expected = alone(tiny_llama, folder, NAMES)
    check_same(evaluated(tiny_llama, folder, "two", *options, program=["-c", PROGRAM]), expected)
    # 12 continuations and 4, 4 whole texts, and 4 to be written: half of them each.
    for index in range(2):
        asked = [line.split() for line in (folder / f"asked{index}").read_text().splitlines()]
        assert sum(int(count) for what, count in asked if what == "score") == 10
        assert sum(int(count) for what, count in asked if what == "write") == 2
    # 3 answers to each of 4 questions, of which `said` asks for one too; 4 texts to score and 4 to write.
    assert len(answers(folder / "answers.db")) == 4 * (3 + 1 + 1)


@long
def test_a_model_that_they_hold_together_and_texts_that_are_drawn(tiny_llama, folder):
    how = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    write_task(folder, {**WRITTEN, "task": "drawn", "generation_kwargs": how})
    caches = [("--cache", folder / f"{name}.db") for name in ("one", "split", "shared")]
    expected = alone(tiny_llama, folder, f"{NAMES},drawn", *caches[0])
    names = ("--tasks", f"{NAMES},drawn")
    check_same(evaluated(tiny_llama, folder, "split", *names, "--split", *caches[1]), expected)
    check_same(evaluated(tiny_llama, folder, "shared", *names, *caches[2]), expected)
    written = [{key: said for key, said in answers(file).items() if isinstance(said, str)} for _, file in caches]
    one, split, shared = written
    assert len(one) == 8 and one == split == shared
    # What is in the cache of the first process is not asked again, by any.
    kept = answers(folder / "shared.db")
    with sqlite3.connect(folder / "shared.db") as database:
        database.execute("DELETE FROM answers WHERE request IN (SELECT request FROM answers LIMIT 3)")
    check_same(evaluated(tiny_llama, folder, "again", *names, *caches[2]), expected)
    assert answers(folder / "shared.db").keys() == kept.keys()


@long
def test_processes_with_other_questions_are_refused(tiny_llama, folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for file in folder.glob("*.yaml"):
        (other / file.name).write_text(file.read_text())
    (other / "questions.jsonl").write_text((folder / "questions.jsonl").read_text().replace("where?", "when?"))
    arguments = [["eval", str(tiny_llama), "--tasks", "choice", "--tasks-dir", str(place)] for place in (folder, other)]
    with job(folder, *arguments[0], second={"arguments": arguments[1]}) as started:
        for code, out, said in started.ended():
            assert (code, out) == (2, "") and "processes differ: what the tasks" in said
