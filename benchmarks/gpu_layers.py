"""Layers of experts, timed on the GPU that is there: every strategy, beside one dense FFN and `jax.lax.ragged_dot`.

    python benchmarks/gpu_layers.py [--shapes mixtral ...] [--kinds full ...] [--tokens 8192] [--out benchmarks/results]

Each is the layer without its router, in bfloat16, forward alone and with all gradients; a time is the median of ten
calls. `jax.lax.ragged_dot` is the same layer with whole kernels as one would write it in plain JAX. What the cost model
foretells of the forward layer stands beside it: it chooses the strategy. Some minutes, most of them for the compiler.
OUT receives `gpu_layers.json`.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from evidence.layouts import GPU_LAYERS
from evidence.results import RESULTS, Figures
from evidence.stamp import Stamp, current_stamp
from hbm.layers import DENSE, DTYPE, KINDS, SHAPES, Shape
from moe_jax.experts import BankConfig, FFNConfig, make_bank, set_strategy
from moe_jax.experts.devices import Platform, current_chip
from moe_jax.experts.shapes import Load
from moe_jax.experts.strategy import cheapest, strategy_costs
from moe_jax.functional.dense import ffn
from moe_jax.functional.routing.token_choices import Routing

PLAIN = "full, jax.lax.ragged_dot"
SPARSE = "sparse 90 %"
ALL_KINDS: dict[str, Any] = {kind: of for kind, of in KINDS.items() if kind != DENSE} | {
    SPARSE: (BankConfig(kind="sparse", rate=0.9), {})
}
CALLS = 10


class Program(NamedTuple):
    """Attributes:
    name: shape, experts and strategy.
    foretold: seconds of the forward layer, by the cost model; None: it does not know.
    chosen: whether the cost model chooses this strategy.
    function: of activations, routing, trained parameters and the rest.
    make: makes its arguments on the device.
    """

    name: tuple[str, str, str]
    foretold: float | None
    chosen: bool
    function: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]

    @property
    def strategy(self) -> str:
        return f"{self.name[2]}, chosen" if self.chosen else self.name[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for name, known, usual in (
        ("shapes", SHAPES, ["mixtral", "olmoe"]),
        ("kinds", ALL_KINDS, [*ALL_KINDS]),
    ):
        parser.add_argument(f"--{name}", nargs="+", metavar=name[:-1].upper(), choices=[*known], default=usual)
    parser.add_argument("--tokens", type=int, default=8192, help="of a batch")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("this measures a GPU, and JAX has none here")
    figures = Figures("gpu_layers", options.out, writes=True, stamp=stamp_of_gpu)
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        for shape in options.shapes:
            kinds = dict.fromkeys([DENSE, PLAIN, *options.kinds])
            every = [program for kind in kinds for program in programs(shape, kind, options.tokens)]
            dense = plain = None
            for program, forward, both in measured(every):
                dense = both if program.name[1] == DENSE else dense
                plain = both if program.name[1] == PLAIN else plain
                foretold = program.foretold and forward / program.foretold
                against = [one and both / one for one in (dense, plain)]
                cells = [shape, program.name[1], program.strategy, 1e3 * forward, 1e3 * both, foretold, *against]
                figures.put_row(GPU_LAYERS.name, f"{options.tokens}, {', '.join(filter(None, program.name))}", cells)
    print(GPU_LAYERS.text(figures))


def programs(shape: str, kind: str, tokens: int) -> list[Program]:
    """The layer in all its strategies."""
    sizes = SHAPES[shape]
    if kind == DENSE:
        expert = FFNConfig(dim=sizes.f)
        return [Program((shape, kind, ""), None, False, lambda x, _, kernels: ffn(x, kernels, {}, expert.activation),
                        lambda: arguments(sizes, tokens, whole_kernels(sizes, ())))]  # fmt: skip
    if kind == PLAIN:
        return [Program((shape, kind, ""), None, False, plain_layer,
                        lambda: arguments(sizes, tokens, whole_kernels(sizes, (sizes.experts,))))]  # fmt: skip
    config, of_kind = ALL_KINDS[kind]
    expert = FFNConfig(dim=sizes.f, **of_kind)
    load = Load(sizes.experts, tokens, sizes.top_k)
    costs = strategy_costs(config, expert, sizes.d, load, Platform.of(current_chip(), DTYPE.itemsize))

    def make() -> Any:
        return make_bank(config, expert, sizes.experts, sizes.d, rngs=nnx.Rngs(0), dtype=DTYPE)

    found = []
    for strategy, cost in costs.items():
        bank = nnx.eval_shape(make)
        set_strategy(bank, strategy if len(costs) > 1 else "auto")
        graphdef, trained, _ = nnx.split(bank, nnx.Param, ...)

        def apply(x: Any, routing: Routing, trained: Any, rest: Any, graphdef: Any = graphdef) -> Any:
            return nnx.merge(graphdef, trained, rest)(x, routing)

        def values() -> tuple[Any, ...]:
            return arguments(sizes, tokens, *map(drawn, nnx.split(nnx.jit(make)(), nnx.Param, ...)[1:]))

        name = (shape, kind, strategy)
        found.append(Program(name, cost.total, strategy == cheapest(costs) and len(costs) > 1, apply, values))
    return found


def plain_layer(x: Any, routing: Routing, kernels: dict[str, Any]) -> Any:
    """Rows sorted by their expert, three products, and the weighted sum of every token's rows."""
    top_k = routing.experts.shape[1]
    flat = routing.experts.reshape(-1)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=kernels["up"].shape[0])
    rows = x[order // top_k]
    product = jax.lax.ragged_dot
    hidden = jax.nn.silu(product(rows, kernels["gate"], sizes)) * product(rows, kernels["up"], sizes)
    y = product(hidden, kernels["down"], sizes) * routing.weights.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros_like(x).at[order // top_k].add(y)


def arguments(sizes: Shape, tokens: int, *state: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((tokens, sizes.experts)), axis=1)[:, : sizes.top_k]
    weights = jnp.full((tokens, sizes.top_k), 1 / sizes.top_k, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (tokens, sizes.d), DTYPE)
    return x, Routing(jnp.asarray(experts, jnp.int32), weights), *state


def whole_kernels(sizes: Shape, leading: tuple[int, ...]) -> dict[str, Any]:
    shapes = FFNConfig(dim=sizes.f).shapes(sizes.d)
    return drawn({name: jnp.zeros((*leading, *shape), DTYPE) for name, shape in shapes.items()})


@jax.jit
def drawn(state: Any) -> Any:
    """Numbers and codes at random, positions as they are: products of zeros are faster."""
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves) + 1)

    def draw(key: Any, leaf: Any) -> Any:
        if leaf.dtype == jnp.uint8:
            return jax.random.bits(key, leaf.shape, jnp.uint8)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)).astype(leaf.dtype) if floating else leaf

    return jax.tree.unflatten(structure, [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=False)])


