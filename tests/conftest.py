"""Every test sees eight virtual CPU devices, set before JAX is imported."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Test models are tiny: compiling them dominates, and unoptimised machine code compiles in half the time.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# The same examples in every run: what passes here passes on another machine.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("reproducible")

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """Folder of real weights, text and configs; tests that need it are skipped where it is absent."""
    folder = pathlib.Path(os.environ.get("MOE_JAX_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set MOE_JAX_DATA")
    return folder


@pytest.fixture
def strict_numerics():
    """No implicit dtype or rank promotion: wrap tests of our own numerics in it (Optax and OTT fail under it)."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten():
    """Compiled programs would otherwise pile up to several GB per process; modules share hardly any."""
    yield
    jax.clear_caches()
