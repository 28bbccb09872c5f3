"""The first step by all-to-all against the same one by all-gather: what a broken exchange gives is noticed."""

import dataclasses
from functools import partial

import jax
import pytest

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import local_rows, place
from moe_jax.experts import exchange, over_mesh
from moe_jax.training.loop import exchange_check
from moe_jax.training.program import first_state, make_program
from moe_jax.training.recipe import MeshSection, ModelSection, PartitionSection
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of
from tests.training.test_step import PLAIN, initial_states, random_batch

MESH = MeshSection(data=1, fsdp=1, expert=2, tensor=1)


def recipe_with(**keys):
    experts = PartitionSection(train=(".*/experts/.*",))  # whose gradients are exchanged
    return recipe_of(mesh=MESH, model=ModelSection(config="c", init="random", **keys), partition=experts)


def first_step(recipe):
    """Compares the first step of a program, as the loop does."""
    config = config_of(dataclasses.replace(moe(), expert=PLAIN))
    program = make_program(recipe, config, jax.devices()[:2])
    check = exchange_check(recipe, program)
    assert check is not None
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        state = first_state(program, params)
        rows = recipe.train.batch_size
        batch = place(random_batch(0, rows), local_rows(program.mesh, rows), program.mesh, rows)
        compare = check(state, frozen, batch)
        _, metrics = program.step(state, frozen, batch)
        compare(metrics)


@long
def test_an_exchange_that_works_passes():
    first_step(recipe_with(exchange="all-to-all", check_exchange=True))


@long
def test_one_whose_gradient_is_wrong_is_named(monkeypatch):
    @partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def corrupted(rows, plan, buffer, count):
        return exchange.send_back(rows, plan, buffer, count)

    corrupted.defvjp(
        lambda *arguments: (corrupted(*arguments), arguments[1]),
        lambda buffer, count, plan, dy: (2 * exchange.send(dy, plan, buffer), None),
    )
    monkeypatch.setattr(over_mesh, "send_back", corrupted)
    with pytest.raises(InputError, match=r"grad_norm is .* by all-to-all, and .* by all-gather"):
        first_step(recipe_with(exchange="all-to-all", check_exchange=True))


def test_there_is_nothing_to_check_by_all_gather_or_on_cpus():
    config = config_of(moe())
    for keys in ({"exchange": "all-gather", "check_exchange": True}, {"exchange": "all-to-all"}):
        recipe = recipe_with(**keys)
        assert exchange_check(recipe, make_program(recipe, config, jax.devices()[:2])) is None
