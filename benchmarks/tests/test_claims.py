"""The harness of `benchmarks/claims.py`: what it does next, how it chooses, and what it says."""

import dataclasses
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import moe_jax
from evidence.results import Figures
from evidence.stamp import Stamp
from evidence.studies import training_job, verdicts
from evidence.studies.claims import CLAIMS
from evidence.studies.claims_file import ClaimsFile
from evidence.studies.compression_plan import COMPRESSION
from evidence.studies.compressions import UNCOMPRESSED, Compressions
from evidence.studies.jobs import (
    DIVERGED,
    SECONDS,
    DiffersError,
    Job,
    NotFiniteError,
    Place,
    do_jobs,
    new_folder,
    open_jobs,
    repeat_jobs,
    store,
)
from evidence.studies.models import Leaves, grown, model_of
from evidence.studies.parameter_groups import group_of, groups_of
from evidence.studies.plan import studies
from evidence.studies.rates import as_rates, rate, rates_of, search, text_of
from evidence.studies.report import report
from evidence.studies.scales import RATE_SEED, SEEDS
from evidence.studies.shapes import shape_of
from evidence.studies.summary import Measured
from evidence.studies.texts import Text
from evidence.studies.trainer import Trainer
from evidence.studies.trainings import Trainings
from evidence.studies.variants import label
from moe_jax.distributed.sharding import path_name
from moe_jax.model_io.loading import abstract_model, model_leaves
from moe_jax.nn.moe import Perft
from moe_jax.peft import trainable_paths
from moe_jax.training.program import draw_model
from tests.support.environment import ROOT
from tests.support.tiers import long, one_in

HERE = pathlib.Path(__file__).parent
PLACE = Place(ROOT, ROOT, ROOT)
STAMP = Stamp(commit="1" * 40, date="2026-11-23", machine="x86_64 with 2 threads", versions={"python": "3.11.7"})


@pytest.fixture
def results(tmp_path):
    return Figures("claims", tmp_path, writes=True, stamp=lambda: STAMP)


@given(
    st.lists(st.integers(-9, -1), min_size=1, max_size=3),
    st.lists(st.integers(-9, -1), min_size=3, max_size=3),
)
def test_rates_are_moved_until_none_is_better(best, first):
    groups = ("base", "deltas", "router")[: len(best)]
    start = dict(zip(groups, first, strict=False))

    def loss(rates):
        return sum(abs(math.log10(value) - half / 2) for (_, value), half in zip(rates, best, strict=True))

    tried: dict = {}
    for _ in range(100):
        missing, chosen = search(groups, start, tried)
        if chosen is not None:
            break
        assert missing and not set(missing) & set(tried)
        tried |= {rates: loss(rates) for rates in missing}
    # Every group has a minimum of its own, so that the choice is the best of all. The first group is moved last.
    assert chosen == as_rates(dict(zip(groups, best, strict=True)))
    for move in (-1, 1):
        beside = as_rates(dict(zip(groups, [best[0] + move, *best[1:]], strict=True)))
        assert beside in tried
    assert rates_of(text_of(chosen)) == chosen


def test_half_decades():
    assert [rate(k) for k in (-6, -5, -4, -1, 0)] == [1e-3, 3e-3, 1e-2, 0.3, 1.0]


def test_a_diverged_rate_is_never_chosen():
    tried = {as_rates({"base": k}): math.inf if k > -6 else float(-k) for k in range(-10, 0)}
    assert search(["base"], {"base": -6}, tried) == ([], as_rates({"base": -6}))


