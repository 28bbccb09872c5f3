"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them (https://pypi.org/project/gptqmodel).

In place of the `weight` [out, in] of a module are, of b bits:

- `qweight` Int32[in * b / 32, out]: codes along the inputs, in a stream of bits that begins with the lowest one of a
  word. In three bits, 32 codes take three words, and two of them lie in two.
- `qzeros` Int32[groups, out * b / 32]: zero points, packed in the same way along the outputs.
- `scales` [groups, out].
- `g_idx` Int32[in]: the group of every input. Without `desc_act` they may be in order, and it may be missing.

Checkpoints of the format `gptq` have zero points that are one less. Of 2, 4, or 8 bits one was taken from all fields of
a word by a single subtraction, so a zero point of 0 borrowed from the next one, and an addition gives back both. In
`gptq_v2` they are stored as they are; here it is written only for zero points of 0, with which not all readers add so.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_jax.conversion.formats.container import Container, Kernel, OwnCodes
from moe_jax.conversion.formats.encoders import Codes, Encoder, Quantise, WholeNumbers, in_words
from moe_jax.conversion.formats.grouped_codes import CODES, ORDER, SCALES, ZEROS, GroupedCodes, module_of
from moe_jax.conversion.formats.integer_rows import WORD, unpacked
from moe_jax.conversion.formats.quantized_format import CodedMatrix, QuantizationKeys, QuantizedFormat, name_pattern
from moe_jax.conversion.safetensors_file import PlannedTensor
from moe_jax.conversion.table import Ignored
from moe_jax.conversion.tensors import DTYPE_NAMES, DTYPES, ReadRows, TensorEntry, TensorFiles
from moe_jax.core.errors import InputError, shown
from moe_jax.functional.codes import pack

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_BIAS, _WEIGHT = ".bias", ".weight"

# Of a rule for some modules: what else was set while they were quantised, and changes nothing about what is stored.
_HARMLESS = (
    "act_group_aware", "damp_auto_increment", "damp_percent", "desc_act", "mse", "static_groups", "sym",
    "true_sequential",
)  # fmt: skip


class Packing(NamedTuple):
    """How the codes of a module are packed: their bits, and the inputs that share a scale; None: all of them."""

    bits: int
    group: int | None


