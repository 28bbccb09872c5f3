"""PESC and PERFT layers against one plain adapter per expert, forward and gradient; what holds before training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import leaf_spec, make_mesh, path_name
from moe_jax.experts.adapters import Adapters
from moe_jax.experts.devices import BATCH_AXES
from moe_jax.functional.adapters import WAYS, routed_adapters
from moe_jax.functional.keys import dropout
from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS
from moe_jax.models import AdapterConfig, BankConfig, FFNConfig, MoEConfig, PerftConfig
from moe_jax.nn.layers import FFN
from moe_jax.nn.moe import MoE
from tests.support.numerics import assert_close, gradients_and_output, made_at_once, normal, randomised
from tests.support.tiers import EVERY, long, one_in

D_MODEL = 12
EXPERT = FFNConfig(dim=10, bias=True)
LORA = AdapterConfig(rank=3, scale=2.0)
PARALLEL = AdapterConfig(rank=5, activation="silu")
MOE = MoEConfig(expert=EXPERT, num_experts=4, top_k=2, gate="softmax_topk")


def perft(variant, adapter, num_experts=1, top_k=None, **others):
    return dataclasses.replace(
        MOE, perft=PerftConfig(variant=variant, adapter=adapter, num_experts=num_experts, top_k=top_k, **others)
    )


CONFIGS = {
    "pesc": dataclasses.replace(
        MOE,
        gate="topk_softmax",
        bank=BankConfig(kind="adapter", adapter=AdapterConfig(rank=6, activation="gelu", scale=0.25)),
    ),
    "routed": perft("routed", LORA, 6, 3),
    "routed-topk-softmax": perft("routed", PARALLEL, 3, 2, gate="topk_softmax"),
    "embedded": perft("embedded", PARALLEL, 4),
    "dense": perft("dense", LORA, 3),
    "single": perft("single", PARALLEL),
}
pytestmark = pytest.mark.usefixtures("strict_numerics")


@functools.cache
def random_moe(config):
    """A layer in which nothing is zero."""
    return randomised(lambda: MoE(config, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))


def one_adapter(adapters, j, x):
    """`s * act(x Down_j) Up_j`, written out."""
    config, h = adapters.config, x @ adapters.down[j]
    act = ACTIVATION_FUNCTIONS.get(config.activation, lambda h: h)
    return config.scale * (act(h) @ adapters.up[j])


def weighted(outputs, routing):
    """Sum over the choices of a token of weight times output; `outputs` is one [T, d] per expert."""
    outputs = jnp.stack(outputs, axis=1)
    chosen = jnp.take_along_axis(outputs, routing.experts[:, :, None], axis=1)
    return jnp.sum(chosen * routing.weights[:, :, None], axis=1)


def per_expert_reference(moe, x):
    tokens, config = x.reshape(-1, D_MODEL), moe.config
    routing, _ = route(tokens @ moe.router.kernel[...], config.top_k, config.gate)
    experts = range(config.num_experts)
    if config.bank.kind == "adapter":
        base = moe.experts.base
        kernels = {name: base[name].kernel[...] for name in config.expert.matrices}
        biases = {name: base[name].bias[...][None, :] for name in config.expert.matrices}
        gate, up = (tokens @ kernels[name] + biases[name] for name in ("gate", "up"))
        h = (jax.nn.silu(gate) * up) @ kernels["down"] + biases["down"]
        y = weighted([h + one_adapter(moe.experts.adapters, i, h) for i in experts], routing)
        return y.reshape(x.shape)
    variant, adapters = config.perft.variant, moe.perft.adapters
    beside = [one_adapter(adapters, j, tokens) for j in range(config.perft.num_experts)]
    outputs = []
    for i in experts:
        kernels, biases = moe.experts.kernels(i), moe.experts.biases(i)
        gate, up = (tokens @ kernels[name] + biases[name][None, :] for name in ("gate", "up"))
        output = (jax.nn.silu(gate) * up) @ kernels["down"] + biases["down"][None, :]
        outputs.append(output + beside[i] if variant == "embedded" else output)
    y = weighted(outputs, routing)
    if variant == "routed":
        own, _ = route(tokens @ moe.perft.router.kernel[...], config.perft.top_k, config.perft.gate)
        y = y + weighted(beside, own)
    elif variant != "embedded":
        y = y + sum(beside)
    return y.reshape(x.shape)


@functools.cache
def layer_program(config, reference):
    graphdef, _, rest = random_moe(config)
    return gradients_and_output(graphdef, rest, per_expert_reference if reference else lambda moe, x: moe(x)[0])


@one_in(8)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_equals_one_adapter_per_expert(name):
    @settings(max_examples=4)
    @given(st.integers(0, 999))
    def check(seed):
        x, target = normal(seed, 2, 2, 5, D_MODEL)
        params = random_moe(CONFIGS[name])[1]
        got, expected = (layer_program(CONFIGS[name], ref)(params, x, target) for ref in (False, True))
        assert_close(got, expected)

    check()


@one_in(2)
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_both_ways_of_routed_adapters_are_one_function(activation):
    """Also where a token chooses the same adapter twice, and for tokens without weight."""

    @functools.partial(jax.jit, static_argnames="way")
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3), has_aux=True)
    def program(x, weights, down, up, experts, target, way):
        y = routed_adapters(x, Routing(experts, weights), down, up, activation, 0.5, way)
        return jnp.sum(y * target), y

    # The shapes are few, so that programs are compiled once; routing, which is data, is drawn freely.
    @settings(max_examples=8)
    @given(st.sampled_from([(1, 1, 1, 1), (9, 5, 3, 4)] if EVERY else [(9, 5, 3, 4)]), st.integers(0, 99))
    def check(shape, seed):
        tokens, adapters, top_k, rank = shape
        rng = np.random.default_rng(seed)
        x, target = normal(rng, 2, tokens, 4)
        weights = jnp.asarray(np.maximum(rng.standard_normal((tokens, top_k)), 0.0), jnp.float32)
        experts = jnp.asarray(rng.integers(0, adapters, (tokens, top_k)), jnp.int32)
        down, up = normal(rng, adapters, 4, rank), normal(rng, adapters, rank, 4)
        one, other = (program(x, weights, down, up, experts, target, way=way) for way in WAYS)
        assert_close(one, other)

    check()


def fresh(config):
    return made_at_once(lambda: MoE(config, D_MODEL, rngs=nnx.Rngs(3), dtype=jnp.float32))


@one_in(2)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_before_training_pesc_is_its_ffn_to_the_last_bit(top_k):
    moe = fresh(dataclasses.replace(CONFIGS["pesc"], top_k=top_k))
    x = normal(0, 3, 7, D_MODEL)
    dense = made_at_once(lambda: FFN(EXPERT, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))
    for name in EXPERT.matrices:
        setattr(dense, name, moe.experts.base[name])
    y, expected = nnx.jit(lambda moe, dense, x: (moe(x)[0], dense(x.reshape(-1, D_MODEL)).reshape(x.shape)))(
        moe, dense, x
    )
    np.testing.assert_array_equal(y, expected)


@one_in(4)
@pytest.mark.parametrize("name", ["routed", "embedded", "dense", "single"])
def test_before_training_perft_is_the_untouched_moe_to_the_last_bit(name):
    tuned, untouched = fresh(CONFIGS[name]), fresh(MOE)
    x = normal(0, 3, 7, D_MODEL)
    apply = nnx.jit(lambda moe, x: moe(x)[0])
    np.testing.assert_array_equal(apply(tuned, x), apply(untouched, x))


def test_perft_r_with_one_adapter_is_perft_s():
    one = perft("routed", PARALLEL, 1, 1)
    routed, single = (nnx.merge(*random_moe(config)) for config in (one, CONFIGS["single"]))
    single.perft.adapters, single.experts, single.router = routed.perft.adapters, routed.experts, routed.router
    x = normal(0, 2, 5, D_MODEL)
    apply = nnx.jit(lambda moe, x: moe(x)[0])
    np.testing.assert_array_equal(apply(routed, x), apply(single, x))


def test_the_own_router_of_perft_r_learns_from_the_task():
    """The task alone, without a balance loss: its gradient comes through the weights of the adapters."""
    graphdef, params, rest = random_moe(CONFIGS["routed"])
    x, target = normal(0, 2, 2, 9, D_MODEL)
    program = jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params, rest)(x)[0] * target)))
    gradient = program(params)
    assert float(jnp.min(jnp.linalg.norm(gradient["perft"]["router"]["kernel"][...], axis=0))) > 1e-2


def test_dropout_is_for_training_and_keeps_the_mean():
    x = jnp.ones((400, 50))
    assert dropout(x, 0.25, None) is x
    dropped = dropout(x, 0.25, jax.random.key(0))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], 1 / 0.75, rtol=1e-6)
    assert abs(float(jnp.mean(kept)) - 0.75) < 0.01

    config = dataclasses.replace(MOE, perft=dataclasses.replace(CONFIGS["single"].perft, adapter=LORA))
    noisy = dataclasses.replace(config.perft, adapter=dataclasses.replace(LORA, dropout=0.5))
    graphdef, params, rest = random_moe(dataclasses.replace(config, perft=noisy))
    moe = nnx.merge(graphdef, params, rest)
    plain = nnx.merge(*random_moe(config))
    x = normal(4, 2, 5, D_MODEL)
    apply = nnx.jit(lambda moe, x, key: moe(x, None, key)[0])
    expected = apply(plain, x, jax.random.key(0))
    np.testing.assert_array_equal(apply(moe, x, None), expected)
    assert not np.array_equal(apply(moe, x, jax.random.key(0)), expected)


@long
@one_in(2)
@pytest.mark.parametrize("name", ["pesc", "routed"])
def test_a_layer_over_a_mesh_equals_one_device(name):
    """With dropout, and so many adapters that rows are sorted, which every device does for itself."""
    config = CONFIGS[name]
    adapter = AdapterConfig(rank=200, activation="gelu", scale=0.25, dropout=0.2)
    if name == "pesc":
        config = dataclasses.replace(config, num_experts=16, bank=BankConfig(kind="adapter", adapter=adapter))
    else:
        own = dataclasses.replace(config.perft, num_experts=16, top_k=2, adapter=adapter)
        config = dataclasses.replace(config, perft=own)
    graphdef, params, rest = random_moe(config)
    x, target = normal(0, 2, 8, 2, D_MODEL)

    def value(params, x, target):
        y, stats = nnx.merge(graphdef, params, rest)(x, None, jax.random.key(5))
        return jnp.sum(y * target), (y, stats)

    program = jax.grad(value, has_aux=True)
    expected = jax.jit(program)(params, x, target)
    mesh = make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})

    def put(path, leaf):
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, leaf_spec(f"layers/0/mlp/{path_name(path)}")))

    with jax.set_mesh(mesh):
        got = jax.jit(program)(jax.tree_util.tree_map_with_path(put, params), x, target)
    assert_close(got, expected)


@pytest.mark.parametrize(("num_tokens", "is_split"), [(16, True), (6, False)])
def test_every_device_sorts_its_own_tokens(num_tokens, is_split):
    """Tokens are gathered from other devices only where there are too few to split them evenly."""
    config = AdapterConfig(rank=200, activation="gelu")
    adapters = made_at_once(lambda: Adapters(config, 16, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))
    graphdef, state = nnx.split(adapters)
    mesh = make_mesh({"fsdp": 4, "expert": 2})
    rows = P(BATCH_AXES) if is_split else P()
    routing = Routing(jnp.zeros((num_tokens, 2), jnp.int32), jnp.ones((num_tokens, 2)))
    given = jax.device_put((jnp.ones((num_tokens, D_MODEL)), routing), jax.sharding.NamedSharding(mesh, rows))
    with jax.set_mesh(mesh):
        apply = jax.jit(lambda x, routing: nnx.merge(graphdef, state)(x, routing), out_shardings=rows)
        program = apply.lower(*given).compile()
    assert "all-gather" not in program.as_text()
    rows_of_a_device = num_tokens // (8 if is_split else 1)
    assert f"f32[{2 * rows_of_a_device},{D_MODEL}]" in program.as_text()  # each token as often as it has choices


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: perft("routed", LORA, 2, 3), "top_k=3 must lie between 1 and .* adapters, 2"),
        (lambda: perft("routed", LORA, 2), "top_k=None does .* with PERFT 'routed'"),
        (lambda: perft("routed", LORA, 2, 1, gate="topk_softmax"), "1 whatever its router"),
        (lambda: perft("dense", LORA, 2, 1), "top_k=1 does .* with PERFT 'dense'"),
        (lambda: perft("single", LORA, 2), "PERFT-S is one adapter, num_experts=2"),
        (lambda: perft("embedded", LORA, 3), "MoE's 4 experts, num_experts=3"),
        (lambda: AdapterConfig(rank=0), "rank=0"),
        (lambda: AdapterConfig(rank=1, dropout=1.0), "dropout=1.0 must lie in"),
        (lambda: dataclasses.replace(CONFIGS["pesc"], gate="softmax_topk"), "go with gate 'topk_softmax' alone"),
        (lambda: BankConfig(kind="adapter"), "bank kind 'adapter' lacks its adapter"),
        (lambda: BankConfig(kind="adapter", adapter=LORA, base="none"), "after a shared FFN"),
    ],
)
def test_configs_that_make_no_sense(make, said):
    with pytest.raises(InputError, match=said):
        make()
