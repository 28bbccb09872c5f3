"""Numbers of parameters of a model, from its config alone (methods.md 8)."""

import math

from moe_jax.core.formatting import is_parameter
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.tuned_base import with_nf4
from moe_jax.models import ModelConfig


def parameter_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns leaf path -> number of parameters.

    Positions of sparse deltas and codes of quantised ones are not parameters. An NF4 kernel counts as the kernel that
    it was quantised from, under that kernel's path; its scales are not counted. The scales of a shared base in other
    codes are parameters.
    """
    specs = leaf_specs(with_nf4(config, False))
    counted = {path: spec for path, spec in specs.items() if is_parameter(spec) and "/coded_nf4/" not in path}
    return {path: math.prod(spec.shape) for path, spec in counted.items()}


def active_size(config: ModelConfig, path: str, size: int) -> int:
    """Returns the number of a leaf's parameters that are active for one token.

    All of them, except for leaves with one part per expert or adapter: of these, the parts that the router chooses for
    a token (PERFT-S and D: all; E: k of E; R: K of M). Routers are active as a whole.

    Args:
      config: config of the model.
      path: path of the leaf, as in `parameter_sizes`.
      size: number of its parameters.
    """
    if "/mlp/perft/adapters/" in path:
        moe = config.moe(int(path.split("/")[1]))
        assert moe.perft is not None
        return size // moe.perft.num_experts * moe.perft_top_k
    if "/mlp/experts/" not in path or "/mlp/experts/base/" in path:
        return size
    moe = config.moe(int(path.split("/")[1]))
    return size // moe.bank_experts * min(moe.bank_top_k, moe.bank_experts)
