"""Sets of point clouds: random ones, and the design matrices of experts."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.compression.source_layer import SourceLayer, design_matrices
from moe_jax.model_io.model_source import ModelSource

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


class CloudSet(NamedTuple):
    """E clouds, [n, D] each, float32."""

    name: str
    clouds: list[Float[np.ndarray, "n D"]]

    @property
    def label(self) -> str:
        """Tells it from other sets."""
        n, dim = self.clouds[0].shape
        return f"{self.name}, E {len(self.clouds)}, n {n}, D {dim}"


class RandomSet(NamedTuple):
    """What a random set is made of: gated experts of model width d have D = 3 d, plain ones with biases 2 d + 1."""

    kind: str
    experts: int
    n: int
    dim: int


RANDOM_SETS = (
    RandomSet("Gaussian", 8, 1024, 192),
    RandomSet("Gaussian", 4, 2048, 129),
    RandomSet("Gaussian", 16, 512, 96),
    RandomSet("Laplace", 8, 1024, 129),
    RandomSet("Laplace", 2, 2048, 192),
    RandomSet("t3", 4, 1024, 384),
    RandomSet("t3", 16, 256, 192),
    RandomSet("clustered", 8, 1024, 192),
    RandomSet("clustered", 3, 1536, 257),
    RandomSet("common origin", 8, 1024, 384),
    RandomSet("common origin", 16, 1024, 129),
    RandomSet("common origin", 4, 2048, 192),
    RandomSet("far common origin", 8, 1024, 192),
    RandomSet("far common origin", 2, 2048, 257),
)
QUICK_SETS = (
    RandomSet("Gaussian", 4, 128, 48),
    RandomSet("clustered", 3, 128, 33),
    RandomSet("common origin", 8, 1024, 48),
)

_NOISE: dict[str, Draw] = {
    "Gaussian": lambda random, shape: random.standard_normal(shape),
    "Laplace": lambda random, shape: random.laplace(size=shape),
    "t3": lambda random, shape: random.standard_t(3, size=shape),
}
# Experts that came from one: how far each has moved, in standard deviations of the weights.
_MOVED = {"common origin": 0.3, "far common origin": 1.5}


def random_set(description: RandomSet, seed: int) -> CloudSet:
    """Draws a set. The points of every cloud are in random order."""
    kind, experts, n, dim = description
    random = np.random.default_rng((seed, experts, n, dim))
    if kind in _NOISE:
        clouds = [_NOISE[kind](random, (n, dim)) for _ in range(experts)]
    elif kind == "clustered":
        centres = random.standard_normal((n // 8, dim))
        clouds = [
            centres[random.integers(len(centres), size=n)] + 0.5 * random.standard_normal((n, dim))
            for _ in range(experts)
        ]
    else:
        origin = random.standard_normal((n, dim))
        clouds = [
            (origin + _MOVED[kind] * random.standard_normal((n, dim)))[random.permutation(n)] for _ in range(experts)
        ]
    return CloudSet(kind, [cloud.astype(np.float32) for cloud in clouds])


def expert_sets(name: str, model: ModelSource, *, shuffled: bool = False) -> Iterator[CloudSet]:
    """The experts of every MoE layer of a model.

    Args:
      name: of the model, for the table.
      model: its experts may be in any bank.
      shuffled: the neurons of every expert are put in random order, which leaves the expert what it is.
    """
    for i in model.config.moe_layers:
        clouds = [np.asarray(matrix, np.float32) for matrix in design_matrices(SourceLayer(model, i))]
        if shuffled:
            random = np.random.default_rng(i)
            clouds = [cloud[random.permutation(len(cloud))] for cloud in clouds]
        yield CloudSet(f"{name}, layer {i}{', shuffled' if shuffled else ''}", clouds)
