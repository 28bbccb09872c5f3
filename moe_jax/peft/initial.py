"""Initial adapters, LoRA and adapters' routers: with them the tuned model computes exactly what its base does."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from moe_jax.core.draws import draw_factor, draw_router, stream
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.models import ModelConfig


def initial_leaves(config: ModelConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the leaves that the base does not have (`own_leaves`), in the order of `leaf_specs`.

    The first factor (`lora/a`, `adapters/down`) is drawn as in LoRA (Kaiming uniform), the second (`lora/b`,
    `adapters/up`) is zero, and routers are normal with standard deviation 0.02 (methods.md 6, 7).

    Args:
      config: config of the tuned model.
      seed: the same seed gives the same leaves; every leaf has its own stream of random numbers.

    Yields:
      Paths and leaves, in the dtype of the config.

    Raises:
      InputError: for a negative seed.
    """
    if seed < 0:
        raise InputError(f"seed={seed} must not be negative")
    own = own_leaves(config)
    for path, spec in leaf_specs(config).items():
        if path in own:
            yield path, initial_leaf(path, spec, seed)


def initial_leaf(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    """Makes one initial leaf; `spec` is its shape and dtype."""
    (make,) = (make for ending, make in _MAKERS.items() if path.endswith(ending))
    return make(path, spec, seed)


def _factor(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    """Draws the first factor: [in, r], or [E, in, r] with its own random stream for every expert."""
    leaf = np.empty(spec.shape, spec.dtype)
    for index, one in enumerate(leaf.reshape(-1, *spec.shape[-2:])):
        one[...] = draw_factor(_stream(seed, path, index), *one.shape)
    return leaf


def _zero(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    return np.zeros(spec.shape, spec.dtype)


def _router(path: str, spec: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    return draw_router(_stream(seed, path, 0), *spec.shape).astype(spec.dtype)


_MAKERS: dict[str, Callable[[str, jax.ShapeDtypeStruct, int], np.ndarray]] = {
    "/lora/a": _factor,
    "/lora/b": _zero,
    "/adapters/down": _factor,
    "/adapters/up": _zero,
    "/router/kernel": _router,
}


def _stream(seed: int, path: str, index: int) -> np.random.Generator:
    return stream(seed, *path.encode(), index)
