"""Slices in Google's names, against its tables of sizes."""

import pytest

from moe_jax.commands.cli import main
from moe_jax.core.errors import InputError
from moe_jax.planning.planned_devices import planned_devices
from moe_jax.planning.slice_names import topology_of
from moe_jax.training.recipe import MeshSection


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-16", "v5p:2x2x2"),
        ("v5p-64", "v5p:2x4x4"),
        ("v4-512", "v4:4x8x8"),
        ("v4-2048", "v4:8x8x16"),
        ("v5litepod-8", "v5e:2x4"),
        ("v5e-16", "v5e:4x4"),
        ("v6e-256", "v6e:16x16"),
        ("v5p:2x2x4", "v5p:2x2x4"),
        ("h100", "h100"),
    ],
)
def test_a_slice_is_what_google_calls_so(name, topology):
    assert topology_of(name) == topology


def test_cores_are_not_chips():
    assert planned_devices(MeshSection(data=1, fsdp=8), "v5p-16", compiles=False).count == 8


@pytest.mark.parametrize("name", ["v5p-24", "v5p-7", "v4-1", "v6e-12"])
def test_sizes_that_are_several_slices_or_none_are_refused(name):
    with pytest.raises(InputError, match="power of two"):
        topology_of(name)


@pytest.mark.parametrize(
    "platform", ["v5p-0", "V5P-16", "h100-16", "h100:2x8x2", "v5e:4x4x4", "v5p:4x4", "h100:999999x999999", "v5p:0x2x2"]
)
def test_what_is_no_platform_is_refused_before_a_model_is_looked_for(platform, capsys):
    given = ["plan", "--train", "upcycle_small", "--set", "model.path=nowhere/model", "--platform", platform]
    assert main([*given, "--propose"]) == 2
    said = capsys.readouterr().err
    assert f"--platform {platform!r}" in said and "nowhere" not in said
