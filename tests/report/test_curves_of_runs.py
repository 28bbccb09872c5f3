"""Curves of a run: only of losses that count, and maps of some layers say of how many."""

import dataclasses

import pytest
from markupsafe import Markup

from moe_jax.models import BankConfig
from moe_jax.report import elements
from moe_jax.report.build import numbers, training_curves, training_facts, use_of_experts
from moe_jax.report.subjects import Run
from tests.support.dense_models import dense_config
from tests.support.moe_models import moe_config

LOAD = {str(layer): [0.5, 0.5] for layer in range(8)}
RECORDS = [
    {"step": step, "loss": 2.0, "balance_loss": 1.25, "z_loss": 3.5, "expert_load": LOAD, "eval_loss": 2.5}
    for step in (1, 2, 3)
]
RUN = Run(recipe="", records=RECORDS, checkpoints=())


@pytest.fixture(autouse=True)
def captions(monkeypatch):
    """Instead of pictures, which take seconds, there is what stands below them."""
    monkeypatch.setattr(elements, "picture", lambda draw, alt, caption, **_: Markup(caption))


def test_losses_with_the_coefficient_0_are_not_drawn_as_if_they_counted():
    config = moe_config(dense_config(num_layers=1), BankConfig())
    one = config.moe(0)

    def page(**coefficients: float) -> str:
        layer = dataclasses.replace(config.layers[0], mlp=dataclasses.replace(one, **coefficients))
        return "".join(training_curves(RUN, dataclasses.replace(config, layers=(layer,))))

    assert "Losses of the routers: z" in page(balance_coef=0.01, z_coef=0.1)
    without = page(balance_coef=0.01, z_coef=0.0)
    assert "3.5" not in without and "Losses of the routers" in without
    assert "Losses of the routers" not in page(balance_coef=0.0, z_coef=0.0)


def test_some_layers_of_many_are_named_as_some():
    assert "(6 of 8 layers)" in "".join(use_of_experts(RUN, "a run"))
    few = [record | {"expert_load": {"0": [0.5, 0.5]}} for record in RECORDS]
    assert "of 8 layers" not in "".join(use_of_experts(dataclasses.replace(RUN, records=few), "a run"))


def test_a_held_out_curve_begins_before_training():
    first = RECORDS[0] | {"eval_loss_before": 4.125}
    curve = numbers([first, *RECORDS[1:]], "eval_loss")
    assert (curve.steps, curve.values) == ([0, 1, 2, 3], [4.125, 2.5, 2.5, 2.5])
    run = dataclasses.replace(RUN, records=[first, *RECORDS[1:]])
    assert "before training" in training_facts(run) and "4.125" in "".join(training_curves(run))
    assert "before training" not in training_facts(RUN) and numbers(RECORDS, "eval_loss").steps == [1, 2, 3]
    assert numbers([RECORDS[0] | {"eval_loss_before": "4"}], "eval_loss").steps == [1]