@given(st.lists(st.floats(-0.1, 0.1), min_size=3, max_size=6), st.floats(0.001, 0.05))
def test_verdicts_follow_from_the_interval(differences, least):
    found = verdicts.effect(differences)
    assert found.low <= found.mean <= found.high
    if verdicts.better(found, least) == verdicts.AGREES:
        assert found.high < 0 and verdicts.no_worse(found, least) == verdicts.AGREES
    if verdicts.equal(found, least) == verdicts.AGREES:
        assert verdicts.better(found, least) != verdicts.AGREES
        assert verdicts.no_worse(found, least) == verdicts.AGREES
    if verdicts.better(found, least) == verdicts.SMALL:
        assert -least < found.low and verdicts.equal(found, least) == verdicts.AGREES
    mirrored = verdicts.effect([-one for one in differences])
    opposite = verdicts.better(mirrored, least) == verdicts.AGREES
    assert (verdicts.better(found, least) == verdicts.OPPOSITE) == opposite
    assert (verdicts.no_worse(found, least) == verdicts.OPPOSITE) == (opposite and found.high >= least)


def test_one_seed_decides_nothing():
    found = verdicts.effect([-0.5])
    assert {verdict(found, 0.01) for verdict in (verdicts.better, verdicts.equal, verdicts.no_worse)} == {
        verdicts.UNDECIDED
    }
    assert verdicts.effect([]) is None


@given(st.lists(st.lists(st.floats(-0.1, 0.1), min_size=3, max_size=5), min_size=1, max_size=6))
def test_chances_agree_with_intervals_and_many_effects_are_told_less_easily(several):
    found = [verdicts.effect(differences) for differences in several]
    apart = [one.low > 0 or one.high < 0 for one in found]
    for one, is_apart in zip(found, apart, strict=True):
        chance = verdicts.chance_of(one)
        assert math.isclose(chance, 0.05, rel_tol=1e-6) or (chance < 0.05) == is_apart
        assert verdicts.discoveries([one]) == [chance <= 0.05]
    for told, is_apart in zip(verdicts.discoveries(found), apart, strict=True):
        assert is_apart or not told


def test_one_small_chance_among_many_is_no_discovery():
    clear, weak, none = ([-0.5, -0.51, -0.49, -0.5], [-0.5, -0.1, -0.4, -0.2], [-0.5, 0.5, 0.1, -0.1])
    told = [verdicts.effect(one) for one in (clear, weak, *[none] * 8)]
    assert verdicts.discoveries(told[:2]) == [True, True]
    assert verdicts.discoveries(told) == [True] + [False] * 9
    assert verdicts.chance_of(verdicts.effect([-0.5])) == 1.0


def test_every_claim_is_about_what_the_plan_measures():
    measured = set()
    for study in studies(PLACE):
        if isinstance(study, Trainings):
            measured |= {Measured(study.name, shape) for shape in study.shapes}
        if isinstance(study, Compressions):
            measured.add(Measured(COMPRESSION, UNCOMPRESSED))
            measured |= {Measured(COMPRESSION, label(name, v)) for name, vs in study.variants.items() for v in vs}
    for claim in CLAIMS:
        assert {claim.these, claim.those} <= measured, claim


def test_rates_come_before_runs_and_runs_once(results, monkeypatch):
    monkeypatch.setattr("evidence.studies.trainings.trained_groups", lambda *_: ("base",))
    study = Trainings("pilot", training_job.SCALES["stories260K"], {"as it is": "as it is"}, 10, 5, SEEDS)
    place, seen = PLACE, []
    while job := next(open_jobs([study], results, place), None):
        run = job.arguments["run"]
        seen.append(run)
        rates = dict(run.rates)
        store(results, job, {"losses": {"code": abs(rates["base"] - 3e-3)}, SECONDS: 1.0})
    trials = [run for run in seen if run.split == "selection"]
    assert {run.seed for run in trials} == {RATE_SEED} and {run.steps for run in trials} == {5}
    reported = seen[len(trials) :]
    assert [(run.seed, run.split, run.steps) for run in reported] == [(seed, "test", 10) for seed in SEEDS]
    assert all(run.rates == (("base", 3e-3),) for run in reported)


