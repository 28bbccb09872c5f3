"""Every test sees eight virtual CPU devices; what is compiled is kept for the other workers and the next run."""

import ctypes
import gc
import math
import os
import pathlib
import resource
import signal
import sys

from tests.support.environment import COMPILER_FLAGS, PLATFORM, ROOT

# All of this is set before JAX is imported, and passed on to the processes that tests start.
os.environ["JAX_PLATFORMS"] = PLATFORM if PLATFORM == "cpu" else f"{PLATFORM},cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {COMPILER_FLAGS}"
COMPILED = ROOT / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Nor are modules compiled once more for every process that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Nor are the lines of Python that an operation comes from written into programs, which is a twentieth of all the work.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# No test asks the Hugging Face Hub; `test_hub.py` has one of its own.
os.environ["HF_HUB_OFFLINE"] = "1"

# No power fails in a test: what it writes need not reach the disk, for which some waited a third of their time.
# Processes that tests start, and kill, wait for it.
os.fsync = lambda fd: None

# A shell starts what it runs in the background with SIGINT ignored, nohup ignores SIGHUP, and processes inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.support.tiers import MARKERS, chosen  # noqa: E402

pytest_plugins = ("tests.support.fixtures",)

# The same examples in every run: what passes here passes on another machine.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("reproducible")

# Tracing makes many objects that stay; looking through all of them for cycles as often as Python does takes a fifth of
# the time of tracing. What was imported is not looked at again.
gc.set_threshold(100_000, 20, 100)

MAX_COMPILED_BYTES = 500_000_000
LIBC = ctypes.CDLL(None)
STATM = pathlib.Path("/proc/self/statm")  # Linux
MAPS = pathlib.Path("/proc/self/maps")
MOST_REGIONS = 50_000


def pytest_configure(config: pytest.Config) -> None:
    """Says which markers there are, and deletes the oldest compiled programs above a total size before a worker starts.

    JAX could bound the cache itself, but it then lists the whole folder for each program that it adds.
    """
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if not hasattr(config, "workerinput"):
        found = [(file, file.stat()) for file in COMPILED.glob("*-cache")]
        total = sum(stat.st_size for _, stat in found)
        for file, stat in sorted(found, key=lambda entry: entry[1].st_mtime):
            if total <= MAX_COMPILED_BYTES:
                break
            file.unlink(missing_ok=True)
            total -= stat.st_size


# After `-k` and the like, so that of the tests that were asked for some are run.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests out that only `make test-all` runs; one that is named with its case is run."""
    named = any("::" in argument for argument in config.args)
    run, left = (items, []) if named else chosen(items)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = run


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


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


def max_resident_bytes() -> float:
    """What a worker may hold: half of its share of the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory / 2 / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))


def mapped_regions() -> int:
    """Every program has some: Linux refuses more than 65,530, and a worker that asks for the next one dies."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten():
    """Compiled programs would otherwise pile up to several GB per process."""
    yield
    resident = int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else math.inf
    if resident > max_resident_bytes() or mapped_regions() > MOST_REGIONS:
        jax.clear_caches()
        gc.collect()
        if hasattr(LIBC, "malloc_trim"):  # otherwise what was freed stays resident, and every module forgets again
            LIBC.malloc_trim(0)
