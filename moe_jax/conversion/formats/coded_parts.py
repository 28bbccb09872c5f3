"""The parts of a model that are written in codes, as compressed-tensors or GPTQ, which Transformers and vLLM load.

Experts that are plain codes already keep them where the format can hold them: our packed codes of groups are its codes
with the bytes transposed, and scales are twice our half steps. A scale below zero keeps its sign, which says on which
side of zero there is one level more.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from moe_jax.conversion.formats.compressed_tensors import InCompressedTensors
from moe_jax.conversion.formats.container import Container, Kernel, OwnCodes
from moe_jax.conversion.formats.encoders import GROUP_SIZES, Codes, Encoder, Quantise, WholeNumbers
from moe_jax.conversion.formats.gptq import InGPTQ
from moe_jax.conversion.safetensors_file import PlannedTensor
from moe_jax.conversion.table import Mapped, Piece
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.coding import Storable, WholeNumberCodes
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, MoEConfig

PARTS = ("experts", "dense", "attention", "head")
"""Parts of a model that can be in codes: experts; FFNs that are none, or stand beside them; attention; the head."""
CONTAINERS: dict[str, Container] = {"compressed-tensors": InCompressedTensors(), "gptq": InGPTQ()}
"""The formats in which they can be, by their names on the command line."""

_SUFFIX = ".weight"
_BITS = 4
_OPTIONS = {"experts": "--bits", **{part: f"--{part}-bits" for part in PARTS[1:]}}


def part_of(path: str) -> str | None:
    """Returns the part of a model that the kernel of a linear layer belongs to; None: it stays whole."""
    if not path.endswith("/kernel") or path.startswith("vision/") or "/router/" in path:
        return None
    if "/mlp/experts/" in path:
        return "experts"
    if path.startswith("lm_head/"):
        return "head"
    return "dense" if "/mlp/" in path else "attention" if "attention/" in path else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """How a model is written in codes.

    Attributes:
      container: the format of the checkpoint.
      encoders: by part; those that are not there stay whole.
      stored: whether experts keep the codes that they have.
      kept_scales: the dtype of the scales of these, if it is another one than that of new scales.
    """

    container: Container
    encoders: Mapping[str, Encoder]
    stored: bool
    kept_scales: np.dtype | None

    @classmethod
    def of(
        cls,
        source: ModelSource,
        written: ModelConfig,
        *,
        container: Container,
        quantise: Quantise,
        codes: Mapping[str, str | None],
        whole: bool,
        group_size: int | None,
        zero_points: bool = False,
    ) -> "Packing":
        """Returns the packing asked for.

        Experts without a format have that of their own codes if all are alike and fit, else 4 bits. If no size of
        groups is asked for, the groups of a part are of the first of `GROUP_SIZES` that fits all its matrices, else of
        the largest size that does, else whole rows. Layers may be wider in the config `written` than they are in the
        source, and dense layers may be MoEs there.

        Args:
          source: the model.
          written: the config that is written.
          container: the format of the checkpoint.
          quantise: makes whole numbers of kernels that have none.
          codes: bits, or another format of numbers that the container has, by part; None, of experts: see above.
          whole: whether attention and dense FFNs that are not among `codes` have the format of the experts, too.
          group_size: inputs that share a scale, of whole numbers.
          zero_points: whether their groups have a zero point.

        Raises:
          InputError: if there is no such format, or it does not fit a matrix, or nothing would be in codes.
        """
        from moe_jax.model_io.loading import leaf_specs

        shapes = {path: spec.shape for path, spec in leaf_specs(written).items()}
        parts = {part: {path: shape for path, shape in shapes.items() if part_of(path) == part} for part in PARTS}
        own = _codes_in_common(source, container.bits)
        experts = codes["experts"] or str(own.codes.bits if own is not None else _BITS)
        others = {part: code for part, code in codes.items() if part != "experts" and code is not None}
        for part in others:
            if not parts[part]:
                raise InputError(f"{_OPTIONS[part]}: the model has no {part} of its own that could be in codes")
        by_default = dict.fromkeys(("experts", "dense", "attention") if whole else ("experts",), experts)
        chosen = {part: code for part, code in (by_default | others).items() if parts[part]}
        if not chosen:
            raise InputError("the model is dense: it has no experts to be written in codes; add --parts model")
        encoders: dict[str, Encoder] = {}
        for part, code in chosen.items():
            if code in container.encoders:
                encoders[part] = container.encoders[code]()
                continue
            size = _group_size(parts[part], own.codes.group_size if own and part == "experts" else None, group_size)
            numbers = container.whole_numbers(int(code), size, quantise)
            encoders[part] = dataclasses.replace(numbers, symmetric=not zero_points)
        if not any(isinstance(one, WholeNumbers) for one in encoders.values()):
            asked = "--zero-points" if zero_points else f"--group-size {group_size}"
            if zero_points or group_size is not None:
                raise InputError(f"{asked} is for whole numbers (of 4 or 8 bits), and no part is in them")
        kept_scales, stored = None, _stays(source, written, encoders.get("experts"), own)
        if stored and own is not None:
            encoders = container.keeping(encoders, own)
            kept_scales = container.kept_scales(own, _of_all_experts(source, "scales"))
        return cls(container=container, encoders=encoders, stored=stored, kept_scales=kept_scales)

    @property
    def is_calibrated(self) -> bool:
        """Whether there are new codes that a calibration can choose."""
        new = (encoder for part, encoder in self.encoders.items() if not (self.stored and part == "experts"))
        return any(isinstance(encoder, WholeNumbers) for encoder in new)

    def said(self, source: ModelSource, text: str | None) -> str:
        """Returns a line about the codes, and whether the experts keep theirs, or get new ones.

        `text` is what these are chosen by; None: they are rounded.
        """
        chosen, by = ("rounded", "") if text is None else ("chosen", f" by what {text} gives the model")
        how = chosen + by
        words = {part: encoder.word for part, encoder in self.encoders.items()}
        if "experts" not in words:
            return f"{_joined(words)}: {how}"
        others = _joined({part: word for part, word in words.items() if part != "experts"})
        experts = f"experts are in {words['experts']}"
        if self.stored:
            return f"{experts}: the codes that they have" + (f"; {others}: {how}" if others else "")
        had = {
            _in_words(form)
            for i in source.config.moe_layers
            if (form := _whole_numbers(source.config.moe(i))) is not None
        }
        if had:
            again = f"{chosen} again{by}, from {' and '.join(sorted(had))}, which loses a little"
            return f"{experts}: {again}" + (f"; {others}: {how}" if others else "")
        return f"{experts}{', ' if others else ''}{others}: {how}"

    def encoder_of(self, path: str) -> Encoder | None:
        """Returns the format of a leaf; None: it is written as it is."""
        part = part_of(path)
        return None if part is None else self.encoders.get(part)

    def scales(self, path: str, dtype: np.dtype) -> np.dtype:
        """Returns the dtype of the scales of whole numbers in a leaf of this dtype."""
        kept = self.kept_scales if part_of(path) == "experts" else None
        return self.container.scales(dtype) if kept is None else kept

    def planned(
        self, mapped: Mapped, tensors: Mapping[str, PlannedTensor], dtypes: Mapping[str, np.dtype]
    ) -> dict[str, PlannedTensor]:
        """Returns the tensors to write, in their order, with those in codes in place of their kernels.

        The `tensors` are those of `mapped`, the model without codes, and the `dtypes` those of its leaves.

        Raises:
          InputError: if experts are fused, tensors are no weights, or a format has no such matrix.
        """
        packed = {
            piece.tensor: (piece, encoder)
            for path, pieces in mapped.pieces.items()
            if (encoder := self.encoder_of(path)) is not None
            for piece in pieces
        }
        planned: dict[str, PlannedTensor] = {}
        for name, tensor in tensors.items():
            if name not in packed:
                planned[name] = tensor
                continue
            piece, encoder = packed[name]
            whole = len(tensor.shape) == 2 and math.prod(piece.shape) == math.prod(tensor.shape)
            if not whole or not name.endswith(_SUFFIX) or not piece.transpose:
                raise InputError(f"{name} cannot be in codes: that takes a matrix for each, as other families have")
            rows, columns = tensor.shape
            try:
                made = encoder.planned((rows, columns), self.scales(piece.leaf, dtypes[piece.leaf]))
            except InputError as error:
                raise InputError(f"{name}: {error}; choose others with {_OPTIONS[part_of(piece.leaf) or '']}") from None
            planned |= {encoder.name_of(name, ending): one for ending, one in made.items()}
        return planned

    def doubts(self, mapped: Mapped) -> list[str]:
        """Returns a line for every part that not all programs will read, with a tensor that is the reason."""
        found: dict[str | None, str] = {}
        for path, pieces in mapped.pieces.items():
            encoder, piece = self.encoder_of(path), pieces[0]
            if encoder is not None and (doubt := encoder.doubt((piece.shape[0], piece.shape[1]))) is not None:
                found.setdefault(part_of(path), f"note: {piece.template}: {doubt}; Transformers and moe_jax read it")
        return list(found.values())

    def tensors_of(self, path: str, piece: Piece) -> list[str]:
        """Returns the names of the tensors that a piece of a leaf is written as."""
        encoder = self.encoder_of(path)
        if encoder is None:
            return [piece.tensor]
        rows, columns = piece.shape
        endings = encoder.planned((rows, columns), np.dtype(np.float32))
        return [encoder.name_of(piece.tensor, ending) for ending in endings]

    def describe(self, mapped: Mapped) -> dict[str, Any]:
        """Returns the `quantization_config` of config.json."""
        kernels = {
            piece.template: Kernel(piece.template, path, None if self.encoder_of(path) is None else part_of(path))
            for path, pieces in mapped.pieces.items()
            for piece in pieces
            if path.endswith("/kernel")
        }
        return self.container.describe(self.encoders, kernels.values())


def _joined(words: Mapping[str, str]) -> str:
    return ", ".join(f"{part} in {word}" for part, word in words.items())


def _is_group(size: int, rows: int) -> bool:
    return size >= 8 and size % 8 == 0 and rows % size == 0


def _group_size(shapes: Mapping[str, tuple[int, ...]], own: int | None, asked: int | None) -> int | None:
    """Returns the number of inputs that share a scale in the kernels [..., in, out] of these shapes, by path.

    Args:
      shapes: by path.
      own: those that share one already; None: nothing does.
      asked: what is asked for; None: nothing is.
    """
    if asked is None and own is not None and all(own >= shape[-2] for shape in shapes.values()):
        return None
    tried = GROUP_SIZES if own is None else (own, *GROUP_SIZES)
    common = math.gcd(*(shape[-2] for shape in shapes.values()))
    largest = next((size for size in (*GROUP_SIZES, *range(248, 0, -8)) if _is_group(size, common)), None)
    if asked is None:
        return next((size for size in tried if _is_group(size, common)), largest)
    for path, (*_, rows, _) in shapes.items():
        if not _is_group(asked, rows):
            hint = f"try {largest}" if largest else "without it, all inputs of an output share a scale"
            raise InputError(
                f"--group-size {asked} must be a multiple of 8 that divides the {rows} inputs of {path}: "
                f"the format has whole groups; {hint}"
            )
    return asked


def _whole_numbers(moe: MoEConfig) -> WholeNumberCodes | None:
    """Returns the codes of experts that are whole numbers; None: they have others, or none."""
    codes = moe.bank.form.whole_numbers if isinstance(moe.bank.form, Storable) else None
    return None if moe.bank.has_base else codes


def _in_words(form: WholeNumberCodes) -> str:
    return f"{form.bits} bits, {form.group_size} inputs to a scale"


def _codes_in_common(source: ModelSource, bits: tuple[int, ...]) -> OwnCodes | None:
    """Returns the codes that all experts have; None: they are not alike, or not such as can be written.

    Zero points that lie between codes cannot be written, and those codes are made again.
    """
    forms = {_whole_numbers(source.config.moe(i)) for i in source.config.moe_layers}
    form = forms.pop() if len(forms) == 1 else None
    if form is None or form.bits not in bits:
        return None
    middle = 1 << (form.bits - 1)
    symmetric, least = True, middle
    for zeros in _of_all_experts(source, "zeros") if form.zero_points else ():
        if (zeros % (1 << (8 - form.bits))).any():
            return None
        codes = zeros >> (8 - form.bits)
        symmetric, least = symmetric and bool((codes == middle).all()), min(least, int(codes.min()))
    return OwnCodes(form, symmetric, least)


def _of_all_experts(source: ModelSource, name: str) -> Iterator[np.ndarray]:
    """Yields the leaves of this name of all experts in codes, kernel by kernel."""
    config = source.config
    for i in config.moe_layers:
        for kernel in config.moe(i).expert.shapes(config.d_model):
            yield source.read(f"layers/{i}/mlp/experts/delta/{kernel}/{name}")


def _stays(source: ModelSource, written: ModelConfig, encoder: Encoder | None, own: OwnCodes | None) -> bool:
    """Whether the experts' codes are written as they are: in the same groups, of experts of the same shape."""
    config = source.config
    if own is None or not isinstance(encoder, WholeNumbers) or encoder.bits != own.codes.bits:
        return False
    size = own.codes.group_size
    inputs = {rows for i in config.moe_layers for rows, _ in config.moe(i).expert.shapes(config.d_model).values()}
    same_groups = encoder.group_size == size or (encoder.group_size is None and size >= max(inputs))
    same = all(config.moe(i).expert.dim == written.moe(i).expert.dim for i in config.moe_layers)
    return same_groups and same and config.moe_layers == written.moe_layers


