"""Layers of experts on accelerators that are not there: bytes moved, fast memory, least time, by the compilers alone.

    python benchmarks/hot_path.py [--chips v5e ...] [--shapes mixtral ...] [--kinds full ...] [--out benchmarks/results]

Each is the forward layer without its router, 8192 tokens in bfloat16, compiled as it would be for one chip and counted
(`hbm.traffic`) against the least that it could move. Nothing is run: the time is that of a roofline, which no program
reaches. Needs libtpu for TPUs and JAX's CUDA plugin for the H100; chips without their compiler are left out, in one
line. Some seconds to a minute for every layer. OUT receives `hot_path.json`.
"""

import argparse
import importlib.util
import re
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_jax.planning.planned_devices import GPUS, described_devices, has_gpu_compiler, prepare_environment

prepare_environment()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from evidence.layouts import HOT_PATH, HOT_PATH_AGAINST  # noqa: E402
from evidence.results import RESULTS, Figures  # noqa: E402
from evidence.stamp import current_stamp  # noqa: E402
from hbm.layers import DENSE, DTYPE, KINDS, SHAPES, VANILLA, make_layer  # noqa: E402
from hbm.traffic import Traffic, traffic  # noqa: E402
from moe_jax.core.data_sheets import CHIPS  # noqa: E402

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "h100": "h100:1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for name, known in (("chips", TOPOLOGIES), ("shapes", SHAPES), ("kinds", KINDS)):
        parser.add_argument(f"--{name}", nargs="+", metavar=name[:-1].upper(), choices=[*known], default=[*known])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    # What a program moves is the compiler's doing.
    packages = [name for name in ("libtpu", "jax-cuda12-plugin") if _is_installed(name)]
    figures = Figures("hot_path", options.out, writes=True, stamp=partial(current_stamp, also=tuple(packages)))
    for chip in options.chips:
        if missing := _missing(chip):
            print(f"{chip} left out: {missing} is not installed")
            continue
        for shape in options.shapes:
            for kind in options.kinds:
                name = f"{chip}, {shape}, {kind}"
                try:
                    figures.put_row(HOT_PATH.name, name, row(chip, shape, kind))
                except ValueError as error:
                    figures.forget("rows", HOT_PATH.name, name)
                    print(f"{name} left out: {error}")
    figures.put_rows(HOT_PATH_AGAINST.name, against(figures.rows(HOT_PATH.name)))
    print(HOT_PATH.text(figures), HOT_PATH_AGAINST.text(figures), sep="\n\n")


def row(chip: str, shape: str, kind: str) -> list[Any]:
    """Compiles a layer; returns its row of the table."""
    mesh = Mesh(np.array([_device(chip)]), ("data",))
    with jax.set_mesh(mesh):
        layer = make_layer(kind, SHAPES[shape])
        there = NamedSharding(mesh, P())
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), layer.arguments)
        found, operations = compiled(jax.jit(layer.function).lower(*arguments), chip)
    operations = operations or layer.products
    of_products = operations / CHIPS[chip].operations_per_second(DTYPE.itemsize)
    of_bytes = found.moved / CHIPS[chip].bandwidth
    least_time = max(of_products, of_bytes)
    return [
        chip,
        shape,
        kind,
        layer.strategy,
        found.moved / 1e9,
        layer.least / 1e9,
        found.moved / layer.least,
        found.kernels / layer.least if found.kernels else None,
        operations / found.moved,
        found.fast / 2**20 if found.fast else None,
        1e3 * least_time,
        of_products / least_time,
    ]


def compiled(lowered: Any, chip: str) -> tuple[Traffic, float | None]:
    """What the program moves, and its operations if the compiler counts them."""
    with tempfile.TemporaryDirectory() as folder:
        done = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        infix = "sm_*_gpu_" if chip in GPUS else ""
        (text,) = Path(folder).glob(f"*.{infix}after_optimizations.txt")
        return traffic(text.read_text()), (done.cost_analysis() or {}).get("flops")


def against(rows: list[list[Any]]) -> list[list[Any]]:
    """Roofline times beside those of the dense FFN and of vanilla experts of the same chip and shape."""
    times = {tuple(cells[:3]): cells[HOT_PATH.head.index(_TIME)] for cells in rows}
    found = []
    for (chip, shape, kind), time in times.items():
        dense, vanilla = times.get((chip, shape, DENSE)), times.get((chip, shape, VANILLA))
        if kind != DENSE and dense is not None:
            of_vanilla = None if vanilla is None else time / vanilla
            found.append([chip, shape, kind, time / dense, time / dense / SHAPES[shape].top_k, of_vanilla])
    return found


_TIME = "least time, ms"


def _device(chip: str) -> Any:
    if chip in GPUS:
        return described_devices(TOPOLOGIES[chip])[0]
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]


def _missing(chip: str) -> str | None:
    """The compiler that a chip needs and that is not there."""
    if chip in GPUS:
        return None if has_gpu_compiler() else "JAX's CUDA plugin"
    return None if importlib.util.find_spec("libtpu") else "libtpu"


def _is_installed(package: str) -> bool:
    try:
        return bool(re.match(r"\d", metadata.version(package)))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
