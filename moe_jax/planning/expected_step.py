"""The expected cost of a training step on a mesh, without mesh or compiler: memory, transfers, least time."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_jax.core.data_sheets import Chip
from moe_jax.data.sections import input_length
from moe_jax.models import ModelConfig
from moe_jax.planning.expected_memory import expected_kept, expected_temporaries
from moe_jax.planning.expected_transfers import expected_transfers
from moe_jax.planning.hlo import Transfer
from moe_jax.planning.kept_bytes import kept_bytes
from moe_jax.planning.placed_leaves import PlacedLeaf
from moe_jax.planning.step_roofline import StateNumbers, StepRoofline, step_roofline
from moe_jax.training.flops import step_flops
from moe_jax.training.program import Program
from moe_jax.training.recipe.schema import Recipe


class ExpectedStep(NamedTuple):
    """The expected cost of a step, on every device.

    Attributes:
      temporaries: bytes that it holds beside its arguments, see `expected_temporaries`.
      kept: of these, the bytes that a microbatch keeps for its backward pass.
      sent: its collectives, see `expected_transfers`.
      model_flops: operations, without those done again.
      roofline: the least time.
    """

    temporaries: int
    kept: int
    sent: list[Transfer]
    model_flops: float
    roofline: StepRoofline


def expected_step(
    recipe: Recipe,
    config: ModelConfig,
    program: Program,
    leaves: Sequence[PlacedLeaf],
    mesh: Mapping[str, int],
    chip: Chip,
    changed: int,
    per_host: int | None = None,
) -> ExpectedStep:
    """Estimates a step.

    Args:
      recipe, config: of the run.
      program: of the recipe, on one device.
      leaves: its parameters, as they lie on the mesh.
      mesh: size of every axis.
      chip: of the mesh.
      changed: bytes on a device that a step changes, see `StateNumbers`.
      per_host: devices of a host; None: all are in one slice.
    """
    devices = math.prod(mesh.values())
    if recipe.model.remat == "full":
        kept = expected_kept(recipe, config, mesh)
    else:
        kept = math.ceil(kept_bytes(program, recipe) / (devices // mesh["tensor"]))
    temporaries = expected_temporaries(recipe, config, leaves, mesh, chip, kept)
    sent = expected_transfers(recipe, config, leaves, mesh, chip)
    rows, seq_len, input_len = recipe.train.batch_size, recipe.data.seq_len, input_length(recipe.data)
    model_flops = step_flops(config, seq_len, input_len)(rows * seq_len, rows * input_len) / devices
    state = StateNumbers(
        used=sum(leaf.gathered * leaf.layers for leaf in leaves),
        changed=changed,
        trained=sum(leaf.held * leaf.layers for leaf in leaves if leaf.trained),
    )
    roofline = step_roofline(recipe, chip, model_flops, state, temporaries, sent, devices, per_host)
    return ExpectedStep(temporaries, kept, sent, model_flops, roofline)
