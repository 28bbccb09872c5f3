"""The base that deltas are taken from, and the loop shared by all methods that store one delta per expert.

The base is the dense model, the one that a bank has already, or the mean of the experts.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from jaxtyping import Array

from moe_jax.compression.alignment.design_matrix import mean_kernel
from moe_jax.compression.coding.coder import LeastError
from moe_jax.compression.coding.expert_coders import ExpertCoder, expert_coders
from moe_jax.compression.coding.shared_base import code_residuals, stored_base
from moe_jax.compression.coding.write_experts import CODER, coder_of_base, refits_for
from moe_jax.compression.layer_figures import LayerFigures, Measure
from moe_jax.compression.source_layer import SourceLayer, Write, check_weights
from moe_jax.conversion.families import FAMILIES
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig
from moe_jax.experts.forms.coding import Encodable, Residual
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, MoEConfig

Encode = Callable[[str, int, Residual, ExpertCoder], tuple[Mapping[str, np.ndarray], np.ndarray | Array]]
"""`encode(matrix, expert, delta, coder)`: the leaves that store a delta, and the float32 [in, out] they stand for."""

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
        """The base of one matrix, [in, out], as it is where it comes from; the mean is float32."""
        if self._dense is not None:
            path = f"layers/{self._layer.index}/mlp/{name}/kernel"
            return check_weights(f"{path} of --base", self._dense.read(path))
        if self.origin == OWN:
            return self._layer.base(name)
        return mean_kernel(self._layer.kernels(name))


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
    layer: SourceLayer,
    base: Base,
    bank: BankConfig,
    write: Write,
    coders: Coders = expert_coders,
    *,
    encode: Encode | None = None,
    rounded: LeastError = CODER,
    refit: bool = False,
) -> LayerFigures:
    """Writes base, deltas and biases of a layer. Memory holds one matrix of all experts, and that of one in float32.

    Args:
      layer: the experts as they are.
      base: what deltas are taken from.
      bank: what they become.
      write: takes the leaves.
      coders: of the deltas.
      encode: codes a delta; None: as the form of the bank does.
      rounded: how codes of a base are chosen that those of deltas make up for; see `coder_of_base`.
      refit: a base in codes is refitted to the codes of the deltas.

    Raises:
      InputError: if a kernel, or what it becomes, is not finite.
    """
    form, measure = bank.form, Measure(layer.num_experts, layer.moe.expert.dim)

    def by_form(
        name: str, expert: int, delta: Residual, coder: ExpertCoder
    ) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
        assert isinstance(form, Encodable)
        return form.encode(delta, layer.matrices[name], coder)

    encode = encode or by_form
    for name in layer.shapes:
        of_base = coder_of_base(layer, bank, name, rounded=rounded)
        coded = code_residuals(
            lambda name=name: layer.kernels(name),
            base.kernel(name),
            lambda base, name=name, coder=of_base: stored_base(layer, bank, name, base, coder),
            lambda name=name: coders(layer, name),
            lambda expert, delta, coder, name=name: encode(name, expert, delta, coder),
            lambda: Measure(layer.num_experts, layer.moe.expert.dim),
            num_experts=layer.num_experts,
            dtype=layer.dtype(name),
            refits=refits_for(layer, bank, layer.matrices[name]) if refit else 0,
        )
        coded.write(name, write)
        measure.include(coded.measure)
        del coded  # nothing of one matrix is held while the next one is read
        biases = layer.biases(name)
        if biases is not None:
            write(f"experts/{name}/bias", biases)
    return measure.figures(choice=None if bank.base_codes is None else bank.describe())
