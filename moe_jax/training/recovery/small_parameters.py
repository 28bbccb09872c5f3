"""The parameters that a recovery tunes: all that is small, and not codes."""

import re

from moe_jax.core.errors import InputError
from moe_jax.core.formatting import is_parameter
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig

SMALL = (
    r"(?!embed/|vision/|further/)("
    r".*norm/(scale|bias)"  # of layers, of the heads of attention, and the last one
    r"|.*/router/(?!.*selection_bias).*"
    r"|.*/(bias|sinks)"
    r"|.*/(scales|scale_steps|row_scales|zeros|table)"  # what codes are multiplied with, or stand for
    r"|.*/mixture"  # of the bases of MoBE
    r")"
)
"""Matches the whole leaf paths of such parameters, as a pattern of `partition.train` in a recipe does."""


def small_parameters(config: ModelConfig) -> frozenset[str]:
    """Returns the leaf paths of routers, norms, biases, and the floating-point leaves beside codes.

    The scales of NF4 kernels are as fixed as their codes. Raises `InputError` if there is none of all these.
    """
    is_small = re.compile(SMALL).fullmatch
    found = frozenset(
        path
        for path, spec in leaf_specs(config).items()
        if is_parameter(spec) and is_small(path) and "nf4/" not in path
    )
    if not found:
        raise InputError(
            "--recover: nothing to tune: the model has no routers, norms, biases, and no scales of codes; leave it out"
        )
    return found
