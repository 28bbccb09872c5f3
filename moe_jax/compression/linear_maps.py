"""The linear maps of a model outside its banks of experts, with embedding and head: which there are, and their codes.

Routers, norms, biases, convolutions and what sees are none of them: they take next to nothing, and stay as they are.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.compression.coding.coder import ExpertCoder
from moe_jax.core.code_options import TABLE_BITS
from moe_jax.core.errors import InputError
from moe_jax.experts.forms import Matrix
from moe_jax.experts.forms.kernel_of_codes import CodedLevels
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.without_codes import config_without_codes
from moe_jax.models import LayerConfig, LinearCodes, ModelConfig, RecurrentConfig
from moe_jax.models.linear_codes import EMBED, EMBEDDING, HEAD, HEAD_KERNEL, joined_codes

Part = Literal["attention", "dense", "embedding", "head"]
_MAP = re.compile(r"layers/(\d+)/(attention|cross_attention|mlp(?:/universal)?)/(?!router)(\w+)")


class LinearMap(NamedTuple):
    """A linear map, or the embedding as the kernel of a head.

    Attributes:
      path: of its module, such as `layers/3/attention/q`, `lm_head` or `embed`.
      shape: [in, out] of its kernel.
      part: of the model.
    """

    path: str
    shape: tuple[int, int]
    part: Part

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to; None: to none."""
        return int(self.path.split("/")[1]) if self.path.startswith("layers/") else None

    @property
    def leaf(self) -> str:
        """The path of its leaf as long as it is whole."""
        return EMBEDDING if self.path == EMBED else f"{self.path}/kernel"

    @property
    def below(self) -> str:
        """Its path below its layer, or the model."""
        return self.path if self.layer is None else self.path.split("/", 2)[2]

    def kernel(self, leaf: np.ndarray) -> np.ndarray:
        """Returns the kernel [in, out], given that leaf."""
        return leaf.T if self.path == EMBED else leaf


def linear_maps(config: ModelConfig) -> list[LinearMap]:
    """Returns those of a model that are whole, in the order in which they are used, the head last."""
    found, last = [], []
    for path, spec in leaf_specs(config).items():
        if path == EMBEDDING:
            found.append(LinearMap(EMBED, spec.shape[::-1], "embedding"))
        elif path == HEAD_KERNEL and config.num_classes is None:
            last.append(LinearMap(HEAD, spec.shape, "head"))
        elif path.endswith("/kernel") and (match := _MAP.fullmatch(path.removesuffix("/kernel"))):
            mixer = config.layers[int(match[1])].attention
            kept = mixer.kept_whole if isinstance(mixer, RecurrentConfig) else ()
            if not (match[2] == "attention" and match[3] in kept):
                part: Part = "dense" if match[2].startswith("mlp") else "attention"
                found.append(LinearMap(path.removesuffix("/kernel"), spec.shape, part))
    return found + last


def parts_of_leaves(config: ModelConfig) -> dict[str, Part]:
    """Returns the part that every leaf of a linear map belongs to, by its path, whether it is whole or in codes."""
    every = linear_maps(config_without_codes(config))
    whole: dict[str, Part] = {one.leaf: one.part for one in every}
    coded: dict[str, Part] = {one.path: one.part for one in every}
    found: dict[str, Part] = {}
    for path in leaf_specs(config):
        module, in_codes, _ = path.partition(f"/{CodedLevels.folder}")
        part = coded.get(module) if in_codes else whole.get(path)
        if part is not None:
            found[path] = part
    return found


def usual_codes(one: LinearMap, bits: int, options: Mapping[str, Any]) -> LinearCodes:
    """Returns codes of so many bits for a map, and the other options of codes that experts have; a table if it may."""
    others = {name: options[name] for name in ("group_size", "scale_bits", "zero_points", "row_scales")}
    table = options.get("table", False) and bits in TABLE_BITS
    return LinearCodes(paths=(one.path,), bits=bits, table=table, **others)


def with_codes(config: ModelConfig, codes: Mapping[str, LinearCodes]) -> ModelConfig:
    """Returns the config with more linear maps in codes, by their paths; the `paths` of the codes do not matter."""
    layers, own = list(config.layers), []
    for index, layer in enumerate(layers):
        prefix = f"layers/{index}/"
        more = [(path.removeprefix(prefix), one) for path, one in codes.items() if path.startswith(prefix)]
        layers[index] = dataclasses.replace(layer, codes=joined_codes([*_by_path(layer.codes), *more]))
    own = [(path, one) for path, one in codes.items() if "/" not in path]
    return dataclasses.replace(config, layers=tuple(layers), codes=joined_codes([*_by_path(config.codes), *own]))


def _by_path(codes: tuple[LinearCodes, ...]) -> list[tuple[str, LinearCodes]]:
    return [(path, one) for one in codes for path in one.paths]


def has_codes_below(layer: LayerConfig, below: str) -> bool:
    """Returns whether a linear map of a layer is in codes whose path in the layer begins so, such as `mlp/`."""
    return any(path.startswith(below) for path, _ in _by_path(layer.codes))


def check_maps(config: ModelConfig) -> list[LinearMap]:
    """Returns the linear maps of a model that can be put in codes; raises `InputError` if it has none."""
    config.check_no_encoder("codes of linear maps")
    config.check_no_tower("a model whose linear maps are put in codes")
    maps = linear_maps(config)
    if not maps:
        again = ", but for its experts, which --of experts compresses again" if config.moe_layers else ""
        raise InputError(
            f"all linear maps of the model are in codes already: there is nothing left to compress{again}; other codes "
            "are made from the model that these were made from"
        )
    return maps


def coded_leaves(
    one: LinearMap, codes: LinearCodes, kernel: np.ndarray, coder: ExpertCoder
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the leaves of a map by their paths, and the float32 numbers [in, out] that they stand for."""
    leaves, approximation = codes.form.stored(kernel, Matrix("", one.shape), coder)
    return {f"{one.path}/{name}": np.asarray(leaf) for name, leaf in leaves.items()}, np.asarray(approximation)


def head_and_rows(moment: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Returns the second moment by which an embedding that is also the head is coded, given that of the head's input.

    Its errors count twice: in the logits, and in what the first layer is given, where all entries count alike.
    """
    return moment / max(float(np.mean(np.diagonal(moment))), 1e-30) + np.eye(len(moment), dtype=np.float32)
