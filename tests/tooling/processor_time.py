"""Processor time of every test, children included, and what of it JAX traced, lowered and compiled.

    python -m pytest -p tests.tooling.processor_time --processor-times=FOLDER ...

adds to one file per worker in FOLDER: a line of JSON per test, with the seconds of each kind.
"""

import json
import os
import pathlib
import time
from collections import Counter
from typing import Any

import pytest

KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
    "/jax/compilation_cache/cache_retrieval_time_sec": "read",
}
spent: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-times", metavar="FOLDER", help="where to write the processor time of every test")


def processor_time() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def heard(event: str, seconds: float, **_: Any) -> None:
    if event in KINDS:
        spent[KINDS[event]] += seconds
        spent[f"times_{KINDS[event]}"] += 1


def write(config: pytest.Config, test: str, seconds: dict[str, float]) -> None:
    folder = config.getoption("--processor-times")
    if folder:
        path = pathlib.Path(folder, f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            rounded = {kind: round(value, 3) for kind, value in seconds.items()}
            file.write(json.dumps({"test": test} | rounded) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    from jax import monitoring

    monitoring.register_event_duration_secs_listener(heard)
    write(session.config, "start and collection", {"processor": processor_time()})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    spent.clear()
    processor, wall = processor_time(), time.monotonic()
    try:
        return (yield)
    finally:
        seconds = {"processor": processor_time() - processor, "wall": time.monotonic() - wall, **spent}
        write(item.config, item.nodeid, seconds)
