"""Processor time of every test, children included, and what of it JAX traced, lowered and compiled.

    python -m pytest -p tests.tooling.processor_time --processor-times FOLDER ...

writes one file per worker into FOLDER: a line of JSON per test, with the seconds of each kind.
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
lines: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-times", metavar="FOLDER", help="where to write the processor time of every test")


def processor_time() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def heard(event: str, seconds: float, **_: Any) -> None:
    if event in KINDS:
        spent[KINDS[event]] += seconds
        spent[f"times_{KINDS[event]}"] += 1


def pytest_collection_finish() -> None:
    from jax import monitoring

    monitoring.register_event_duration_secs_listener(heard)
    lines.append(json.dumps({"test": "start and collection", "processor": processor_time()}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    spent.clear()
    processor, wall = processor_time(), time.monotonic()
    try:
        return (yield)
    finally:
        seconds = {"processor": processor_time() - processor, "wall": time.monotonic() - wall, **spent}
        lines.append(json.dumps({"test": item.nodeid} | {kind: round(value, 3) for kind, value in seconds.items()}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config.getoption("--processor-times")
    if folder:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        path = pathlib.Path(folder, f"{worker}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
