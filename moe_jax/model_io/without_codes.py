"""A model whose linear maps are in codes, read as if these were whole: for what has no codes of its own."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.core.finite import cast
from moe_jax.core.formatting import count_bytes
from moe_jax.experts.forms import Coded, Matrix
from moe_jax.experts.forms.coding import Storable
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ChangedSource, ModelSource
from moe_jax.models import ModelConfig
from moe_jax.models.linear_codes import EMBEDDING


def has_linear_codes(config: ModelConfig) -> bool:
    """Whether linear maps outside the experts, the embedding or the head are in codes."""
    return bool(config.codes) or any(layer.codes for layer in config.layers)


def weights_in_linear_codes(config: ModelConfig) -> int:
    """Returns the number of weights of linear maps outside the experts, embedding and head that are in codes."""
    if not has_linear_codes(config):
        return 0
    stored = leaf_specs(config)
    return sum(
        math.prod(spec.shape) for path, spec in leaf_specs(config_without_codes(config)).items() if path not in stored
    )


def weights_in_codes(config: ModelConfig) -> int:
    """Returns the number of all weights that are in codes, those of experts too; codes themselves are not trained."""
    count, specs = weights_in_linear_codes(config), leaf_specs(config)
    for layer in config.moe_layers:
        moe = config.moe(layer)
        form = moe.bank.form
        if form.has_codes and not (isinstance(form, Storable) and form.counts_largest):
            for name, (rows, columns) in moe.expert.shapes(config.d_model).items():
                codes = specs.get(f"layers/{layer}/mlp/experts/delta/{name}/codes")
                count += 0 if codes is None else codes.shape[0] * rows * columns
    return count


def config_without_codes(config: ModelConfig) -> ModelConfig:
    """Returns the config with linear maps outside the experts, embedding and head whole."""
    layers = tuple(dataclasses.replace(layer, codes=()) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, codes=())


def without_codes(source: ModelSource) -> ModelSource:
    """Returns the model with whole kernels in place of codes; itself if none of its linear maps are in codes."""
    return _WithoutCodes(source) if has_linear_codes(source.config) else source


class _WithoutCodes(ChangedSource):
    """Decodes kernels when they are read, in the dtype of their layer's norm, or of the one after the last layer."""

    def __init__(self, source: ModelSource):
        config = source.config
        super().__init__(source, config_without_codes(config))
        self._stored = source.specs()
        self._forms: dict[str, Coded] = {path: one.form for one in config.codes for path in one.paths}
        for index, layer in enumerate(config.layers):
            self._forms |= {f"layers/{index}/{path}": one.form for one in layer.codes for path in one.paths}
        self._specs = {
            path: self._stored.get(path) or jax.ShapeDtypeStruct(spec.shape, self._dtype(path, spec.dtype))
            for path, spec in leaf_specs(self.config).items()
        }

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._specs

    def read(self, path: str) -> np.ndarray:
        if path in self._stored:
            return self._source.read(path)
        module, spec = path.rsplit("/", 1)[0], self._specs[path]
        form, shape = self._forms[module], spec.shape[::-1] if path == EMBEDDING else spec.shape
        matrix = Matrix("", (shape[0], shape[1]))
        names = form.leaf_names(matrix)
        arrays = {name: jnp.asarray(self._source.read(f"{module}/{name}")) for name in names}
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            kernel = np.asarray(form.materialise(None, arrays, matrix))
        return cast(path, kernel.T if path == EMBEDDING else kernel, spec.dtype)

    def stored_bytes(self, path: str) -> int:
        return self._source.stored_bytes(path) if path in self._stored else count_bytes([self._specs[path]])

    def _dtype(self, path: str, default: np.dtype) -> np.dtype:
        prefix = "/".join(path.split("/")[:2]) if path.startswith("layers/") else "final_norm"
        named = [name for name in self._stored if name.startswith(prefix) and name.endswith("norm/scale")]
        norms = (self._stored[name].dtype for name in named)
        return next((dtype for dtype in norms if jnp.issubdtype(dtype, jnp.floating)), default)
