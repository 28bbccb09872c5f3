"""How a shared base is stored, if not in the dtype of the model."""

import dataclasses
from typing import Literal, get_args

from moe_jax.core.errors import InputError, check_member
from moe_jax.experts.forms.kinds.kernel_of_codes import Coded, CodedLevels, CodedNF4
from moe_jax.experts.forms.kinds.nf4 import NF4
from moe_jax.experts.forms.kinds.quantized import (
    TABLE_BITS,
    Quantized,
    check_group_size,
    check_scale_bits,
    more_in_words,
    own_bits,
    own_bits_in_words,
)

Code = Literal["8", "4", "3", "2", "nf4"]
CODES: tuple[str, ...] = get_args(Code)
DEFAULT_GROUP_SIZE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseCodes:
    """The kernels of a base in codes, which the experts' own parts are added to (methods.md 4).

        >>> from moe_jax.experts import BaseCodes
        >>> BaseCodes(code="4").group_size, BaseCodes(code="nf4").describe()
        (128, 'NF4 codes')

    Attributes:
      code: bits of a code, 8, 4, 3 or 2, with a bfloat16 scale per group; or `nf4` (see `functional.codes`).
      group_size: entries along the input axis that share a scale, a multiple of 8, by default 128. NF4 has its own.
      table: every kernel of 4, 3 or 2 bits has a table of levels of its own.
      scale_bits: of a scale: 16, or 8 (see `functional.codes`). NF4 has its own.
      gate_bits, up_bits, down_bits: bits of the codes of these matrices; None: as `code` says; 0: these matrices have
        no base, and experts have them for themselves. Not with NF4.
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
        for bits in self._own_bits.values():
            check_member("code of a base", str(bits), (*CODES, "0"))
            if self.code == "nf4":
                raise InputError(f"a base in NF4 codes has no matrices of {bits} bits")
        if self.table and not self.may_have_table:
            raise InputError(f"a base in codes {self.code!r} has no table of levels: only 4, 3 or 2 bits have")

    @property
    def _own_bits(self) -> dict[str, int]:
        return own_bits(self)

    def has(self, name: str) -> bool:
        """Whether the matrix of this name has a base."""
        return self._own_bits.get(name) != 0

    @property
    def may_have_table(self) -> bool:
        """Whether codes are of so few bits that their levels may be those of a table."""
        return any(code in map(str, TABLE_BITS) for code in (self.code, *map(str, self._own_bits.values())))

    @property
    def form(self) -> Coded:
        """The form of a kernel, of the matrices that have a base."""
        if self.group_size is None:
            return CodedNF4(codes=NF4())
        form = Quantized(
            bits=int(self.code),
            group_size=self.group_size,
            table=self.table,
            scale_bits=self.scale_bits,
            gate_bits=self.gate_bits or None,
            up_bits=self.up_bits or None,
            down_bits=self.down_bits or None,
        )
        return CodedLevels(codes=form)

    @property
    def adjective(self) -> str:
        """The codes in one word, such as `4-bit`."""
        if self.group_size is None:
            return "NF4"
        return f"{self.code}-bit{own_bits_in_words(self)}"

    def describe(self) -> str:
        """In words, for tables."""
        groups = "" if self.group_size in (None, DEFAULT_GROUP_SIZE) else f" in groups of {self.group_size}"
        return f"{self.adjective} codes{groups}{more_in_words(self)}"