class Rule(NamedTuple):
    """How the modules are packed whose names a pattern matches from their beginning on; None: they have no codes."""

    pattern: re.Pattern[str]
    packing: Packing | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQCodes(GroupedCodes):
    """A matrix whose transpose is stored, packed along the inputs.

    Attributes:
      is_less: whether stored zero points are one less than they are.
    """

    is_by_rows = False
    is_less: bool

    def codes_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        words = read(self.codes, 0, self.codes.shape[0])
        return unpacked(words[:, start:stop].T, self.bits, self.inputs)

    def zeros_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        words = read(self.zeros, 0, self.zeros.shape[0])
        most = (1 << self.bits) - 1
        if self.is_less and WORD % self.bits == 0:
            words = (words.view("<u4") + np.uint32((1 << WORD) // most)).view("<i4")
        zeros = unpacked(words, self.bits, self.scales.shape[1])[:, start:stop].T
        if self.is_less and WORD % self.bits:
            middle = np.int8(1 << (self.bits - 1))
            zeros = (zeros + middle + np.int8(1) & np.int8(most)) - middle
        return zeros

    def scales_of(self, read: ReadRows, start: int, stop: int) -> np.ndarray:
        return read(self.scales, 0, self.scales.shape[0])[:, start:stop].T


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQ(QuantizedFormat):
    """Attributes:
    packing: of modules that no rule is for.
    rules: for some modules; the first that matches holds.
    is_less: whether stored zero points are one less than they are.
    is_ordered: whether the groups of inputs are in order.
    """

    methods = ("gptq",)
    packing: Packing
    rules: tuple[Rule, ...]
    is_less: bool
    is_ordered: bool

    @classmethod
    def read(cls, keys: QuantizationKeys) -> "GPTQ":
        packing = _packing(keys)
        if keys.choice("is_marlin_format", (True, False, None)):
            raise InputError(f"{keys.where}: codes in Marlin's order are not read; convert the checkpoint they are of")
        keys.choice("pack_dtype", ("int32", None))
        if keys.data.get("adapter") is not None:
            raise InputError(f"{keys.where}: an 'adapter' beside the codes is not read; merge it first")
        return cls(
            packing=packing,
            rules=_rules(keys, packing),
            is_less=_format(keys) == "gptq",
            is_ordered=not keys.choice("desc_act", (True, False, None)),
        )

    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator[CodedMatrix]:
        for name in tensors:
            module, _, part = name.rpartition(".")
            if part == CODES:
                yield self._matrix(name, CodedMatrix(f"{module}.weight", tensors))

    def ignored(self, tensors: Mapping[str, TensorEntry]) -> Iterator[Ignored]:
        # AutoGPTQ gave every module that it quantised a bias, and so have many published checkpoints of Llama and Qwen.
        files, are_zero = TensorFiles(), dict[str, bool]()
        for name, entry in tensors.items():
            module = name.removesuffix(_BIAS)
            if name.endswith(_BIAS) and f"{module}.{CODES}" in tensors and entry.dtype in DTYPES:
                kind = module.rpartition(".")[2]
                is_row = len(entry.shape) == 1 and entry.strides is None
                is_zero = is_row and not files.rows(entry, 0, 1).any()
                are_zero[kind] = are_zero.get(kind, True) and is_zero
        for kind in (kind for kind, are in are_zero.items() if are):
            yield Ignored(rf"(.*\.)?{re.escape(kind)}\.bias", "a bias of zeros, as AutoGPTQ adds it to what has none")

    def _matrix(self, name: str, matrix: CodedMatrix) -> CodedMatrix:
        module = module_of(name, matrix)
        bits, group = self._packing(module)
        codes = matrix.take(name, "I32")
        if len(codes.shape) != 2:
            raise InputError(f"{name} has shape {shown(list(codes.shape))}, expected that of codes of a matrix")
        order = matrix.find(f"{module}.{ORDER}", "I32")
        if order is not None and len(order.shape) != 1:
            raise InputError(f"{module}.{ORDER} has shape {shown(list(order.shape))}, expected a group for every input")
        if order is None and not self.is_ordered:
            raise InputError(f"{module}.{ORDER} is missing, without which codes in 'desc_act' have no groups; fetch it")
        inputs = codes.shape[0] * WORD // bits if order is None else order.shape[0]
        outputs = codes.shape[1]
        group = min(group or inputs, inputs) or 1
        groups = math.ceil(inputs / group)
        zeros = matrix.take(f"{module}.{ZEROS}", "I32")
        for entry, part, shape in (
            (codes, CODES, (math.ceil(inputs * bits / WORD), outputs)),
            (zeros, ZEROS, (groups, math.ceil(outputs * bits / WORD))),
        ):
            if entry.shape != shape:
                raise InputError(
                    f"{module}.{part} has shape {shown(list(entry.shape))}, expected {shown(list(shape))} of {bits} "
                    f"bits in groups of {group}; if only this module differs, say so in 'dynamic' of config.json"
                )
        rows = GPTQCodes(
            module=module,
            bits=bits,
            inputs=inputs,
            group=group,
            codes=codes,
            zeros=zeros,
            scales=matrix.take(f"{module}.{SCALES}", *DTYPES, shape=[(groups, outputs)]),
            order=order,
            is_ordered=self.is_ordered,
            is_less=self.is_less,
        )
        return matrix.made((outputs, inputs), rows, f"gptq{bits}")

    def _packing(self, module: str) -> Packing:
        found = next((rule.packing for rule in self.rules if rule.pattern.match(module)), self.packing)
        if found is None:
            raise InputError(
                f"{module} has codes, although 'dynamic' of config.json leaves it whole; fetch the checkpoint again"
            )
        return found


def _packing(keys: QuantizationKeys, default: Packing | None = None) -> Packing:
    """Returns the packing that some keys say; where they do not, the default, if there is one."""
    bits = keys.choice("bits", _BITS, default=None if default is None else default.bits)
    if default is not None and "group_size" not in keys.data:
        return Packing(bits, default.group)
    return Packing(bits, keys.group_size(default=128))


def _format(keys: QuantizationKeys) -> str:
    """Returns the name of the format, which is under one of two keys or both."""
    given = [key for key in ("checkpoint_format", "format") if keys.data.get(key) is not None]
    found = {keys.choice(key, _FORMATS) for key in given}
    if len(found) > 1:
        raise InputError(f"{keys.where}: 'format' and 'checkpoint_format' differ, expected one of the two")
    return found.pop() if found else _FORMATS[0]


def _rules(keys: QuantizationKeys, default: Packing) -> tuple[Rule, ...]:
    if not keys.data.get("dynamic"):
        return ()
    rules = keys.inside("dynamic")
    return tuple(_rule(rules, name, given, default) for name, given in rules.data.items())


def _rule(rules: QuantizationKeys, name: str, given: Any, default: Packing) -> Rule:
    pattern = name_pattern(name.removeprefix("-:").removeprefix("+:"), rules.where)
    if name.startswith("-:"):
        return Rule(pattern, None)
    keys = rules.inside(name)
    unread = [key for key in keys.data if key not in ("bits", "group_size", *_HARMLESS)]
    if unread:
        raise InputError(
            f"{rules.where}: the rule {shown(name)} sets {shown(unread[0])}, expected only bits and groups"
        )
    return Rule(pattern, _packing(keys, default))


# --- writing --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQNumbers(WholeNumbers):
    """Whole numbers in the tensors of a GPTQ module.

    Attributes:
      is_less: whether stored zero points are one less than they are.
    """

    is_less: bool = True

    def name_of(self, tensor: str, ending: str) -> str:
        return tensor.removesuffix(_WEIGHT) + ending

    def planned(self, shape: tuple[int, int], scales: np.dtype) -> dict[str, PlannedTensor]:
        (outputs, inputs), size = shape, self.group_size or shape[1]
        for count, what in ((inputs, "inputs"), (outputs, "outputs")):
            if count * self.bits % WORD:
                raise InputError(
                    f"GPTQ has whole words of {WORD} bits, which {count} {what} of {self.bits} do not fill"
                )
        if inputs % size:
            raise InputError(f"{size} inputs to a scale do not divide {inputs}")
        return {
            f".{CODES}": PlannedTensor("I32", (inputs * self.bits // WORD, outputs)),
            f".{ZEROS}": PlannedTensor("I32", (inputs // size, outputs * self.bits // WORD)),
            f".{SCALES}": PlannedTensor(DTYPE_NAMES[scales], (inputs // size, outputs)),
            f".{ORDER}": PlannedTensor("I32", (inputs,)),
        }

    def tensors(self, codes: Codes, shape: tuple[int, ...], scales: np.dtype) -> dict[str, np.ndarray]:
        steps = 2 * codes.scales.astype(np.float32)
        with np.errstate(over="ignore"):
            stored = steps.astype(scales)
        if not np.isfinite(stored.astype(np.float32)).all():
            raise InputError(
                f"a scale of {np.abs(steps).max():.3g} does not fit in {scales}, as GPTQ has them; choose --format "
                "compressed-tensors"
            )
        middle = np.uint8(1 << (self.bits - 1))
        zeros = np.full(steps.shape, middle) if codes.zeros is None else codes.zeros
        packed = np.asarray(pack(jnp.asarray((zeros - np.uint8(self.is_less)).T), self.bits))
        return {
            f".{CODES}": in_words(codes.packed).T,
            f".{ZEROS}": in_words(packed),
            f".{SCALES}": stored,
            f".{ORDER}": np.arange(shape[1], dtype=np.int32) // np.int32(self.group_size or shape[1]),
        }

    def stored(self, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return tensors[f".{CODES}"].T, tensors[f".{SCALES}"].T


class InGPTQ(Container):
    """This format, as it is written."""

    bits = _BITS

    def whole_numbers(self, bits: int, group_size: int | None, quantise: Quantise) -> WholeNumbers:
        return GPTQNumbers(bits=bits, group_size=group_size, quantise=quantise)

    def keeping(self, encoders: Mapping[str, Encoder], own: OwnCodes) -> dict[str, Encoder]:
        is_less = own.least_zero > 0
        return {
            part: dataclasses.replace(encoder, is_less=is_less) if isinstance(encoder, GPTQNumbers) else encoder
            for part, encoder in super().keeping(encoders, own).items()
        }

    def scales(self, dtype: np.dtype) -> np.dtype:
        return np.dtype(np.float16)

    def kept_scales(self, own: OwnCodes, scales: Iterable[np.ndarray]) -> np.dtype | None:
        if all(map(_fit_float16, scales)):
            return None
        return np.dtype(np.float32 if own.codes.scale_bits == 32 else ml_dtypes.bfloat16)

    def describe(self, encoders: Mapping[str, Encoder], kernels: Iterable[Kernel]) -> dict[str, Any]:
        numbers = {part: encoder for part, encoder in encoders.items() if isinstance(encoder, GPTQNumbers)}
        first = next(iter(numbers.values()))
        rules: dict[str, dict[str, int]] = {}
        # The first rule that matches holds: what is whole, such as routers, stands beside what may be in codes.
        for kernel in sorted(kernels, key=lambda kernel: kernel.part is not None):
            if kernel.part is None:
                rules[f"-:{_modules(kernel)}"] = {}
            elif (own := _packing_keys(numbers[kernel.part])) != _packing_keys(first):
                rules[f"+:{_modules(kernel)}"] = own
        return {
            "quant_method": "gptq",
            **_packing_keys(first),
            "sym": all(encoder.symmetric for encoder in numbers.values()),
            "desc_act": False,
            "lm_head": "head" in encoders,
            "checkpoint_format": _FORMATS[0] if first.is_less else _FORMATS[1],
            "pack_dtype": "int32",
            "dynamic": rules,
        }


def _fit_float16(half_steps: np.ndarray) -> bool:
    steps = 2 * half_steps.astype(np.float32)
    with np.errstate(over="ignore"):
        return bool((steps.astype(np.float16).astype(np.float32) == steps).all())


def _packing_keys(numbers: WholeNumbers) -> dict[str, int]:
    return {"bits": numbers.bits, "group_size": -1 if numbers.group_size is None else numbers.group_size}


def _modules(kernel: Kernel) -> str:
    """Returns the regular expression of the modules that a rule is for.

    vLLM joins modules, such as all that give queries, keys and values, and names them otherwise: so it is all that
    stand beside one another. All experts of a layer are one module there, which no rule is for.
    """
    name = kernel.template.removesuffix(_WEIGHT)
    if kernel.path.startswith("vision/"):
        return rf".*\b{re.escape(name.removeprefix('model.').partition('.')[0])}\..*"
    beside, _, last = name.rpartition("{i}.")[2].rpartition(".")
    if "/router/" in kernel.path or not beside:
        return rf".*\b{re.escape(name.rpartition('{i}.')[2])}$"
    return rf".*\b{re.escape(beside)}\.(?!experts$)[^.]+$"
