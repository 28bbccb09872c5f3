"""Arrays under their names in a module."""

from collections.abc import Callable, Mapping

from flax import nnx
from jaxtyping import Array


class Fixed(nnx.Variable):
    """What is saved with a model and never trained: positions, codes, and the scales of frozen kernels."""


class Leaves(nnx.Module):
    """Arrays as attributes by their paths: `nf4/codes` is the attribute `codes` of the attribute `nf4`."""

    def __init__(self, arrays: Mapping[str, Array], is_trained: Callable[[str, Array], bool] = lambda *_: True):
        """Takes the arrays.

        Args:
          arrays: by path.
          is_trained: says of a path and its array whether this is a parameter, or `Fixed`.
        """
        self._add({path: (nnx.Param if is_trained(path, array) else Fixed)(array) for path, array in arrays.items()})

    def _add(self, variables: Mapping[str, nnx.Variable]) -> None:
        for path, variable in variables.items():
            name, slash, rest = path.partition("/")
            if not slash:
                setattr(self, name, variable)
                continue
            if not hasattr(self, name):
                setattr(self, name, Leaves({}))
            getattr(self, name)._add({rest: variable})

    def arrays(self) -> dict[str, Array]:
        """All of them by path."""
        found: dict[str, Array] = {}
        for name, value in vars(self).items():
            if isinstance(value, nnx.Variable):
                found[name] = value[...]
            elif isinstance(value, Leaves):
                found |= {f"{name}/{path}": array for path, array in value.arrays().items()}
        return found
