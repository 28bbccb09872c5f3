"""The section of a recipe on the balance among experts."""

import dataclasses

from moe_jax.core.formatting import short_repr
from moe_jax.data.sections import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoESection:
    """Balance among the experts of MoEs, beside the auxiliary losses that the model's config names.

    Attributes:
      bias_update_rate: after every step, the bias of selection of each expert goes up by this much where the expert got
        fewer assignments than the mean of all experts, and down where it got more; the tokens of the whole batch count
        that are not padding (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, section 2.1.2, has 0.001).
        It is for models whose routers all have such a bias. The biases are float32, and part of the model and its
        checkpoints; neither gradients, decay nor `partition` concern them. 0: they stay as they are.
    """

    bias_update_rate: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 0, "bias_update_rate")
