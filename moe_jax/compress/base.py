"""The base that deltas are taken from: the dense model, the one a bank has already, or the mean of the experts."""

from collections.abc import Iterable

import numpy as np

from moe_jax.compress.source_layer import SourceLayer
from moe_jax.convert.families import FAMILIES
from moe_jax.errors import InputError
from moe_jax.model_source import ModelSource
from moe_jax.models import ModelConfig, MoEConfig

DENSE = "dense model"
OWN = "base of the bank"
MEAN = "mean of the experts"
BARYCENTER = "barycenter of the experts"
NO_BASE = "experts themselves"


class Base:
    """Where the base of one layer comes from.

    Attributes:
      origin: `DENSE`, `OWN` or `MEAN`.
    """

    def __init__(self, layer: SourceLayer, dense: ModelSource | None):
        """Chooses: the dense model if there is one, else the bank's own base, else the mean of the experts."""
        self._layer = layer
        self._dense = dense
        self.origin = DENSE if dense is not None else OWN if layer.has_base else MEAN

    def kernel(self, name: str) -> np.ndarray:
        """The base of one matrix, [in, out], in the dtype in which the experts are stored."""
        if self.origin == DENSE:
            kernel = self._dense.read(f"layers/{self._layer.index}/mlp/{name}/kernel")
        elif self.origin == OWN:
            kernel = self._layer.base(name)
        else:
            kernel = mean_kernel(self._layer.kernels(name))
        return kernel.astype(self._layer.dtype(name), copy=False)


def mean_kernel(kernels: Iterable[np.ndarray]) -> np.ndarray:
    """The mean of kernels, added up in float32 one after another; float32[in, out]."""
    kernels = iter(kernels)
    total, count = next(kernels).astype(np.float32), 1
    for kernel in kernels:
        total += kernel.astype(np.float32, copy=False)
        count += 1
    return total / np.float32(count)


def check_base(base: ModelConfig, model: ModelConfig, layers: Iterable[int]) -> None:
    """Raises `InputError` unless `base` can be the dense model that the MoE layers of `model` came from."""
    if base.moe_layers:
        raise InputError("--base is an MoE itself; expected the dense model that the experts came from")
    family = FAMILIES.get(base.family)
    if model.family != base.family and (family is None or family.moe_format != model.family):
        raise InputError(f"--base is a {base.family!r} model and the experts are of a {model.family!r} one")
    if (base.num_layers, base.d_model) != (model.num_layers, model.d_model):
        raise InputError(
            f"--base has {base.num_layers} layers of width {base.d_model}, "
            f"the model {model.num_layers} of width {model.d_model}"
        )
    for i in layers:
        moe, ffn = model.layers[i].mlp, base.layers[i].mlp
        assert isinstance(moe, MoEConfig)
        if ffn != moe.expert:
            raise InputError(f"--base has another FFN than the experts in layer {i}: {ffn}, and not {moe.expert}")
