"""Which GPU a program is for."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from moe_jax.kernels.hardware import capability_of, compute_capability, triton_fits
from tests.support.environment import PLATFORM


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H100 PCIe", (9, 0)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA B300", (10, 3)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA RTX A6000", (8, 6)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA L4", (8, 9)),
        ("Tesla T4", (7, 5)),
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("a GPU of 2040", None),
    ],
)
def test_names(name, capability):
    assert capability_of(name) == capability


def test_the_mesh_says_for_which_gpu_a_program_is():
    from jax._src.mesh import AbstractDevice  # a mesh of GPUs makes it; there is no public name

    assert (compute_capability() is None) == (PLATFORM == "cpu")
    for platform, kind, expected in (("gpu", "NVIDIA H100 80GB HBM3", (9, 0)), ("tpu", "TPU v5 lite", None)):
        device = AbstractDevice(device_kind=kind, num_cores=132, platform=platform)
        mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert compute_capability() == expected


@pytest.mark.parametrize(("said", "expected"), [("9.0", (9, 0)), ("10.3", (10, 3)), (None, None), ("gfx942", None)])
def test_a_gpu_whose_name_is_unknown_says_it_itself(said, expected, monkeypatch):
    gpu = types.SimpleNamespace(device_kind="a GPU of 2040", compute_capability=said)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert compute_capability() == capability_of("a GPU of 2040") == expected
    assert capability_of("another GPU of 2040") is None
    assert triton_fits(jnp.bfloat16, expected) and triton_fits(jnp.bfloat16, (8, 0))
    assert not triton_fits(jnp.bfloat16, (7, 5)) and not triton_fits(jnp.float64, expected)
