"""The experts of one MoE layer of a model on disk, whatever its bank: as stored, aligned, and as design matrices.

The design matrix of an expert has a row for every neuron (methods.md 5; ResMoE, arXiv 2503.06881, section 4.1). Gated:
[G^T | U^T | D], f x 3d; plain: [W1^T | W2], f x 2d; with biases, those of the input side are further columns. The rows
are points, an expert is a cloud of them, and their order has no meaning.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from moe_jax.compression.calibration.recording import LayerCalibration, LayerRows
from moe_jax.compression.threads import ahead, in_threads
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast, check_finite, largest_magnitude
from moe_jax.core.formatting import count_bytes
from moe_jax.experts.forms import KernelForm, ffn_matrices
from moe_jax.experts.forms.coding import Wanted
from moe_jax.experts.on_host import base_kernel, expert_kernels
from moe_jax.model_io.model_source import ModelSource, read_part
from moe_jax.models import BankConfig, MoEConfig

Write = Callable[[str, np.ndarray], None]
"""Takes a leaf: its path below the layer's `mlp`, and the array."""
LARGE_LEAF = 2**28
"""Bytes of the kernels of all experts, from which on they are read one after another."""
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
      moments: those that `calibration.expert_statistics.moments` keeps for the next call, by what they are of.
    """

    def __init__(
        self,
        source: ModelSource,
        index: int,
        *,
        with_universal: bool = False,
        calibration: LayerCalibration | None = None,
    ):
        """Reads nothing yet. With `with_universal` the universal FFN beside the bank counts as its last expert."""
        self.index = index
        self.moe: MoEConfig = source.config.moe(index)
        self.matrices = ffn_matrices(self.moe.expert, source.config.d_model)
        self.shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        self.num_experts = self.moe.bank_experts + with_universal
        self.calibration = calibration
        self.moments: dict[str, list[Float[np.ndarray, "i i"]]] = {}
        self._source = source
        self._with_universal = with_universal
        self._stored = source.specs()
        self._last: tuple[str, np.ndarray] | None = None

    @property
    def rows(self) -> LayerRows | None:
        """The inputs of its bank on the calibration text; None: not known."""
        return None if self.calibration is None else self.calibration.rows

    @property
    def knows_inputs(self) -> bool:
        """Whether it is known which inputs of its experts count most: by rows, or by sums over those of an imatrix."""
        return self.calibration is not None and (self.rows is not None or self.calibration.squares is not None)

    def give(self, rows: LayerRows) -> None:
        """Replaces the inputs of its bank by those that it is given now; how much depends on them stays known."""
        assert self.calibration is not None
        gradients = None if self.rows is None else self.rows.gradients
        self.calibration = self.calibration._replace(rows=rows._replace(gradients=gradients))
        self.moments = {}

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
        """A kernel, or part of one, in the dtype of those of a matrix; `InputError` if a number is too large for it."""
        return cast(f"the {name} kernels of layer {self.index}", array, self.dtype(name))

    def forget(self) -> None:
        """Frees the leaf that was read last."""
        self._last = None

    def _kernels(self, name: str) -> Iterator[np.ndarray]:
        path, matrix = self._path("experts"), self.matrices[name]
        leaf = f"{path}/{name}/kernel"
        if not self.moe.bank.form.over_base and self._can_read_parts(leaf):
            experts, *others = self._stored[leaf].shape
            whole = tuple(slice(0, size) for size in others)
            yield from (read_part(self._source, leaf, (slice(e, e + 1), *whole))[0] for e in range(experts))
        else:
            yield from expert_kernels(self._read, self.moe.bank, path, matrix, dtype=np.dtype(np.float32))
        if self._with_universal:
            yield self._read(self._path(f"universal/{name}/kernel"))

    def _can_read_parts(self, path: str) -> bool:
        """Whether a leaf is so large that it is better read in parts, and is stored so that no part needs the rest."""
        nbytes = count_bytes([self._stored[path]])
        is_last = self._last is not None and self._last[0] == path
        has_parts = hasattr(self._source, "read_part") and self._source.stored_bytes(path) >= nbytes
        return nbytes >= LARGE_LEAF and has_parts and not is_last

    def _read(self, path: str) -> np.ndarray:
        """Reads a leaf, and keeps it until the next one: the kernels of a full bank are gone through twice."""
        if self._last is None or self._last[0] != path:
            self._last = None
            self._last = path, self._source.read(path)
        return self._last[1]

    def _path(self, below: str) -> str:
        return f"layers/{self.index}/mlp/{below}"


def check_weights(what: str, weights: np.ndarray) -> np.ndarray:
    """The weights that it was given; `InputError` if one is not finite, or larger than `LARGEST_WEIGHT`."""
    check_finite(what, weights, "they cannot be compressed; mend the model")
    largest = largest_magnitude(weights)
    if largest > LARGEST_WEIGHT:
        raise InputError(
            f"{what}: {largest:.3g} is too large to be compressed: squares are summed up in float32, which holds those "
            f"of weights up to {LARGEST_WEIGHT:.2g}"
        )
    return weights


_SQUARE = 256


def design_matrices(layer: SourceLayer) -> list[Float[np.ndarray, "f D"]]:
    """The design matrices of all experts, in the dtype in which the kernels are read."""
    designs: list[np.ndarray] = []
    width = sum(_width(layer, name) for name in layer.shapes)
    start = 0
    for name in layer.shapes:
        biases = layer.biases(name) if name != "down" else None
        for expert, kernel in enumerate(ahead(layer.kernels(name))):
            rows = neuron_rows(name, kernel)
            if len(designs) == expert:
                designs.append(np.empty((len(rows), width), kernel.dtype))
            _copy(rows, designs[expert][:, start : start + rows.shape[1]])
            if biases is not None:
                designs[expert][:, start + rows.shape[1]] = biases[expert]
        start += _width(layer, name)
    return designs


def aligned_kernels(
    layer: SourceLayer, name: str, permutations: Int[np.ndarray, "E f"]
) -> Iterator[Float[np.ndarray, "i o"]]:
    """One matrix of all experts with the neurons in the given order; float32."""
    for kernel, order in zip(layer.kernels(name), permutations, strict=True):
        # Orders are in bounds; NumPy checking each index of each row takes three times as long, indexing nine times.
        ordered = np.take(kernel, order, axis=0 if name == "down" else 1, mode="clip")
        yield ordered.astype(np.float32, copy=False)


def aligned_experts(
    layer: SourceLayer, permutations: Int[np.ndarray, "E f"]
) -> Iterator[dict[str, Float[np.ndarray, "i o"]]]:
    """All matrices of one expert after another, aligned; float32. Memory holds their stored leaves."""
    every = [aligned_kernels(layer, name, permutations) for name in layer.shapes]
    for kernels in zip(*every, strict=True):
        yield dict(zip(layer.shapes, kernels, strict=True))


def aligned_biases(
    layer: SourceLayer, name: str, permutations: Int[np.ndarray, "E f"] | None
) -> Float[np.ndarray, "E o"] | None:
    """The biases that belong to `aligned_kernels`, or to the kernels as they are stored; None if the FFN has none."""
    biases = layer.biases(name)
    if biases is None or permutations is None or name == "down":  # an output bias belongs to no neuron
        return biases
    return np.take_along_axis(biases, permutations, axis=1)


def unaligned(layer: SourceLayer) -> Int[np.ndarray, "E f"]:
    """The orders that leave neurons where they are."""
    return np.tile(np.arange(layer.moe.expert.dim, dtype=np.int32), (layer.num_experts, 1))


def mean_kernel(kernels: Iterable[np.ndarray]) -> np.ndarray:
    """The mean of kernels, added up in float32 one after another; float32[in, out]."""
    kernels = iter(ahead(kernels))
    total, count = next(kernels).astype(np.float32), 1
    for kernel in kernels:
        total += kernel.astype(np.float32, copy=False)
        count += 1
    return total / np.float32(count)


def neuron_rows(name: str, kernel: Float[np.ndarray, "i o"]) -> Float[np.ndarray, "f d"]:
    """A kernel with a row for every neuron; applied twice it returns the kernel."""
    return kernel if name == "down" else kernel.T


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies the source into the target in squares that fit into the cache.

    One of the two may be the transpose of what is stored; plain copying would then take four times as long.
    """

    def fill(rows: slice) -> None:
        for start in range(0, source.shape[1], _SQUARE):
            columns = slice(start, start + _SQUARE)
            target[rows, columns] = source[rows, columns]

    in_threads(fill, (slice(start, start + _SQUARE) for start in range(0, len(source), _SQUARE)))


def _width(layer: SourceLayer, name: str) -> int:
    """Number of columns of the design matrix that a matrix of the FFN contributes."""
    rows, columns = layer.shapes[name]
    return columns if name == "down" else rows + layer.moe.expert.bias
