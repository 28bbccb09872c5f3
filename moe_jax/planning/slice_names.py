"""Google's names of TPU slices, such as `v5p-16`, and the topologies that they stand for."""

import re
from collections.abc import Iterator

from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError, shown

_NAME = re.compile(r"(v4|v5p|v5e|v5litepod|v6e)-([1-9]\d{0,5})")
SIDES = {"v4": 3, "v5p": 3, "v5e": 2, "v6e": 2}
# Chips of the smallest slice but one chip alone, and of the largest that is a power of two.
_SIZES = {"v4": (4, 4096), "v5p": (4, 4096), "v5e": (4, 256), "v6e": (4, 256)}
_COUNTED_BY_CORE = ("v4", "v5p")  # of which a chip has two


def topology_of(platform: str) -> str:
    """Returns the topology of a slice in Google's name: `v5p:2x2x2` of `v5p-16`, `v5e:4x4` of `v5litepod-16`.

    What is named otherwise is returned as it is. Raises `InputError` for a number of chips that is no power of two:
    there are several such slices, or none.
    """
    match = _NAME.fullmatch(platform)
    if match is None:
        return platform
    chip, count = match[1].replace("v5litepod", "v5e"), int(match[2])
    per_chip = 2 if chip in _COUNTED_BY_CORE else 1
    chips, sides = count // per_chip, SIDES[chip]
    if count % per_chip or not chips or chips & (chips - 1):
        example = "v5p:2x2x4" if sides == 3 else f"{chip}:4x4"
        raise InputError(f"{shown(platform)}: not a power of two of chips; name the topology, as in {example}")
    least, longer = divmod(chips.bit_length() - 1, sides)
    lengths = [2**least] * (sides - longer) + [2 ** (least + 1)] * longer
    ordered = sorted(lengths, key=lambda length: (length == 1, length))  # `2x2x1`, as the compiler has it
    return f"{chip}:{'x'.join(map(str, ordered))}"


def larger_slices(topology: str, count: int) -> Iterator[str]:
    """Yields the slices with more chips than `count`, in powers of two, of the same chip; nothing if none is known.

    GPUs are on hosts of 8, as those of `h100:2x8` are, and at most 4096.
    """
    name = topology.partition(":")[0]
    is_gpu = CHIPS[name].platform == "gpu"
    least, most = (1, 4096) if is_gpu else _SIZES.get(name, (1, 0))
    devices = 1 << count.bit_length()
    while devices <= most:
        if devices >= least and is_gpu:
            yield f"{name}:{devices}" if devices <= 8 else f"{name}:{devices // 8}x8"
        elif devices >= least:
            yield topology_of(f"{name}-{devices * (2 if name in _COUNTED_BY_CORE else 1)}")
        devices *= 2
