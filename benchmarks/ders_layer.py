"""One MoE layer with DeRS deltas against the dense FFN and against full experts: time, memory, decoding.

    python benchmarks/ders_layer.py [--rounds 5] [--only time|memory|decode|restore] [--out benchmarks/results]

d 1024, f 2816 (gated), 8 experts, 4096 tokens, float32.

- time: forward and backward of the layer, gradients of input and parameters, at top-1, 2 and 4: plain dense FFN,
  vanilla (full experts), DeRS-LM, DeRS-SM. All take turns, so that they see the same machine; ratios are of medians.
- memory: what the compiled training step (gradient and AdamW) of the layer holds, from the compiler.
- decode: one step of 1 and of 8 tokens, top-2: full experts against a base with quantised deltas; the bytes of
  parameters that have to be read, and the time.
- restore: the time that it takes to make the kernels of all experts of what is stored around a centre, beside the time
  of the layer of full experts for 4096 tokens, top-2, as ResMoE's authors compare it (arXiv 2503.06881, run time).

OUT receives `ders_layer.json`.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from evidence.layouts import LAYER_MEMORY, LAYER_RESTORED, LAYER_TIME, layer_decoding
from evidence.results import RESULTS, Figures
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.experts import BankConfig, ExpertBank, FFNConfig, make_bank
from moe_jax.functional.dense import ffn
from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.token_choices import Routing

D_MODEL, HIDDEN, EXPERTS, TOKENS = 1024, 2816, 8, 4096
FFN = FFNConfig(dim=HIDDEN)
KINDS = {
    "vanilla": BankConfig(),
    "DeRS-LM, rank 4": BankConfig(kind="low-rank", rank=4),
    "DeRS-LM, rank 64": BankConfig(kind="low-rank", rank=64),
    "DeRS-SM, rate 0.9": BankConfig(kind="sparse", rate=0.9),
    "DeRS-SM, rate 0.9999": BankConfig(kind="sparse", rate=0.9999),
}


@functools.cache
def fresh_bank(config: BankConfig) -> ExpertBank:
    return make_bank(config, FFN, EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)


def inputs(tokens: int, top_k: int) -> tuple[jax.Array, Routing]:
    x, logits = (jax.random.normal(jax.random.key(i), (tokens, n)) for i, n in ((1, D_MODEL), (2, EXPERTS)))
    return x, route(logits, top_k, "topk_softmax")[0]


def interleaved(programs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round; the programs take turns.

    In each turn a run that does not count comes first: where another program has run meanwhile, memory has to be had
    from the system again, which no program that goes on has to wait for.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            jax.block_until_ready(run())
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def dense_step() -> Callable[[], object]:
    x, _ = inputs(TOKENS, 1)
    kernels = fresh_bank(KINDS["vanilla"]).kernels(0)
    loss = jax.jit(jax.grad(lambda kernels, x: jnp.mean(ffn(x, kernels, {}, FFN.activation) ** 2), argnums=(0, 1)))
    return lambda: loss(kernels, x)


def bank_step(config: BankConfig, top_k: int) -> Callable[[], object]:
    x, routing = inputs(TOKENS, top_k)
    graphdef, params, rest = nnx.split(fresh_bank(config), nnx.Param, ...)

    def loss(params: nnx.State, x: jax.Array, weights: jax.Array, rest: nnx.State, experts: jax.Array) -> jax.Array:
        return jnp.mean(nnx.merge(graphdef, params, rest)(x, Routing(experts, weights)) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return lambda: gradient(params, x, routing.weights, rest, routing.experts)


def measure_time(figures: Figures, rounds: int) -> None:
    programs = {"dense FFN": dense_step()}
    programs |= {f"{name}, top-{k}": bank_step(config, k) for name, config in KINDS.items() for k in (1, 2, 4)}
    seconds = interleaved(programs, rounds)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    dense = median["dense FFN"]
    print(f"\nforward + backward, {TOKENS} tokens; times of the dense FFN ({1e3 * dense:.0f} ms)\n")
    figures.put_rows(
        LAYER_TIME.name, [[name, *(median[f"{name}, top-{k}"] / dense for k in (1, 2, 4))] for name in KINDS]
    )
    print(LAYER_TIME.text(figures))


def measure_memory(figures: Figures) -> None:
    print(f"\ntraining step (gradient, AdamW) of the layer, {TOKENS} tokens, top-2; MiB by the compiler\n")
    rows = []
    optimizer = optax.adamw(1e-4)
    x, routing = inputs(TOKENS, 2)
    for name, config in KINDS.items():
        bank = fresh_bank(config)
        graphdef, params, rest = nnx.split(bank, nnx.Param, ...)

        def step(params, moments, rest, x, routing, graphdef=graphdef):
            def loss(params):
                return jnp.mean(nnx.merge(graphdef, params, rest)(x, routing) ** 2)

            updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
            return optax.apply_updates(params, updates), moments

        moments = jax.eval_shape(optimizer.init, params)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, moments, rest, x, routing)
        memory = lowered.compile().memory_analysis()
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        held, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        rows.append([name, count, held >> 20, temporary >> 20, (held + temporary) >> 20])
    figures.put_rows(LAYER_MEMORY.name, rows)
    print(LAYER_MEMORY.text(figures))


def randomised(bank: ExpertBank) -> ExpertBank:
    """With deltas that are not zero: zeros could be faster than numbers."""

    keys = iter(jax.random.split(jax.random.key(3), 64))

    def draw(leaf: jax.Array) -> jax.Array:
        key = next(keys)
        if leaf.dtype == jnp.uint8:
            return jax.random.bits(key, leaf.shape, jnp.uint8)
        return (0.01 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    graphdef, state = nnx.split(bank)
    return nnx.merge(graphdef, jax.tree.map(draw, state))


def bytes_read(bank: ExpertBank, experts_used: int) -> int:
    """Of parameters: a shared base once, and of everything else the share of the experts that have tokens."""
    flat = jax.tree_util.tree_flatten_with_path(nnx.state(bank))[0]
    base = sum(leaf.nbytes for path, leaf in flat if "base" in jax.tree_util.keystr(path))
    own = sum(leaf.nbytes for path, leaf in flat) - base
    return base + own * experts_used // EXPERTS


def measure_decode(figures: Figures, rounds: int) -> None:
    kinds = {"full experts": BankConfig()}
    kinds |= {f"base + {b} bits": BankConfig(kind="quantized", bits=b, group_size=128) for b in (8, 4, 2, 1)}
    for tokens in (1, 8):
        x, routing = inputs(tokens, 2)
        used = len(set(routing.experts.reshape(-1).tolist()))
        banks = {name: randomised(fresh_bank(config)) for name, config in kinds.items()}
        programs = {}
        for name, bank in banks.items():
            graphdef, state = nnx.split(bank)
            run = jax.jit(lambda state, x, routing, graphdef=graphdef: nnx.merge(graphdef, state)(x, routing))
            programs[name] = lambda run=run, state=state, x=x, routing=routing: run(state, x, routing)
        seconds = interleaved(programs, 5 * rounds)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        full = "full experts"
        print(f"\ndecoding {tokens} token(s), top-2, {used} experts used, float32\n")
        rows = []
        for name, bank in banks.items():
            read, of_full = bytes_read(bank, used), bytes_read(banks[full], used)
            rows.append([name, read / 1e6, read / of_full, 1e3 * median[name], median[name] / median[full]])
        table = layer_decoding(tokens)
        figures.put_rows(table.name, rows)
        print(table.text(figures))


RESTORED = {
    "a quarter, pruned": BankConfig(kind="sparse", rate=0.75, encoding="bitmap"),
    "a quarter, low rank": BankConfig(kind="low-rank", rank=D_MODEL * HIDDEN // (4 * (D_MODEL + HIDDEN))),
    "4 bits": BankConfig(kind="quantized", bits=4, group_size=128),
    "2 bits": BankConfig(kind="quantized", bits=2, group_size=128),
}


def measure_restore(figures: Figures, rounds: int) -> None:
    def made(bank: ExpertBank) -> list[dict[str, jax.Array]]:
        return [bank.kernels(expert) for expert in range(EXPERTS)]

    x, routing = inputs(TOKENS, 2)
    programs = {}
    for name, config in {"layer": BankConfig(), **RESTORED}.items():
        graphdef, state = nnx.split(fresh_bank(config))
        if name == "layer":
            run = jax.jit(lambda state, graphdef=graphdef: nnx.merge(graphdef, state)(x, routing))
        else:
            run = jax.jit(lambda state, graphdef=graphdef: made(nnx.merge(graphdef, state)))
        programs[name] = lambda run=run, state=state: run(state)
    seconds = {name: statistics.median(values) for name, values in interleaved(programs, rounds).items()}
    print(f"\nrestoring {EXPERTS} experts; the layer takes {1e3 * seconds['layer']:.0f} ms for {TOKENS} tokens\n")
    figures.put_rows(
        LAYER_RESTORED.name,
        [[name, 1e3 * seconds[name], 1e3 * seconds["layer"], seconds[name] / seconds["layer"]] for name in RESTORED],
    )
    print(LAYER_RESTORED.text(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("time", "memory", "decode", "restore"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    ask_for_huge_pages()  # as commands do
    figures = Figures("ders_layer", options.out, writes=True)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    if options.only in (None, "time"):
        measure_time(figures, options.rounds)
    if options.only in (None, "memory"):
        measure_memory(figures)
    if options.only in (None, "decode"):
        measure_decode(figures, options.rounds)
    if options.only in (None, "restore"):
        measure_restore(figures, options.rounds)


if __name__ == "__main__":
    main()
