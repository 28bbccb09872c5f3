"""Experts of one layer in codes of different bits, around one base or without one (methods.md 4, 5)."""

import collections
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.experts.bank import KernelBank
from moe_jax.experts.devices import Platform
from moe_jax.experts.forms.coding import ByExpert, Own, below, folder_of_part
from moe_jax.experts.forms.optional import CostModel
from moe_jax.experts.forms.protocol import KernelForm, register
from moe_jax.experts.forms.quantized import Quantized
from moe_jax.experts.hidden_rows import FFNs, Kernels
from moe_jax.experts.shapes import Matrix, Split
from moe_jax.functional.routing.token_choices import NO_EXPERT, Routing, renumbered

MAX_PARTS = 4


class MixedBank(KernelBank):
    """Every part of the experts is applied to what is routed to it, and the outputs are summed.

        >>> import moe_jax
        >>> from moe_jax.experts.forms import Quantized
        >>> few, many = Quantized(bits=2, group_size=8), Quantized(bits=4, group_size=8)
        >>> config = moe_jax.BankConfig(kind="mixed", parts=(few, many), part_of=(0, 1, 0))
        >>> bank = moe_jax.make_bank(config, moe_jax.FFNConfig(dim=32), 3, 16, rngs=nnx.Rngs(0))
        >>> bank.delta.up.part0.codes[...].shape, bank.delta.up.part1.codes[...].shape
        ((2, 4, 32), (1, 8, 32))

    The router and its order of experts stay as they are: the config says where an expert is. The base and the biases
    are stored once, as in other banks. Where the base is applied on its own (factored), a part multiplies its own sums
    of hidden states with the base of `down`, so that this product is computed once for every part. Over a mesh a part
    whose number of experts the axis `expert` does not divide is on every device (`experts.devices.spec_on_mesh`).
    """

    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        form, strategy = self._own_form, self._strategy_for(x, routing)
        assert isinstance(form, Mixed)
        arrays = {name: self.arrays_of(name) for name in self.matrices}
        biases, y = self.stacked_biases(), jnp.zeros_like(x)
        for number, part in enumerate(form.parts):
            folder, experts = folder_of_part(number), np.asarray(form.experts_of(number))
            own = {
                name: Kernels(part.of_matrix(matrix), matrix, below(arrays[name], folder))
                for name, matrix in self.matrices.items()
            }
            of_part = {name: bias[experts] for name, bias in biases.items()}
            at_part = _at_part(routing, experts, self.num_experts)
            experts_of_part = FFNs(own, of_part, self.expert.activation)
            y = y + self._applied(x, at_part, experts_of_part, strategy, key)
        return y


@register("mixed")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(ByExpert, CostModel, KernelForm):
    """Parts of the experts, each in codes of its own: leaves `part0/codes` [E_0, bytes, out] and so on.

    The arrays of one expert are those of its part, without that folder: `of_expert` says which form they have.

    Attributes:
      parts: what the experts of every part are made of; at most `MAX_PARTS`.
      part_of: of every expert, the part that it is in. In a part experts have the order that they have in the layer.
    """

    bank: ClassVar[type | None] = MixedBank

    parts: tuple[Quantized, ...]
    part_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= MAX_PARTS:
            raise InputError(f"mixed experts have 1 to {MAX_PARTS} parts, not {len(self.parts)}")
        if {*self.part_of} != {*range(len(self.parts))}:
            raise InputError(
                f"part_of={self.part_of} must name, for every expert, one of the parts 0 to {len(self.parts) - 1}, and "
                "each part at least once"
            )

    def check_count(self, num_experts: int) -> None:
        """Raises `InputError` if the options are not those of so many experts."""
        if num_experts != len(self.part_of):
            raise InputError(f"part_of names the parts of {len(self.part_of)} experts, and there are {num_experts}")

    def of_matrix(self, matrix: Matrix) -> "Mixed":
        return dataclasses.replace(self, parts=tuple(part.of_matrix(matrix) for part in self.parts))

    def of_expert(self, expert: int) -> Own:
        part = self.part_of[expert]
        return Own(self.parts[part], folder_of_part(part), self.part_of[:expert].count(part))

    def experts_of(self, part: int) -> list[int]:
        """The experts of a part, by their numbers in the layer."""
        return [expert for expert, own in enumerate(self.part_of) if own == part]

    @property
    def num_experts(self) -> int:
        return len(self.part_of)

    def experts_with(self, leaf: str) -> list[int]:
        return self.experts_of(next(part for part in range(len(self.parts)) if leaf.startswith(folder_of_part(part))))

    @property
    def has_codes(self) -> bool:
        return True

    def describe(self) -> str:
        count = collections.Counter(self.part_of)
        return "mixed: " + "; ".join(f"{count[i]} experts {part.describe()}" for i, part in enumerate(self.parts))

    # ---- what is stored ---------------------------------------------------------------------------------------------

    def leaf_names(self, matrix: Matrix) -> tuple[str, ...]:
        every = (part.of_matrix(matrix).leaf_names(matrix) for part in self.parts)
        return tuple(folder_of_part(number) + leaf for number, names in enumerate(every) for leaf in names)

    def fresh(self, rngs: nnx.Rngs, matrix: Matrix, stack: tuple[int, ...], dtype: jnp.dtype) -> dict[str, Array]:
        """Raises `InputError` if there are not as many experts as `part_of` has."""
        self.check_count(*stack)
        leaves = {}
        for number, part in enumerate(self.parts):
            own = part.fresh(rngs, matrix, (self.part_of.count(number),), dtype)
            leaves |= {folder_of_part(number) + leaf: array for leaf, array in own.items()}
        return leaves

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        own = Quantized.stored_specs(split)
        return {folder_of_part(number) + leaf: spec for number in range(MAX_PARTS) for leaf, spec in own.items()}

    def specs(self, split: Split) -> dict[str, P]:
        every = (part.specs(split) for part in self.parts)
        return {folder_of_part(number) + leaf: spec for number, own in enumerate(every) for leaf, spec in own.items()}

    # ---- what it costs: the mean over experts -----------------------------------------------------------------------

    def own_bytes(self, matrices: Any, itemsize: int) -> float:
        return float(np.mean([self.parts[part].own_bytes(matrices, itemsize) for part in self.part_of]))

    def making(self, matrices: Any, platform: Platform) -> float:
        return float(np.mean([self.parts[part].making(matrices, platform) for part in self.part_of]))


def _at_part(routing: Routing, own: Int[np.ndarray, " n"], num_experts: int) -> Routing:
    """The routing with experts as a part numbers its own; all others are none, and have no weight."""
    numbers = np.full(num_experts, NO_EXPERT, np.int32)
    numbers[own] = np.arange(len(own))
    at_part = renumbered(routing, jnp.asarray(numbers))
    return at_part._replace(weights=jnp.where(at_part.experts == NO_EXPERT, 0, routing.weights))
