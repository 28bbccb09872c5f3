"""The section of a recipe on the balance among experts."""

import dataclasses
from typing import TYPE_CHECKING

from moe_jax.core.errors import InputError
from moe_jax.core.formatting import short_repr
from moe_jax.data.sections import at_least

if TYPE_CHECKING:
    from moe_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoESection:
    """Balance among the experts of a model's MoEs.

    Coefficients take the place of those in the model's config, in all of its MoEs, and are in that of the trained
    model.

    Attributes:
      balance_coef: coefficient of the balance loss over all tokens of a batch. None: as the model's config says.
      sequence_balance_coef: coefficient of the balance loss within each sequence by itself, or packed document
        (DeepSeek-V3, equations 17 to 20, where it is 0.0001). None: as the model's config says.
      bias_update_rate: after every step, the bias of selection of each expert goes up by this much where the expert got
        fewer assignments than the mean of all experts, and down where it got more; the tokens of the whole batch count
        that are not padding (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, section 2.1.2, has 0.001).
        It is for models whose routers all have such a bias. The biases are float32, and part of the model and its
        checkpoints; neither gradients, decay nor `partition` concern them. 0: they stay as they are.
    """

    balance_coef: float | None = None
    sequence_balance_coef: float | None = None
    bias_update_rate: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 0, "balance_coef", "sequence_balance_coef", "bias_update_rate")

    def applied(self, config: "ModelConfig") -> "ModelConfig":
        """Returns the config of a model with these coefficients.

        Raises `InputError` if there are some, and the model has no MoE, or stands on another one, whose config it has.
        """
        names = ("balance_coef", "sequence_balance_coef")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given and not config.moe_layers:
            raise InputError(f"moe.{next(iter(given))} is for models with MoEs, and this has none; leave the key out")
        if given and config.frozen_base:
            raise InputError(
                f"moe.{next(iter(given))} would change the config of the frozen base that the model stands on; leave "
                "the key out"
            )
        layers = list(config.layers)
        for i in config.moe_layers if given else ():
            layers[i] = dataclasses.replace(layers[i], mlp=dataclasses.replace(config.moe(i), **given))
        return dataclasses.replace(config, layers=tuple(layers)) if given else config
