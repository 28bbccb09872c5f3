"""The gated delta rule: timed beside Transformers on this CPU, and compiled for a TPU v5e and an H100 at long texts.

    python benchmarks/delta_rule.py --times [--compile v5e:2x2 h100:1] [--out benchmarks/results]

Heads are those of Qwen3-Next: 16 of queries and keys, 32 states of 128 x 128. `--times` runs the chunked form of
2 x 1024 tokens in float32, forward alone and with all gradients, in turns with the fallback of Transformers without its
CUDA kernels (`torch_chunk_gated_delta_rule`); the aim is 1.5 times as fast. `--compile` needs no device (JAX's CUDA
plugin for GPUs): the branch of a layer in bfloat16 with all gradients at 8 and 32 thousand tokens, whose memory
must grow with the length and not with its square. `compiled_layers.py` has the whole layer. OUT receives
`delta_rule.json`.
"""

import argparse
import dataclasses
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from evidence.layouts import DELTA_COMPILED, DELTA_TIMES
from evidence.results import RESULTS, Figures
from moe_jax.conversion import read_hf_config
from moe_jax.functional.recurrent.delta_rule import DeltaInputs, delta_rule
from moe_jax.nn.block import make_layer
from moe_jax.planning.planned_devices import described_devices, prepare_environment

MIB, ROUNDS = 1 << 20, 5
BATCH, LENGTH = 2, 1024
LENGTHS = (8192, 32768)
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--times", action="store_true", help="run it on this CPU beside Transformers")
    parser.add_argument("--compile", nargs="+", default=[], metavar="TOPOLOGY", help="compile it for these")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("delta_rule", options.out, writes=True)
    if options.times:
        for row in times():
            figures.put_row(DELTA_TIMES.name, row[0], row)
    prepare_environment()
    for topology in options.compile:
        mesh = Mesh(np.array(described_devices(topology)[:1]), ("data",))
        for length in LENGTHS:
            name = f"{topology}, the branch with gradients, {length} tokens"
            figures.put_row(DELTA_COMPILED.name, name, report(name, mesh, *branch(length), length=length))
    print(DELTA_TIMES.text(figures), DELTA_COMPILED.text(figures), sep="\n\n")


# --- times ----------------------------------------------------------------------------------------


def times() -> Iterator[list[Any]]:
    """Yields rows of `DELTA_TIMES`; raises `SystemExit` if the two do not compute the same."""
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    rule = read_hf_config(QWEN3_NEXT).layers[0].recurrence
    rng = np.random.default_rng(0)
    keys = (BATCH, LENGTH, rule.num_key_heads, rule.key_dim)
    values = (BATCH, LENGTH, rule.num_heads, rule.value_dim)
    arrays = [rng.standard_normal(shape, np.float32) for shape in (keys, keys, values)]
    arrays += [rng.random(values[:3], np.float32), -rng.random(values[:3], np.float32)]
    inputs = DeltaInputs(*map(jnp.asarray, arrays))

    def theirs(q: Any, k: Any, v: Any, beta: Any, log_decay: Any) -> Any:
        return torch_chunk_gated_delta_rule(q, k, v, log_decay, beta, use_qk_l2norm_in_kernel=True)[0]

    def their_gradients() -> None:
        given = [torch.tensor(one, requires_grad=True) for one in arrays]
        theirs(*given).square().sum().backward()

    def their_result() -> Any:
        with torch.no_grad():
            return theirs(*map(torch.tensor, arrays)).numpy()

    apply = jax.jit(lambda inputs: delta_rule(inputs)[0])
    gradients = jax.jit(jax.grad(lambda inputs: jnp.sum(jnp.square(delta_rule(inputs)[0]))))
    difference = np.abs(their_result() - np.asarray(apply(inputs))).max()
    if not difference < 1e-4:
        raise SystemExit(f"the two differ by {difference:.1e}")
    for name, one, other in (
        ("forward", their_result, lambda: jax.block_until_ready(apply(inputs))),
        ("with gradients", their_gradients, lambda: jax.block_until_ready(gradients(inputs))),
    ):
        one(), other()
        # In turns, so that what else the machine does slows both.
        measured = np.array([[seconds(one), seconds(other)] for _ in range(ROUNDS)])
        ratio = statistics.median(measured[:, 0] / measured[:, 1])
        yield [name, float(measured[:, 0].min()), float(measured[:, 1].min()), float(ratio)]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# --- programs -------------------------------------------------------------------------------------


def branch(length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The delta rule with its projections: its value and all gradients."""
    whole = read_hf_config(QWEN3_NEXT)
    config = dataclasses.replace(whole, layers=whole.layers[:1], dtype="bfloat16")
    block = nnx.eval_shape(lambda: make_layer(config.layers[0], config, rngs=nnx.Rngs(0), dtype=jnp.dtype("bfloat16")))
    graphdef, state = nnx.split(block.attention)

    def value_and_gradients(state: Any, x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x)[0], state, x)
        return y, pull(dy)

    x = jax.ShapeDtypeStruct((1, length, config.d_model), jnp.bfloat16)
    return value_and_gradients, (state, x, x)


def report(name: str, mesh: Mesh, function: Callable[..., Any], arguments: Any, *, length: int) -> list[Any]:
    """Returns a row of `DELTA_COMPILED`, of the compiled program; no array may be of length x length."""
    whole = NamedSharding(mesh, P())
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole), arguments)
    with jax.set_mesh(mesh):
        done = jax.jit(function).lower(*shapes).compile()
    memory = done.memory_analysis()
    assert memory is not None, "these compilers all say it"
    found = {
        (dtype, tuple(int(size) for size in sizes.split(",")))
        for dtype, sizes in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", done.as_text())
    }
    square = [one for one in found if sum(size % length == 0 for size in one[1]) > 1]
    assert not square, square
    dtype, sizes = max(found, key=lambda one: math.prod(one[1]))
    largest = f"{dtype}{list(sizes)}"
    return [name, memory.argument_size_in_bytes / MIB, memory.temp_size_in_bytes / MIB, largest]


if __name__ == "__main__":
    main()
