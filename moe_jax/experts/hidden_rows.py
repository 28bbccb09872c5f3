"""The hidden states of experts for rows that are sorted by expert."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.matrix import BASE, ORIGIN, Matrix, Part
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.functional.dispatch import row_biases
from moe_jax.functional.ffn import hidden
from moe_jax.functional.gated import GATE, UP, gated_product
from moe_jax.kernels.deferred import Bound
from moe_jax.kernels.tpu.fused_tile import FusedTile


class Kernels(NamedTuple):
    """The kernels of one matrix of all experts.

    Attributes:
      form: the form of the kernels.
      matrix: the matrix.
      arrays: by name, stacked over the experts; a base, if there is one, is the array `BASE`.
    """

    form: KernelForm
    matrix: Matrix
    arrays: dict[str, Array]

    def specs(self) -> dict[str, P]:
        """How the arrays are split inside `shard_map`."""
        split = self.matrix.split
        specs = self.form.specs(split)
        if BASE in self.arrays:
            specs[BASE] = P("tensor", None) if split == "in" else P(None, "tensor")
        return specs

    def stored_rounded_specs(self) -> dict[str, P]:
        """How the arrays are stored that are rounded before they are gathered; see `KernelForm.rounded_specs`.

        A base is one of them: what is added to it in float32 is rounded to the same dtype in the end.
        """
        split = self.matrix.split
        specs = self.form.rounded_specs(split)
        if BASE in self.arrays:
            specs[BASE] = P("tensor", "fsdp") if split == "in" else P("fsdp", "tensor")
        return specs

    def project(
        self,
        rows: Float[Array, "M i"],
        bias: Float[Array, "E o"] | None,
        group_sizes: Int[Array, " E"],
        part: Part | None,
    ) -> Float[Array, "M o"]:
        """Multiplies every row with the kernel of its expert, and adds its bias if there is one."""
        y = self.form.grouped(rows, self.arrays, group_sizes, self.matrix, part)
        return y if bias is None else y + row_biases(bias, group_sizes, rows.shape[0])


def hidden_rows(
    rows: Float[Array, "M d"],
    kernels: Mapping[str, Kernels],
    biases: Mapping[str, Float[Array, "E o"]],
    group_sizes: Int[Array, " E"],
    parts: Mapping[str, Part],
    activation: str,
) -> Float[Array, "M f"]:
    """`act(rows W_gate) * (rows W_up)`, or `act(rows W_up)` if there is no gate.

    Args:
      rows: sorted by expert.
      kernels: `up`, and `gate` if gated.
      biases: any of them by the same names.
      group_sizes: number of rows of every expert.
      parts: the parts of the kernels that the arrays describe; empty: the whole kernels.
      activation: of the FFN.
    """
    if GATE in kernels and not biases.keys() & {GATE, UP}:
        gate, up = (_Stored.of(kernels[name], parts.get(name), group_sizes) for name in (GATE, UP))
        if not isinstance(gate.tile, str) and not isinstance(up.tile, str):
            trained, fixed = {GATE: gate.trained, UP: up.trained}, {GATE: gate.fixed, UP: up.fixed}
            apart = Bound(_apart, gate=gate.static, up=up.static, activation=activation)
            return gated_product(
                rows, trained, fixed, group_sizes, apart, (gate.tile, up.tile), up.static.shape, activation
            )

    def project(name: str) -> Array:
        return kernels[name].project(rows, biases.get(name), group_sizes, parts.get(name))

    gate = project(GATE) if GATE in kernels else None
    return hidden(project(UP), gate, activation)


class _Static(NamedTuple):
    """What is known of kernels without their arrays; `part` is the shape of the part that the device has, or None."""

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
        form, matrix, arrays = kernels
        static = _Static(form, matrix, None if part is None else part.shape)
        trained = {name: array for name, array in arrays.items() if name == BASE or form.is_trained(name, array)}
        fixed = {name: array for name, array in arrays.items() if name not in trained}
        if part is not None:
            fixed[ORIGIN] = jnp.broadcast_to(part.origin[None, :], (group_sizes.shape[0], 2))
        return cls(static, form.fused_tile(static.shape, matrix.shape), trained, fixed)


def _apart(
    rows: Array,
    trained: Mapping[str, dict[str, Array]],
    fixed: Mapping[str, dict[str, Array]],
    group_sizes: Array,
    *,
    gate: _Static,
    up: _Static,
    activation: str,
) -> Array:
    """The same as two products."""
    products = []
    for name, (form, matrix, shape) in ((GATE, gate), (UP, up)):
        arrays = trained[name] | fixed[name]
        part = None if shape is None else Part(shape, arrays.pop(ORIGIN)[0])
        products.append(form.grouped(rows, arrays, group_sizes, matrix, part))
    return hidden(products[1], products[0], activation)
