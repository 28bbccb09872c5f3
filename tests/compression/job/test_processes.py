"""Two processes that compress a model together: each its own layers, killed and gone on with, and the bits of one."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.checkpoints.zarr_arrays import is_whole
from moe_jax.commands import cli
from moe_jax.files.regular_files import hold
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import BankConfig
from tests.files.remote.conftest import bucket as bucket
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import write_model
from tests.support.jobs import job, run
from tests.support.moe_models import memory_moe, same_weights
from tests.support.tiers import long

# Notes which layers a process has worked on; one may die while it writes its second layer.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from moe_jax.commands import cli
from moe_jax.compression import METHODS

folder, dies = Path(sys.argv[1]), sys.argv[2] == "dies"
method = METHODS[sys.argv[sys.argv.index("--method") + 1]]
steps = {step: getattr(method, step) for step in ("analyse", "compress")}
seen = {step: [] for step in steps}

def noting(step):
    def noted(self, layer, *rest, **named):
        seen[step].append(layer.index)
        (folder / step).write_text(str(seen[step]))
        if dies and step == "compress" and len(seen[step]) == 2:
            base, target, write, analysis = rest
            left = iter(range(2))
            def write_or_die(path, leaf):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                write(path, leaf)
            rest = base, target, write_or_die, analysis
        return steps[step](self, layer, *rest, **named)
    return noted

for step in steps:
    setattr(method, step, noting(step))
sys.exit(cli.main(sys.argv[3:]))
"""
BUDGET = ["--method", "resmoe", "--residual", "svd", "--solver", "identity", "--budget-bits", "20", "--json"]


def compressed(folder: Path, *arguments: str, processes: int = 2, dies: int | None = None):
    """Runs the command in a folder; what every process said, and the layers that each analysed and compressed."""
    notes = [folder / f"notes{index}" for index in range(processes)]
    for place in notes:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    given = [[str(place), "dies" if dies == index else "lives", *arguments] for index, place in enumerate(notes)]
    first, second = given[0], given[-1]
    with job(folder, *first, processes=processes, second={"arguments": second}, program=["-c", PROGRAM]) as started:
        ended = started.ended()
    layers = [{file.name: json.loads(file.read_text()) for file in place.iterdir()} for place in notes]
    return ended, layers


def unfinished(model: Path, noted: set[int], is_there: Callable[[str], bool]) -> list[int]:
    """The layers without noted figures, or without one of their leaves, some of which another process copies."""
    layers = (int(path.split("/")[1]) for path in leaf_specs(open_source(str(model)).config)
              if path.startswith("layers/") and not is_there(path))  # fmt: skip
    return sorted(({0, 1, 3, 4} - noted) | ({0, 1, 3, 4} & set(layers)))


def lines(said: str) -> list[str]:
    """What a process said, without what Gloo says of its connections."""
    return [line for line in said.splitlines() if not line.startswith("[Gloo]")]


def figures(out: str) -> list[dict]:
    """The lines of --json, without what differs from run to run."""
    found = [json.loads(line) for line in out.splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "out")} for line in found]


