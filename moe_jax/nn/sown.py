"""Intermediate values that modules inside stacked layers store with `Module.sow`, for `nnx.capture`.

Layers are applied in a loop, on copies of the modules. The values leave the loop as its results, and are then put where
Flax looks for them, in the stacked modules, with a leading axis over the repeats.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

_CAPTURES = "__captures__"  # where `nnx.capture` has the values of a module, in variables of the types it captures


def take_sown(blocks: Iterable[nnx.Module]) -> dict[str, dict]:
    """Returns what the modules of these blocks have stored, by path; arrays only, for a loop returns nothing else."""
    captured, alone = {}, {}
    for path, module in _modules(blocks):
        for number, variable in enumerate(getattr(module, _CAPTURES, ())):
            if variable.get_value():
                captured[path, number] = _arrays(variable.get_value())
        for name, variable in vars(module).items():
            if isinstance(variable, nnx.Intermediate):
                alone[path, name] = _arrays(variable.get_value())
    return {"captured": captured, "alone": alone}


def put_sown(blocks: Iterable[nnx.Module], sown: dict[str, dict]) -> None:
    """Puts what `take_sown` returned, stacked over the repeats, into the modules."""
    if not any(sown.values()):
        return
    at = dict(_modules(blocks))
    for (path, number), values in sown["captured"].items():
        getattr(at[path], _CAPTURES)[number].set_value(values)
    for (path, name), values in sown["alone"].items():
        setattr(at[path], name, nnx.Intermediate(values))


def forget_captures(module: nnx.Module) -> None:
    """Removes what `nnx.capture` leaves in a module when a call ends with an error: nothing could split it then."""
    for _, below in nnx.iter_modules(module):
        if hasattr(below, _CAPTURES):
            delattr(below, _CAPTURES)


def _modules(blocks: Iterable[nnx.Module]) -> Iterator[tuple[tuple, nnx.Module]]:
    for number, block in enumerate(blocks):
        for path, module in nnx.iter_modules(block):
            yield (number, *path), module


def _arrays(values: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, Array) else None, values)
