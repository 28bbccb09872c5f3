"""Modules that stand in the place of attention and carry a state from token to token.

A module is made from the layer's `RecurrentConfig` (`MODULES`), and is called with

    module(x, documents, cache=cache, begins=begins, key=key) -> y, cache

where `x` are activations [B, T, d], `documents` Int32[B, T] or None are those of `nn.context.Context`, `cache` is the
layer's `RecurrentCache` or None, and `begins` says whether rows begin with this call, whatever the cache holds. The
cache that is returned is that after the last token of every row that is not padding.
"""

from typing import Any

from moe_jax.models.recurrent_config import DeltaRuleConfig, Mamba2Config, RecurrentConfig, ShortConvConfig
from moe_jax.nn.recurrent.delta_rule import DeltaRule as DeltaRule
from moe_jax.nn.recurrent.mamba2 import Mamba2 as Mamba2
from moe_jax.nn.recurrent.short_conv import ShortConv as ShortConv

MODULES: dict[type[RecurrentConfig], Any] = {
    DeltaRuleConfig: DeltaRule,
    ShortConvConfig: ShortConv,
    Mamba2Config: Mamba2,
}
"""The module of every kind of recurrence."""
