"""The layers that `hot_path.py` compiles: shapes of real models, kinds of experts, what the least is that they move."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.experts import BankConfig, FFNConfig, make_bank
from moe_jax.experts.devices import Platform, current_chip
from moe_jax.experts.shapes import Load
from moe_jax.experts.strategy import cheapest, strategy_costs
from moe_jax.functional.dense import ffn
from moe_jax.functional.routing.token_choices import Routing

DTYPE = jnp.dtype("bfloat16")
TOKENS = 8192


class Shape(NamedTuple):
    """Attributes:
    d, f: widths of the model and of an expert.
    experts, top_k: of a layer.
    """

    d: int
    f: int
    experts: int
    top_k: int


SHAPES = {
    "llama-2-7b": Shape(4096, 11008, 8, 2),
    "mixtral": Shape(4096, 14336, 8, 2),
    "olmoe": Shape(2048, 1024, 64, 8),
    "qwen3-30b": Shape(2048, 768, 128, 8),
}
DENSE, VANILLA, LOW_RANK = "dense FFN", "full", "low-rank 16"
KINDS: dict[str, tuple[BankConfig, dict[str, Any]] | None] = {
    DENSE: None,
    VANILLA: (BankConfig(), {}),
    LOW_RANK: (BankConfig(kind="low-rank", rank=16), {}),
    "2-bit": (BankConfig(kind="quantized", bits=2, group_size=128), {}),
    "4-bit": (BankConfig(kind="quantized", bits=4, group_size=128), {}),
    "NF4": (BankConfig(), {"nf4": True}),
}


class Layer(NamedTuple):
    """Attributes:
    function: of the arguments.
    arguments: without values.
    strategy: how the experts are applied.
    products: operations of the matrix products, by the cost model.
    least: bytes: parameters once, activations into and out of every product once.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    strategy: str
    products: float
    least: int


def make_layer(kind: str, shape: Shape) -> Layer:
    """A layer for the device of the mesh in use, forward, without router."""
    spec, of_kind = jax.ShapeDtypeStruct, KINDS[kind]
    expert = FFNConfig(dim=shape.f, **(of_kind[1] if of_kind else {}))
    sides = sum(map(sum, expert.shapes(shape.d).values()))
    x = spec((TOKENS, shape.d), DTYPE)
    if of_kind is None:
        kernels = {name: spec(sizes, DTYPE) for name, sizes in expert.shapes(shape.d).items()}
        size = 3 * shape.d * shape.f
        return Layer(
            lambda x, kernels: ffn(x, kernels, {}, expert.activation),
            (x, kernels), "", 2.0 * TOKENS * size, DTYPE.itemsize * (size + TOKENS * sides),
        )  # fmt: skip
    config, load = of_kind[0], Load(shape.experts, TOKENS, shape.top_k)
    bank = nnx.eval_shape(lambda: make_bank(config, expert, shape.experts, shape.d, rngs=nnx.Rngs(0), dtype=DTYPE))
    graphdef, state = nnx.split(bank)
    costs = strategy_costs(config, expert, shape.d, load, Platform.of(current_chip(), DTYPE.itemsize))
    strategy = cheapest(costs)
    if strategy.startswith("factored"):
        # The three products with the base, a row per token; the two of the deltas that begin with a row per token; and
        # what makes of the products into the hidden layer the sum over a token's experts.
        rows = TOKENS * (sides + 2 * shape.d + 3 * shape.f)
    else:
        rows = load.rows * sides
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    choices = (TOKENS, shape.top_k)

    def apply(x: Any, experts: Any, weights: Any, state: Any) -> Any:
        return nnx.merge(graphdef, state)(x, Routing(experts, weights))

    return Layer(
        apply,
        (x, spec(choices, jnp.int32), spec(choices, jnp.float32), state),
        strategy,
        costs[strategy].products * current_chip().operations_per_second(DTYPE.itemsize),
        stored + DTYPE.itemsize * rows,
    )