def test_the_plan_can_be_worked_through_to_its_end(results, tmp_path, monkeypatch):
    """With results as if every job had given the same: no study waits for what no other one makes."""
    monkeypatch.setattr("evidence.studies.trainings.trained_groups", lambda *_: ("base", "router"))
    monkeypatch.setattr(results, "_write", lambda: None)  # two thousand files, of which nobody reads any
    place = Place(tmp_path, tmp_path, tmp_path)
    plan, rounds = studies(place), 0
    while waiting := list(open_jobs(plan, results, place)):
        rounds += 1
        for job in {job.path: job for job in waiting}.values():
            if job.makes is not None:
                (new_folder(job.makes) / training_job.MODEL).mkdir(parents=True)
            store(results, job, {"losses": {"code": 1.0}, SECONDS: 1.0})
    assert 4 < rounds < 40
    for study in plan:
        jobs = list(study.jobs(results, place))
        assert jobs and study.is_done(results), study
        # What others begin with is what some study keeps.
        assert {job.path for job in jobs if job.makes is not None} == set(study.keeps), study
    assert {key for study in plan for key in study.needs} <= {key for study in plan for key in study.keeps}
    for study in plan:
        if isinstance(study, Trainings):
            assert all(results.get(*study.path(shape, seed)) for shape in study.shapes for seed in study.seeds), study


def test_a_result_is_finite_and_the_same_when_it_is_made_again(results, tmp_path):
    model = tmp_path / "model"
    job = Job(("pilot", "a"), dict, {}, makes=model)

    def made():
        new_folder(model).mkdir()
        (new_folder(model) / "model").touch()

    class Study(Open):
        def jobs(self, results, place):
            yield job

    def again():
        return list(open_jobs([Study()], results, PLACE, all_models=True))

    with pytest.raises(NotFiniteError, match="pilot / a: loss is nan"):
        store(results, job, {"loss": math.nan})
    assert results.get("pilot", "a") is None
    made()
    store(results, job, {"loss": 1.0, SECONDS: 2.0})
    assert (model / "model").exists() and not again()
    shutil.rmtree(model)
    # The model is gone, so that it is made again: the same figures, in another time, and a new one.
    assert again() == [job] and not list(open_jobs([Study()], results, PLACE))
    made()
    with pytest.raises(DiffersError, match="choose another --out"):
        store(results, job, {"loss": 1.5, SECONDS: 3.0})
    assert not model.exists() and again() == [job]
    store(results, job, {"loss": 1.0, "new": 1, SECONDS: 3.0})
    assert (model / "model").exists() and not again()
    # A model of other results is not taken for that of these.
    other = Figures("claims", tmp_path / "other", writes=True, stamp=lambda: STAMP)
    other.put("pilot", "a", value={"loss": 2.0})
    with pytest.raises(DiffersError, match="choose another --work"):
        list(open_jobs([Study()], other, PLACE))
    # What diverged keeps no model, and is not tried for ever.
    other.put("pilot", "a", value={DIVERGED: True})
    assert not list(open_jobs([Study()], other, PLACE, all_models=True))


def test_a_lost_model_is_made_again_where_something_begins_with_it(results, tmp_path):
    class Step(Open):
        """Begins with the model of the step before, and keeps one."""

        def __init__(self, before, name, done):
            self.name, self.done = name, done
            self.needs, self.keeps = ((("pilot", before),) if before else ()), (("pilot", name),)

        def is_done(self, results):
            return self.done

        def jobs(self, results, place):
            yield Job(("pilot", self.name), dict, {}, makes=tmp_path / self.name)

    for name in "abcd":
        results.put("pilot", name, value={"loss": 1.0})

    def remade(**done):
        steps = [Step(before, name, done.get(name, True)) for before, name in (("", "a"), ("a", "b"), ("b", "c"))]
        return "".join(job.path[1] for job in open_jobs([*steps, Step("", "d", True)], results, PLACE))

    assert remade() == "" and remade(a=False) == ""
    assert remade(b=False) == "a" and remade(c=False) == "ab"


