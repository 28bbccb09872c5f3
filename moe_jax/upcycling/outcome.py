"""Results of upcycling: sizes before and after, comparisons, and the figures of both for the lineage."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from moe_jax.checks.step0 import Step0, TextComparison, probe_tokens
from moe_jax.core.formatting import count_bytes, count_parameters
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.models import ModelConfig
from moe_jax.peft.trained import parameter_sizes

Specs = dict[str, jax.ShapeDtypeStruct]


class Stored(NamedTuple):
    """Size of a model: number of parameters (see `parameter_sizes`), and bytes of all leaves as loaded."""

    params: int
    bytes: int


class Upcycled(NamedTuple):
    """The result of `upcycle`.

    Attributes:
      config: config of the new model.
      dense, upcycled: sizes of the model before and after; of a larger MoE, `dense` is the smaller one.
      own: size of the leaves that an adapter directory stores itself; None if a model directory was written.
      step0: comparison of the MoE with its source, or, with NF4 kernels, with the source in NF4; None if it was not
        asked for.
      differs: why the MoE is not meant to begin with its source's logits; None: it is meant to.
      quantization: comparison of the dense model in NF4 with the dense model; None if there are no NF4 kernels.
      on_text: the same comparison on a given text; None if there was none.
      copies: of a larger MoE, how many experts each expert of the source became, by layer; None: the source was dense.
    """

    config: ModelConfig
    dense: Stored
    upcycled: Stored
    own: Stored | None = None
    step0: Step0 | None = None
    differs: str | None = None
    quantization: Step0 | None = None
    on_text: TextComparison | None = None
    copies: Mapping[int, tuple[int, ...]] | None = None


def sizes_of(source: ModelSource, config: ModelConfig, specs: Specs) -> tuple[Stored, Stored, Stored | None]:
    """Returns the sizes of the source, of the new model, and of the leaves that an adapter directory stores."""
    dense, sizes = source.specs().values(), parameter_sizes(config)
    before = Stored(count_parameters(dense), count_bytes(dense))
    after = Stored(sum(sizes.values()), count_bytes(specs.values()))
    if not config.frozen_base:
        return before, after, None
    own = own_leaves(config)
    return before, after, Stored(sum(sizes[path] for path in own), count_bytes(specs[path] for path in own))


def measured_of(result: Upcycled) -> dict[str, Any]:
    """Returns the figures of a result for the lineage."""
    measured = {
        "dense_params": result.dense.params,
        "total_params": result.upcycled.params,
        "param_bytes": result.upcycled.bytes,
        "step0_max_abs_difference": None,
    }
    if result.own is not None:
        measured |= {"adapter_params": result.own.params, "adapter_bytes": result.own.bytes}
    if result.step0 is not None:
        measured |= {
            "step0_max_abs_difference": result.step0.difference,
            "step0_max_abs_logit": result.step0.largest,
            "step0_allowed": result.step0.allowed,
            "step0_probe_tokens": list(probe_tokens(result.config, seed=0).shape),
        }
    if result.differs is not None:
        measured["step0_differs"] = result.differs
    if result.quantization is not None:
        measured["nf4_max_abs_difference"] = result.quantization.difference
    if result.on_text is not None:
        measured |= {f"nf4_{name}": value for name, value in result.on_text._asdict().items()}
    return measured
