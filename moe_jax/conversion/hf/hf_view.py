"""The leaves of a model as a Hugging Face format stores them: full experts of equal width, universal FFNs beside them.

This is a view: experts are materialised one at a time while they are written, never a whole layer at once.
"""

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from moe_jax.conversion.formats.packed_experts import Codes, Packing, codes_of
from moe_jax.core.finite import REMEDY, cast, check_finite
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.on_host import expert_kernels
from moe_jax.model_io.loading import check_leaves, leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import FFNConfig, ModelConfig, MoEConfig


class MergedModel:
    """The leaves of a source as `exported_config` describes them."""

    def __init__(self, source: ModelSource, config: ModelConfig):
        """Checks the leaves of the source; no weights are read.

        Args:
          source: to read from.
          config: from `exported_config`, for the config of the source.

        Raises:
          InputError: if the source does not hold the leaves that its own config describes.
        """
        self.config = config
        self._source = source
        self._stored = source.specs()
        check_leaves(leaf_specs(source.config), self._stored, str(source.path))
        self._shapes = {path: spec.shape for path, spec in leaf_specs(config).items()}

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape of every leaf, by path, with the dtype of the leaves that it is made from."""
        return {path: jax.ShapeDtypeStruct(shape, self._dtype(path)) for path, shape in self._shapes.items()}

    def parts(self, path: str) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yields (None, leaf); or for experts (e, leaf[e]) for every e, in the order of the bank.

        Shapes and dtypes are those of `specs`; deltas are added in float32.
        """
        if "/experts/" in path:
            yield from self._experts(path)
        elif "/mlp/universal/" in path:
            yield None, self._universal(path)
        elif path in self._stored:
            yield None, self._source.read(path)
        else:
            # Zeros do for a router among equal experts, and for the gate of a universal FFN, whose weight is then
            # constant.
            yield None, self._zeros(path)

    def codes(self, path: str, packing: Packing) -> Iterator[tuple[int, Codes]]:
        """Yields (e, codes of leaf[e]) for every e, in the order of the bank: stored codes, or else new ones.

        Args:
          path: of the kernels of experts.
          packing: how they are written.

        Raises:
          InputError: if stored codes cannot be written so, or are not finite.
        """
        stored = codes_of(self._source, path, self._shapes[path][1:], packing)
        if stored is not None:
            # A universal FFN in the bank is its last expert, and not one of the router's.
            for outputs, codes in zip(self._outputs(path), stored, strict=False):
                for output in outputs:
                    yield output, codes
            return
        for expert, kernel in self._experts(path):
            check_finite(f"{path}[{expert}]", kernel, REMEDY)
            yield expert, packing.quantise(kernel.astype(np.float32), packing.bits, packing.group_size)

    def _experts(self, path: str) -> Iterator[tuple[int, np.ndarray]]:
        outputs, shape = self._outputs(path), self._shapes[path][1:]
        mlp = self._mlp(path)
        routed = range(mlp.routed_experts if isinstance(mlp, MoEConfig) else 1)
        for expert, kernel in zip(routed, self._bank(path, routed), strict=True):
            kernel = _padded(kernel, shape)
            for output in outputs[expert]:
                yield output, kernel

    def _outputs(self, path: str) -> list[np.ndarray]:
        """Returns the router outputs that each expert of the bank stands for; for the FFN of a dense layer, all."""
        mlp, outputs = self._mlp(path), np.arange(self._shapes[path][0])
        if not isinstance(mlp, MoEConfig):
            return [outputs]
        if mlp.merged_experts is None:
            return list(outputs[:, None])
        groups = self._source.read(f"{path.partition('/experts/')[0]}/groups")
        return [np.flatnonzero(groups == group) for group in range(mlp.merged_experts)]

    def _bank(self, path: str, experts: Iterable[int]) -> Iterator[np.ndarray]:
        """Yields the kernel or bias of some experts of the bank, as stored or materialised."""
        block, _, name = path.partition("/experts/")
        mlp = self._mlp(path)
        if not isinstance(mlp, MoEConfig):
            yield self._source.read(path.replace("/experts/", "/"))
        elif path in self._stored:
            leaf = self._source.read(path)
            yield from (leaf[expert] for expert in experts)
        else:
            matrix = ffn_matrices(mlp.expert, self.config.d_model)[name.removesuffix("/kernel")]
            read, bank, dtype = self._source.read, f"{block}/experts", self._dtype(path)
            # The range of float16 is so small that a sum of two numbers may well lie outside.
            made = np.dtype(np.float32) if dtype == np.float16 else dtype
            kernels = expert_kernels(read, mlp.bank, bank, matrix, dtype=made, experts=experts)
            for expert, kernel in zip(experts, kernels, strict=True):
                yield cast(f"{path}[{expert}]", kernel, dtype)

    def _universal(self, path: str) -> np.ndarray:
        """Returns a kernel or bias of the universal FFN: beside the bank, the bank's last expert, or zeros."""
        mlp = self._mlp(path)
        assert isinstance(mlp, MoEConfig)
        if mlp.universal == "none":
            return self._zeros(path)
        if mlp.universal_beside:
            leaf = self._source.read(path)
        else:
            (leaf,) = self._bank(path.replace("/universal/", "/experts/"), [mlp.routed_experts])
        if mlp.universal != "sigmoid" and self.config.moe(_layer(path)).universal == "sigmoid" and "/down/" in path:
            # Its weight was 1 and will be 1/2.
            leaf = cast(path, 2 * leaf.astype(np.float32), leaf.dtype)
        return _padded(leaf, self._shapes[path])

    def _zeros(self, path: str) -> np.ndarray:
        return np.zeros(self._shapes[path], self._dtype(path))

    def _dtype(self, path: str) -> np.dtype:
        """Returns the dtype of the leaf; else of the leaf it is made from or belongs to; else of the layer's norm."""
        like = (
            path,
            path.replace("/experts/", "/"),
            path.replace("/experts/", "/experts/base/"),
            path.replace("/router/universal/", "/router/"),
            path.replace("/universal/", "/experts/"),
            path.replace("/universal/", "/experts/base/"),
            f"{path.partition('/mlp/')[0]}/attention_norm/scale",
        )
        return np.dtype(next(self._stored[leaf].dtype for leaf in like if leaf in self._stored))

    def _mlp(self, path: str) -> FFNConfig | MoEConfig:
        return self._source.config.layers[_layer(path)].mlp


def _layer(path: str) -> int:
    return int(path.split("/")[1])


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads every axis with zeros at its end."""
    if array.shape == shape:
        return array
    return np.pad(array, [(0, size - there) for size, there in zip(shape, array.shape, strict=True)])
