"""The time of a deep model's step from that of shallow ones: which models are run, and how their times are added up."""

import dataclasses

import jax
import pytest

from moe_jax.models import BankConfig, FFNConfig
from moe_jax.planning import timed_step as module
from moe_jax.planning.timed_step import timed_step
from moe_jax.training.recipe import MeshSection, OptimizerSection, PartitionSection
from tests.support.training_models import FFN, config_of, encoder_decoder, moe, recipe_of

ONE = MeshSection(data=1, fsdp=1)
WIDE = dataclasses.replace(FFN, dim=64)


def devices():
    return jax.devices()[:1]


def test_repeats_that_are_lacking_are_added(monkeypatch):
    """As if an FFN took 1 second, an MoE 10, and the rest 100."""

    def rounds(programs, recipe):
        layers = [program.config.layers for program in programs]
        return [[100 + sum(1 if isinstance(one.mlp, FFNConfig) else 10 for one in some) for some in layers]]

    monkeypatch.setattr(module, "_rounds", rounds)
    deep = config_of(*[WIDE] * 3, *[FFN, moe()] * 12)
    timed = timed_step(recipe_of(mesh=ONE), deep, devices())
    assert timed is not None and timed.seconds == pytest.approx(100 + 3 + 12 * 11)
    # The last of three layers; and of twelve pairs, two and then eight.
    assert timed.layers == (6, 7, 18)
    assert "6, 7 and 18 of the 27 layers" in timed.source(27)
    shallow = timed_step(recipe_of(mesh=ONE), config_of(FFN, moe()), devices())
    assert shallow is not None and shallow.seconds == 111 and shallow.layers == (2,)
    stacks = encoder_decoder(FFN, moe())
    both = dataclasses.replace(stacks, layers=stacks.layers[:1] * 5 + stacks.layers[2:3] * 4, num_encoder_layers=5)
    found = timed_step(recipe_of(mesh=ONE), both, devices())
    assert found is not None and found.seconds == pytest.approx(100 + 5 + 40)


def test_steps_are_run():
    bank = BankConfig(kind="quantized", bits=4, train_base=False)
    config = config_of(*[moe(bank, expert=dataclasses.replace(FFN, gated=False))] * 2)
    timed = timed_step(recipe_of(mesh=ONE, optimizer=OptimizerSection(kind="adafactor")), config, devices())
    assert timed is not None and 0 < timed.seconds < 60 and timed.layers == (2,)


def test_nothing_is_run_where_there_may_be_no_room(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    assert timed_step(recipe_of(mesh=ONE), config_of(FFN), devices()) is None


def test_a_recipe_that_names_layers_is_not_shortened():
    recipe = recipe_of(mesh=ONE, partition=PartitionSection(train=("layers/11/mlp/.*",)))
    assert timed_step(recipe, config_of(*[FFN] * 12), devices()) is None


def test_drawn_arrays_are_small_numbers_and_scales_of_one():
    def abstract(dtype):
        return jax.ShapeDtypeStruct((64,), dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    abstract_tree = {"kernel": abstract("float32"), "codes": abstract("uint8"), "norm": {"scale": abstract("bfloat16")}}
    drawn = jax.device_get(module._drawn(abstract_tree))
    assert 0.02 < abs(drawn["kernel"]).max() <= 0.03 and len(set(drawn["kernel"].tolist())) == 64
    assert not drawn["codes"].any() and drawn["codes"].dtype == "uint8" and (drawn["norm"]["scale"] == 1).all()
