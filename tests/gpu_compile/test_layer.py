"""A whole MoE layer, forward and backward: nothing dense over the experts, no loop of dynamic length."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.experts import BankConfig, set_strategy
from moe_jax.models import FFNConfig, MoEConfig
from moe_jax.nn.moe import MoE
from tests.gpu_compile.compiling import MIB, compiled, needs_xla_gpu, shape

pytestmark = needs_xla_gpu

TOKENS, TOP_K = 4096, 2
# Experts, width of the model, neurons of an expert.
MIXTRAL, OLMOE = (8, 4096, 14336), (64, 2048, 1024)
VANILLA, DERS_LM = BankConfig(), BankConfig(kind="low-rank", rank=16)
TWO_BITS = BankConfig(kind="quantized", bits=2, group_size=128)


def program(bank, sizes, strategy="auto"):
    """A layer's value and all its gradients."""
    experts, d_model, neurons = sizes
    config = MoEConfig(expert=FFNConfig(dim=neurons), num_experts=experts, top_k=TOP_K, bank=bank)
    layer = nnx.eval_shape(lambda: MoE(config, d_model, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    set_strategy(layer, strategy)
    graphdef, parameters, others = nnx.split(layer, nnx.Param, ...)

    def forward_and_backward(parameters, others, x, dy):
        def apply(parameters, x):
            return nnx.merge(graphdef, parameters, others)(x)[0]

        y, pull = jax.vjp(apply, parameters, x)
        return y, pull(dy)

    x = shape(1, TOKENS, d_model)
    return compiled(forward_and_backward, parameters, others, x, x)


def dense_arrays(found, sizes):
    """Arrays as large as all rows for every expert, which a dense product takes; the kernels are none of them."""
    experts, d_model, neurons = sizes
    limit, kernels = experts * TOKENS * TOP_K * min(d_model, neurons), {*sizes}
    return [(dtype, dims) for dtype, dims in found.arrays() if math.prod(dims) >= limit and {*dims} != kernels]


@pytest.mark.parametrize("sizes", [MIXTRAL, OLMOE], ids=["Mixtral", "OLMoE"])
@pytest.mark.parametrize(
    ("bank", "strategy"),
    [(VANILLA, "auto"), (DERS_LM, "auto"), (DERS_LM, "synthesised"), (TWO_BITS, "synthesised"), (TWO_BITS, "factored")],
    ids=["vanilla", "DeRS-LM", "DeRS-LM, synthesised", "2 bits, synthesised", "2 bits, factored"],
)
def test_layer(bank, strategy, sizes):
    found = program(bank, sizes, strategy)
    assert not found.dynamic_loops
    assert not dense_arrays(found, sizes)
    experts, d_model, neurons = sizes
    if bank is not VANILLA:
        stacked = {(experts, d_model, neurons), (experts, neurons, d_model)}
        assert not stacked & {dims for _, dims in found.arrays()}
    # Rows by neurons: what a layer keeps for the way back, and needs on it.
    activations = TOKENS * TOP_K * (4 * d_model + 8 * neurons) * 2
    # Kernels of a block of experts in bfloat16, and in float32 when they are made and when their gradient is.
    kernels = 0 if bank is VANILLA else (2 + 4 + 4) * max(d_model * neurons, 1 << 26)
    assert found.temporaries <= activations + kernels + 64 * MIB
