"""Tokens through the experts of layers of true shapes while a CPU generates: what each form takes beside bfloat16.

    python benchmarks/true_decoding.py [--layers NAME ...] [--rounds 3] [--out benchmarks/results]

Layers of Mixtral-8x7B (width 4096, 8 experts of 14336 neurons, top-2), Qwen3-30B-A3B (2048, 128 of 768, top-8) and of
the shape of DeepSeek-V3 (7168, 32 of its 256 experts of 2048, top-8), without router and attention. Experts are random,
arranged as `generate` arranges them (`generation.arrange`), and of one layer at a time. A program lets one step of
tokens after another through the layer, each with other experts, so that hardly any is in the cache. All forms run in
turns in one process, and the fastest of the rounds counts: memory is what this takes, and what others use too. It needs
12 GB of memory and some 10 minutes on two cores. OUT receives `true_decoding.json`.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from evidence.layouts import TRUE_DECODING
from evidence.results import RESULTS, Figures
from hbm.layers import SHAPES, Shape
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.experts import BankConfig, ExpertBank, FFNConfig, make_bank
from moe_jax.experts.forms import Quantized
from moe_jax.functional.group_loops import of_this_turn
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.generation.arrange import arrange

ROWS = (1, 4, 16)
STEPS = 4


LAYERS = {
    "Mixtral-8x7B": SHAPES["mixtral"],
    "Qwen3-30B-A3B": SHAPES["qwen3-30b"],
    "DeepSeek-V3, an eighth of the experts": Shape(7168, 2048, 32, 8),
}
WHOLE, GROUP = "bfloat16", 64
FORMS = {
    WHOLE: BankConfig(),
    "4 bits": BankConfig(Quantized(bits=4, group_size=GROUP), base="none"),
    "3 bits": BankConfig(Quantized(bits=3, group_size=GROUP), base="none"),
    "2 bits": BankConfig(Quantized(bits=2, group_size=GROUP), base="none"),
    "3 bits with a table": BankConfig(Quantized(bits=3, group_size=GROUP, table=True), base="none"),
    "2 bits over a base": BankConfig(Quantized(bits=2, group_size=GROUP)),
    "low rank 32": BankConfig(kind="low-rank", rank=32),
    "a tenth of the deltas": BankConfig(kind="sparse", rate=0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--layers", nargs="+", metavar="NAME", choices=[*LAYERS], default=[*LAYERS])
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("true_decoding", options.out, writes=True)
    for name in options.layers:
        for row in measured(name, LAYERS[name], options.rounds):
            figures.put_row(TRUE_DECODING.name, f"{name}, {row[1]}", row)
    print(TRUE_DECODING.text(figures))


def measured(name: str, layer: Shape, rounds: int) -> list[list]:
    """Returns the rows of a layer: its name, the form, MB of the experts, and milliseconds beside those of bfloat16."""
    sizes, steps = {}, {}
    for form, config in FORMS.items():
        bank = make_bank(config, FFNConfig(dim=layer.f), layer.experts, layer.d, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
        sizes[form] = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(bank)))
        arrange(bank)
        for rows in ROWS:
            steps[form, rows] = step_of(bank, layer, rows)
    fastest = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            fastest[key] = min(fastest[key], 1e3 * (time.perf_counter() - start) / STEPS)
    return [
        [
            name,
            form,
            size / 1e6,
            *(part for m in ROWS for part in (fastest[form, m], fastest[form, m] / fastest[WHOLE, m])),
        ]
        for form, size in sizes.items()
    ]


def step_of(bank: ExpertBank, layer: Shape, rows: int) -> Callable[[], Array]:
    """Compiles, and runs once, what lets `STEPS` times `rows` tokens through a bank; returns it."""
    graphdef, state = nnx.split(bank)

    @jax.jit
    def run(state: nnx.State, x: Float[Array, "m d"], chosen: Int[Array, "n m k"]) -> Float[Array, "m d"]:
        def step(x: Array, experts: Array) -> tuple[Array, None]:
            of_step, x = of_this_turn(state, x)  # as the engine does
            routing = Routing(experts=experts, weights=jnp.full(experts.shape, 1 / layer.top_k))
            y = nnx.merge(graphdef, of_step)(x, routing)
            return y / jnp.sqrt(jnp.mean(y**2) + 1e-6), None

        return jax.lax.scan(step, x, chosen)[0]

    draw = np.random.default_rng(0)
    chosen = draw.permuted(np.tile(np.arange(layer.experts), (STEPS, rows, 1)), axis=-1)[..., : layer.top_k]
    x = draw.standard_normal((rows, layer.d), np.float32)
    given = state, jnp.asarray(x), jnp.asarray(chosen, jnp.int32)
    run(*given).block_until_ready()
    return lambda: run(*given).block_until_ready()


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