@long
def test_jobs_are_done_again_and_compared(results, tmp_path):
    class Study(Open):
        def jobs(self, results, place):
            yield Job(("pilot", "same"), _work, {})
            yield Job(("pilot", "other"), _threads, {})

    place = Place(tmp_path, tmp_path)
    assert do_jobs([Study()], results, place, workers=1)
    assert repeat_jobs([Study()], results, place, workers=1, count=2) == (2, [("pilot", "other")])
    assert results.get("repeated", "pilot") == {"jobs": 2, "different": ["pilot / other"]}


@long
def test_a_job_of_two_threads_is_alone(results, tmp_path):
    class Study(Open):
        def jobs(self, results, place):
            yield Job(("pilot", "both"), _threads, {}, threads=2)
            yield Job(("pilot", "one"), _threads, {})

    assert do_jobs([Study()], results, Place(tmp_path, tmp_path), workers=2)
    cores = len(os.sched_getaffinity(0))
    both, one = (results.get("pilot", name) for name in ("both", "one"))
    assert both["cores"] == min(2, cores) and one["cores"] == 1 and both["end"] <= one["begin"]


def _threads(place):
    return {"cores": len(os.sched_getaffinity(0)), "begin": time.time(), "end": time.time()}


class Open:
    """A study that is not done, and that nothing depends on."""

    name = scale_name = "pilot"
    needs = keeps = ()

    def is_done(self, results):
        return False


@long
def test_a_job_that_fails_loses_nothing_of_those_beside_it(results, tmp_path):
    class Study(Open):
        def jobs(self, results, place):
            yield Job(("pilot", "fails"), _fail, {})
            yield Job(("pilot", "works"), _work, {})

    with pytest.raises(ValueError, match="no"):
        do_jobs([Study()], results, Place(tmp_path, tmp_path), workers=2)
    assert results.get("pilot", "works")["loss"] == 1.0 and results.get("pilot", "fails") is None


def _fail(place):
    raise ValueError("no")


def _work(place):
    time.sleep(0.5)
    return {"loss": 1.0}


def test_texts_are_those_of_the_results(tmp_path, monkeypatch):
    texts = {"code": lambda data: Text("a", "b", "c")}
    monkeypatch.setattr("evidence.studies.texts.TEXTS", texts)
    results = ClaimsFile(tmp_path)
    for _ in range(2):
        results.check_texts(tmp_path)
    texts["code"] = lambda data: Text("a", "b", "other")
    with pytest.raises(DiffersError, match="code is another"):
        results.check_texts(tmp_path)


def test_a_report_of_runs_that_diverged(results):
    scored = {"losses": {"code": 1.0}, "trained": 1}
    for shape, runs in {"vanilla": [scored, {DIVERGED: True}], "LM r=4": [{DIVERGED: True}]}.items():
        for seed, run in enumerate(runs):
            results.put("upcycling", "middle", "5 steps", shape, str(seed), value=run)
    text = report(results)
    assert "| vanilla | 1 | 1.0000 ± 0.0000 | 1, 1 diverged |" in text and "| LM r=4 |  |  | 1 diverged |" in text


@one_in(4)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ("as it is", ("base",)),
        ("vanilla", ("base", "router", "experts")),
        ("LM r=4", ("base", "router", "deltas")),
        ("LM r=4, frozen base", ("base", "router", "deltas")),
        ("LM r=4, extended", ("base", "router", "deltas")),
        ("SM 0.9", ("base", "router", "deltas")),
        ("PESC 8 LoRA 8", ("adapters", "router")),
        ("QLoRA 16", ("adapters",)),
        ("LoRA 16", ("adapters",)),
        ("granularity 2", ("base", "router", "experts")),
    ],
)
def test_shapes_and_what_is_trained_of_them(shape, groups):
    dense = moe_jax.tiny_model().config
    model = abstract_model(shape_of(shape).config(dense))
    trained = trainable_paths(model)
    assert groups_of(trained) == groups
    if shape.startswith("LM"):
        bases = {path for path, _ in _leaves(nnx.state(model)) if "/experts/base/" in path}
        assert bases and bool(bases & trained) == ("frozen" not in shape)


