"""Every way to apply experts on the GPU in bfloat16, forward and gradients, against one FFN per expert in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.distributed.sharding import path_name
from moe_jax.experts import BankConfig, BaseCodes, FFNConfig, Mixed, make_bank, set_strategy
from moe_jax.experts.devices import Platform, current_chip
from moe_jax.experts.forms import Quantized
from moe_jax.experts.shapes import Load
from moe_jax.experts.strategy import strategy_costs
from moe_jax.functional.routing.token_choices import Routing
from tests.on_gpu.measured import error, needs_gpu
from tests.support.references import experts_reference

pytestmark = needs_gpu

D_MODEL, NEURONS, EXPERTS, TOP_K = 256, 512, 8, 2
PARTS = (Quantized(bits=2, group_size=64), Quantized(bits=4, group_size=64))
KINDS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=16),
    "sparse": BankConfig(kind="sparse", rate=0.9),
    "bitmap": BankConfig(kind="sparse", rate=0.8, encoding="bitmap"),
    "coo-4": BankConfig(kind="sparse", rate=0.9, encoding="coo", bits=4, group_size=64),
    "2 bits": BankConfig(kind="quantized", bits=2, group_size=64),
    "4 bits": BankConfig(kind="quantized", bits=4, group_size=64),
    "3 bits alone": BankConfig(kind="quantized", base="none", bits=3, group_size=64),
    "joint-low-rank": BankConfig(kind="joint-low-rank", rank=16),
    "bases": BankConfig(kind="mixture-of-bases", base="none", rank=16, bases=2),
    "mixed": BankConfig(Mixed(parts=PARTS, part_of=(1, 0, 1, 1, 0, 0, 1, 0))),
    "over codes": BankConfig(kind="low-rank", rank=16, base_codes=BaseCodes(code="4", group_size=64)),
}
EXPERT = FFNConfig(dim=NEURONS)


def random_bank(kind):
    """Base and deltas both matter: every parameter is drawn anew, with a standard deviation that suits its size."""

    def make():
        return make_bank(KINDS[kind], EXPERT, EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)

    graphdef, params, _ = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    rest = jax.jit(lambda: nnx.state(make(), nnx.Not(nnx.Param)))()
    rng = np.random.default_rng(0)

    def parameter(path, leaf):
        scale = 0.1 if leaf.ndim < 3 else 0.05
        return jnp.asarray(scale * rng.standard_normal(leaf.shape), jnp.bfloat16)

    def other(path, leaf):
        if path_name(path).endswith("codes"):
            return jnp.asarray(rng.integers(0, 256, leaf.shape), jnp.uint8)
        return leaf

    return graphdef, *(jax.tree_util.tree_map_with_path(f, s) for f, s in ((parameter, params), (other, rest)))


@pytest.mark.parametrize("tokens", [4, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_bank(kind, tokens):
    graphdef, params, rest = random_bank(kind)
    rng = np.random.default_rng(1)
    experts = np.stack([rng.choice(EXPERTS - 1, TOP_K, replace=False) for _ in range(tokens)])
    x, target = (jnp.asarray(rng.standard_normal((tokens, D_MODEL)), jnp.bfloat16) for _ in range(2))
    weights = jnp.asarray(rng.random((tokens, TOP_K)), jnp.float32)
    routing = jnp.asarray(experts, jnp.int32)

    def gradients(strategy):
        def value(params, x, weights):
            bank = nnx.merge(graphdef, params, rest)
            if strategy is None:
                y = experts_reference(bank, x, Routing(routing, weights))
            else:
                set_strategy(bank, strategy)
                y = bank(x, Routing(routing, weights))
            return jnp.sum(y.astype(jnp.float32) * target.astype(jnp.float32)), y

        return jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))

    in_float32 = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    with jax.default_matmul_precision("highest"):
        expected, expected_y = gradients(None)(*in_float32, weights)
    load = Load(EXPERTS, tokens, TOP_K)
    strategies = strategy_costs(KINDS[kind], EXPERT, D_MODEL, load, Platform.of(current_chip(), 2)) or {"auto": None}
    errors = {}
    for strategy in strategies:
        got, y = gradients("auto" if len(strategies) == 1 else strategy)(params, x, weights)
        errors[f"{strategy}, output"] = error(y, expected_y)
        found = jax.tree_util.tree_leaves_with_path(got)
        for (path, a), b in zip(found, jax.tree.leaves(expected), strict=True):
            errors[f"{strategy}, {path_name(path)}"] = error(a, b)
    # Three products and an activation, rounded one after the other; gradients of the weights of routing, the last, are
    # sums of terms that cancel.
    bounds = {name: 2.0**-4 if name.endswith(", 2") else 2.0**-6 for name in errors}
    assert not {name: value for name, value in errors.items() if value > bounds[name]}
