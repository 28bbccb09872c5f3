"""Which of the exact ways to apply a shared-base bank is the cheapest, by a small cost model (METHODS 3).

The model counts floating-point operations and the bytes of parameters that are read, per call. It may be overruled:

    with use_strategy("synthesised"):
        y = bank(x, routing)

or, for a whole command, by the environment variable MOE_JAX_STRATEGY.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache

import jax

from moe_jax.errors import InputError, nearest
from moe_jax.experts.config import BankConfig, FFNConfig

logger = logging.getLogger(__name__)

STRATEGIES = (
    "auto",
    "factored",
    "factored-side-by-side",
    "factored-grouped",
    "factored-entrywise",
    "synthesised",
)
ENVIRONMENT = "MOE_JAX_STRATEGY"

# Operations that take as long as one byte from memory. A CPU core has some 15, accelerators 100 to 300; large batches
# and single tokens, between which it decides, are far apart on either.
OPERATIONS_PER_BYTE = 15
# What an entry of a sparse delta costs for a row, in operations of a dense product (on CPU: 3 ns at 190 GFLOP/s), and
# what it costs to put it into a tile, to look an entry of a bitmap up, or to unpack a code.
PER_SPARSE_ENTRY, PER_SCATTER, PER_GATHER, PER_UNPACK = 600, 1300, 200, 100
BYTES_PER_ENTRY = 4

_chosen: ContextVar[str] = ContextVar("strategy", default="auto")


@contextlib.contextmanager
def use_strategy(name: str) -> Iterator[None]:
    """Overrules the cost model for what is traced inside: one of `STRATEGIES`.

    `factored` is the cheapest of the factored ones. What there is not for a kind of delta leaves the choice open.

    Raises:
      InputError: for another name.
    """
    token = _chosen.set(_known(name, "strategy"))
    try:
        yield
    finally:
        _chosen.reset(token)


def choose_strategy(
    config: BankConfig, expert: FFNConfig, num_experts: int, tokens: int, d_model: int, top_k: int
) -> str:
    """`synthesised`, or `factored-` with how the deltas are applied (see `experts.factored`).

    Args:
      config: of the bank, which has a shared base.
      expert: its FFN.
      num_experts, tokens, d_model, top_k: E, T, d and k.

    Raises:
      InputError: if MOE_JAX_STRATEGY names no strategy.
    """
    asked = _chosen.get()
    if asked == "auto":
        asked = _known(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1
    return _choose(config, expert, num_experts, tokens, d_model, top_k, asked, alone)


@lru_cache(maxsize=1024)
def _choose(
    config: BankConfig,
    expert: FFNConfig,
    num_experts: int,
    tokens: int,
    d_model: int,
    top_k: int,
    asked: str,
    alone: bool,
) -> str:
    """Cached, so that a choice is logged once."""
    costs = _costs(config, expert, num_experts, tokens, d_model, top_k)
    if config.has_base and (expert.nf4 or expert.lora is not None):
        # Inside a kernel's tile, LoRA would become `W + A B`. Over a mesh, sparse and quantised deltas then have no
        # better way than to sort rows that are sharded.
        costs.pop("synthesised")
        if not alone:
            costs = {name: cost for name, cost in costs.items() if name == "factored-side-by-side"} or costs
    elif not alone:
        # Rows sorted over a mesh would be gathered everywhere. Only `side-by-side` needs no exchange at all, and
        # `synthesised` is written by hand for a mesh.
        costs = {name: cost for name, cost in costs.items() if name in ("factored-side-by-side", "synthesised")}
    allowed = {name: cost for name, cost in costs.items() if asked == "auto" or name.startswith(asked)} or costs
    best = min(allowed, key=allowed.__getitem__)
    shown = ", ".join(f"{name} {cost:.2g}" for name, cost in costs.items())
    logger.info("%s experts, %d tokens, top-%d: %s (costs: %s)", config.kind, tokens, top_k, best, shown)
    return best


def _costs(
    config: BankConfig, expert: FFNConfig, num_experts: int, tokens: int, d_model: int, top_k: int
) -> dict[str, float]:
    """Operations, with bytes converted to operations, of every way there is for this kind of delta."""
    shapes = tuple(expert.shapes(d_model).values())
    size = sum(map(math.prod, shapes))
    used = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
    rows = tokens * top_k
    low_rank = config.kind in ("low-rank", "joint-low-rank")
    if low_rank:
        assert config.rank is not None
        packed, build = BYTES_PER_ENTRY * config.rank * sum(map(sum, shapes)), 2 * config.rank * size
    elif config.kind == "sparse":
        entries = sum(config.for_matrix(index).nonzeros(shape) for index, shape in enumerate(shapes))
        per_value = BYTES_PER_ENTRY if config.bits is None else config.bits / 8
        if config.places == "bitmap":
            packed, build = entries * per_value + size / 8, size * PER_GATHER
        else:
            packed, build = entries * (per_value + 2), entries * PER_SCATTER
    else:
        assert config.bits is not None
        packed, build = size * config.bits / 8, size * PER_UNPACK

    def cost(operations: float, read: float) -> float:
        return operations + OPERATIONS_PER_BYTE * read

    base = BYTES_PER_ENTRY * size if config.has_base else 0
    costs = {"synthesised": cost(2 * rows * size + used * build, used * (base + packed))}
    factored = cost(2 * tokens * size if config.has_base else 0, base + used * packed)
    if low_rank:
        into = sum(config.rank * shape[0] for shape in shapes)
        out = sum(config.rank * shape[1] for shape in shapes)
        costs["factored-side-by-side"] = factored + 2 * num_experts * (tokens * into + rows * out)
        # Sorting moves the rows of every matrix, which costs about two reads and writes of them.
        moved = 4 * BYTES_PER_ENTRY * rows * sum(map(sum, shapes))
        costs["factored-grouped"] = factored + 2 * rows * (into + out) + OPERATIONS_PER_BYTE * moved
    else:
        costs["factored-grouped"] = factored + 2 * rows * size + used * build
    if config.kind == "sparse" and config.places != "bitmap":
        costs["factored-entrywise"] = factored + rows * entries * PER_SPARSE_ENTRY
    return costs


def _known(name: str, where: str) -> str:
    if name not in STRATEGIES:
        raise InputError(f"{where} is {name!r}{nearest(name, STRATEGIES)}; it is one of {', '.join(STRATEGIES)}")
    return name
