"""LoRA and NF4 in linear maps, dense FFNs and banks, against kernels with everything added up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import leaf_spec, make_mesh, path_name
from moe_jax.experts import make_bank, set_strategy
from moe_jax.experts.devices import sharded_product
from moe_jax.experts.linear import Linear, ffn_linears
from moe_jax.experts.shapes import Matrix
from moe_jax.functional.keys import dropout, fold_in
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.models import BankConfig, FFNConfig, LoRAConfig, MoEConfig
from moe_jax.nn import Head
from tests.support.numerics import assert_close, made_at_once, normal, randomised
from tests.support.tiers import long, one_in
from tests.support.training_models import config_of

D_MODEL, EXPERTS, TOKENS, TOP_K = 16, 4, 16, 2
LORA = LoRAConfig(rank=3, targets=("gate", "up", "down"), scale=0.5)
BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=2),
    "sparse": BankConfig(kind="sparse", rate=0.8),
    "quantized": BankConfig(kind="quantized", bits=4, group_size=8),
}
pytestmark = pytest.mark.usefixtures("strict_numerics")


@pytest.mark.parametrize("nf4", [False, True])
def test_a_linear_map_equals_its_kernel_with_everything_added_up(nf4):
    lora = LoRAConfig(rank=3, targets=("q",), scale=0.5)
    graphdef, params, rest = randomised(
        lambda: Linear((20, 12), bias=True, nf4=nf4, lora=lora, rngs=nnx.Rngs(0), dtype=jnp.float32)
    )
    x, target = normal(0, 7, 20), normal(1, 7, 12)

    def value(params, x, added_up):
        linear = nnx.merge(graphdef, params, rest)
        y = x @ linear.materialise() + linear.bias[...][None, :] if added_up else linear(x)
        return jnp.sum(y * target), y

    gradient = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True), static_argnums=2)
    got, expected = (gradient(params, x, added_up) for added_up in (False, True))
    assert_close(got, expected)


def test_what_is_drawn_before_training():
    """Kernels are normal with deviation 0.02, `a` of LoRA fills ±1/sqrt(fan-in) evenly, all else is zero."""
    lora = LoRAConfig(rank=30, targets=("q",))
    made = made_at_once(lambda: Linear((100, 300), bias=True, lora=lora, rngs=nnx.Rngs(0), dtype=jnp.float32))
    leaves = {path: np.asarray(array) for path, array in made.arrays().items()}
    assert scipy.stats.kstest(leaves["kernel"].ravel() / 0.02, "norm").pvalue > 0.01
    assert scipy.stats.kstest(leaves["lora/a"].ravel() * 10.0, "uniform", (-1, 2)).pvalue > 0.01
    assert not leaves["lora/b"].any() and not leaves["bias"].any()
    config = config_of(FFNConfig(dim=8))
    head = made_at_once(lambda: Head(dataclasses.replace(config, head_bias=True), rngs=nnx.Rngs(0)))
    assert head.bias.shape == (config.num_outputs,) and not np.asarray(head.bias[...]).any()


def test_dropout_acts_on_the_input_of_the_adapter_alone():
    lora = LoRAConfig(rank=3, targets=("q",), scale=0.5, dropout=0.5)
    parts = randomised(lambda: Linear((20, 12), lora=lora, rngs=nnx.Rngs(0), dtype=jnp.float32))
    linear, key, x = nnx.merge(*parts), jax.random.key(3), normal(0, 7, 20)
    leaves = linear.arrays()
    adapted = 0.5 * (dropout(x, 0.5, key) @ leaves["lora/a"] @ leaves["lora/b"])
    assert_close(nnx.jit(lambda linear, x: linear(x, key))(linear, x), x @ leaves["kernel"] + adapted)


def test_every_map_of_an_ffn_is_split_as_its_matrix():
    config = FFNConfig(dim=24, nf4=True)
    made = nnx.eval_shape(lambda: ffn_linears(config, 16, bias=False, rngs=nnx.Rngs(0), dtype=jnp.float32))
    assert {name: linear.matrix.split for name, linear in made.items()} == {"gate": "out", "up": "out", "down": "in"}


def test_lora_adds_nothing_before_training():
    made = Linear((20, 12), lora=LoRAConfig(rank=3, targets=("q",)), rngs=nnx.Rngs(0), dtype=jnp.float32)
    x = normal(0, 7, 20)
    np.testing.assert_array_equal(made(x), x @ made.kernel[...])


def per_expert(bank, x, routing):
    outputs = []
    for e in range(EXPERTS):
        kernels = bank.kernels(e)
        outputs.append((jax.nn.silu(x @ kernels["gate"]) * (x @ kernels["up"])) @ kernels["down"])
    chosen = jnp.take_along_axis(jnp.stack(outputs, axis=1), routing.experts[:, :, None], axis=1)
    return jnp.sum(chosen * routing.weights[:, :, None], axis=1)


def routed(seed):
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K]
    weights = rng.random((TOKENS, TOP_K))
    weights = jnp.asarray(weights / weights.sum(axis=1, keepdims=True), jnp.float32)
    return Routing(jnp.asarray(experts, jnp.int32), weights)


def loss_of(graphdef, rest, x, routing, target, reference):
    def value(params):
        bank = nnx.merge(graphdef, params, rest)
        y = per_expert(bank, x, routing) if reference else bank(x, routing)
        return jnp.sum(y * target), y

    return jax.grad(value, has_aux=True)


def random_bank(bank, expert):
    return randomised(lambda: make_bank(bank, expert, EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))


def bank_with(kind, nf4, lora):
    expert = FFNConfig(dim=24, nf4=nf4, lora=LORA if lora else None)
    return random_bank(BANKS[kind], expert)


@one_in(10)
@pytest.mark.parametrize(("nf4", "lora"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", BANKS)
def test_banks_equal_experts_with_everything_added_up(kind, nf4, lora):
    graphdef, params, rest = bank_with(kind, nf4, lora)
    x, target = normal(5, 2, TOKENS, D_MODEL)
    programs = (jax.jit(loss_of(graphdef, rest, x, routed(0), target, reference)) for reference in (False, True))
    results = [program(params) for program in programs]
    assert_close(*results, tolerance=2e-5)


@long
@pytest.mark.parametrize("kind", ["full", "low-rank"])
def test_banks_over_a_mesh_equal_one_device(kind):
    graphdef, params, rest = bank_with(kind, True, True)
    x, target = normal(5, 2, TOKENS, D_MODEL)
    expected = jax.jit(loss_of(graphdef, rest, x, routed(0), target, False))(params)
    mesh = make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})

    def put(path, leaf):
        path = f"layers/0/mlp/experts/{path_name(path)}"
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, leaf_spec(path)))

    params, rest = (jax.tree_util.tree_map_with_path(put, state) for state in (params, rest))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda params, rest: loss_of(graphdef, rest, x, routed(0), target, False)(params))(params, rest)
    assert_close(got, expected)


def with_dropped_out_base(bank, x, routing, key):
    """The experts over a base whose products with dropout are given, one expert after another."""
    base = {name: bank.base[name] for name in bank.expert.matrices}
    stored = {name: linear.materialise() for name, linear in base.items()}
    gate, up = (base[name](x, fold_in(key, index)) for index, name in enumerate(("gate", "up")))
    hidden, outputs = [], []
    for e in range(EXPERTS):
        delta = {name: kernel - stored[name] for name, kernel in bank.kernels(e).items()}
        hidden.append(jax.nn.silu(gate + x @ delta["gate"]) * (up + x @ delta["up"]))
        outputs.append(hidden[-1] @ delta["down"])
    h, y = (
        jnp.sum(
            jnp.take_along_axis(jnp.stack(array, axis=1), routing.experts[:, :, None], axis=1)
            * routing.weights[:, :, None],
            axis=1,
        )
        for array in (hidden, outputs)
    )
    return base["down"](h, fold_in(key, 2)) + y


@one_in(9, first=1)
@pytest.mark.parametrize("strategy", ["auto", "synthesised", "factored-grouped"])
@pytest.mark.parametrize("kind", ["low-rank", "sparse", "quantized"])
def test_the_dropout_of_a_base_with_lora_is_applied_whatever_the_strategy(kind, strategy):
    """Inside a synthesised kernel LoRA would be `W + A B`, and the rows would have no dropout."""
    expert = FFNConfig(dim=24, lora=dataclasses.replace(LORA, dropout=0.5))
    bank = nnx.merge(*random_bank(BANKS[kind], expert))
    set_strategy(bank, strategy)
    x, key = normal(5, TOKENS, D_MODEL), jax.random.key(6)
    apply = nnx.jit(lambda bank, key: bank(x, routed(0), key))
    got = apply(bank, key)
    expected = nnx.jit(lambda bank, key: with_dropped_out_base(bank, x, routed(0), key))(bank, key)
    assert_close(got, expected, tolerance=2e-5)
    assert float(jnp.max(jnp.abs(got - apply(bank, None)))) > 0.1


@pytest.mark.parametrize("nf4", [False, True])
def test_no_array_of_the_size_of_the_kernel_is_made(nf4):
    """`W + A B` would be one, and so would a kernel taken out of its codes as a whole."""
    width = 8192
    lora = LoRAConfig(rank=4, targets=("q",))
    made = nnx.eval_shape(lambda: Linear((width, width), nf4=nf4, lora=lora, rngs=nnx.Rngs(0), dtype=jnp.float32))
    graphdef, factors, rest = nnx.split(made, lambda path, _: "lora" in path, ...)
    x = jax.ShapeDtypeStruct((8, width), jnp.float32)

    def loss(factors, rest, x):
        return jnp.sum(jnp.square(nnx.merge(graphdef, factors, rest)(x)))

    program = jax.jit(jax.grad(loss, argnums=(0, 2))).lower(factors, rest, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * width * width / 8


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LoRAConfig(rank=0, targets=("q",)), "rank=0"),
        (lambda: LoRAConfig(rank=1, targets=()), "least one kernel"),
        (lambda: FFNConfig(dim=4, gated=False, lora=LORA), "LoRA targets gate do"),
        (
            lambda: MoEConfig(
                expert=FFNConfig(dim=4, lora=LORA),
                num_experts=2,
                top_k=1,
                bank=BankConfig(kind="low-rank", rank=1, base="none"),
            ),
            "needs full kernels",
        ),
        (
            lambda: MoEConfig(
                expert=FFNConfig(dim=4, lora=dataclasses.replace(LORA, dropout=0.1)), num_experts=2, top_k=1
            ),
            "LoRA on full experts",
        ),
    ],
)
def test_configs_that_make_no_sense(make, said):
    with pytest.raises(InputError, match=said):
        make()


@pytest.mark.parametrize(
    ("shape", "split", "unit", "part"),
    [
        ((96, 40), "out", 8, (96, 10)),
        ((96, 42), "out", 8, None),
        ((96, 40), "in", 8, (24, 40)),
        ((80, 40), "in", 8, None),  # shards of 20 rows do not begin with whole bytes
        ((80, 40), "in", 2, (20, 40)),
    ],
)
def test_a_product_over_a_mesh_is_of_parts_where_the_kernel_divides(shape, split, unit, part):
    seen = []

    def multiply(x, arrays, part):
        seen.append((part and part.shape, arrays["kernel"].shape, x.shape[-1]))
        return x @ arrays["kernel"]

    x, kernel = normal(0, 8, shape[0]), normal(1, *shape)
    specs = {"kernel": P("tensor", None) if split == "in" else P(None, "tensor")}
    with jax.set_mesh(make_mesh({"fsdp": 2, "tensor": 4})):
        y = jax.jit(
            lambda x, kernel: sharded_product(
                x, {"kernel": kernel}, Matrix("", shape, split), specs, multiply, unit=unit
            )
        )(x, kernel)
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-4, atol=1e-4)
    assert set(seen) == {(part, part or shape, (part or shape)[0])}
