"""Numbers, counts, names of dtypes and configs, as people write and read them."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from moe_jax.core.errors import InputError, shown

if TYPE_CHECKING:
    import jax

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_bytes(text: str | int, *, flag: str = "") -> int:
    """Returns the bytes of `5GB`, `500 mb`, `1.5GiB` or a plain number; an error names the option that has the value.

    Raises:
      InputError: for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", str(text))
    count = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if count < 1:
        raise InputError(f"{flag} {shown(text)}: expected bytes, such as 12GB, 800MB or 1.5GiB".lstrip())
    return count


def show_bytes(count: int) -> str:
    """Bytes with a decimal unit, as disks are sold: 999 B, 1.2 kB, 93.4 GB."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def show_duration(seconds: float) -> str:
    """`1:02:03`, or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def index_set(indices: Iterable[int]) -> str:
    """Indices in the short form that shells expand: 3, {0..5}, {1..31..2}, {0,3,4}."""
    ordered = sorted(indices)
    if len(ordered) == 1:
        return str(ordered[0])
    step = ordered[1] - ordered[0]
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1, step)):
        return f"{{{ordered[0]}..{ordered[-1]}{f'..{step}' if step > 1 else ''}}}"
    return f"{{{','.join(map(str, ordered))}}}"


def is_parameter(spec: "jax.ShapeDtypeStruct") -> bool:
    """Whether a leaf holds parameters. Integers are positions of sparse deltas, or codes (methods.md 8)."""
    return spec.dtype.kind not in "iu"


def count_parameters(specs: "Iterable[jax.ShapeDtypeStruct]") -> int:
    """Number of parameters in leaves; integers are not counted."""
    return sum(math.prod(spec.shape) for spec in specs if is_parameter(spec))


def count_bytes(specs: "Iterable[jax.ShapeDtypeStruct]") -> int:
    """Number of bytes in leaves, integers included."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


SHORT_NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
}


def full_name(name: str, choices: Collection[str]) -> str:
    """The one of `choices` that a short name of a dtype stands for; `name` itself if it stands for none."""
    full = SHORT_NAMES.get(name, name)
    return full if name not in choices and full in choices else name


def short_repr(self: Any, **texts: str) -> str:
    """Returns a dataclass as the call that makes it, without the fields that have their default: its `__repr__`.

    Of long values, such as lists of numbers, it has the beginning. `texts` has fields by name that are written in
    another way.
    """
    written = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING or value != default:
            text = repr(value) if dataclasses.is_dataclass(value) else shown(value)
            written.append(f"{field.name}={texts.get(field.name, text)}")
    return f"{type(self).__name__}({', '.join(written)})"
