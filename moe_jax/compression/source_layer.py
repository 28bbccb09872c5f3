"""The experts of one MoE layer of a model on disk, whatever its bank; kernels are made one at a time."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moe_jax.compression.calibration.recorded import LayerCalibration, LayerRows
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast, check_finite, largest_magnitude
from moe_jax.experts.forms import KernelForm, ffn_matrices
from moe_jax.experts.forms.coding import Wanted
from moe_jax.experts.on_host import base_kernel, expert_kernels
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import BankConfig, MoEConfig

if TYPE_CHECKING:
    from moe_jax.models import ModelConfig

Write = Callable[[str, np.ndarray], None]
"""Takes a leaf: its path below the layer's `mlp`, and the array."""
LARGEST_WEIGHT = 2.0**50
"""Methods compute in float32, in which the sum over a kernel of the squares of larger numbers could be infinite."""


class SourceLayer:
    """The experts of a layer, as methods read them: finite, and none larger than `LARGEST_WEIGHT`.

    Methods that read another weight raise `InputError`.

    Attributes:
      index: of the layer.
      moe: the layer as it is stored.
      matrices: of an expert, by name.
      shapes: [in, out] of their kernels, by name.
      num_experts: experts, the universal FFN included if it counts as one.
      calibration: what its bank was given on a text; None: not known.
    """

    def __init__(
        self,
        source: ModelSource,
        index: int,
        *,
        with_universal: bool = False,
        calibration: LayerCalibration | None = None,
    ):
        """Uses the config only; nothing is read yet.

        Args:
          source: the model.
          index: of one of its MoE layers.
          with_universal: the universal FFN beside the bank counts as its last expert.
          calibration: what its bank was given on a text.
        """
        self.index = index
        self.moe: MoEConfig = source.config.moe(index)
        self.matrices = ffn_matrices(self.moe.expert, source.config.d_model)
        self.shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        self.num_experts = self.moe.bank_experts + with_universal
        self.calibration = calibration
        self._source = source
        self._with_universal = with_universal
        self._stored = source.specs()
        self._last: tuple[str, np.ndarray] | None = None

    @property
    def rows(self) -> LayerRows | None:
        """The inputs of its bank on the calibration text; None: not known."""
        return None if self.calibration is None else self.calibration.rows

    @property
    def has_base(self) -> bool:
        """Whether the bank has a base already."""
        return self.moe.bank.has_base

    def target(self, bank: BankConfig) -> MoEConfig:
        """The layer with its experts, all `num_experts` of them, in another bank."""
        bank = dataclasses.replace(bank, train_base=self.moe.bank.train_base)
        if not self._with_universal:
            return dataclasses.replace(self.moe, bank=bank)
        return dataclasses.replace(self.moe, bank=bank, extended=True, universal_dim=None)

    def wanted(self, wanted: Wanted, shares: Sequence[float] | None = None) -> KernelForm:
        """A form and size for experts of the shape of these; `shares` as of `Wanted.made`."""
        return wanted.made(self.moe.expert, self.shapes["up"][0], self.num_experts, shares)

    def dtype(self, name: str) -> np.dtype:
        """The dtype of the stored kernels of a matrix; of a bank with deltas, of its base, or else of the layer's norm.

        A base in codes has no dtype of its own.
        """
        bank = self.moe.bank
        if not bank.form.over_base:
            leaf = self._path(f"experts/{name}/kernel")
        elif bank.has_base and bank.base_codes is None:
            leaf = self._path(f"experts/base/{name}/kernel")
        else:
            leaf = f"layers/{self.index}/attention_norm/scale"  # every layer has it
        return np.dtype(self._stored[leaf].dtype)

    def base(self, name: str) -> np.ndarray:
        """The bank's own base, [in, out]; of codes, the float32 numbers that they stand for."""
        kernel = base_kernel(self._read, self.moe.bank, self._path("experts"), self.matrices[name])
        return check_weights(self._path(f"experts/base/{name}"), kernel)

    def kernels(self, name: str) -> Iterator[np.ndarray]:
        """One matrix of all experts, [in, out] each; the universal FFN comes last if it counts as one.

        Full kernels have the dtype they are stored in. Those made of a base and a delta are float32: rounded to a
        bfloat16 base, most of a small delta would be lost.
        """
        for expert, kernel in enumerate(self._kernels(name)):
            yield check_weights(f"the {name} kernel of expert {expert} in layer {self.index}", kernel)

    def biases(self, name: str) -> np.ndarray | None:
        """Biases of all experts, [E, out]; None where the FFN has none."""
        if not self.moe.expert.bias:
            return None
        biases = self._read(self._path(f"experts/{name}/bias"))
        if self._with_universal:
            universal = self._read(self._path(f"universal/{name}/bias"))
            biases = np.concatenate([biases, cast(f"universal/{name}/bias", universal[None], biases.dtype)])
        return check_weights(f"the {name} biases of layer {self.index}", biases)

    @property
    def leaves(self) -> tuple[str, ...]:
        """All leaves of the MoE as they are stored, by their paths below `mlp`."""
        prefix = self._path("")
        return tuple(path.removeprefix(prefix) for path in self._stored if path.startswith(prefix))

    def leaf(self, below: str) -> np.ndarray:
        """A leaf beside the experts, by its path below `mlp`."""
        return check_weights(self._path(below), self._read(self._path(below)))

    def stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """A kernel, or part of one, in the dtype in which those of a matrix are stored.

        Raises:
          InputError: if a number is too large for it.
        """
        return cast(f"the {name} kernels of layer {self.index}", array, self.dtype(name))

    def forget(self) -> None:
        """Frees the leaf that was read last."""
        self._last = None

    def _kernels(self, name: str) -> Iterator[np.ndarray]:
        path, matrix = self._path("experts"), self.matrices[name]
        yield from expert_kernels(self._read, self.moe.bank, path, matrix, dtype=np.dtype(np.float32))
        if self._with_universal:
            yield self._read(self._path(f"universal/{name}/kernel"))

    def _read(self, path: str) -> np.ndarray:
        """Reads a leaf, and keeps it until the next one: the kernels of a full bank are gone through twice."""
        if self._last is None or self._last[0] != path:
            self._last = None
            self._last = path, self._source.read(path)
        return self._last[1]

    def _path(self, below: str) -> str:
        return f"layers/{self.index}/mlp/{below}"