def contents(folder: Path) -> dict[str, bytes]:
    """All files that a model consists of; what describes how it was made has a date, and times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lineage.json"]
    model = [path for path in files if re.fullmatch(r"[\d.]+|\.zarray|config.json|tokenizer.json", path.name)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in model}


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    """A folder with the model `moe`, of whose 5 layers all but the third have experts, and a text."""
    folder = tmp_path_factory.mktemp("moe")
    full = BankConfig()
    model = memory_moe(full, full, None, full, full, shape={"vocab_size": 264})
    write_model(folder / "moe", model.config, model.leaves, (byte_tokenizer(folder / "tokenizer.json"),))
    (folder / "text.txt").write_text("all that is written here is read, and nothing else. " * 20)
    return folder


@long
def test_two_processes_share_the_layers_and_a_killed_job_goes_on_with_two_and_with_one(moe, monkeypatch, capsys):
    monkeypatch.chdir(moe)
    assert cli.main(["compress", "moe", "one", *BUDGET]) == 0
    expected = capsys.readouterr().out
    ended, layers = compressed(moe, "compress", "moe", "two", *BUDGET, dies=1)
    (code, _, said), (died, _, _) = ended
    assert died == -signal.SIGKILL and code == 1 and said.count("moe-jax: error: ") == 1 and "Traceback" not in said
    assert "process 1 (2 of 2, on " in said and "is gone: it was killed" in said
    # A layer was analysed by one process, and each had two of four; the first had done its own, or not.
    assert sorted(layers[0]["analyse"] + layers[1]["analyse"]) == [0, 1, 3, 4] and len(layers[1]["analyse"]) == 2
    assert len(layers[1]["compress"]) == 2 and not set(layers[1]["compress"]) & set(layers[0]["compress"])
    assert not (moe / "two").exists()
    noted = {int(file.stem) for file in (moe / ".two.partial" / "notes").iterdir()}
    assert layers[1]["compress"][0] in noted and layers[1]["compress"][1] not in noted
    held = hold(moe / ".two.partial" / "params")
    left_to_do = unfinished(moe / "one", noted, lambda path: is_whole(held, path))
    for left in ("partial", "analysis"):
        shutil.copytree(moe / f".two.{left}", moe / f".alone.{left}")

    ((code, out, said), (other, silent, _)), layers = compressed(moe, "compress", "moe", "two", *BUDGET)
    assert (code, other, silent) == (0, 0, ""), said
    again = [i for one in layers for i in one.get("compress", [])]
    assert sorted(again) == left_to_do and not any("analyse" in one for one in layers)
    assert figures(out) == figures(expected)
    assert contents(moe / "two") == contents(moe / "one")
    measured = [json.loads((moe / name / "lineage.json").read_text())[-1]["measured"] for name in ("one", "two")]
    for one, two in zip(*(found.pop("layers") for found in measured), strict=True):
        assert one | {"seconds": 0} == two | {"seconds": 0}
    assert measured[0] == measured[1]

    assert cli.main(["compress", "moe", "alone", *BUDGET]) == 0
    assert contents(moe / "alone") == contents(moe / "one")
    assert not [name for name in os.listdir(moe) if name.startswith(".")]


@long
@pytest.mark.parametrize("dies", [0, 1])
def test_a_job_in_a_bucket_goes_on_too(moe, bucket, dies):
    if not (moe / "plain").exists():
        run(moe, "compress", "moe", "plain", *BUDGET, processes=1)
    ended, before = compressed(moe, "compress", "moe", "gs://bucket/small", *BUDGET, dies=dies)
    assert [code for code, *_ in ended] == ([-signal.SIGKILL, 1] if dies == 0 else [1, -signal.SIGKILL])
    noted = {int(name.rpartition("/")[2].partition(".")[0]) for name in bucket.names() if "/notes/" in name}
    assert before[dies]["compress"][0] in noted and before[dies]["compress"][1] not in noted
    assert "small/config.json" not in bucket.names()
    marked = {name.partition("/done/")[2] for name in bucket.names()}
    left_to_do = unfinished(moe / "plain", noted, marked.__contains__)
    ((code, _, said), (other, silent, _)), after = compressed(moe, "compress", "moe", "gs://bucket/small", *BUDGET)
    assert (code, other, silent) == (0, 0, ""), said
    # Analyses are made again there, and of the layers those that were not done.
    assert sorted(i for one in after for i in one.get("compress", [])) == left_to_do
    assert same_weights(moe / "plain", as_path("gs://bucket/small"))
    assert not [name for name in bucket.names() if name.startswith(".small.partial/")]


@long
@pytest.mark.parametrize("place", [0, 1], ids=["of the first process", "of the other"])
def test_what_is_wrong_in_a_layer_ends_all_with_one_line_that_says_so(moe, place, tmp_path):
    model = memory_moe(*[BankConfig()] * 5)
    model.leaves[f"layers/{place}/mlp/experts/up/kernel"][0, 0, 0] = np.nan
    write_model(tmp_path / "bad", model.config, model.leaves)
    ended, _ = compressed(tmp_path, "compress", "bad", "out", "--method", "quantize", "--bits", "4")
    assert [code for code, *_ in ended] == [2, 2]
    for _, out, said in ended:
        assert out == "" and len(lines(said)) == 1 and lines(said)[0].startswith("moe-jax: error: ")
        assert f"the up kernel of expert 0 in layer {place}" in said
    left = {name for name in os.listdir(tmp_path) if "out" in name}
    # Who hears of another's error ends where it is; the next command begins anew.
    assert left == (set() if place == 0 else {".out.analysis", ".out.partial"})


@long
def test_processes_with_other_options_are_refused(moe):
    arguments = ["compress", "moe", "differs", "--method", "quantize", "--bits"]
    with job(moe, *arguments, "4", second={"arguments": [*arguments, "8"]}) as started:
        for code, out, said in started.ended():
            assert (code, out, len(lines(said))) == (2, "", 1) and "the processes differ: the options is" in said
    assert not (moe / "differs").exists()


@long
@pytest.mark.parametrize(
    "options",
    [
        ["--method", "ders-sparsify", "--drop", "0.5", "--layers", "3"],
        ["--method", "msmoe", "--keep", "0.5", "--calibrate", "text.txt", "--seq-len", "16"],
        ["--method", "resmoe", "--keep", "0.25"],
    ],
    ids=["one layer", "calibrated", "shares of all layers"],
)
def test_whatever_the_method_two_processes_give_what_one_gives(moe, options, tmp_path):
    [(code, expected, said)], _ = compressed(moe, "compress", "moe", str(tmp_path / "one"), *options, processes=1)
    assert code == 0, said
    ((code, out, said), (other, silent, _)), _ = compressed(moe, "compress", "moe", str(tmp_path / "two"), *options)
    assert (code, other, silent) == (0, 0, ""), said
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert len(out.splitlines()) == len(expected.splitlines())


@long
def test_a_sweep_is_shared_too(moe):
    sweep = ["--sweep", "--text", "text.txt", "--seq-len", "16"]
    sweep += ["--method", "quantize,up", "--bits", "4", "--keep", "0.25"]
    run(moe, "compress", "moe", "sweep-one", *sweep, processes=1)
    run(moe, "compress", "moe", "sweep-two", *sweep)
    one, two = (json.loads((moe / f"sweep-{name}" / "sweep.json").read_text())["measured"] for name in ("one", "two"))
    assert [point["expert_bytes"] for point in one["points"]] == [point["expert_bytes"] for point in two["points"]]
    for a, b in zip(one["points"], two["points"], strict=True):
        assert a["nll"] == pytest.approx(b["nll"], abs=1e-5) and a["relative_error"] == b["relative_error"]
    assert not [name for name in os.listdir(moe) if name.startswith(".sweep")]
