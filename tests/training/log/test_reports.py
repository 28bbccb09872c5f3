"""What a run says besides metrics.jsonl: Weights & Biases, a profiler trace, and the share of a device's peak."""

import json
import sys
import types
from pathlib import Path

import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.training import metrics, training_run
from moe_jax.training.flops import peak_flops
from moe_jax.training.metrics import MetricsWriter, StepTrace, WandbWriter
from moe_jax.training.recipe import LogSection
from tests.support.tiers import long


class FakeRun:
    """A run of Weights & Biases that keeps what it is told."""

    def __init__(self, **options):
        self.options, self.logged, self.axes, self.finished = options, [], {}, False

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake(monkeypatch):
    """A module in the place of wandb, with the runs that were begun."""
    module = types.ModuleType("wandb")
    module.runs = []
    module.init = lambda **options: module.runs.append(FakeRun(**options)) or module.runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_metrics_go_to_weights_and_biases_and_a_continued_run_goes_on_there(fake, tmp_path):
    def begin() -> MetricsWriter:
        make = lambda: WandbWriter(tmp_path, mode="offline", project="p", config={"train.steps": 3})  # noqa: E731
        return MetricsWriter(tmp_path, last_step=0, tensorboard=False, wandb=make)

    writer = begin()
    writer.write({"step": 1, "loss": 2.5, "expert_load": {"1": [0.25, 0.75]}})
    writer.close()
    (run,) = fake.runs
    assert run.finished and run.axes == {"step": None, "*": "step"}
    # TensorBoard's tags, and our steps.
    assert run.logged == [
        {"step": 1, "loss": 2.5, "expert_load/layer_1/expert_0": 0.25, "expert_load/layer_1/expert_1": 0.75}
    ]
    assert run.options["mode"] == "offline" and run.options["project"] == "p" and run.options["resume"] == "allow"
    assert run.options["dir"] == str(tmp_path) and run.options["name"] == tmp_path.name
    assert run.options["config"] == {"train.steps": 3}
    begin().close()
    assert fake.runs[1].options["id"] == run.options["id"] == (tmp_path / "wandb_id").read_text()


def test_without_the_library_a_run_that_asks_for_it_does_not_begin(folder, failing, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = failing("--set", "run_dir=new", "log.wandb=offline")
    assert "log.wandb needs Weights & Biases: pip install 'moe-jax[wandb]'" in line and not Path("new").exists()


@long
def test_a_run_logs_traces_and_knows_its_share_of_the_peak(folder, fake, capsys, monkeypatch):
    for module in (metrics, training_run):
        monkeypatch.setattr(module, "has_tensorboard", lambda: False)
    keys = [
        "log.tensorboard=true",
        "log.wandb=offline",
        "log.profile_steps=[2, 3]",
        "log.peak_flops=1e9",
        "log.every=1",
    ]
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=watched", *keys]) == 0
    out = capsys.readouterr().out
    assert "pip install 'moe-jax[tensorboard]'" in out and not Path("watched/tensorboard").exists()
    assert "wrote a trace to watched/profile" in out and "% MFU" in out
    assert len(list(Path("watched/profile").rglob("*.xplane.pb"))) == 1
    records = [json.loads(line) for line in Path("watched/metrics.jsonl").read_text().splitlines()]
    assert all(record["mfu"] == pytest.approx(record["flops_per_second"] / 8e9) for record in records)  # 8 devices
    (run,) = fake.runs
    assert [values["step"] for values in run.logged] == [1, 2, 3, 4] and run.finished
    assert [values["loss"] for values in run.logged] == [record["loss"] for record in records]
    assert run.options["config"]["log.profile_steps"] == [2, 3]
    # Nothing of this changes what is computed, and a CPU has no peak unless somebody says so.
    plain = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in plain] == [record["loss"] for record in records]
    assert "mfu" not in plain[0]


@long
def test_a_trace_ends_with_the_run(tmp_path):
    with StepTrace(tmp_path / "profile", (1, 9)) as trace:
        with trace.step(1):
            pass
        assert not trace.after(1, None)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    with StepTrace(tmp_path / "none", ()) as trace, trace.step(1):
        assert not trace.after(1, None)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("device", "dtype", "given", "expected"),
    [
        (("TPU v5 lite", "tpu"), "bfloat16", None, 197e12),
        (("TPU v5 lite", "tpu"), "float32", None, 197e12 / 6),
        (("NVIDIA H100 80GB HBM3", "gpu"), "bfloat16", None, 989.4e12),
        (("a new chip", "gpu"), "bfloat16", None, None),
        (("a new chip", "gpu"), "bfloat16", 3e12, 3e12),
        (("cpu", "cpu"), "float32", None, None),
        (("cpu", "cpu"), "float32", 2e11, 2e11),
    ],
)
def test_peaks_are_those_of_data_sheets_or_of_the_recipe(device, dtype, given, expected):
    assert peak_flops(*device, dtype, given) == expected


@pytest.mark.parametrize("steps", [(3,), (0, 2), (5, 4), (1, 2, 3)])
def test_steps_to_trace_are_a_first_and_a_last_one(steps):
    with pytest.raises(InputError, match=r"profile_steps = .* must be \[first, last\], steps from 1 on"):
        LogSection(profile_steps=steps)