def check_weights(what: str, weights: np.ndarray) -> np.ndarray:
    """The weights that it was given.

    Raises:
      InputError: if one is not finite, or larger than `LARGEST_WEIGHT`.
    """
    check_finite(what, weights, "they cannot be compressed; mend the model")
    largest = largest_magnitude(weights)
    if largest > LARGEST_WEIGHT:
        raise InputError(
            f"{what}: {largest:.3g} is too large to be compressed: squares are summed up in float32, which holds those "
            f"of weights up to {LARGEST_WEIGHT:.2g}"
        )
    return weights


def parse_layers(text: str, config: "ModelConfig") -> tuple[int, ...] | None:
    """Reads which layers a user means.

    Args:
      text: `all`; `top:N`, the last N MoE layers; or layers and ranges of layers, counted from 0, separated by commas.
        A range stands for the MoE layers in it. Of a model with an encoder, layers are counted through both stacks; or
        in each of them, if any of these stands after `encoder:` or `decoder:`.
      config: of the model.

    Returns:
      Indices in the order given; a layer named on its own need not be an MoE layer. None: all MoE layers.

    Raises:
      InputError: if it cannot be read, asks for more MoE layers than there are, or names a range without any, or a
        stack that the model does not have.
    """
    from moe_jax.core.errors import InputError

    if text == "all":
        return None
    if not re.match(r"(encoder|decoder):", text):
        return _parse(text, config.moe_layers, "the model")
    if not config.has_encoder:
        raise InputError(f"--layers {text}: the model has no encoder; name its layers without a stack")
    first, found = config.num_encoder_layers, []
    for part in re.split(r",(?=(?:encoder|decoder):)", text):
        stack, _, rest = part.partition(":")
        layers = range(first) if stack == "encoder" else range(first, config.num_layers)
        moe = [layers.index(i) for i in config.moe_layers if i in layers]
        chosen = moe if rest == "all" else _parse(rest, moe, f"the {stack}")
        if not chosen:
            raise InputError(f"--layers {part}: the {stack} has no MoE layers")
        outside = [i for i in chosen if i >= len(layers)]
        if outside:
            raise InputError(f"--layers {part}: the {stack} has layers 0 to {len(layers) - 1}, and no {outside[0]}")
        found += [layers[i] for i in chosen]
    return tuple(found)


def _parse(text: str, moe: "tuple[int, ...] | list[int]", where: str) -> tuple[int, ...] | None:
    """Reads the layers of one stack; `moe` are its MoE layers, counted within the stack."""
    from moe_jax.core.errors import InputError, shown

    if top := re.fullmatch(r"top:(\d{1,9})", text):
        count = int(top[1])
        if not 1 <= count <= max(1, len(moe)):
            raise InputError(f"--layers {text}: {where} has {len(moe)} MoE layers")
        return tuple(moe[-count:]) or None  # a model without MoE layers is refused elsewhere
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if ends is None:
            raise InputError(f"--layers {shown(text)}: expected all, top:N, or layers such as 0,3,8-11")
        if ends[2] is None:
            found.append(int(ends[1]))
            continue
        some = [i for i in moe if int(ends[1]) <= i <= int(ends[2])]
        if not some:
            raise InputError(f"--layers {part.strip()}: none of them is an MoE layer")
        found += some
    return tuple(found)
