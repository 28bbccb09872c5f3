"""Towers alone: gradients, and what they refuse. Against Transformers they are compared in `tests/vision`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.conversion import read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.models import ModelConfig
from moe_jax.nn.vision import VisionTower
from tests.support.tiers import long

KEYS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "patch_size": 4, "image_size": 20}


def tower_config(model_type: str) -> ModelConfig:
    return read_hf_config({"model_type": model_type, "intermediate_size": 64, **KEYS}, ignored=["intermediate_size"])


@long
def test_gradients_reach_every_parameter_but_the_norm_of_what_is_pooled():
    tower = VisionTower(tower_config("dinov2"), rngs=nnx.Rngs(0))
    pixels = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 20, 3)), jnp.float32)
    gradients = nnx.grad(lambda tower: jnp.sum(jnp.sin(tower(pixels).x)))(tower)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert jnp.abs(leaf).max() > 0 or "attention/k/bias" in path_name(path), path_name(path)


@pytest.mark.parametrize(
    ("shape", "named"), [((1, 3, 30, 3), "smaller than a patch"), ((1, 8, 8, 4), "pixels"), ((8, 8, 3), "pixels")]
)
def test_pictures_of_another_shape_are_refused(shape, named):
    tower = VisionTower(tower_config("clip_vision_model"), rngs=nnx.Rngs(0))
    with pytest.raises(InputError) as error:
        tower(jnp.zeros(shape))
    assert named in str(error.value)


def test_a_tower_sees_all_and_rotates_nothing():
    config = tower_config("clip_vision_model")
    causal = dataclasses.replace(config.layers[0].attention, mask="causal")
    with pytest.raises(InputError, match="bidirectional"):
        dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], attention=causal),))
    with pytest.raises(InputError, match="positions"):
        dataclasses.replace(config, patches=dataclasses.replace(config.patches, grid=(3, 3)))
