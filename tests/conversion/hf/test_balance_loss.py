"""The balance loss that a published coefficient belongs to: against Transformers' own function."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moe_jax.conversion import read_hf_config
from moe_jax.conversion.hf_config import with_balance_over, write_hf_config
from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.models import config_from_json, config_to_json
from moe_jax.models.segments import segments_of
from moe_jax.nn import auxiliary_loss
from tests.support.hf_checkpoints import CONFIGS
from tests.support.tiers import one_in


def routed(config, logits: dict[int, np.ndarray], valid: np.ndarray) -> tuple[RouterStats, ...]:
    """The statistics of the routers of a model, as it returns them, for the logits of its layers."""
    of_layer = {
        layer: route(jnp.asarray(one), config.moe(layer).top_k, config.moe(layer).gate, valid=jnp.asarray(valid))[1]
        for layer, one in logits.items()
    }
    found = []
    for segment in segments_of(config.layers):
        for position in range(len(segment.pattern)):
            members = [of_layer.get(segment.layer(repeat, position)) for repeat in range(segment.repeats)]
            if None not in members:
                found.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *members))
    return tuple(found)


@one_in(3)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe-dense-layers", "qwen3_moe", "olmoe"])
def test_the_coefficient_means_what_it_does_in_transformers(name):
    config = read_hf_config(CONFIGS[name] | {"router_aux_loss_coef": 0.5, "num_hidden_layers": 4})
    rng, family = np.random.default_rng(0), config.family
    moe = config.moe(config.moe_layers[0])
    valid = rng.random(24) < 0.7
    logits = {i: rng.normal(i, 2.0, (24, moe.num_experts)).astype(np.float32) for i in config.moe_layers}
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    given = tuple(map(torch.tensor, logits.values())), moe.num_experts, moe.top_k, torch.tensor(valid)[None]
    theirs = 0.5 * float(module.load_balancing_loss_func(*given))
    found = float(auxiliary_loss(config, routed(config, logits, valid)))
    assert found == pytest.approx(theirs, rel=1e-5) and found > 0.4 * moe.top_k


@pytest.mark.parametrize("layers", [1, 3])
def test_an_exported_coefficient_gives_transformers_our_loss_of_layers_that_are_alike(layers):
    data = CONFIGS["qwen3_moe"] | {"num_hidden_layers": layers, "router_aux_loss_coef": 0.5}
    ours = dataclasses.replace(read_hf_config(data), balance_over="layer")
    rng, moe = np.random.default_rng(1), ours.moe(0)
    logits = dict.fromkeys(ours.moe_layers, rng.normal(0, 2.0, (24, moe.num_experts)).astype(np.float32))
    module = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    given = tuple(map(torch.tensor, logits.values())), moe.num_experts, moe.top_k
    coefficient = write_hf_config(ours)["router_aux_loss_coef"]
    assert coefficient == pytest.approx(0.5 * len(logits) / moe.top_k)
    of_layers = float(auxiliary_loss(ours, routed(ours, logits, np.ones(24, bool))))
    assert of_layers == pytest.approx(coefficient * float(module.load_balancing_loss_func(*given)), rel=1e-5)
    # And back: the loss of the model, for a family whose layers have one each.
    back = with_balance_over(with_balance_over(ours, "model"), "layer")
    assert back == ours and read_hf_config(write_hf_config(ours)).balance_over == "model"


def test_a_coefficient_that_was_read_is_written_as_it_was():
    data = CONFIGS["mixtral"] | {"router_aux_loss_coef": 0.02}
    assert write_hf_config(read_hf_config(data))["router_aux_loss_coef"] == 0.02


def test_a_model_that_was_upcycled_has_a_loss_in_every_layer_and_files_are_as_before():
    ours = read_hf_config(CONFIGS["deepseek_v3"])
    assert ours.balance_over == "layer" and "balance_over" not in config_to_json(ours)
    theirs = read_hf_config(CONFIGS["mixtral"])
    written = json.loads(json.dumps(config_to_json(theirs)))
    assert written["balance_over"] == "model" and config_from_json(written) == theirs
