"""What `plan --train` prints of numbers that are given."""

import dataclasses

from moe_jax.commands.planned_tables import print_training
from moe_jax.planning.planned_training import TEACHER_ITEM, MemoryItem, PlannedTraining, Sent
from moe_jax.planning.step_time import StepRoofline, StepTime

MB = 10**6
ITEMS = (
    MemoryItem(name="parameters", bytes=60 * MB, note="of all"),
    MemoryItem(name="activations", bytes=30 * MB),
)
TIME = StepTime(seconds=0.5, products=0.4, bytes=0.1, operations=1e9, tokens_per_second=2048)
ALONE = PlannedTraining(
    platform="cpu", devices=1, mesh={"data": 1, "expert": 1}, items=ITEMS, total=90 * MB, memory=200 * MB,
    is_compiled=True, fits=True, tight=False, time=TIME, is_least=False, rates="measured here", steps=100,
    run_seconds=50.0, run_tokens=102_400,
)  # fmt: skip


def printed(capsys, *, of_recipe: bool = True, **changes) -> list[str]:
    print_training(dataclasses.replace(ALONE, **changes), of_recipe=of_recipe)
    return [" ".join(line.split()) for line in capsys.readouterr().out.strip().splitlines()]


def test_one_device_with_a_time(capsys):
    assert printed(capsys) == [
        "training on cpu:",
        "parameters 60.0 MB of all",
        "activations 30.0 MB",
        "in all 90.0 MB 45% of 200.0 MB",
        "time: about 500 ms a step (400 ms of products, 100 ms of memory), about 2,048 tokens/s; "
        "100 steps: about 50 s, 102,400 tokens",
        "measured here",
    ]


def test_what_does_not_fit_or_hardly_does(capsys):
    assert printed(capsys, memory=91 * MB, tight=True)[4].startswith("warning: more than 90%")
    assert printed(capsys, memory=80 * MB, fits=False, tight=True)[3:5] == [
        "in all 90.0 MB 112% of 80.0 MB",
        "does not fit: see model.remat, train.accumulation, model.param_dtype, mesh, optimizer",
    ]
    *_, advice, _, _ = printed(capsys, memory=80 * MB, fits=False, of_recipe=False)
    assert advice.startswith("does not fit: see --mesh") and "model.remat" not in advice
    assert printed(capsys, memory=None, fits=None)[3] == "in all 90.0 MB"


def test_a_time_by_a_data_sheet_and_an_unknown_one(capsys):
    least = dataclasses.replace(TIME, products=None, seconds=2.0)
    *_, time, rates = printed(capsys, is_least=True, time=least, run_seconds=7200.0, rates="by its data sheet")
    assert time.startswith("time: at least 2 s a step, at most 2,048 tokens/s; 100 steps: ")
    assert time.endswith(" 100 steps: at least 2:00:00, 102,400 tokens, 2 device hours")
    assert rates == "by its data sheet"
    speeds = {"products": 989.4e12, "memory": 3.35232e12, "links": 450e9}
    *_, rates = printed(capsys, is_least=True, rates="a sheet", speeds=speeds)
    assert rates == "989.4 TFLOP/s, memory 3,352 GB/s, links 450 GB/s: a sheet"
    assert printed(capsys, time=None, run_seconds=None)[-1].startswith("time: not known")


def test_many_devices_with_what_they_send(capsys):
    many = dict(
        devices=8, mesh={"data": 1, "expert": 4, "fsdp": 2}, model_flops=1.25e15, rates="data sheet of v5e",
        sent={"all-gather": Sent(runs=3, bytes=8 * MB, sent=2 * MB), "all-to-all": Sent(runs=4, bytes=4 * MB, sent=MB)},
        is_least=True,
    )  # fmt: skip
    roofline = StepRoofline(matrix=0.2, memory=0.3, links=0.4, seconds=0.4, bound="links", utilisation=0.375)
    first, *_, sent, estimate, whole, rates = printed(capsys, **many, roofline=roofline)
    assert first == "training on cpu, 8 devices (expert 4 x fsdp 2), of which each holds:"
    assert whole == "100 steps: at least 50 s, 102,400 tokens, 0.111 device hours"
    assert sent == "sent by each in a step, as in a ring: all-gather 3 x, 2.0 MB, all-to-all 4 x, 1.0 MB"
    assert estimate == (
        "estimate, at the peaks of data sheets: at least 400 ms a step, at most 38% utilisation of 1.25e+15 FLOP, "
        "bound by links (matrix units 200 ms, memory 300 ms, links 400 ms)"
    )
    assert rates == "data sheet of v5e"
    with_teacher = (*ITEMS, MemoryItem(name=TEACHER_ITEM, bytes=MB))
    unknown = roofline._replace(links=None)
    *_, sent, teacher, estimate, _, _ = printed(capsys, **many | {"sent": {}}, roofline=unknown, items=with_teacher)
    assert sent == "sent by each in a step, as in a ring: nothing" and "teacher" in teacher
    assert estimate.endswith("memory 300 ms, links not known)")
