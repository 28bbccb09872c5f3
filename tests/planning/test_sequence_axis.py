"""What a step sends over a slice of TPU chips that share every sequence, in the program that the TPU compiler makes."""

import dataclasses
import importlib.util

import jax.numpy as jnp
import pytest

from moe_jax.data.sections import DataSection
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig
from moe_jax.planning.compile_only import compiled_step
from moe_jax.planning.hlo import transfers
from moe_jax.planning.planned_devices import described_devices, prepare_environment
from moe_jax.training.program import make_program
from moe_jax.training.recipe import MeshSection, ModelSection, TrainSection
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of
from tests.support.uncached import uncached

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which holds the TPU compiler, is not installed"
)

WIDTH, LENGTH, HEADS, ROWS = 256, 4096, 8, 4
ACTIVATIONS = LENGTH * WIDTH * jnp.dtype("bfloat16").itemsize  # of one row


@long
def test_attention_exchanges_tokens_for_heads_and_nothing_gathers_a_sequence():
    attention = AttentionConfig(num_heads=HEADS, num_kv_heads=HEADS // 2, head_dim=WIDTH // HEADS)
    layer = LayerConfig(attention=attention, mlp=dataclasses.replace(moe(), expert=FFNConfig(dim=256)))
    config = config_of(FFNConfig(dim=256), d_model=WIDTH, vocab_size=256, bos_id=None, eos_ids=())
    config = dataclasses.replace(config, layers=(layer,) * 2)
    recipe = recipe_of(
        model=ModelSection(config="c", init="random", compute_dtype="bfloat16", remat="full"),
        data=DataSection(seq_len=LENGTH),
        train=TrainSection(batch_size=ROWS),
        mesh=MeshSection(fsdp=2, expert=2, sequence=4),
    )
    prepare_environment()
    with uncached():
        program = make_program(recipe, config, described_devices("v5e:4x4"))
        sent = transfers(compiled_step(program, recipe).as_text())
    exchanged = sum(one.bytes * one.count for one in sent if one.kind == "all-to-all")
    # In two layers forward, once more where they are computed again, and backward: queries and the result; and keys and
    # values, which have half as many heads. Of a row every one of 4 chips has a quarter.
    assert exchanged == 2 * 3 * (2 + 2 / 2) * ACTIVATIONS // 4
    assert max(one.bytes for one in sent if one.kind in ("all-gather", "all-reduce", "reduce-scatter")) < ACTIVATIONS
