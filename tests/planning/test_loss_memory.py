"""No array of a compiled training step is as large as the logits of all tokens, for a large vocabulary."""

import dataclasses
import importlib.util
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.data.sections import DataSection
from moe_jax.distributed.sharding import make_mesh
from moe_jax.functional.cross_entropy import weighted_cross_entropy
from moe_jax.functional.head_chunks import HeadOptions, LossAxes
from moe_jax.models import AttentionConfig, FFNConfig
from moe_jax.planning.planned_devices import prepare_environment
from moe_jax.training.program import abstract_batch, make_program
from moe_jax.training.recipe import ModelSection, TrainSection
from tests.support.tiers import long
from tests.support.training_models import config_of, recipe_of

VOCABULARY, ROWS, LENGTH, WIDTH = 151_936, 64, 512, 512
ONE_GB = 10**9

_ARRAY = re.compile(r"\b(pred|[a-z]+)(\d*)\[([\d,]+)\]")


def bytes_of_logits(text, vocabulary):
    """Of the largest array of a compiled program that has the vocabulary and something else than the width as axes."""
    found = [0]
    for _, bits, axes in _ARRAY.findall(text):
        shape = [int(size) for size in axes.split(",")]
        if vocabulary in shape and any(size not in (vocabulary, WIDTH, 1) for size in shape):
            found.append(math.prod(shape) * int(bits or 8) // 8)
    return max(found)


def test_a_step_holds_no_logits_but_those_of_a_chunk():
    attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=128)
    config = config_of(
        FFNConfig(dim=512), vocab_size=VOCABULARY, d_model=WIDTH, max_positions=LENGTH, tie_embeddings=True
    )
    config = dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], attention=attention),))
    model = ModelSection(config="c", init="random", compute_dtype="bfloat16", remat="full")
    recipe = recipe_of(model=model, train=TrainSection(batch_size=ROWS), data=DataSection(seq_len=LENGTH))
    program = make_program(recipe, config, jax.devices()[:1])
    with jax.set_mesh(program.mesh):
        batch = abstract_batch(recipe, config, program.mesh)
        compiled = program.step.lower(program.state, program.frozen, batch).compile()
    # All at once would take 20 GB. That a chunk is found shows that they would be, too.
    assert 4 * 1024 * VOCABULARY == bytes_of_logits(compiled.as_text(), VOCABULARY) < ONE_GB
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * ONE_GB


@long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_nor_do_the_loss_and_its_gradient_on_tpu_chips():
    from jax.experimental import topologies

    prepare_environment()
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, list(chips))
    batch = ("data", "fsdp", "expert")

    def given(dtype, shape, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    x = given(jnp.bfloat16, (ROWS, LENGTH, WIDTH), batch)
    kernel = given(jnp.float32, (WIDTH, VOCABULARY), "fsdp", "tensor")
    targets, weights = (given(dtype, (ROWS, LENGTH), batch) for dtype in (jnp.int32, jnp.float32))
    loss = partial(weighted_cross_entropy, HeadOptions(axes=LossAxes(batch, None, ("fsdp",), "tensor")))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        compiled = gradient.lower(x, kernel, None, targets, weights).compile()
    assert 4 * 2048 * VOCABULARY // 2 == bytes_of_logits(compiled.as_text(), VOCABULARY // 2) < ONE_GB
    # A chunk of logits, the kernel as a whole in bfloat16 and its gradient in float32, over `tensor` split in two.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * ONE_GB
