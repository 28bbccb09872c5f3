"""Products, losses and gradients of no tokens, as of an empty batch: empty, or zero."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.experts import BankConfig, FFNConfig, make_bank
from moe_jax.experts.bank_config import BaseCodes
from moe_jax.experts.forms import LowRank, Quantized
from moe_jax.experts.shapes import BASE, Matrix
from moe_jax.functional.cross_entropy import token_cross_entropies, weighted_cross_entropy
from moe_jax.functional.dense import linear
from moe_jax.functional.few_rows.bfloat16_bits import linear_of_bits
from moe_jax.functional.few_rows.bfloat16_kernels import row_after_row
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.functional.head_chunks import HeadOptions
from moe_jax.functional.routing.token_choices import Routing

NONE = jnp.zeros((0, 8), jnp.float32)
KERNEL = jnp.ones((8, 6), jnp.bfloat16)
NO_TARGETS = jnp.zeros((0,), jnp.int32)


@pytest.mark.parametrize(
    "product",
    [
        lambda kernel: linear(NONE, kernel),
        lambda kernel: linear_of_bits(NONE, jnp.zeros((6, 8), jnp.uint16)),
        lambda kernel: row_after_row(NONE.astype(kernel.dtype), kernel.T, lambda x, kernel: x @ kernel.T),
    ],
)
def test_products_are_empty(product):
    assert jax.eval_shape(product, KERNEL).shape == (0, 6)


def test_losses_are_zero():
    head = jnp.ones((8, 6), jnp.float32)
    options, weights = HeadOptions(), jnp.zeros((0,), jnp.float32)
    loss, gradient = jax.value_and_grad(
        lambda head: weighted_cross_entropy(options, NONE[None], head, None, NO_TARGETS[None], weights[None])
    )(head)
    assert loss == 0 and not gradient.any()
    assert token_cross_entropies(options, NONE[None], head, None, NO_TARGETS[None]).shape == (1, 0)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_experts_have_no_kernel_for_them(platform):
    sizes, form, matrix = jnp.zeros((2,), jnp.int32), LowRank(rank=4), Matrix("up", (8, 6))

    def total(x, plain, leaves):
        own = jnp.sum(form.grouped(x, leaves, sizes, matrix).astype(jnp.float32))
        return own + jnp.sum(grouped_matmul(x, plain, sizes).astype(jnp.float32))

    arrays = NONE.astype(jnp.bfloat16), jnp.ones((2, 8, 6), jnp.bfloat16)
    leaves = {"a": jnp.ones((2, 8, 4), jnp.bfloat16), "b": jnp.ones((2, 4, 6), jnp.bfloat16), BASE: KERNEL}
    program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(*arrays, leaves)
    assert "custom_call @" not in program.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("form", [Quantized(bits=2, group_size=8), LowRank(rank=2)], ids=["codes", "over codes"])
def test_experts_in_codes_give_none(form):
    codes = None if form.kind == "quantized" else BaseCodes(code="4", group_size=8)
    bank = BankConfig(form, base_codes=codes)
    routing = Routing(jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2), jnp.float32))

    def output(x):
        return make_bank(bank, FFNConfig(dim=16, gated=False, activation="relu"), 4, 8, rngs=nnx.Rngs(0))(x, routing)

    assert jax.eval_shape(output, NONE).shape == (0, 8)
