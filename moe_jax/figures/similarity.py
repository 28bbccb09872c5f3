"""Cosines between the experts of a layer and their base, and among the experts: the redundancy that DeRS exploits.

Dot products are summed block by block in float64, because cosines of upcycled experts differ from 1 by less than
float32 can show.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.on_host import base_kernel, expert_kernels
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, MoEConfig

SHARED = "shared base"
MEAN = "mean of the experts"

# Elements in a block, over all experts: 32 MB in float64.
_BLOCK = 1 << 22


class LayerSimilarity(NamedTuple):
    """Cosines of one layer, between matrices, or between all matrices of an expert, as vectors.

    Attributes:
      layer: its index.
      base: `SHARED`, or `MEAN` if the bank has no base.
      to_base: per matrix, between every expert and the base; float64[E].
      whole_to_base: the same for whole experts.
      between: between whole experts; float64[E, E].
      universal: whether the last expert is the universal FFN, which sees every token.
    """

    layer: int
    base: str
    to_base: dict[str, Float[np.ndarray, " E"]]
    whole_to_base: Float[np.ndarray, " E"]
    between: Float[np.ndarray, "E E"]
    universal: bool

    def all_to_base(self) -> Float[np.ndarray, " n"]:
        """The cosines of all experts and matrices."""
        return np.concatenate(list(self.to_base.values()))

    def between_others(self) -> Float[np.ndarray, " n"]:
        """The cosines of every two different experts."""
        return self.between[~np.eye(len(self.between), dtype=bool)]


def comparable_layers(config: ModelConfig) -> list[int]:
    """The MoE layers whose experts can be compared: they are kernels, and the model stores them itself."""
    moes = {index: config.moe(index) for index in config.moe_layers}
    return [
        index
        for index, moe in moes.items()
        if moe.bank.form.has_expert_kernels and moe.expert.lora is None and not moe.expert.nf4
    ]


def measure_similarity(source: ModelSource, layer: int) -> LayerSimilarity:
    """Measures one MoE layer, one matrix of its experts at a time; raises `InputError` if a weight is not finite."""
    moe = source.config.moe(layer)
    assert isinstance(moe, MoEConfig)
    has_base = moe.bank.has_base
    grams = {}
    for name in moe.expert.matrices:
        grams[name] = gram_matrix(_vectors(source, layer, name))
        if not np.isfinite(grams[name]).all():
            raise InputError(f"the {name} kernels of the experts in layer {layer} have entries that are not finite")
    to_base = {name: _cosines_to_base(gram, has_base) for name, gram in grams.items()}
    whole = np.sum(list(grams.values()), axis=0)
    experts = whole[1:, 1:] if has_base else whole
    norms = np.sqrt(np.diag(experts))
    return LayerSimilarity(
        layer=layer,
        base=SHARED if has_base else MEAN,
        to_base=to_base,
        whole_to_base=_cosines_to_base(whole, has_base),
        between=_cosine(experts, np.outer(norms, norms)),
        universal=moe.extended,
    )


def measure_layers(source: ModelSource, progress: Progress) -> list[LayerSimilarity]:
    """Measures every layer whose experts can be compared, one after the other; there may be none."""
    layers, found = comparable_layers(source.config), []
    for done, layer in enumerate(layers, start=1):
        found.append(measure_similarity(source, layer))
        progress("comparing experts", done, len(layers))
    return found


def gram_matrix(vectors: Sequence[np.ndarray]) -> Float[np.ndarray, "n n"]:
    """Dot products between arrays of one shape, each taken as a vector; float64."""
    rows, width = len(vectors[0]), vectors[0][0].size
    step = max(1, _BLOCK // (len(vectors) * width))
    gram = np.zeros((len(vectors), len(vectors)))
    for start in range(0, rows, step):
        block = np.stack([vector[start : start + step].reshape(-1).astype(np.float64) for vector in vectors])
        gram += block @ block.T
    return gram


def _vectors(source: ModelSource, layer: int, name: str) -> list[np.ndarray]:
    """One matrix of the base, if there is one, and then of every expert."""
    moe = source.config.moe(layer)
    place = moe.bank, f"layers/{layer}/mlp/experts", ffn_matrices(moe.expert, source.config.d_model)[name]
    # In float32, because rounding to the bfloat16 of a base would lose most of a small delta.
    experts = expert_kernels(source.read, *place, dtype=np.dtype(np.float32))
    return [*([base_kernel(source.read, *place)] if moe.bank.has_base else ()), *experts]


def _cosines_to_base(gram: Float[np.ndarray, "n n"], has_base: bool) -> Float[np.ndarray, " E"]:
    """Cosines from dot products. The first row is that of the base, if there is one; otherwise the base is the mean."""
    if has_base:
        dots, base, experts = gram[0, 1:], gram[0, 0], np.diag(gram)[1:]
    else:
        dots, base, experts = gram.mean(axis=1), gram.mean(), np.diag(gram)
    return _cosine(dots, np.sqrt(np.maximum(base, 0.0) * experts))


def _cosine(dots: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """The cosine; two zero vectors count as equal."""
    cosines = np.divide(dots, norms, out=np.ones_like(dots), where=norms > 0)
    return np.clip(cosines, -1.0, 1.0)
