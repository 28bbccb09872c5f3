"""Solvers of others: POT's `free_support_barycenter` and OTT's `FreeWassersteinBarycenter`."""

import functools
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import ot
import ot.lp._barycenter_solvers as pot_solvers
from jaxtyping import Float
from ott.problems.linear.barycenter_problem import FreeBarycenterProblem
from ott.solvers.linear.continuous_barycenter import FreeWassersteinBarycenter
from ott.solvers.linear.sinkhorn import Sinkhorn

# Of POT's network simplex: its default of 100,000 ends before the optimum from about 2000 points on.
_SIMPLEX_ITERATIONS = 10**8
_ROUNDS = 1000
# OTT stops its outer iterations after so many.
_OTT_ITERATIONS = 20


class Timed(NamedTuple):
    points: Float[np.ndarray, "n D"]
    seconds: float


def pot_barycenter(clouds: Sequence[Float[np.ndarray, "n D"]], start: Float[np.ndarray, "n D"]) -> Timed:
    """POT, in float64 and until its points stop: what it moves in the last round is rounding."""
    clouds = [cloud.astype(np.float64) for cloud in clouds]
    start = start.astype(np.float64)
    weights = [np.full(len(cloud), 1 / len(cloud)) for cloud in clouds]
    emd = functools.partial(ot.lp.emd, numItermax=_SIMPLEX_ITERATIONS)
    with mock.patch.object(pot_solvers, "emd", emd), warnings.catch_warnings():
        warnings.simplefilter("error")
        began = time.perf_counter()
        points = ot.lp.free_support_barycenter(
            clouds, weights, start, numItermax=_ROUNDS, stopThr=1e-18 * float(np.vdot(start, start))
        )
        return Timed(points, time.perf_counter() - began)


def ott_program(
    clouds: Float[jax.Array, "E n D"] | jax.ShapeDtypeStruct, start, epsilon: float, iterations: int = _OTT_ITERATIONS
) -> jax.stages.Lowered:
    """OTT's solver for clouds of some shape, lowered and not run."""
    experts, n, _ = clouds.shape

    def solve(clouds, start):
        problem = FreeBarycenterProblem(clouds, jnp.full((experts, n), 1 / n), epsilon=epsilon)
        solver = FreeWassersteinBarycenter(Sinkhorn(), max_iterations=iterations, threshold=1e-4)
        return solver(problem, bar_size=n, x_init=start).x

    return jax.jit(solve).lower(clouds, start)


def ott_barycenter(clouds: Sequence[Float[np.ndarray, "n D"]], start: Float[np.ndarray, "n D"]) -> tuple[Timed, int]:
    """OTT at an epsilon of a hundredth of the mean cost, without compilation; and the bytes of its temporaries."""
    stacked = jnp.stack(clouds)
    epsilon = 0.01 * float(np.mean(np.sum(start**2, axis=1)) + np.mean(np.sum(clouds[1] ** 2, axis=1)))
    program = ott_program(stacked, jnp.asarray(start), epsilon).compile()
    began = time.perf_counter()
    points = np.asarray(program(stacked, jnp.asarray(start)))
    return Timed(points, time.perf_counter() - began), program.memory_analysis().temp_size_in_bytes