def stored_codes(source: ModelSource, path: str) -> Iterator[Codes]:
    """Yields the codes of all experts of a kernel as they are stored.

    Raises:
      InputError: if groups are on the odd grid, which no format of other libraries has.
    """
    block, _, name = path.removesuffix("/kernel").partition("/experts/")
    folder = f"{block}/experts/delta/{name}"
    codes, scales = source.read(f"{folder}/codes"), source.read(f"{folder}/scales")
    form = _whole_numbers(source.config.moe(int(path.split("/")[1])))
    assert form is not None
    if form.zero_points:
        zeros = source.read(f"{folder}/zeros") >> (8 - form.bits)
        return map(Codes, codes, scales, zeros)
    if (scales.astype(np.float32) > 0).any():
        raise InputError(
            f"{folder}: its codes stand for odd multiples of half a step, which no other library has; compress with "
            "--levels even, or give the model as it was before"
        )
    return map(Codes, codes, scales)


# Kernels of a module that vLLM reads as one matrix.
_READ_AS_ONE = (("q", "k", "v"), ("q_down", "kv_down"), ("gate", "up"))

Parts = Callable[[str], Iterator[tuple[int | None, np.ndarray]]]
"""Returns the kernels of a leaf, by expert."""


class SharedScales:
    """The largest magnitudes of kernels that are read as one matrix: of their scales vLLM takes one for all."""

    def __init__(self) -> None:
        self._paths: tuple[str, ...] = ()
        self._largest: dict[int | None, float] = {}

    def largest(self, path: str, known: Mapping[str, object], parts: Parts) -> Mapping[int | None, float]:
        """Returns them by expert, for a kernel and the `known` ones that are read with it; keeps those found last."""
        module, _, name = path.removesuffix("/kernel").rpartition("/")
        together = next((names for names in _READ_AS_ONE if name in names), (name,))
        paths = tuple(one for other in together if (one := f"{module}/{other}/kernel") in known)
        if paths != self._paths:
            found: dict[int | None, float] = {}
            for one in paths:
                for expert, kernel in parts(one):
                    found[expert] = max(found.get(expert, 0.0), float(np.abs(kernel).max(initial=0)))
            self._paths, self._largest = paths, found
        return self._largest


class CodingErrors:
    """How far codes are from the numbers that they were made of, by part of the model."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, path: str, matrix: np.ndarray, decoded: np.ndarray) -> None:
        """Adds a matrix of a leaf, float32, and what its codes stand for."""
        part = part_of(path)
        assert part is not None
        error, whole = self._sums.get(part, (0.0, 0.0))
        difference = (decoded - matrix).ravel()
        self._sums[part] = error + float(difference @ difference), whole + float(matrix.ravel() @ matrix.ravel())

    def said(self) -> str | None:
        """Returns a line with the relative error of every part that got new codes; None: none did."""
        errors = {part: math.sqrt(error / whole) if whole else 0.0 for part, (error, whole) in self._sums.items()}
        shares = ", ".join(f"{part} {error:.2%}" for part, error in errors.items())
        return f"codes changed, of the norm of the weights: {shares}" if shares else None


Pack = Callable[[ModelSource, ModelConfig], Packing]
"""Returns how a model is written in codes, given it and the config that is written."""
