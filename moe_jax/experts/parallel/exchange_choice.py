"""The choice between the two ways in which tokens come to experts over a mesh (`experts.parallel.over_mesh`).

The attribute `exchange` of a bank says it. It is set when the bank is made, from the environment variable
MOE_JAX_EXCHANGE, and can be changed later with `set_exchange`. Like the strategy it is part of the graphdef.
"""

import math
import os
from typing import NamedTuple

from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.experts.parallel.exchange import DEFAULT_CAPACITY

WAYS = ("auto", "all-gather", "all-to-all")

ENVIRONMENT = "MOE_JAX_EXCHANGE"


class Exchange(NamedTuple):
    """How tokens come to experts.

    Attributes:
      way: one of `WAYS`; `auto` is the one that sends fewer bytes.
      capacity: how many rows a device has room for in a round, in multiples of the even share.
    """

    way: str = "auto"
    capacity: float = DEFAULT_CAPACITY

    @classmethod
    def parse(cls, text: str, where: str) -> "Exchange":
        """From `WAY`, `all-gather:CAPACITY` or `all-to-all:CAPACITY`.

        Raises:
          InputError: if it is neither; the message names `where`.
        """
        way, colon, capacity = text.partition(":")
        if way not in WAYS or colon and way == "auto":
            known = "auto, all-gather, all-to-all, all-gather:CAPACITY or all-to-all:CAPACITY"
            raise InputError(f"{where} is {shown(text)}{nearest(way, WAYS)}; it is {known}")
        if not colon:
            return cls(way)
        try:
            found = float(capacity)
        except ValueError:
            found = math.nan
        if not 0 < found < math.inf:
            raise InputError(f"{where} is {shown(text)}: the capacity is a number above 0")
        return cls(way, found)

    def chosen(self, devices: int, top_k: int) -> str:
        """`all-gather` or `all-to-all`, for so many devices along `expert`.

        Of its t tokens a device gets those of the others, and the same number of sums comes back, (n - 1) t each; or
        rows of its k t assignments travel, all but those that stay.
        """
        if self.way != "auto":
            return self.way
        return "all-gather" if devices <= top_k else "all-to-all"


DEFAULT = Exchange()


def exchange_from_environment() -> Exchange:
    """What MOE_JAX_EXCHANGE says; the default if it is not set.

    Raises:
      InputError: see `Exchange.parse`.
    """
    return Exchange.parse(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)
