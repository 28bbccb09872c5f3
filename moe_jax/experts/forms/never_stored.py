"""Forms that are never stored: made of others for a CPU to generate with (`generation.arrange`)."""

from typing import ClassVar

from jax.sharding import PartitionSpec as P

from moe_jax.experts.forms.optional import CostModel
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.shapes import Split


class NeverStored(CostModel, KernelForm):
    """A form whose arrays [E, ...] are on one device. It is not registered.

    Attributes:
      paths: of the leaves of a matrix.
    """

    paths: ClassVar[tuple[str, ...]]

    @classmethod
    def stored_specs(cls, split: Split) -> dict[str, P]:
        return {path: P("expert", None, None) for path in cls.paths}

    def specs(self, split: Split) -> dict[str, P]:
        return self.stored_specs(split)
