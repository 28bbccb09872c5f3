"""Routers: products of the highest precision whatever the compute dtype, and gradients of the task."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.distributed.sharding import path_name
from moe_jax.experts import AdapterConfig, BankConfig, FFNConfig, LoRAConfig
from moe_jax.functional.routing.gates import GATES
from moe_jax.models import MoEConfig
from moe_jax.models.moe_config import PerftConfig
from moe_jax.nn.moe import MoE
from tests.support.jaxprs import equations
from tests.support.numerics import normal, randomised
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

D_MODEL, FFN = 8, FFNConfig(dim=16)
ADAPTER = AdapterConfig(rank=2)
# The layer, and how many products its routers have in a step: forward, and the gradients of kernel and input.
LAYERS = {
    "linear": (MoEConfig(expert=FFN, num_experts=4, top_k=2), 3),
    "linear with LoRA": (
        MoEConfig(expert=FFN, num_experts=4, top_k=2, router_lora=LoRAConfig(rank=2, targets=("router",))),
        9,
    ),
    # Hidden, out and noise.
    "coder": (MoEConfig(expert=FFN, num_experts=4, top_k=2, universal="coder"), 9),
    "PESC": (
        MoEConfig(expert=FFN, num_experts=4, top_k=2, bank=BankConfig(kind="adapter", adapter=ADAPTER)),
        3,
    ),
    "PERFT-R": (
        MoEConfig(
            expert=FFN,
            num_experts=4,
            top_k=2,
            perft=PerftConfig(variant="routed", adapter=ADAPTER, num_experts=3, top_k=2),
        ),
        6,
    ),
}


def step(config):
    """The gradients of a layer in bfloat16, and its arguments."""
    graphdef, params, rest = randomised(lambda: MoE(config, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))

    def loss(params, x):
        y, _ = nnx.merge(graphdef, params, rest)(x, None, jax.random.key(0))
        return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1)), (params, jnp.ones((1, 6, D_MODEL), jnp.bfloat16))


@pytest.mark.parametrize("name", LAYERS)
def test_every_product_of_a_router_has_the_highest_precision(name):
    config, count = LAYERS[name]
    gradients, arguments = step(config)
    products = [
        equation for equation in equations(jax.make_jaxpr(gradients)(*arguments)) if is_float32_product(equation)
    ]
    # Experts, adapters and the universal FFN multiply in bfloat16. The mean of products of logits is a statistic.
    assert len(products) == count + count_of_statistics(config)
    assert all(is_highest(equation.params["precision"]) for equation in products)


def test_the_program_for_tpu_says_so():
    gradients, arguments = step(LAYERS["coder"][0])
    text = jax.export.export(jax.jit(gradients), platforms=["tpu"])(*arguments).mlir_module()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    of_router = [line for line in products if re.search(r": \(tensor<[0-9x]*xf32>, tensor<[0-9x]*xf32>\)", line)]
    assert len(of_router) == 9  # the statistic is not asked for
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in of_router)


GATED = [
    *({"gate": gate, "top_k": top_k} for gate in GATES for top_k in (1, 2, 4) if gate != "top1" or top_k == 1),
    *({"universal": universal, "top_k": top_k} for universal in ("coder", "med") for top_k in (1, 2)),
    {"gate": "topk_softmax", "top_k": 2, "bank": BankConfig(kind="adapter", adapter=ADAPTER)},
    {"gate": "topk_softmax", "top_k": 1, "bank": BankConfig(kind="adapter", adapter=ADAPTER)},
]


@one_in(13)  # one that learns, and one that does not
@pytest.mark.parametrize("options", GATED, ids=str)
def test_the_task_reaches_the_router_where_its_config_says_so(options):
    """All but one expert per token with a weight that is always 1, which is never made anew (see `upcycle`)."""
    config = MoEConfig(expert=FFN, num_experts=4, **options)
    graphdef, params, rest = randomised(lambda: MoE(config, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))
    x, target = normal(99, 2, 1, 6, D_MODEL)

    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.sum(nnx.merge(graphdef, params, rest)(x)[0] * target)

    largest = {name: float(jnp.max(jnp.abs(leaf))) for name, leaf in of_router(gradient(params))}
    largest.pop("noise/kernel", None)  # drawn with a key alone
    assert largest and all((value > 1e-3) == config.router_learns for value in largest.values()), largest


def of_router(params):
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["router"]):
        yield path_name(path), leaf


def is_float32_product(equation):
    return equation.primitive.name == "dot_general" and all(v.aval.dtype == jnp.float32 for v in equation.invars)


def is_highest(precision):
    return precision == (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def count_of_statistics(config):
    return 2 if config.perft is not None else 1
