"""Options of codes of a few bits, and their limits: bits, groups, scales and levels.

The forms of experts and the methods of compression have these options; the command line checks them without JAX.
"""

import dataclasses
from typing import Literal, get_args

from moe_jax.core.errors import InputError, check_member, shown

BITS = (8, 4, 3, 2, 1)
TABLE_BITS = (4, 3, 2)
VALUE_BITS = (8, 4, 3, 2)
"""Bits of a code; of a code whose levels may be those of a table; of a value that stays in sparse experts."""
MAX_GROUP_SIZE = 2**16
"""Above the width of any known model and of its FFNs."""
DEFAULT_GROUP_SIZE = 128
"""Number of codes that share a scale, where nothing else is asked for."""
Code = Literal["8", "4", "3", "2", "nf4"]
CODES: tuple[str, ...] = get_args(Code)
"""Codes of a shared base."""
Levels = Literal["any", "even", "fitted"]
LEVELS: tuple[str, ...] = get_args(Levels)
"""Levels of codes: per group the better of two grids, always the one with a zero, or a table fitted to every kernel."""


class CodesOptions:
    """The options that codes of experts and of a shared base have in common; fields of dataclasses."""

    table: bool
    scale_bits: int
    gate_bits: int | None
    up_bits: int | None
    down_bits: int | None

    @property
    def own_bits(self) -> dict[str, int]:
        """Bits of the matrices that have others than most."""
        given = {"gate": self.gate_bits, "up": self.up_bits, "down": self.down_bits}
        return {name: bits for name, bits in given.items() if bits is not None}

    def own_bits_in_words(self) -> str:
        """Returns such as ` (gate 2, down 4)`, or ` (down none)` for a base; empty if all matrices are alike."""
        own = ", ".join(f"{name} {bits or 'none'}" for name, bits in self.own_bits.items())
        return own and f" ({own})"

    def more_in_words(self) -> str:
        """Returns the other options of codes in words, such as `, 8-bit scales`."""
        scales = "" if self.scale_bits == 16 else f", {self.scale_bits}-bit scales"
        return (", fitted levels" if self.table else "") + scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertCodesOptions(CodesOptions):
    """The options of experts in codes.

    Attributes:
      bits: per code: 8, 4, 3, 2 or 1.
      group_size: the number of entries along the input axis that share a scale; None: one scale for the whole kernel.
      table: the levels of codes are those of a `table` [E, 2^bits] of every kernel; of matrices of 4, 3 or 2 bits.
      scale_bits: of a scale: 16, or 32; or 8: instead of `scales`, `scale_codes` [E, groups, out], and `scale_steps`
        [E, groups, 1].
      zero_points: groups have `zeros` [E, groups, out], zero points of eight bits.
      row_scales: what codes stand for is multiplied by `row_scales` [E, in, 1].
      gate_bits, up_bits, down_bits: of the kernels of these matrices; None: `bits`.

    Raises:
      InputError: for a value out of range, or options that do not go together.
    """

    bits: int
    group_size: int | None = None
    table: bool = False
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False
    gate_bits: int | None = None
    up_bits: int | None = None
    down_bits: int | None = None

    def __post_init__(self) -> None:
        for bits in (self.bits, *self.own_bits.values()):
            if bits not in BITS:
                raise InputError(f"bits={bits} must be one of {', '.join(map(str, BITS))}")
        if self.table and not {self.bits, *self.own_bits.values()} & set(TABLE_BITS):
            raise InputError(f"bits={self.bits} have no table of levels: only 4, 3 or 2 bits have")
        check_group_size(self.group_size)
        check_scale_bits(self.scale_bits)
        if self.scale_bits == 8 and self.group_size is None:
            raise InputError("scale_bits=8 go with groups: one scale for a whole kernel takes next to nothing")
        if self.zero_points and (self.table or self.group_size is None):
            raise InputError("zero points go with groups, and with levels at equal distances (no table)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseCodesOptions(CodesOptions):
    """The options of a shared base in codes (methods.md 4).

    Attributes:
      code: bits of a code, 8, 4, 3 or 2, with a bfloat16 scale per group; or `nf4` (see `functional.codes`).
      group_size: entries along the input axis that share a scale, a multiple of 8, by default 128. NF4 has its own.
      table: every kernel of 4, 3 or 2 bits has a table of levels of its own.
      scale_bits: of a scale: 32, 16, or 8 (see `functional.codes`). NF4 has its own.
      gate_bits, up_bits, down_bits: bits of the codes of these matrices; None: as `code` says; 0: these matrices have
        no base, and experts have them for themselves. Not with NF4.

    Raises:
      InputError: for a value out of range, or options that do not go together.
    """

    code: Code
    group_size: int | None = None
    table: bool = False
    scale_bits: int = 16
    gate_bits: int | None = None
    up_bits: int | None = None
    down_bits: int | None = None

    def __post_init__(self) -> None:
        check_member("code of a base", self.code, CODES)
        if self.code == "nf4" and self.group_size is not None:
            raise InputError(f"group_size={self.group_size} does not go with an NF4 base, which has blocks of its own")
        if self.code != "nf4":
            object.__setattr__(self, "group_size", DEFAULT_GROUP_SIZE if self.group_size is None else self.group_size)
        check_group_size(self.group_size)
        check_scale_bits(self.scale_bits)
        if self.code == "nf4" and self.scale_bits != 16:
            raise InputError(f"scale_bits={self.scale_bits} does not go with an NF4 base, which has scales of its own")
        for bits in self.own_bits.values():
            check_member("code of a base", str(bits), (*CODES, "0"))
            if self.code == "nf4":
                raise InputError(f"a base in NF4 codes has no matrices of {bits} bits")
        if self.table and not self.may_have_table:
            raise InputError(f"a base in codes {self.code!r} has no table of levels: only 4, 3 or 2 bits have")

    @property
    def may_have_table(self) -> bool:
        """Whether codes are of so few bits that their levels may be those of a table."""
        return any(code in map(str, TABLE_BITS) for code in (self.code, *map(str, self.own_bits.values())))


def check_scale_bits(scale_bits: int) -> None:
    """Raises `InputError` unless scales can have so many bits."""
    if scale_bits not in (32, 16, 8):
        raise InputError(f"scale_bits={scale_bits} must be 16 or 8, or 32 for codes that have such scales already")


def check_group_size(group_size: int | None) -> None:
    """Raises `InputError` unless the group size is a multiple of 8, so that groups begin at whole bytes.

    Kernels are filled up to whole groups: more than `MAX_GROUP_SIZE` would only take memory.
    """
    if group_size is not None and (not 8 <= group_size <= MAX_GROUP_SIZE or group_size % 8):
        raise InputError(
            f"group_size={shown(group_size)} must be a multiple of 8 and at most {MAX_GROUP_SIZE:,}, "
            "or null for one per kernel"
        )


def check_levels(levels: str, bits: int, *, zero_points: bool = False) -> None:
    """Raises `InputError` if codes of so many bits have no such levels."""
    check_member("levels", levels, LEVELS)
    if bits == 1 and levels == "even":
        raise InputError("levels=even: one bit has no zero; choose 2 bits or more")
    if levels == "fitted" and bits not in TABLE_BITS:
        raise InputError(f"bits={bits} have no table of levels: only 4, 3 or 2 bits have")
    if zero_points and levels != "any":
        raise InputError(f"levels={levels} do not go with zero points, which say where levels lie")
