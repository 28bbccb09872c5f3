"""Barycenters of experts against POT's `free_support_barycenter`, and what OTT's own solver takes.

    python benchmarks/barycenter.py [DATA] [--models MODEL ...] [--quick] [--out benchmarks/results]

Needs POT beside the project: `pip install pot`. It is no dependency, and nothing else uses it.

DATA is a folder with `weights/stories260K/hf` and `text/tinyshakespeare/input.txt`: small MoEs are trained on it, of
1024 neurons from random weights (gated, and plain with biases) and upcycled from stories260K, and kept in --work.
MODELs are further directories of models with experts. Every MoE layer is a set of clouds; the random sets come with any
call.

Every solver begins with the points of the first expert and runs to its end. POT works in float64 with enough iterations
of its network simplex to reach the optimum (by default it gives up near 2000 points). All barycenters are scored alike:
exact transport of every expert to the points, (1/E) sum of squared distances, in float64. `alternation` is POT's
algorithm; `assignment` adds coordinate descent, and `auto` annealing. Compilation is not counted.

Asserted: permutations are valid, and no objective is above POT's by more than 1e-6 of it. OUT receives
`barycenter.json`, set by set, and `barycenter.md`; sets that are in the JSON already are not run again. It takes about
a quarter of an hour on two CPU threads, --quick half a minute.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from barycenters.clouds import QUICK_SETS, RANDOM_SETS, CloudSet, expert_sets, random_set
from barycenters.others import ott_barycenter, ott_program, pot_barycenter
from barycenters.report import Results, Settings, write_report
from barycenters.trained import trained_models
from moe_jax.api.open_source import open_source
from moe_jax.compression.alignment import barycenter
from moe_jax.compression.alignment.assignment import align
from moe_jax.compression.alignment.barycenter import free_support_barycenter

SOLVERS = ("alternation", "assignment", "auto")
TOLERANCE = 1e-6
MIXTRAL = (8, 14336, 12288)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA")
    parser.add_argument("--models", type=Path, nargs="*", default=[], metavar="MODEL")
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=SOLVERS)
    parser.add_argument("--steps", type=int, default=60, help="of training (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random sets (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="three random sets, and OTT at a small size")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "moe_jax_barycenter",
        help="folder of the trained models, some MB (default %(default)s)",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "barycenter.json", Settings(list(options.solvers)))
    for clouds in all_sets(options):
        if results.get("sets", clouds.label) is None:
            row = compare(clouds, options.solvers)
            results.put("sets", clouds.label, value=row)
            print(json.dumps(row), flush=True)
    results.put("ott", value=ott_figures(*(4, 64, 24) if options.quick else (4, 512, 192)))
    results.put("memory", value=memory_figures())
    print(write_report(results, options.out))
    rows = results.get("sets").values()
    worst = max(row[solver]["difference"] for row in rows for solver in options.solvers)
    assert worst <= TOLERANCE, f"an objective is {worst:g} above POT's"


def all_sets(options: argparse.Namespace):
    """The sets, one after another: those of experts are read when it is their turn."""
    for random in QUICK_SETS if options.quick else RANDOM_SETS:
        yield random_set(random, options.seed)
    if options.data is not None:
        for name, model in trained_models(options.data, options.work, options.steps).items():
            yield from expert_sets(name, model)
            yield from expert_sets(name, model, shuffled=True)
    for path in options.models:
        yield from expert_sets(path.name, open_source(path))


def compare(cloud_set: CloudSet, solvers: Sequence[str]) -> dict[str, Any]:
    """One row: POT's objective and seconds, and of every solver the difference from it and its seconds."""
    name, clouds = cloud_set
    n, start = len(clouds[0]), clouds[0]
    pot = pot_barycenter(clouds, start)
    row: dict[str, Any] = {"set": name, "E": len(clouds), "n": n, "D": clouds[0].shape[1]}
    row["POT"] = {"objective": objective(clouds, pot.points), "seconds": pot.seconds}
    for solver in solvers:
        if solver == "auto":
            # Compiles, for this shape, what annealing needs.
            free_support_barycenter(clouds[:2], solver="sinkhorn", max_rounds=1)
        began = time.perf_counter()
        found = free_support_barycenter(clouds, solver=solver, start=start)
        seconds = time.perf_counter() - began
        assert (np.sort(found.permutations, axis=1) == np.arange(n)).all(), f"{name}: not permutations"
        assert found.converged, f"{name}: {solver} did not converge"
        reached = objective(clouds, found.points)
        row[solver] = {
            "objective": reached,
            "difference": reached / row["POT"]["objective"] - 1,
            "seconds": seconds,
            "ratio": pot.seconds / seconds,
            "rounds": found.rounds,
        }
    return row


def objective(clouds: Sequence[np.ndarray], points: np.ndarray) -> float:
    """(1/E) sum_k of the least squared distance of a cloud, in any order, to the points."""
    points = points.astype(np.float64)
    total = 0.0
    for cloud in clouds:
        cloud = cloud.astype(np.float64)
        total += float(((cloud[align(cloud, points)] - points) ** 2).sum())
    return total / len(clouds)


def ott_figures(experts: int, n: int, dim: int) -> dict[str, Any]:
    """OTT's own solver on Gaussian clouds beside ours."""
    random = np.random.default_rng(0)
    clouds = [random.standard_normal((n, dim), dtype=np.float32) for _ in range(experts)]
    ott, temporaries = ott_barycenter(clouds, clouds[0])
    free_support_barycenter(clouds[:2], solver="sinkhorn", max_rounds=1)
    began = time.perf_counter()
    ours = free_support_barycenter(clouds, start=clouds[0])
    return {
        "E": experts,
        "n": n,
        "D": dim,
        "OTT": {"objective": objective(clouds, ott.points), "seconds": ott.seconds, "temporaries": temporaries},
        "auto": {"objective": objective(clouds, ours.points), "seconds": time.perf_counter() - began},
    }


def memory_figures() -> dict[str, int]:
    """Bytes of temporaries of compiled programs for one Mixtral layer; nothing of that size is made."""
    experts, n, dim = MIXTRAL
    clouds, points, potential = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((experts, n, dim), (n, dim), (n,))
    )
    temperature = jax.ShapeDtypeStruct((), jnp.float32)
    programs = {
        "OTT": ott_program(clouds, points, epsilon=1.0),
        "annealing": barycenter.transport.lower(points, points, (potential, potential), temperature),
    }
    return {name: program.compile().memory_analysis().temp_size_in_bytes for name, program in programs.items()}


if __name__ == "__main__":
    main()
