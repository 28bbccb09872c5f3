"""The base that deltas are taken from, and the loop shared by all methods that store one delta per expert.

The base is the dense model, the one that a bank has already, or the mean of the experts.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from jaxtyping import Array

from moe_jax.compress.alignment.design_matrix import mean_kernel
from moe_jax.compress.calibration.expert_coders import ExpertCoder, expert_coders
from moe_jax.compress.layer_figures import LayerFigures, Measure
from moe_jax.compress.source_layer import SourceLayer, Write, check_weights
from moe_jax.convert.families import FAMILIES
from moe_jax.errors import InputError
from moe_jax.model_source import ModelSource
from moe_jax.models import ModelConfig, MoEConfig

Encode = Callable[[str, int, np.ndarray, ExpertCoder], tuple[Mapping[str, np.ndarray], np.ndarray | Array]]
"""`encode(matrix, expert, delta, coder)`: float32[in, out] -> the leaves that store it, and what they stand for."""

Coders = Callable[[SourceLayer, str], Iterable[ExpertCoder]]
"""The coders of all experts of a layer, for a matrix."""

DENSE = "dense model"
OWN = "base of the bank"
MEAN = "mean of the experts"
BARYCENTER = "barycenter of the experts"
NO_BASE = "experts themselves"


class Base:
    """The base of one layer, and where it comes from.

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
        if self._dense is not None:
            path = f"layers/{self._layer.index}/mlp/{name}/kernel"
            kernel = check_weights(f"{path} of --base", self._dense.read(path))
        elif self.origin == OWN:
            kernel = self._layer.base(name)
        else:
            kernel = mean_kernel(self._layer.kernels(name))
        return self._layer.stored(name, kernel)


def check_base(base: ModelConfig, model: ModelConfig, layers: Iterable[int]) -> None:
    """Raises `InputError` unless `base` can be the dense model that the MoE layers of `model` came from."""
    if base.moe_layers:
        raise InputError("--base is an MoE itself; expected the dense model that the experts came from")
    family = FAMILIES.get(base.family)
    if model.family != base.family and (family is None or model.family not in family.moe_formats):
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


def compress_deltas(
    layer: SourceLayer, base: Base, encode: Encode, write: Write, coders: Coders = expert_coders
) -> LayerFigures:
    """Writes base, deltas and biases of a layer. Memory holds one matrix of all experts, and that of one in float32.

    Raises:
      InputError: if a kernel, or what it becomes, is not finite.
    """
    measure = Measure(layer.num_experts, layer.moe.expert.dim)
    for name in layer.shapes:
        _compress_matrix(layer, name, base.kernel(name), encode, write, measure, coders(layer, name))
        biases = layer.biases(name)
        if biases is not None:
            write(f"experts/{name}/bias", biases)
    return measure.figures()


def _compress_matrix(
    layer: SourceLayer,
    name: str,
    base: np.ndarray,
    encode: Encode,
    write: Write,
    measure: Measure,
    coders: Iterable[ExpertCoder],
) -> None:
    """A function of its own, so that nothing of one matrix is held while the next one is read."""
    write(f"experts/base/{name}/kernel", base)
    stacked: dict[str, np.ndarray] = {}
    for expert, (kernel, coder) in enumerate(zip(layer.kernels(name), coders, strict=True)):
        delta = kernel.astype(np.float32, copy=False) - base.astype(np.float32, copy=False)
        leaves, approximation = encode(name, expert, delta, coder)
        for leaf, array in leaves.items():
            if leaf not in stacked:
                stacked[leaf] = np.empty((layer.num_experts, *array.shape), array.dtype)
            stacked[leaf][expert] = array
        measure.add(expert, kernel, base, approximation, coder.moment)
    for leaf, array in stacked.items():
        write(f"experts/delta/{name}/{leaf}", array)
