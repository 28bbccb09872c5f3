"""Records, metrics.jsonl across a continuation, TensorBoard events, progress lines, model FLOPs."""

import dataclasses
import io
import json
import math
import struct

import numpy as np
import pytest
import rich.console

from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import LayerConfig
from moe_jax.training import metrics
from moe_jax.training.flops import active_matmul_params, train_flops_per_token
from moe_jax.training.metrics import MetricsWriter, StepLine, is_finite, read_metrics, to_record
from moe_jax.training.step import StepMetrics
from tests.support.training_models import ATTENTION, BANKS, FFN, config_of, encoder_decoder, moe


def step_metrics(router=(), **changes) -> StepMetrics:
    scalars = dict(loss=2.5, auxiliary=0.02, grad_norm=1.5, learning_rate=1e-3, scored=100.0)
    fields = {name: np.float32(value) for name, value in (scalars | changes).items()}
    counts = dict(tokens=np.int32(120), input_tokens=np.int32(0), cut=np.zeros(2, np.int32))
    return StepMetrics(**fields, **counts, router=router)


def test_router_statistics_are_reported_by_layer():
    config = config_of(FFN, moe(), FFN, moe())
    stats = RouterStats(
        z=np.array([0.5, 0.7], np.float32),
        load=np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]], np.float32),
        dropped=np.array([0.0, 0.125], np.float32),
        importance=np.full((2, 4), 0.25, np.float32),
        probability=np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]], np.float32),
        gram=np.zeros((2, 4, 4), np.float32),
        tokens=np.full(2, 120, np.float32),
        balanced_load=np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]], np.float32),
        sequence_balance=np.zeros(2, np.float32),
    )
    record = json.loads(json.dumps(to_record(abstract_model(config), 7, step_metrics((stats,)))))
    assert record["step"] == 7 and record["tokens"] == 120 and record["scored_tokens"] == 100
    assert record["expert_load"] == {"1": [0.25] * 4, "3": [0.5, 0.5, 0.0, 0.0]}
    assert record["dropped"] == {"1": 0.0, "3": 0.125}
    assert record["balance_loss"] == 1.5 and record["z_loss"] == pytest.approx(0.6)
    assert record["cv_loss"] == pytest.approx(2 / 3)  # of the second layer's load: E/k (E - k) / (E - 1), halved


