"""Products of experts in programs without a mesh that the compiler divides between devices: it cannot divide a kernel.

Who calls `jax.jit` with arrays that are split, and never says `jax.set_mesh`, has such a program.
"""

import contextlib
import importlib.util
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.kernel_of_codes import NF4
from moe_jax.experts.shapes import BASE, Matrix
from moe_jax.functional.grouped import grouped_matmul
from moe_jax.planning.planned_devices import prepare_environment
from tests.support.tiers import long, one_in
from tests.support.uncached import uncached

EXPERTS, SHAPE, ROWS = 4, (256, 384), 512
FORMS = {
    "low-rank": LowRank(rank=16),
    "2-bit": Quantized(bits=2, group_size=128),
    "nf4": NF4(),
    "entries": Sparse(rate=0.999),
}
KERNELS = {"tpu": "tpu_custom_call", "cuda": "triton|mosaic_gpu"}
# From 0.12 on, JAX lowers a Triton kernel for a GPU that it knows, and here is none.
H100 = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")


def on_h100():
    """Says which GPU programs are lowered for, without a mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H100))


def lowered(kind, devices, platform):
    """A product of rows that are split between the devices, and its gradients."""
    mesh = Mesh(np.array(devices), ("data",))

    def given(array, *axes):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, P(*axes)))

    if kind == "plain":
        leaves = {"kernel": jax.ShapeDtypeStruct((EXPERTS, *SHAPE), jnp.bfloat16)}
        trained, product = leaves, lambda x, leaves, sizes: grouped_matmul(x, leaves["kernel"], sizes)
    else:
        form, matrix = FORMS[kind], Matrix("up", SHAPE)
        leaves = dict(nnx.eval_shape(lambda: form.fresh(nnx.Rngs(0), matrix, (EXPERTS,), jnp.dtype("bfloat16"))))
        trained = {name: leaf for name, leaf in leaves.items() if form.is_trained(name, leaf)}
        if form.over_base:
            trained[BASE] = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
        product = lambda x, leaves, sizes: form.grouped(x, leaves, sizes, matrix)  # noqa: E731
    fixed = {name: leaf for name, leaf in leaves.items() if name not in trained}

    def run(x, trained, fixed, sizes):
        def value(x, trained):
            return jnp.sum(product(x, trained | fixed, sizes).astype(jnp.float32) ** 2)

        return jax.value_and_grad(value, argnums=(0, 1))(x, trained)

    x = given(jax.ShapeDtypeStruct((ROWS, SHAPE[0]), jnp.bfloat16), "data")
    sizes = given(jax.ShapeDtypeStruct((EXPERTS,), jnp.int32))
    arguments = x, *(jax.tree.map(given, leaves) for leaves in (trained, fixed)), sizes
    with on_h100() if platform == "cuda" else contextlib.nullcontext():
        return jax.jit(run).trace(*arguments).lower(lowering_platforms=(platform,))


@one_in(3)
@pytest.mark.parametrize(
    ("platform", "kind"),
    [("tpu", "low-rank"), ("tpu", "plain"), ("cuda", "low-rank"), ("cuda", "plain"), ("cuda", "entries")],
)
def test_kernels_are_called_on_one_device_only(platform, kind):
    one, two = (lowered(kind, jax.devices()[:count], platform).as_text() for count in (1, 2))
    assert re.search(KERNELS[platform], one)
    assert not re.search(KERNELS[platform], two)


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_what_takes_their_place_is_the_same_product(backend):
    """The product of a platform can be asked for on every other: with several devices it calls no kernel."""
    rng = np.random.default_rng(0)
    x, kernel, dout = (rng.standard_normal(shape, np.float32) for shape in ((24, 16), (3, 16, 8), (24, 8)))
    sizes = np.asarray([9, 0, 11], np.int32)
    groups = np.eye(4, dtype=np.float32)[np.repeat(np.arange(4), [*sizes, 4]), :3]

    @jax.jit
    def product_and_gradients(x, kernel, dout):
        y, vjp = jax.vjp(lambda x, kernel: grouped_matmul(x, kernel, sizes, backend), x, kernel)
        return y, *vjp(dout)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    y, dx, dkernel = product_and_gradients(jax.device_put(x, NamedSharding(mesh, P("data"))), kernel, dout)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(y, np.einsum("mi,me,eio->mo", x, groups, kernel))
    close(dx, np.einsum("mo,me,eio->mi", dout, groups, kernel))
    close(dkernel, np.einsum("mi,me,mo->eio", x, groups, dout))


@long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("kind", ["plain", *FORMS])
def test_they_compile_for_four_tpus(kind):
    from jax.experimental import topologies

    prepare_environment()
    with uncached():
        chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        text = lowered(kind, chips, "tpu").compile().as_text()
    assert "num_partitions=4" in text
    assert not re.search(r"%(grouped_product|grouped_outer|low_rank_gradients|reduced_outer)", text)
