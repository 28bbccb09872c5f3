"""Records, metrics.jsonl across a continuation, TensorBoard events, progress lines, model FLOPs."""

import dataclasses
import io
import json
import math
import struct

import numpy as np
import pytest
import rich.console

from moe_jax.functional.routing.decision import RouterStats
from moe_jax.models import LayerConfig
from moe_jax.training.flops import active_matmul_params, train_flops_per_token
from moe_jax.training.log.metrics import MetricsWriter, StepLine, is_finite, read_metrics, to_record
from moe_jax.training.log.tensorboard import EventWriter, crc32c
from moe_jax.training.step import StepMetrics
from tests.support.training_models import ATTENTION, BANKS, FFN, config_of, moe


def step_metrics(router=(), **changes) -> StepMetrics:
    scalars = dict(loss=2.5, auxiliary=0.02, grad_norm=1.5, learning_rate=1e-3, scored=100.0)
    fields = {name: np.float32(value) for name, value in (scalars | changes).items()}
    counts = dict(tokens=np.int32(120), input_tokens=np.int32(0), cut=np.zeros(2, np.int32))
    return StepMetrics(**fields, **counts, router=router)


def test_router_statistics_are_reported_by_layer():
    config = config_of(FFN, moe(), FFN, moe())
    stats = RouterStats(
        balance=np.array([1.0, 2.0], np.float32),
        z=np.array([0.5, 0.7], np.float32),
        load=np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]], np.float32),
        dropped=np.array([0.0, 0.125], np.float32),
        cv=np.array([0.2, 0.4], np.float32),
        probability=np.full((2, 4), 0.25, np.float32),
        gram=np.zeros((2, 4, 4), np.float32),
    )
    record = json.loads(json.dumps(to_record(config, 7, step_metrics((stats,)))))
    assert record["step"] == 7 and record["tokens"] == 120 and record["scored_tokens"] == 100
    assert record["expert_load"] == {"1": [0.25] * 4, "3": [0.5, 0.5, 0.0, 0.0]}
    assert record["dropped"] == {"1": 0.0, "3": 0.125}
    assert record["balance_loss"] == 1.5 and record["z_loss"] == pytest.approx(0.6)
    assert record["cv_loss"] == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["loss", "auxiliary", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_noticed(name, value):
    config = config_of(FFN)
    assert is_finite(to_record(config, 1, step_metrics()))
    assert not is_finite(to_record(config, 1, step_metrics(**{name: value})))
    assert not is_finite({**to_record(config, 1, step_metrics()), "eval_loss": value})


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


def test_events_are_records_of_scalars(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283  # the check value of RFC 3720's polynomial
    writer = EventWriter(tmp_path, first_step=3)
    writer.write(300, [("loss", 1.5)])
    writer.close()
    content = next(tmp_path.iterdir()).read_bytes()
    events = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        events.append(content[12 : 12 + length])
        for start, stop in ((0, 8), (12, 12 + length)):
            crc = crc32c(content[start:stop])
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert content[stop : stop + 4] == struct.pack("<I", masked)
        content = content[16 + length :]
    # Every event begins with its time (field 1, 9 bytes). The rest was checked against TensorBoard's own protocol.
    assert [event[9:] for event in events] == [
        b"\x1a\x0dbrain.Event:2",
        b"\x10\x03\x3a\x02\x08\x01",
        b"\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\xc0\x3f",
    ]


def test_events_are_written_beside_the_metrics(tmp_path):
    writer = MetricsWriter(tmp_path, last_step=0, tensorboard=True)
    writer.write({"step": 1, "loss": 2.0, "expert_load": {"1": [0.25, 0.75]}, "dropped": {"1": 0.5}})
    writer.close()
    content = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    for tag in (b"loss", b"expert_load/layer_1/expert_0", b"expert_load/layer_1/expert_1", b"dropped/layer_1"):
        assert tag in content
    assert b"step" not in content


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