@pytest.mark.parametrize("name", ["loss", "auxiliary", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_noticed(name, value):
    model = abstract_model(config_of(FFN))
    assert is_finite(to_record(model, 1, step_metrics()))
    assert not is_finite(to_record(model, 1, step_metrics(**{name: value})))
    assert not is_finite({**to_record(model, 1, step_metrics()), "eval_loss": value})


def test_a_continued_run_has_every_step_once(tmp_path):
    writer = MetricsWriter(tmp_path, last_step=0, tensorboard=False)
    for step in range(1, 8):
        writer.write({"step": step, "loss": float(step)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    writer = MetricsWriter(tmp_path, last_step=5, tensorboard=False)
    for step in (6, 7):
        writer.write({"step": step, "loss": -float(step)})
    writer.close()
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, -6, -7]
    assert not (tmp_path / "tensorboard").exists()


def events_in(folder):
    """The events of the files of a folder, each as TensorBoard's own protocol has it."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_events_are_written_beside_the_metrics(tmp_path):
    writer = MetricsWriter(tmp_path, last_step=2, tensorboard=True)
    writer.write({"step": 300, "loss": 2.0, "expert_load": {"1": [0.25, 0.75]}, "dropped": {"1": 0.5}})
    version, start, scalars = events_in(tmp_path / "tensorboard")  # as TensorBoard sees them while training goes on
    writer.write({"step": 301, "loss": 1.5})
    writer.close()
    assert version.file_version == "brain.Event:2"
    assert start.step == 3 and start.session_log.status == start.session_log.START
    expected = {"loss": 2.0, "expert_load/layer_1/expert_0": 0.25, "expert_load/layer_1/expert_1": 0.75}
    assert scalars.step == 300
    assert {value.tag: value.simple_value for value in scalars.summary.value} == expected | {"dropped/layer_1": 0.5}
    assert [event.step for event in events_in(tmp_path / "tensorboard")][2:] == [300, 301]


def test_the_held_out_loss_before_training_is_that_of_step_0(tmp_path):
    writer = MetricsWriter(tmp_path, last_step=0, tensorboard=True)
    writer.write({"step": 1, "loss": 2.0, "eval_loss_before": 3.0, "eval_loss": 2.5})
    writer.close()
    *_, before, first = events_in(tmp_path / "tensorboard")
    found = [(event.step, {one.tag: one.simple_value for one in event.summary.value}) for event in (before, first)]
    assert found == [(0, {"eval_loss": 3.0}), (1, {"loss": 2.0, "eval_loss": 2.5})]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_run_that_goes_on_at_once_has_a_file_of_events_of_its_own(tmp_path):
    for last_step in (0, 1):
        writer = MetricsWriter(tmp_path, last_step=last_step, tensorboard=True)
        writer.write({"step": last_step + 1, "loss": 2.0})
        writer.close()
    assert [event.step for event in events_in(tmp_path / "tensorboard")] == [0, 1, 1, 0, 2, 2]


def test_without_tensorboardx_metrics_are_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "has_tensorboard", lambda: False)
    writer = MetricsWriter(tmp_path, last_step=0, tensorboard=True)
    writer.write({"step": 1, "loss": 2.0})
    writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_without_a_terminal_there_is_a_plain_line_now_and_then():
    output = io.StringIO()
    with StepLine(rich.console.Console(file=output, width=40), first=0, steps=7, every=3) as progress:
        for step in range(1, 8):
            speed = {"tokens_per_second": 1234.0, "flops_per_second": 5e12}
            progress.show({"step": step, "loss": 2.0, "learning_rate": 1e-3, **speed})
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert "loss 2.0000  lr 1.00e-03  1,234 tokens/s  5 TFLOP/s" in lines[0] and lines[0].endswith("left")


def test_on_a_terminal_there_is_a_live_line():
    output = io.StringIO()
    console = rich.console.Console(file=output, force_terminal=True, width=120)
    with StepLine(console, first=0, steps=2, every=1) as progress:
        for step in (1, 2):
            progress.show({"step": step, "loss": 2.0, "learning_rate": 1e-3})
    assert "step 2/2" in output.getvalue() and "loss 2.0000" in output.getvalue()


def test_model_flops_count_what_a_token_is_multiplied_with():
    attention = 16 * 16 * 4
    ffn = 3 * 16 * 32
    router = 16 * 4
    head = 16 * 264
    assert active_matmul_params(config_of(FFN)) == attention + ffn + head
    assert active_matmul_params(config_of(moe())) == attention + router + 2 * ffn + head
    low_rank = 2 * 2 * (48 + 48 + 48)
    assert active_matmul_params(config_of(moe(BANKS["low-rank"]))) == attention + router + ffn + low_rank + head
    sparse = 2 * 3 * round(16 * 32 * 0.1)
    assert active_matmul_params(config_of(moe(BANKS["sparse"]))) == attention + router + ffn + sparse + head


def test_attention_flops_grow_with_what_a_query_sees():
    config = config_of(FFN)
    base = 6 * active_matmul_params(config)
    # A causal query sees (T + 1) / 2 positions on average; scores and values, forward and twice backward.
    assert train_flops_per_token(config, 9) - base == 3 * 2 * 2 * 16 * 5
    attention = dataclasses.replace(ATTENTION, sliding_window=1)
    windowed = dataclasses.replace(config, layers=(LayerConfig(attention=attention, mlp=FFN),))
    assert train_flops_per_token(windowed, 9) - base == 3 * 2 * 2 * 16 * 1


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("window", [1, 3, 9, 12, None])
def test_attention_flops_are_those_of_the_pairs_that_see_each_other(mask, window):
    """Of few tokens at once, both ways or one, and within a window less than this many positions away."""
    config = encoder_decoder(FFN, FFN) if mask == "bidirectional" else config_of(FFN, FFN)
    attention = dataclasses.replace(config.layers[0].attention, sliding_window=window)
    layers = tuple(dataclasses.replace(layer, attention=attention) for layer in config.layers[:2])
    config = dataclasses.replace(config, layers=layers + config.layers[2:])
    distance = np.subtract.outer(np.arange(9), np.arange(9))  # from the key to the query
    seen = {"causal": (distance >= 0).sum(), "bidirectional": 81}
    rest = 2 * seen["causal"] if config.has_encoder else 0  # the layers of the decoder
    near = np.abs(distance) < (window or 9)
    pairs = 2 * (near & ((distance >= 0) | (mask == "bidirectional"))).sum() + rest
    attended = train_flops_per_token(config, 9) - 6 * active_matmul_params(config)
    assert attended == pytest.approx(3 * 2 * 2 * 16 * pairs / 9, rel=1e-12)
