"""The jitted programs of compression at the size of a layer of Mixtral-8x7B, compiled for a device that is described.

The least time of a program is that of its products at the peak of float32, or of its arguments and results at the
bandwidth of the memory, whichever is longer. The search for scales, which is no product, is not counted, nor that GPTQ
codes 4096 or 14336 rows one after another, with some kernels for each. Cholesky's decompositions (`triangular_factor`),
eigenvalues and QR of subspaces, and the orders of neurons but for their products are work of NumPy and SciPy.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.compression.calibration import expert_statistics
from moe_jax.compression.coding import factorization, half_products, learnt_rounding
from moe_jax.compression.coding.calibrated_codes import quantize_with_feedback
from moe_jax.compression.methods import choices, mobe
from moe_jax.compression.report import _output_sums
from moe_jax.core.data_sheets import CHIPS
from moe_jax.experts.forms import MixtureOfBases, Quantized
from moe_jax.models import FFNConfig
from moe_jax.planning.planned_devices import described_devices, prepare_environment
from true_size.layers import LAYERS

MIB, FLOAT = 1 << 20, np.dtype(np.float32).itemsize
SHAPE = LAYERS["Mixtral-8x7B"]
E, F, D = SHAPE.experts, SHAPE.neurons, SHAPE.d_model
TOKENS, COLUMNS = expert_statistics._CHUNK, choices._COLUMNS
STEPS = 200  # of learnt rounding, by default


class Program(NamedTuple):
    """A program, as a method calls it.

    Attributes:
      method: that does.
      name: in words.
      runs: of it, for a layer.
      function: jitted.
      arguments: without values; what is not an array is static.
      products: operations of the matrix products, a multiplication and an addition being two.
    """

    method: str
    name: str
    runs: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    products: float


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def programs() -> Iterator[Program]:
    """Yields the programs of all methods."""
    coded = partial(quantize_with_feedback, bits=4, group_size=128)
    chunks = -(-(8192 * 2 // E + expert_statistics._BACKGROUND_ROWS) // TOKENS)
    for name, width, other, matrices in (("gate and up", D, F, 2), ("down", F, D, 1)):
        given = "inputs" if matrices == 2 else "hidden activations"
        yield Program(
            "all with a text", f"a second moment of {given}, {TOKENS:,} tokens", E * matrices * chunks,
            jax.jit(expert_statistics._add.__wrapped__, donate_argnums=0),
            (array(width, width), array(TOKENS, width), array(TOKENS)), TOKENS * width**2,
        )  # fmt: skip
        yield Program(
            "GPTQ", f"codes of {name}", E * matrices, jax.jit(coded),
            (array(width, other), array(width, width)), width**2 * other,
        )  # fmt: skip
        yield Program(
            "all with a text", f"error of the outputs of {name}", 2 * E * matrices, _output_sums,
            (array(width, other, dtype=jnp.bfloat16), array(1, 1), array(width, other), array(width, width)),
            width**2 * other,
        )  # fmt: skip
        columns = COLUMNS * max(Counter(bits for _, bits in choices.CHOICES).values())
        tried = len({bits for _, bits in choices.CHOICES})
        yield Program(
            "allocate", f"codes of {columns} columns of {name}", E * matrices * tried, jax.jit(coded),
            (array(width, columns), array(width, width)), width**2 * columns,
        )  # fmt: skip
        yield Program(
            "allocate", f"outputs of {name} as factors see them", E * matrices, half_products.whitened,
            (array(width, width), array(width, other)), width**2 * other,
        )  # fmt: skip
    yield from _learnt()
    yield from _joint()
    yield from _mixed()


def _learnt() -> Iterator[Program]:
    form = Quantized(bits=4, group_size=128)
    shapes = FFNConfig(dim=F).shapes(D)
    starts, now = {}, {}
    for name, (rows, columns) in shapes.items():
        scales = array(rows // 128, columns)
        starts[name] = learnt_rounding.Start(array(rows, columns), scales)
        now[name] = learnt_rounding.Rounding(array(rows, columns), scales)
    kernels = {name: array(*shape) for name, shape in shapes.items()}
    tokens = learnt_rounding._BATCH
    given = (now, starts, kernels, {}, array(tokens, D), array(tokens), array())
    # The codes forwards and backwards, and the kernels as they were.
    products = (2 + 2 * 2) * 2 * tokens * 3 * D * F - 2 * tokens * 2 * D * F
    static = (learnt_rounding._Frozen(dict.fromkeys(shapes, form)), "silu")
    yield Program("learnt rounding", f"a step of {tokens} tokens", E * STEPS, learnt_rounding._moved, (*given, *static),
                  products)  # fmt: skip


def _joint() -> Iterator[Program]:
    rank = int(0.25 * F * 3 * D / (F + 3 * D))
    design = [array(F, 2 * D), array(F, D), array(F, F), array(F, D)]
    problem = factorization.Problem(*design, down_norm=array(), down_unit=array())  # type: ignore[arg-type]
    left, into = array(F, rank), array(rank, 2 * D)
    fit = factorization.Fit(left, left, into, array(rank, D), array())  # type: ignore[arg-type]
    of_design, of_moment = 2 * F * rank * D, 2 * F * F * rank
    yield Program("joint factors", "the best right factor", E * factorization.ROUNDS, factorization._products,
                  (problem, left), of_moment + (2 * 2 + 1) * of_design + 2 * F * rank**2 * 3)  # fmt: skip
    yield Program("joint factors", "steps of conjugate gradients", E * factorization.ROUNDS,
                  factorization._conjugate_gradients, (problem, fit, array(rank, rank), array(rank)),
                  factorization._STEPS * of_moment + 3 * of_design + 4 * 2 * F * rank**2)  # fmt: skip


def _mixed() -> Iterator[Program]:
    form = MixtureOfBases.of_size(FFNConfig(dim=F), D, E, keep=0.25, rank=None, bases=None, activation="silu")
    rank, bases = form.rank, form.bases
    factors = mobe.MixedFactors(array(bases, D, rank), array(E, bases), array(E, rank, F))
    state = jax.eval_shape(mobe._adam(2000, 0.02).init, factors)
    static = (form.mix, 2000, 0.02, mobe.LOOKED_AT)
    yield Program("MoBE", f"{mobe.LOOKED_AT} steps", 2 * 2000 // mobe.LOOKED_AT, mobe._advance,
                  (factors, state, array(E, D, F), *static), mobe.LOOKED_AT * 3 * 2 * E * D * F * rank)  # fmt: skip


def rows_for(topology: str) -> Iterator[list[Any]]:
    """Yields rows, one program after another."""
    prepare_environment()
    mesh = Mesh(np.array(described_devices(topology)[:1]), ("data",))
    chip, whole = CHIPS[topology.partition(":")[0]], NamedSharding(mesh, P())

    def placed(argument: Any) -> Any:
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(argument)):
            return argument  # static
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), argument)

    for one in programs():
        arguments = [placed(argument) for argument in one.arguments]
        with jax.set_mesh(mesh):
            done = one.function.lower(*arguments).compile()
        memory = done.memory_analysis()
        assert memory is not None, "these compilers all say it"
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
        least = max(one.products / chip.operations_per_second(FLOAT), moved / chip.bandwidth)
        sizes = [memory.argument_size_in_bytes / MIB, memory.temp_size_in_bytes / MIB]
        row = [topology, one.method, one.name, one.runs, *sizes, one.products / 1e9, 1e3 * least, least * one.runs]
        print(*row, flush=True)
        yield row
