"""Compiles products of experts, with their gradients, for TPU chips that are not there; prints a JSON line for each.

    python -m tests.kernels.tpu.compile_for_tpu GENERATION:KIND:E:IN:OUT:ROWS ...

KIND `factored` is a whole forward layer of low-rank experts whose base is applied once per token.

A process of its own: the environment has to be described before JAX is imported, and without the tests' flags.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_jax.planning.planned_devices import prepare_environment

prepare_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from moe_jax.experts import BankConfig, FFNConfig, make_bank  # noqa: E402
from moe_jax.experts.forms import Full, LowRank, Quantized  # noqa: E402
from moe_jax.experts.forms.kernel_of_codes import NF4  # noqa: E402
from moe_jax.experts.hidden_rows import FFNs, Kernels, hidden_rows  # noqa: E402
from moe_jax.experts.shapes import BASE, Matrix  # noqa: E402
from moe_jax.functional.routing.token_choices import Routing  # noqa: E402

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
FORMS = {
    "low-rank": LowRank(rank=16),
    "full": Full(),
    "2-bit": Quantized(bits=2, group_size=128),
    "3-bit": Quantized(bits=3, group_size=128),
    "nf4": NF4(),
}


def compiled(generation: str, kind: str, experts: int, shape: tuple[int, int], rows: int) -> dict:
    """What the compiler says of a product of bfloat16 rows and parameters, all its gradients, and a gated product."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices[0]
    form, matrix = FORMS[kind], Matrix("up", shape)
    leaves = nnx.eval_shape(lambda: form.fresh(nnx.Rngs(0), matrix, (experts,), jnp.dtype(jnp.bfloat16)))
    trained = {name: leaf for name, leaf in leaves.items() if form.is_trained(name, leaf)}
    fixed = {name: leaf for name, leaf in leaves.items() if name not in trained}
    if form.over_base:
        trained[BASE] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def product_and_gradients(x, trained, fixed, sizes, dout):
        y, vjp = jax.vjp(lambda x, trained: form.grouped(x, trained | fixed, sizes, matrix), x, trained)
        kernels = {name: Kernels(form, matrix, trained | fixed) for name in ("gate", "up")}
        return y, vjp(dout), hidden_rows(x, FFNs(kernels, {}, "silu"), sizes)

    of_rows = (jax.ShapeDtypeStruct((rows, side), jnp.bfloat16) for side in shape)
    arguments = next(of_rows), trained, fixed, jax.ShapeDtypeStruct((experts,), jnp.int32), next(of_rows)
    return report(product_and_gradients, arguments, device)


def compiled_factored(generation: str, experts: int, shape: tuple[int, int], rows: int) -> dict:
    """What the compiler says of a forward layer of low-rank experts whose factors lie side by side."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices[0]
    top_k = 2 if experts == 8 else 8
    config, expert = BankConfig(kind="low-rank", rank=16), FFNConfig(dim=shape[1])
    bank = nnx.eval_shape(lambda: make_bank(config, expert, experts, shape[0], rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    bank.strategy = "factored-side-by-side"
    graphdef, state = nnx.split(bank)
    tokens = rows // top_k
    routing = (jax.ShapeDtypeStruct((tokens, top_k), dtype) for dtype in (jnp.int32, jnp.float32))
    arguments = jax.ShapeDtypeStruct((tokens, shape[0]), jnp.bfloat16), Routing(*routing), state
    return report(lambda x, routing, state: nnx.merge(graphdef, state)(x, routing), arguments, device)


def report(function: Callable[..., Any], arguments: tuple, device: jax.Device) -> dict:
    """Compiles a function for a device that is not there."""
    there = SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arguments)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        done = jax.jit(function).lower(*arguments).compile(compiler_options=options)
        (text,) = (file.read_text() for file in Path(folder).glob("*.after_optimizations.txt"))
    return {
        "kernels": sorted(name for name in KERNELS if f"%{name}." in text or f"%{name} " in text),
        "loops": text.count(" while("),
        "temporaries": done.memory_analysis().temp_size_in_bytes,
        "flops": (done.cost_analysis() or {}).get("flops"),
    }


KERNELS = (
    "gated_product", "grouped_product", "grouped_product_transposed", "grouped_outer", "low_rank_gradients",
    "low_rank_hidden", "reduced_outer",
)  # fmt: skip

if __name__ == "__main__":
    for case in sys.argv[1:]:
        generation, kind, *numbers = case.split(":")
        experts, fan_in, fan_out, rows = map(int, numbers)
        sizes = experts, (fan_in, fan_out), rows
        found = compiled_factored(generation, *sizes) if kind == "factored" else compiled(generation, kind, *sizes)
        print(json.dumps({"case": case} | found), flush=True)
