"""`mobe`: gate and up as products, one factor mixed of shared bases (MoBE, arXiv 2508.05257; methods.md 5).

Factors are found by Adam, everything in one orientation: a kernel [w, s] is `act(sum_j alpha_j B_j) A`, B_j [w, r] and
A [r, s].

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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from moe_jax.compression.coding.factorization import truncated_svd
from moe_jax.compression.coding.storage import disk_bytes
from moe_jax.compression.methods.interface import Analysis, Base, Method
from moe_jax.compression.options.of_kernels import MoBEOptions
from moe_jax.compression.report import NO_BASE, LayerFigures, Measure
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.experts.forms import MixtureOfBases
from moe_jax.experts.forms.coding import Layout
from moe_jax.experts.forms.mixture_of_bases import MIXTURE, sides
from moe_jax.models import BankConfig, MoEConfig

Mix = Callable[[Array, Array], Array]
"""`mix(bases, logits)`: [m, w, r], [E, m] -> [E, w, r]; hashable."""
LOOKED_AT = 50
# Logit of an expert's own basis at the start; the others have 0.
_OWN_LOGIT = 2.0
# Of the mean of the diagonal, added to it: directions that float32 does not know.
_DAMPING = 1e-6


class MixedFactors(NamedTuple):
    """Factors of all experts: `bases` [m, w, r], `logits` [E, m] and `own` [E, r, s]."""

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
    """Finds factors of rank r of little squared error, with m bases, by steps of Adam from a learning rate.

    The same input gives the same result. `store` rounds an array as it is to be stored. Memory on the default device:
    the kernels, finite and float32, and the factors five times.
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
    """The factors that Adam begins with, of kernels of standard deviation 1."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoBE(MoBEOptions, Method):
    """The method with the options `MoBEOptions`."""

    layouts: ClassVar[tuple[Layout, ...]] = MixtureOfBases.layouts()
    origin: ClassVar[str | None] = NO_BASE

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Nothing is gained where factors and bases take as much as kernels."""
        for layer in layers:
            target, d_model, dtype = self._target(layer), layer.shapes["up"][0], layer.dtype("up")
            form = target.bank.form
            assert isinstance(form, MixtureOfBases)
            if form.bases > layer.num_experts:
                raise InputError(
                    f"bases={form.bases} are more than the {layer.num_experts} experts of layer {layer.index}"
                )
            target.bank.check_fits(layer.moe.expert, d_model)
            whole = disk_bytes(layer.target(BankConfig()), d_model, dtype)
            if (taken := disk_bytes(target, d_model, dtype)) >= whole:
                raise InputError(
                    f"layer {layer.index}: rank {form.rank} and {form.bases} bases take {taken:,} bytes, whole experts "
                    f"{whole:,}: nothing is gained; choose a lower --keep, --rank or --bases"
                )

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return {layer.index: self._target(layer) for layer in layers}

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """Memory holds one matrix of all experts."""
        form = target.bank.form
        assert isinstance(form, MixtureOfBases)
        measure = Measure(layer.num_experts, layer.moe.expert.dim)
        for name, matrix in layer.matrices.items():
            kernels = list(layer.kernels(name))
            layer.forget()
            if form.of_matrix(matrix) is form:
                # Kernels in the orientation in which their mixed factor is the left one.
                mixed, own = sides(matrix)
                axes = (0, 1, 2) if mixed == "a" else (0, 2, 1)
                turned = np.ascontiguousarray(np.stack(kernels).astype(np.float32).transpose(axes))
                store = partial(layer.stored, name)
                found = mixed_factors(
                    turned, form.rank, form.bases, form.mix, steps=self.steps, rate=self.rate, store=store
                )
                mixes = np.asarray(form.mix(found.bases, found.logits), np.float32)
                made = (mixes @ np.asarray(found.own, np.float32)).transpose(axes)
                bases, factors = (np.ascontiguousarray(array.transpose(axes)) for array in (found.bases, found.own))
                leaves = {f"basis/{mixed}": bases, MIXTURE: found.logits, own: factors}
            else:
                leaves = {"kernel": np.stack([layer.stored(name, kernel) for kernel in kernels])}
                made = leaves["kernel"]
            for expert, kernel in enumerate(kernels):
                measure.add(expert, kernel, None, np.asarray(made[expert], np.float32))
            for leaf, array in leaves.items():
                write(f"experts/delta/{name}/{leaf}", array)
            del kernels, leaves, made
            biases = layer.biases(name)
            if biases is not None:
                write(f"experts/{name}/bias", biases)
        return measure.figures(choice=form.describe())

    def _target(self, layer: SourceLayer) -> MoEConfig:
        form = MixtureOfBases.of_size(
            layer.moe.expert,
            layer.shapes["up"][0],
            layer.num_experts,
            keep=self.keep,
            rank=self.rank,
            bases=self.bases,
            activation=self.activation,
        )
        return layer.target(BankConfig(form, base="none"))
