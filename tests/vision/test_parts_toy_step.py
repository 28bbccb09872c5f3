"""A projector step that the library does not know, through everything a model goes through.

It is defined and registered here alone. It has parameters of its own names, and gives half as many features.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.distributed import own_rules
from moe_jax.distributed.sharding import leaf_spec
from moe_jax.model_io.loading import load_model, model_leaves
from moe_jax.models import config_from_json, config_to_json
from moe_jax.nn.projector import STEPS, make_projector, tokens_per_picture
from tests.support.dense_models import dense_config, random_leaves
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.seeing_models import picture_batch, seeing
from tests.support.tiers import long

FLOAT = jnp.dtype("float32")
NAME = "tests.vision.test_parts_toy_step:Halved"


class Halved(nnx.Module):
    """Every other feature, times a factor for each of its entries."""

    def __init__(self, given, *, rngs, dtype):
        self.power = int(given.argument or 1)
        self.factors = nnx.Param(jnp.ones(given.width, dtype))

    def __call__(self, x):
        return x[:, ::2] * self.factors[...].astype(x.dtype) ** self.power


@pytest.fixture(scope="module", autouse=True)
def registered():
    moe_jax.nn.register_projector_step(NAME, Halved, shardings={"factors": P("tensor")})
    yield
    STEPS.pop(NAME)
    own_rules._rules.pop(NAME)


@pytest.fixture(scope="module")
def model():
    config = seeing(dense_config(num_layers=1), projector=("linear", f"{NAME}:2", "gelu", "linear"))
    return moe_jax.Model(load_model(MemorySource(config, random_leaves(config))))


def batches(config, count=2):
    return [picture_batch(config, 16, (1, 8), (), (5,), (0,), *[(2,)] * 4, seed=seed) for seed in range(count)]


def pictured(model):
    batch = batches(model.config, 1)[0]
    return np.asarray(logits_of(model.decoder, batch["tokens"], pixels=batch["pixels"], slots=batch["slots"]))


@long
def test_it_is_a_part_of_the_config_and_has_its_place_on_a_mesh(model):
    config = model.config
    assert config_from_json(config_to_json(config)) == config
    assert tokens_per_picture(config.vision, config.d_model) == 5
    assert leaf_spec("vision/projector/1/factors") == P("tensor")
    with pytest.raises(InputError, match="'my_lab:Halved'.* import my_lab"):
        moe_jax.Decoder(seeing(dense_config(), projector=("linear", "my_lab:Halved")), rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="unknown projector step 'pol'.*'pool'"):
        moe_jax.Decoder(seeing(dense_config(), projector=("linear", "pol:2")), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("eps", ["x", "0", "-1", "nan", "inf", "2"])
def test_an_epsilon_that_is_none_is_refused(eps):
    with pytest.raises(InputError, match=f"'norm:{eps}'"):
        tokens_per_picture(seeing(dense_config(), projector=(f"norm:{eps}", "linear")).vision, 16)


def test_a_norm_has_the_epsilon_that_it_names():
    for step, eps in (("norm", 1e-5), ("norm:1e-06", 1e-6), ("norm:0.5", 0.5)):
        config = seeing(dense_config(), projector=(step, "linear")).vision
        assert config.tower.norm_eps == 1e-5
        made = nnx.eval_shape(lambda config=config: nnx.List(make_projector(config, 16, rngs=nnx.Rngs(0), dtype=FLOAT)))
        assert made[0].eps == eps


def trained(model, **more):
    losses = []
    recipe = {"train": {"steps": 2}, "optimizer": {"learning_rate": 1e-2}, **more}
    return moe_jax.train(recipe, model, batches(model.config), on_step=lambda step: losses.append(step["loss"])), losses


def test_it_is_trained_saved_and_loaded(model, tmp_path, capsys):
    after, _ = trained(model)
    factors = (dict(model_leaves(one.decoder))["vision/projector/1/factors"] for one in (model, after))
    assert (np.asarray(next(factors)) != np.asarray(next(factors))).all()
    moe_jax.save(after, tmp_path / "trained")
    np.testing.assert_array_equal(pictured(moe_jax.load(tmp_path / "trained")), pictured(after))
    assert cli.main(["inspect", str(tmp_path / "trained")]) == 0
    assert NAME in capsys.readouterr().out.replace("\n", "")
    # No format of Transformers has a place for it.
    assert cli.main(["export", str(tmp_path / "trained"), str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "projector" in error and not (tmp_path / "hf").exists()


@long
def test_it_is_trained_alike_over_a_mesh(model):
    one, other = (trained(model, **more)[1] for more in ({}, {"mesh": {"fsdp": 2, "expert": 2, "tensor": 2}}))
    np.testing.assert_allclose(one, other, atol=1e-4)


@long
def test_it_sees_at_step_0_and_is_left_alone_by_upcycling(model):
    moe = moe_jax.upcycle(model, experts=2, every=1)
    assert moe.config.vision == model.config.vision
    np.testing.assert_allclose(pictured(moe), pictured(model), atol=1e-4)
