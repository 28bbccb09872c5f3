"""Generation over a mesh of eight devices."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.commands import cli
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.generation import continued_rows, engine
from moe_jax.models import MoEConfig
from moe_jax.nn import unstacked
from tests.generation.test_generation import DENSE, PROMPTS, make_model
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.generated import generate
from tests.support.tiers import long, one_in

EIGHT = [[3], [1, 2], [9, 8, 7], *PROMPTS, [5, 5], [30, 31, 32, 33]]


@pytest.fixture(scope="module")
def model():
    return make_model(DENSE, MoEConfig(expert=DENSE, num_experts=4, top_k=2), window=4)


def split(model, mesh):
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(state, state_shardings(state, mesh)))


@long
@one_in(2, first=1)
@pytest.mark.parametrize(
    ("axes", "prompts"), [({"tensor": 8}, PROMPTS), ({"data": 2, "expert": 2, "tensor": 2}, EIGHT)]
)
def test_a_mesh_changes_no_token(model, axes, prompts):
    expected = generate(model, prompts, max_new_tokens=10)
    assert generate(split(model, make_mesh(axes)), prompts, max_new_tokens=10) == expected


def test_caches_are_split_by_rows_and_heads_and_never_gathered():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    parts = nnx.split(unstacked(split(make_model(DENSE, window=4), mesh)))
    asked = continued_rows.ask(4, 9, key=jax.random.key(0))
    prompts, lengths = jnp.ones((4, 32), jnp.int32), jnp.full(4, 32, jnp.int32)
    with jax.set_mesh(mesh):
        begun, *_ = engine.read_prompts(*parts, prompts, lengths, asked, cache_length=64, draws=False)
        stay, nine, one = jnp.ones(4, bool), jnp.int32(9), jnp.int32(1)
        text = engine.continue_rows.lower(*parts, begun, stay, nine, one, draws=False).compile().as_text()
    for cache in jax.tree.leaves(begun.caches):
        assert cache.shape == (1, 4, 2, 16, 8)
        assert cache.sharding.shard_shape(cache.shape) == (1, 1, 1, 16, 8)
    assert re.search(r"f32\[(1,)?1,1,16,8\]", text)
    assert not re.search(r"f32\[(1,)*4,\d,16,8\]|f32\[(1,)*\d,2,16,8\]", text)


def test_the_command_takes_a_mesh(tmp_path, capsys):
    config = dense_config(num_layers=1)
    model = write_model(tmp_path / "model", config, random_leaves(config))
    options = ["generate", str(model), "--ids", "1,2,3", "--max-new-tokens", "6", "--json"]
    printed = []
    for mesh in ((), ("--mesh", "data=4,tensor=2")):
        assert cli.main([*options, *mesh]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert cli.main([*options, "--mesh", "tensor=3"]) == 2
    assert "does not fit 8 devices" in capsys.readouterr().err
