"""Factors of all experts of a layer, one of them mixed of shared bases, found by Adam (MoBE, arXiv 2508.05257).

Everything is in one orientation: a kernel [w, s] is `act(sum_j alpha_j B_j) A`, B_j [w, r] and A [r, s].

- *Scale*: kernels are divided by the standard deviation of all of them, which A then takes (section 3.3, and the public
  code, which subtracts no mean).
- *Start*: the experts are divided into m groups in order; the basis of each is the subspace of the SVD of its kernels
  side by side, as in the public code, which however leaves bases orthonormal: here their entries are of size 1, where
  the activation is curved, and A is the best for them.
- *Steps*: Adam on the mean squared error of all experts at once. The rate falls to 0 on a cosine, where the published
  one (0.07) stays as it is for 10,000 to 30,000 steps. The best of what is looked at every `LOOKED_AT` steps stays.
- *End*: bases and logits are rounded as they are to be stored, and A is the best for these. That is not published; it
  makes up for the rounding, and cannot be worse than what Adam found.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from moe_jax.compression.coding.truncated_svd import truncated_svd

Mix = Callable[[Array, Array], Array]
"""`mix(bases, logits)`: [m, w, r], [E, m] -> [E, w, r]; hashable."""
LOOKED_AT = 50
# Logit of an expert's own basis at the start; the others have 0.
_OWN_LOGIT = 2.0
# Of the mean of the diagonal, added to it: directions that float32 does not know.
_DAMPING = 1e-6


class MixedFactors(NamedTuple):
    """Factors of all experts.

    Attributes:
      bases: [m, w, r].
      logits: [E, m].
      own: [E, r, s].
    """

    bases: Any
    logits: Any
    own: Any


def mixed_factors(
    kernels: Float[np.ndarray, "E w s"],
    rank: int,
    bases: int,
    mix: Mix,
    *,
    steps: int,
    rate: float,
    store: Callable[[np.ndarray], np.ndarray] = lambda array: array,
) -> MixedFactors:
    """Finds factors of little squared error. The same input gives the same result.

    Memory on the default device: the kernels, and the factors five times, in float32.

    Args:
      kernels: finite, float32.
      rank: r, at most min(w, s).
      bases: m, at most E.
      mix: mixes bases.
      steps: of Adam.
      rate: its learning rate at first.
      store: rounds an array as it is to be stored.
    """
    scale = float(np.std(kernels, dtype=np.float64)) or 1.0
    target = jnp.asarray(kernels / np.float32(scale))
    factors = starting_factors(np.asarray(target), rank, bases, mix)
    best, least, state = factors, _error(factors, target, mix), _adam(steps, rate).init(factors)
    for first in range(0, steps, LOOKED_AT):
        factors, state = _advance(factors, state, target, mix, steps, rate, min(LOOKED_AT, steps - first))
        error = _error(factors, target, mix)
        if error < least:
            best, least = factors, error
    stored, logits = store(np.asarray(best.bases)), store(np.asarray(best.logits))
    own = _best_own(mix(jnp.asarray(stored), jnp.asarray(logits)).astype(jnp.float32), target)
    return MixedFactors(stored, logits, store(np.asarray(own) * np.float32(scale)))


def starting_factors(target: Float[np.ndarray, "E w s"], rank: int, bases: int, mix: Mix) -> MixedFactors:
    """The factors that Adam begins with; arguments as of `mixed_factors`, kernels of standard deviation 1."""
    experts, width, _ = target.shape
    groups = np.array_split(np.arange(experts), bases)
    logits = np.zeros((experts, bases), np.float32)
    shared = np.zeros((bases, width, rank), np.float32)
    for number, group in enumerate(groups):
        logits[group, number] = _OWN_LOGIT
        shared[number] = truncated_svd(np.concatenate(list(target[group]), axis=1), rank).u * np.sqrt(width)
    own = _best_own(mix(jnp.asarray(shared), jnp.asarray(logits)).astype(jnp.float32), jnp.asarray(target))
    return MixedFactors(jnp.asarray(shared), jnp.asarray(logits), own)


def squared_error(factors: MixedFactors, target: Float[Array, "E w s"], mix: Mix) -> Float[Array, ""]:
    """The mean squared error of the products, float32."""
    return jnp.mean((mix(factors.bases, factors.logits) @ factors.own - target) ** 2)


_error = jax.jit(squared_error, static_argnums=2)


def _adam(steps: int, rate: float) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, max(steps, 1)))


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _advance(
    factors: MixedFactors, state: Any, target: Array, mix: Mix, steps: int, rate: float, count: int
) -> tuple[MixedFactors, Any]:
    optimizer = _adam(steps, rate)

    def step(carried: Any, _: None) -> Any:
        factors, state = carried
        updates, state = optimizer.update(jax.grad(squared_error)(factors, target, mix), state)
        return (optax.apply_updates(factors, updates), state), None

    return jax.lax.scan(step, (factors, state), None, count)[0]


@jax.jit
def _best_own(mixed: Float[Array, "E w r"], target: Float[Array, "E w s"]) -> Float[Array, "E r s"]:
    """The least squares solution of `mixed @ own = target`."""
    gram = jnp.einsum("ewr,ewq->erq", mixed, mixed, precision="highest")
    size = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / gram.shape[1]
    damped = gram + (_DAMPING * size + jnp.finfo(jnp.float32).tiny) * jnp.eye(gram.shape[1], dtype=gram.dtype)
    return jnp.linalg.solve(damped, jnp.einsum("ewr,ews->ers", mixed, target, precision="highest"))
