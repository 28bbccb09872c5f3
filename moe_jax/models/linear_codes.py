"""Linear maps, embedding and head that are stored in codes, as data of a layer and of a model (methods.md 4)."""

import dataclasses
from collections.abc import Sequence

from moe_jax.core.code_options import DEFAULT_GROUP_SIZE
from moe_jax.core.errors import InputError, shown
from moe_jax.core.formatting import short_repr
from moe_jax.experts.forms.kernel_of_codes import Coded, CodedLevels
from moe_jax.experts.forms.quantized import Quantized

EMBED, HEAD = "embed", "lm_head"
EMBEDDING, HEAD_KERNEL = "embed/embedding", "lm_head/kernel"
"""Modules of a model beside its layers, and the leaves of their kernels as long as these are whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCodes:
    """Linear maps whose kernels are stored in the same codes.

    >>> LinearCodes(paths=("attention/q", "attention/k"), bits=4).form.codes.bits
    4

    Attributes:
      paths: of the maps below their layer, such as `attention/q`, `mlp/up` or `mlp/universal/down`; or of the model,
        `lm_head` and `embed`. The embedding is coded as the kernel [d, V] of a head.
      bits: per code: 8, 4, 3, 2 or 1.
      group_size: entries along the input axis that share a scale; None: one scale for the whole kernel.
      table, scale_bits, zero_points, row_scales: as `ExpertCodesOptions` has them.

    Raises:
      InputError: for a value out of range, options that do not go together, or a path that is named twice.
    """

    paths: tuple[str, ...]
    bits: int
    group_size: int | None = DEFAULT_GROUP_SIZE
    table: bool = False
    scale_bits: int = 16
    zero_points: bool = False
    row_scales: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not self.paths or len(set(self.paths)) < len(self.paths):
            raise InputError(f"codes of {shown(list(self.paths))}: name at least one linear map, and each once")
        self.form  # noqa: B018  (checks the options)

    @property
    def form(self) -> Coded:
        """The form of each of these kernels."""
        options = {name: value for name, value in vars(self).items() if name != "paths"}
        return CodedLevels(codes=Quantized(**options))

    def describe(self) -> str:
        """Returns the codes in words."""
        return self.form.codes.describe()


def check_codes(codes: Sequence[LinearCodes]) -> None:
    """Raises `InputError` if a linear map has codes of two kinds."""
    every = [path for one in codes for path in one.paths]
    for path in every:
        if every.count(path) > 1:
            raise InputError(f"{path} has codes of two kinds; a linear map has one")


def codes_of(codes: Sequence[LinearCodes], path: str) -> Coded | None:
    """Returns the form of the linear map with this path; None: it is not in codes."""
    return next((one.form for one in codes if path in one.paths), None)


def joined_codes(by_path: Sequence[tuple[str, LinearCodes]]) -> tuple[LinearCodes, ...]:
    """Returns codes by their paths with those of the same kind together, in the order of the paths."""
    together: dict[LinearCodes, list[str]] = {}
    for path, one in sorted(by_path, key=lambda item: item[0]):
        together.setdefault(dataclasses.replace(one, paths=("",)), []).append(path)
    return tuple(dataclasses.replace(one, paths=tuple(paths)) for one, paths in together.items())