@long
def test_as_public_code_has_it_no_gradient_of_the_task_reaches_the_router_of_perft():
    before = Perft.__call__
    wrong, right = "PERFT-R 2/8 r=8, weights of the base's router", "PERFT-R 2/8 r=8"
    moved = {}
    for name in (wrong, right):
        base = _drawn(moe_jax.tiny_model(experts=4).config)
        shape = shape_of(name)
        config = _without_balance(shape.config(base.config))
        with shape.patched():
            moved[name] = _moved(name, config, base, {"router": 1e-2, "adapters": 1e-2})
    assert Perft.__call__ is before
    assert moved == {wrong: {"adapters"}, right: {"adapters", "router"}}


@long
def test_every_group_learns_at_its_own_rate():
    base = _drawn(moe_jax.tiny_model().config)
    config = shape_of("LM r=4").config(base.config)
    assert _moved("LM r=4", config, base, {"deltas": 1e-2}) == {"deltas"}
    assert _moved("LM r=4", config, base, {"deltas": 1e-2, "base": 1e-3}) == {"deltas", "base"}


@cache
def _trainer(name, config):
    return Trainer(config, steps=3, warmup_steps=1)


def _moved(name, config, base, rates):
    """The groups with parameters that a few steps change."""
    model = model_of(grown(config, base))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16), dtype=np.int32)
    ones = np.ones((2, 16), np.int32)
    places = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": ones.astype(np.float32)}
    batch |= {"segment_ids": ones, "positions": places}
    trained = _trainer(name, config).run(model, [batch] * 3, seed=0, rates=rates)
    before, after = (dict(_leaves(nnx.state(of))) for of in (model, trained.model))
    return {group_of(path) for path in before if not np.array_equal(before[path], after[path])}


def _without_balance(config):
    """Without losses of routers, so that only the task moves anything."""
    layers = [dataclasses.replace(layer, mlp=_unbalanced(layer.mlp)) for layer in config.layers]
    return dataclasses.replace(config, layers=tuple(layers))


def _unbalanced(moe):
    perft = dataclasses.replace(moe.perft, balance_coef=0.0)
    return dataclasses.replace(moe, balance_coef=0.0, perft=perft)


def _drawn(config):
    return Leaves(config, {path: np.asarray(leaf) for path, leaf in model_leaves(draw_model(config, 0))})


def _leaves(state):
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        yield path_name(path), leaf


def _sleep(place):
    (place.work / str(os.getpid())).touch()
    time.sleep(600)
    return {}


class _Sleeping(Open):
    def jobs(self, results, place):
        yield Job(("pilot", "a"), _sleep, {})


_PROGRAM = """
import pathlib, sys
sys.path[:0] = [{root!r}, {benchmarks!r}, {tests!r}]
from evidence.results import Figures
from evidence.studies.jobs import Place, do_jobs
from test_claims import _Sleeping
if __name__ == "__main__":
    work = pathlib.Path(sys.argv[1])
    do_jobs([_Sleeping()], Figures("claims", work, writes=True), Place(work, work), workers=1)
"""


@long
def test_a_killed_program_leaves_no_worker(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(root=str(ROOT), benchmarks=str(ROOT / "benchmarks"), tests=str(HERE)))
    work = tmp_path / "work"
    work.mkdir()
    parent = subprocess.Popen([sys.executable, str(program), str(work)])
    worker = wait_until(lambda: next((int(file.name) for file in work.iterdir() if file.name.isdigit()), None))
    parent.kill()
    parent.wait()
    wait_until(lambda: not pathlib.Path(f"/proc/{worker}").exists())


def wait_until(found, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError("waited for too long")