def measured(every: list[Program]) -> Iterator[tuple[Program, float, float]]:
    """Seconds of each program forward, and with its gradients; the compiler works on several at once."""
    mesh = jax.sharding.get_mesh()

    def compiled(program: Program) -> tuple[Any, Any]:
        with jax.set_mesh(mesh):  # a thread has none of its own
            given = jax.eval_shape(program.make)
            return tuple(jax.jit(one).lower(*given).compile() for one in (program.function, gradients(program)))

    with ThreadPoolExecutor(8) as threads:
        ready = [threads.submit(compiled, program) for program in every]
        wait(ready)
    for program, both in zip(every, ready, strict=True):
        try:
            given = program.make()
            forward, all_of_it = (seconds(one, given) for one in both.result())
        except jax.errors.JaxRuntimeError as error:
            print(f"{', '.join(program.name)} left out: {str(error).splitlines()[0]}", flush=True)
            continue
        finally:
            given = None  # before the next one takes memory
        print(*program.name, f"{1e3 * forward:.2f} ms", f"{1e3 * all_of_it:.2f} ms", flush=True)
        yield program, forward, all_of_it


def gradients(program: Program) -> Callable[..., Any]:
    def function(x: Any, routing: Routing, trained: Any, *rest: Any) -> Any:
        def apply(x: Any, weights: Any, trained: Any) -> Any:
            return program.function(x, Routing(routing.experts, weights), trained, *rest)

        y, pull = jax.vjp(apply, x, routing.weights, trained)
        return y, pull(y)

    return function


def seconds(compiled: Any, given: tuple[Any, ...]) -> float:
    times = []
    for _ in range(3 + CALLS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def stamp_of_gpu() -> Stamp:
    """With the GPU in the place of the processor."""
    return dataclasses.replace(current_stamp(), machine=jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
