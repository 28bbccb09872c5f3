"""The hidden states of experts for rows that are sorted by expert."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.experts.devices import part_here
from moe_jax.experts.forms.coding import ByExpert
from moe_jax.experts.forms.kernel_of_codes import Coded
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.shapes import BASE, ORIGIN, Arrays, Matrix, Part, Window
from moe_jax.functional.dense import hidden
from moe_jax.functional.gated import GATE, UP, gated_product
from moe_jax.functional.token_dispatch import row_biases
from moe_jax.kernels.by_platform import PRODUCT, Bound
from moe_jax.kernels.tpu.fused_tile import FusedTile

_BELOW_BASE = f"{BASE}/"


class Kernels(NamedTuple):
    """The kernels of one matrix of all experts.

    Attributes:
      form: the form of the kernels.
      matrix: the matrix.
      arrays: by name, stacked over the experts; a base, if there is one, is the array `BASE`, or if it is in codes the
        arrays with names below it.
      base: the form of a base in codes; None: there is no such base.
    """

    form: KernelForm
    matrix: Matrix
    arrays: dict[str, Array]
    base: Coded | None = None

    def is_trained(self, path: str) -> bool:
        """Whether an array has a gradient."""
        if self.base is not None and path.startswith(_BELOW_BASE):
            return self.base.is_trained(path.removeprefix(_BELOW_BASE), self.arrays[path])
        return path == BASE or self.form.is_trained(path, self.arrays[path])

    def over(self, base: Coded, arrays: Arrays) -> "Kernels":
        """Returns these kernels over a base in codes, given the arrays of its kernel."""
        return self._replace(base=base, arrays=self.arrays | {_BELOW_BASE + path: arrays[path] for path in arrays})

    def specs(self) -> dict[str, P]:
        """How the arrays are split inside `shard_map`."""
        split = self.matrix.split
        specs = self.form.specs(split)
        if BASE in self.arrays:
            specs[BASE] = P("tensor", None) if split == "in" else P(None, "tensor")
        if self.base is not None:
            specs |= {_BELOW_BASE + path: spec for path, spec in self.base.specs_of_one(split).items()}
        return specs

    def stored_rounded_specs(self) -> dict[str, P]:
        """How the arrays are stored that are rounded before they are gathered; see `KernelForm.rounded_leaves`.

        A base is one of them: what is added to it in float32 is rounded to the same dtype in the end.
        """
        split = self.matrix.split
        stored = self.form.stored_specs(split)
        specs = {path: stored[path] for path in self.form.rounded_leaves}
        if BASE in self.arrays:
            specs[BASE] = P("tensor", "fsdp") if split == "in" else P("fsdp", "tensor")
        return specs

    def product(self, rows: Float[Array, "M i"], group_sizes: Int[Array, " E"], part: Part | None) -> Array:
        """Multiplies every row with the kernel of its expert."""
        if self.base is None:
            return self.form.grouped(rows, self.arrays, group_sizes, self.matrix, part)
        base, matrix = self.base, self.matrix

        def product(rows: Array, arrays: dict[str, Array], group_sizes: Array) -> Array:
            own = {path: array for path, array in arrays.items() if not path.startswith(_BELOW_BASE)}
            codes = {path.removeprefix(_BELOW_BASE): array for path, array in arrays.items() if path not in own}
            window = Window.all(matrix.shape)
            if part is not None:
                window = Window(part.shape, matrix.shape, part.origin, 0, part.shape[1])
            return self.form.grouped(rows, own | {BASE: base.tile(None, codes, window)}, group_sizes, matrix, part)

        # Made again for the gradient: kept for that, the kernels of all layers would be in memory at once. The name is
        # that of products, so that what is told to keep these keeps this one.
        return checkpoint_name(jax.checkpoint(product)(rows, self.arrays, group_sizes), PRODUCT)


def is_of_base(path: str) -> bool:
    """Whether an array belongs to the base, and is not stacked over the experts."""
    return path == BASE or path.startswith(_BELOW_BASE)


class FFNs(NamedTuple):
    """The FFNs of all experts of a layer, or of those of a device.

    Attributes:
      kernels: `up`, `down`, and `gate` if gated.
      biases: any of them by the same names.
      activation: of the FFNs.
      parts: the parts of the kernels that the arrays describe, on a device of a mesh; empty: the whole kernels.
    """

    kernels: Mapping[str, Kernels]
    biases: Mapping[str, Float[Array, "E o"]]
    activation: str
    parts: Mapping[str, Part] = MappingProxyType({})

    @property
    def num_experts(self) -> int:
        """The number of experts in the arrays."""
        form = self.kernels["up"].form
        if isinstance(form, ByExpert):
            return form.num_experts
        return next(array for name, array in self.kernels["up"].arrays.items() if not is_of_base(name)).shape[0]

    def with_arrays(self, arrays: Mapping[str, dict[str, Array]], biases: Mapping[str, Array]) -> "FFNs":
        """The same of other arrays, by the names of the kernels."""
        kernels = {name: kernel._replace(arrays=arrays[name]) for name, kernel in self.kernels.items()}
        return self._replace(kernels=kernels, biases=biases)

    def in_parts(self) -> "FFNs":
        """The same inside `shard_map`: the arrays describe the parts of the kernels that this device holds."""
        return self._replace(parts={name: part_here(kernel.matrix) for name, kernel in self.kernels.items()})

    def project(self, name: str, rows: Float[Array, "M i"], group_sizes: Int[Array, " E"]) -> Float[Array, "M o"]:
        """Multiplies every row, sorted by expert, with the kernel of its expert, and adds its bias if there is one."""
        y = self.kernels[name].product(rows, group_sizes, self.parts.get(name))
        return y + row_biases(self.biases[name], group_sizes, rows.shape[0]) if name in self.biases else y


def hidden_rows(rows: Float[Array, "M d"], experts: FFNs, group_sizes: Int[Array, " E"]) -> Float[Array, "M f"]:
    """`act(rows W_gate) * (rows W_up)`, or `act(rows W_up)` if there is no gate.

    Args:
      rows: sorted by expert.
      experts: theirs.
      group_sizes: number of rows of every expert.
    """
    kernels, biases, activation, parts = experts
    of_codes = [name for name in (GATE, UP) if name in kernels and kernels[name].base is not None]
    if GATE in kernels and not biases.keys() & {GATE, UP} and not of_codes:
        gate, up = (_Stored.of(kernels[name], parts.get(name), group_sizes) for name in (GATE, UP))
        if not isinstance(gate.tile, str) and not isinstance(up.tile, str):
            trained, fixed = {GATE: gate.trained, UP: up.trained}, {GATE: gate.fixed, UP: up.fixed}
            apart = Bound(_apart, gate=gate.static, up=up.static, activation=activation)
            return gated_product(
                rows, trained, fixed, group_sizes, apart, (gate.tile, up.tile), up.static.shape, activation
            )
    gate = experts.project(GATE, rows, group_sizes) if GATE in kernels else None
    return hidden(experts.project(UP, rows, group_sizes), gate, activation)


class _Static(NamedTuple):
    """Kernels without their arrays; `part` is the shape of the part that the device has, or None."""

    form: KernelForm
    matrix: Matrix
    part: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape if self.part is None else self.part


class _Stored(NamedTuple):
    """Kernels with those arrays apart that have a gradient, as `gated_product` takes them."""

    static: _Static
    tile: FusedTile | str
    trained: dict[str, Array]
    fixed: dict[str, Array]

    @classmethod
    def of(cls, kernels: Kernels, part: Part | None, group_sizes: Array) -> "_Stored":
        form, matrix, arrays, _ = kernels
        static = _Static(form, matrix, None if part is None else part.shape)
        trained = {name: array for name, array in arrays.items() if name == BASE or form.is_trained(name, array)}
        fixed = {name: array for name, array in arrays.items() if name not in trained}
        if part is not None:
            fixed[ORIGIN] = jnp.broadcast_to(part.origin[None, :], (group_sizes.shape[0], 2))
        return cls(static, FormTiles(form, static.shape, matrix.shape).fused(), trained, fixed)


def _apart(
    rows: Array, trained: Any, fixed: Any, group_sizes: Array, *, gate: _Static, up: _Static, activation: str
) -> Array:
    """Makes the hidden rows as two products."""
    products = []
    for name, (form, matrix, shape) in ((GATE, gate), (UP, up)):
        arrays = trained[name] | fixed[name]
        part = None if shape is None else Part(shape, arrays.pop(ORIGIN)[0])
        products.append(form.grouped(rows, arrays, group_sizes, matrix, part))
    return hidden(products[1], products[0], activation)
