"""Modules that hold arrays by their paths."""

from collections.abc import Callable, Mapping

from flax import nnx
from jaxtyping import Array


class Fixed(nnx.Variable):
    """An array that is saved with the model and never trained: positions, codes, scales of NF4 kernels."""


class Leaves(nnx.Module):
    """Holds arrays as attributes: the path `nf4/codes` is the attribute `codes` of the attribute `nf4`."""

    def __init__(self, arrays: Mapping[str, Array], is_trained: Callable[[str, Array], bool] = lambda *_: True):
        """Makes a variable of every array.

        Args:
          arrays: by path.
          is_trained: `is_trained(path, array)` says whether the variable is an `nnx.Param` or `Fixed`.
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
        """The arrays by path."""
        found: dict[str, Array] = {}
        for name, value in vars(self).items():
            if isinstance(value, nnx.Variable):
                found[name] = value[...]
            elif isinstance(value, Leaves):
                found |= {f"{name}/{path}": array for path, array in value.arrays().items()}
        return found
