"""Coefficients of balance losses that a recipe names: in a step, in microbatches of it, and in the trained model."""

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.models import FFNConfig, config_from_json, config_to_json
from moe_jax.nn import Decoder
from moe_jax.nn.moe import sum_of_losses
from moe_jax.training.balance.moe_section import MoESection
from moe_jax.training.metrics import to_record
from moe_jax.training.program import first_state, make_program
from moe_jax.training.recipe import TrainSection
from moe_jax.training.saved_model import trained_config
from tests.functional.test_sequence_balance import balance_by_hand
from tests.support.numerics import initialised
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of
from tests.training.test_step import initial_states, random_batch

SIGMOID = moe(gate="topk_sigmoid", balance_coef=0.25, num_experts=5)
ASKED = MoESection(balance_coef=0.0, sequence_balance_coef=0.5)


def by_hand(decoder: Decoder, batch: dict) -> float:
    """The mean over layers of the balance within packed documents."""
    given = {name: batch[name] for name in ("segment_ids", "positions")}
    routing = decoder(batch["tokens"], **given, routing=True).routing
    return float(np.mean([balance_by_hand(np.asarray(one.logits), batch["segment_ids"]) for one in routing.values()]))


def test_documents_of_packed_rows_count_one_by_one():
    config = ASKED.applied(config_of(SIGMOID))
    decoder, batch = initialised(lambda: Decoder(config, rngs=nnx.Rngs(0))), random_batch(0, 4)
    given = {name: batch[name] for name in ("segment_ids", "positions")}
    out = decoder(batch["tokens"], **given)
    np.testing.assert_allclose(out.router[0].sequence_balance[0], by_hand(decoder, batch), rtol=1e-5)


@long
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_has_the_loss_of_its_whole_batch(accumulation):
    recipe = recipe_of(train=TrainSection(batch_size=4, accumulation=accumulation), moe=ASKED)
    program, batch = make_program(recipe, config_of(SIGMOID, SIGMOID), jax.devices()[:1]), random_batch(0, 4)
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        expected = by_hand(nnx.merge(program.graphdef, params, frozen), batch)
        state, metrics = program.step(first_state(program, params), frozen, batch)
    np.testing.assert_allclose(metrics.auxiliary, 0.5 * 2 * expected, rtol=1e-5)
    record = to_record(program.model, 1, metrics)
    np.testing.assert_allclose(record["sequence_balance_loss"], expected, rtol=1e-5)


def test_the_trained_model_keeps_them_and_files_without_them_are_as_before():
    config = config_of(FFNConfig(dim=8), SIGMOID)
    asked = trained_config(config, recipe_of(moe=ASKED))
    assert (asked.moe(1).balance_coef, asked.moe(1).sequence_balance_coef) == (0.0, 0.5)
    assert trained_config(config, recipe_of()).layers == config.layers
    assert "sequence_balance_coef" not in str(config_to_json(config))
    assert config_from_json(config_to_json(asked)) == asked


def test_each_loss_is_multiplied_by_its_own_coefficient():
    config = MoESection(balance_coef=3.0, sequence_balance_coef=0.5).applied(config_of(moe(z_coef=7.0, cv_coef=11.0)))
    ones, shares = np.ones(1, np.float32), np.full((1, 4), 0.25, np.float32)
    stats = RouterStats(
        z=2 * ones, load=shares, dropped=ones, importance=shares, probability=shares, gram=ones, tokens=ones,
        balanced_load=shares, sequence_balance=13 * ones,
    )  # fmt: skip
    routers = initialised(lambda: Decoder(config, rngs=nnx.Rngs(0))).routers()
    assert float(sum_of_losses("layer", routers, (stats,))) == 3.0 + 7.0 * 2 + 0.5 * 13


@pytest.mark.parametrize("name", ["balance_coef", "sequence_balance_coef"])
def test_what_a_dense_model_has_no_use_for_is_refused(name):
    with pytest.raises(InputError, match=f"moe.{name} is"):
        MoESection(**{name: 0.1}).applied(config_of(FFNConfig(dim=8)))
    with pytest.raises(InputError, match="frozen base"):
        MoESection(**{name: 0.1}).applied(config_of(moe(), frozen_base=True))
    with pytest.raises(InputError, match="at least 0"):
        MoESection(**{name: -0.1})
