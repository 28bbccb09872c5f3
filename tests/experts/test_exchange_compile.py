"""What layers of experts send over a slice of TPU chips, in the program that the TPU compiler makes."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.experts import BankConfig, FFNConfig, make_bank, set_exchange
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.planning.hlo import Collectives, sums_by_kind, transfers
from tests.support.tiers import long
from tests.support.uncached import uncached

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which holds the TPU compiler, is not installed"
)

D_MODEL, HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 512, 16, 2, 512  # tokens of every chip


class Layer(nnx.Module):
    def __init__(self, config):
        expert = FFNConfig(dim=HIDDEN, gated=False)
        self.experts = make_bank(config, expert, EXPERTS, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)


def program(config, topology, axes, exchange="auto", tokens=TOKENS):
    """The program of the layer and its gradient."""
    mesh = make_mesh(axes, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: Layer(config)), nnx.Param, ...)
    tokens = tokens * mesh.size // mesh.shape["tensor"]

    def like(tree):
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            state_shardings(tree, mesh),
        )

    def array(width, dtype):
        sharding = NamedSharding(mesh, P(("data", "fsdp", "expert"), None))
        return jax.ShapeDtypeStruct((tokens, width), dtype, sharding=sharding)

    def value(params, x, weights, rest, experts):
        layer = nnx.merge(graphdef, params, rest)
        set_exchange(layer, exchange)
        return jnp.sum(layer.experts(x, Routing(experts, weights)).astype(jnp.float32) ** 2)

    x, weights, experts = array(D_MODEL, jnp.bfloat16), array(TOP_K, jnp.float32), array(TOP_K, jnp.int32)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(value, argnums=(0, 1, 2)))
        lowered = gradient.lower(like(params), x, weights, like(rest), experts)
        with uncached():
            return lowered.compile().as_text()


ROWS = 2 * TOKENS * D_MODEL  # bytes of the tokens of a chip, bfloat16


def test_what_a_chip_sends_does_not_grow_with_the_slice():
    """Rows travel there and back, forward and backward: as many as one chip has, whatever the number of chips."""
    sixteen = sums_by_kind(transfers(program(BankConfig(), "v5e:4x4", {"expert": 16})))
    assert sixteen["ragged-all-to-all"] == Collectives(4, 4 * TOP_K * ROWS)
    # What all devices get is how many rows go where.
    assert sum(found.bytes for kind, found in sixteen.items() if kind != "ragged-all-to-all") < ROWS / 50


@long
def test_by_all_gather_it_does():
    gathered = sums_by_kind(transfers(program(BankConfig(), "v5e:4x4", {"expert": 16}, "all-gather")))
    assert "ragged-all-to-all" not in gathered and gathered["all-gather"].bytes > 16 * ROWS


@long
@pytest.mark.parametrize(
    "config",
    [
        BankConfig(kind="low-rank", rank=4),
        BankConfig(kind="sparse", rate=0.999),
        BankConfig(kind="low-rank", rank=4, base="none"),
    ],
    ids=["low-rank", "sparse", "low-rank without a base"],
)
def test_deltas_send_no_tokens(config):
    """What travels along `expert` is parameters and their gradients, the same for any number of tokens."""
    axes = {"fsdp": 2, "expert": 4, "tensor": 2}
    few, many = (transfers(program(config, "v5e:4x4", axes, tokens=TOKENS * more)) for more in (1, 4))
    assert not {one.kind for one in many} & {"all-to-all", "ragged-all-to-all"}
    along_few, along_many = (
        sorted((one.kind, one.bytes, one.count) for one in some if _leaves_tensor(one.group)) for some in (few, many)
    )
    assert along_few == along_many


def _leaves_tensor(group):
    """Whether a collective is one of other devices than those that share the neurons of the same tokens."""
    return len(group) != 2 or group[1] != group[0] + 1
