"""The layers of a stack by their index, although equal ones are stacked: read, written, called, replaced.

A stack keeps every parameter of equal layers as one array with a leading axis over them, and `nnx.state` and gradients
show it so. A view reads and writes one layer of these arrays. `module` is a copy of a layer, or of a part, that stands
alone. Any module takes the place of a layer or of a part of one, if it is called as that is: the layers before and
after it are stacked by themselves then, and the model compiles anew.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.experts.bank import ExpertBank
from moe_jax.functional.array_shapes import check_shape

_Key = str | int


class Layers(Sequence["LayerView"]):
    """The layers of a stack; negative indices count from the last, and slices are lists.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> decoder = moe_jax.tiny_model(experts=4).decoder
    >>> layer = decoder.layers[1]
    >>> layer.mlp.router.kernel.shape
    (16, 4)
    >>> layer.mlp.router.kernel[...] = jnp.zeros((16, 4))
    >>> layer.mlp.experts[2].kernels()["up"].shape
    (16, 32)
    >>> layer.mlp.experts[2] = layer.mlp.experts[0]
    >>> y, stats = layer.mlp(jnp.ones((1, 5, 16)))
    >>> layer.mlp = moe_jax.MoE(layer.mlp.config, 16, rngs=nnx.Rngs(1))
    """

    def __init__(self, stack: Any):
        """Looks at the layers of a `Stack`, which its `segments` hold."""
        self._stack = stack

    def __len__(self) -> int:
        return sum(segment.repeats * len(segment.blocks) for segment in self._stack.segments)

    def __getitem__(self, index: Any) -> Any:
        """Returns the view of a layer; raises `InputError` if there is none."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return LayerView(self, self._index(index))

    def __iter__(self) -> Iterator["LayerView"]:
        return (self[index] for index in range(len(self)))

    def __setitem__(self, index: int, layer: "nnx.Module | LayerView") -> None:
        """Replaces a layer by another one's copy, or by any module that is called as a layer is.

        Raises:
          InputError: if there is no such layer, or `layer` is no module.
        """
        at = self._index(index)
        module = layer.module if isinstance(layer, LayerView) else layer
        if not isinstance(module, nnx.Module):
            raise InputError(f"layer {at} becomes {shown(layer)}, expected a module of NNX")
        number, repeat, position = self.place(at)
        segments = list(self._stack.segments)
        segment = segments[number]
        graphdef, state = nnx.split(module)
        there, stacked = nnx.split(segment.blocks[position])
        if graphdef == there and _shapes(state) == _shapes(_slice(stacked, repeat)):
            nnx.update(segment.blocks[position], jax.tree.map(lambda a, one: a.at[repeat].set(one), stacked, state))
            return
        alone = nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state))
        middle = list(_part(segment, repeat, repeat + 1).blocks)
        middle[position] = alone
        parts = [
            _part(segment, 0, repeat),
            type(segment)(segment.start + repeat * len(segment.blocks), 1, middle),
            _part(segment, repeat + 1, segment.repeats),
        ]
        segments[number : number + 1] = [part for part in parts if part.repeats]
        self._stack.segments = nnx.List(segments)

    def __repr__(self) -> str:
        return f"Layers(0 to {len(self) - 1})"

    def place(self, index: int) -> tuple[int, int, int]:
        """Returns the segment of a layer, the repeat of its pattern, and the place in the pattern."""
        for number, segment in enumerate(self._stack.segments):
            repeat, position = divmod(index - segment.start, len(segment.blocks))
            if repeat < segment.repeats:
                return number, repeat, position
        raise AssertionError(index)

    def stacked(self, index: int) -> tuple[nnx.Module, int]:
        """Returns the module that holds a layer, stacked with others, and the place of the layer in its arrays."""
        number, repeat, position = self.place(index)
        return self._stack.segments[number].blocks[position], repeat

    def _index(self, index: Any) -> int:
        try:
            at = operator.index(index)
        except TypeError:
            raise InputError(f"layer {shown(index)} is not the index of one: 0 to {len(self) - 1}") from None
        if not -len(self) <= at < len(self):
            raise InputError(f"there is no layer {at}; there are 0 to {len(self) - 1}")
        return at % len(self)


class LayerView:
    """A layer of a stack, or a part of it: its attributes are those of the module, of this layer alone."""

    def __init__(self, layers: Layers, index: int, path: tuple[_Key, ...] = ()):
        vars(self).update(_layers=layers, _index=index, _path=path)

    @property
    def module(self) -> Any:
        """A copy that stands alone: what is written to it does not change the stack."""
        stacked, repeat = self._stacked()
        graphdef, state = nnx.split(stacked)
        return nnx.merge(graphdef, _slice(state, repeat))

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Calls the module, with arguments as it takes them."""
        return self.module(*given, **named)

    def __getattr__(self, name: str) -> Any:
        stacked, _ = self._stacked()
        child = getattr(stacked, name)
        if isinstance(child, nnx.Module | nnx.Variable):
            return self._child(name, child)
        # Methods and properties are about arrays, of this layer alone; what the module was made from is the same.
        return child if name in vars(stacked) else getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Replaces a part of the layer by a module, or any function, that is called as it is."""
        if isinstance(value, LayerView):
            value = value.module
        if not callable(value):
            raise InputError(f"{self._name(name)} becomes {shown(value)}: a module, or for values {name}[...] = them")
        layer = LayerView(self._layers, self._index).module
        setattr(_at(layer, self._path), name, value if isinstance(value, nnx.Module) else nnx.static(value))
        self._layers[self._index] = layer

    def __getitem__(self, key: Any) -> Any:
        stacked, repeat = self._stacked()
        if isinstance(stacked, ExpertBank):
            return ExpertView(stacked, repeat, stacked.index_of(key))
        return self._child(key, stacked[key])  # pyright: ignore[reportIndexIssue]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Sets an expert of a bank; see `ExpertView.set`."""
        self[key].set(value)

    def __len__(self) -> int:
        stacked, _ = self._stacked()
        return stacked.num_experts if isinstance(stacked, ExpertBank) else len(stacked)  # pyright: ignore

    def __dir__(self) -> list[str]:
        return dir(self._stacked()[0])

    def __repr__(self) -> str:
        return f"<{self._name()}: {type(self._stacked()[0]).__name__}>"

    def _stacked(self) -> tuple[nnx.Module, int]:
        block, repeat = self._layers.stacked(self._index)
        return _at(block, self._path), repeat

    def _child(self, key: _Key, child: Any) -> Any:
        if isinstance(child, nnx.Variable):
            return VariableView(child, self._layers.place(self._index)[1], self._name(key))
        return LayerView(self._layers, self._index, (*self._path, key)) if isinstance(child, nnx.Module) else child

    def _name(self, *more: _Key) -> str:
        return ".".join(map(str, (f"layers[{self._index}]", *self._path, *more)))


class VariableView:
    """A parameter of one layer: `[...]` reads and writes it."""

    def __init__(self, variable: nnx.Variable, repeat: int, name: str):
        self._variable, self._repeat, self._name = variable, repeat, name

    def __getitem__(self, key: Any) -> Array:
        return self._variable[...][self._repeat][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Writes values; raises `InputError` for another shape."""
        one = self[...]
        if key is Ellipsis:
            check_shape(self._name, jnp.asarray(value), one.shape)
        self._variable[...] = self._variable[...].at[self._repeat].set(one.at[key].set(value))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_variable", "_repeat", "_name"):
            raise InputError(f"{self._name}.{name} cannot be set; its values are written as {self._name}[...] = them")
        super().__setattr__(name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in one layer."""
        return self._variable.shape[1:]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype, as of all layers."""
        return self._variable.dtype

    def __jax_array__(self) -> Array:
        return self[...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    def __repr__(self) -> str:
        return f"<{self._name}: {self.dtype}{list(self.shape)}>"


class ExpertView:
    """One expert of one layer."""

    def __init__(self, bank: ExpertBank, repeat: int, expert: int):
        self._bank, self._repeat, self._expert = bank, repeat, expert

    def kernels(self) -> dict[str, Array]:
        """Returns the expert's kernels by name, with those of a base; raises `InputError` if it has none."""
        graphdef, state = nnx.split(self._bank)
        return nnx.merge(graphdef, _slice(state, self._repeat)).kernels(self._expert)

    def leaves(self) -> dict[str, Array]:
        """Returns the arrays that are this expert's alone, by their paths in the bank."""
        own = self._bank.own_leaves(self._expert)
        return {path: variable[...][self._repeat, at] for path, (variable, at) in own.items()}

    def set(self, value: "ExpertView | Mapping[str, Any]") -> None:
        """Sets the expert: to another one, to arrays that `leaves` names, or where it is whole to kernels.

        Raises:
          InputError: for other names or shapes.
        """
        given = dict(value.leaves() if isinstance(value, ExpertView) else value)
        own = self._bank.own_leaves(self._expert)
        # Kernels by their names alone, where there is nothing else.
        given = {
            path if path in own or f"{path}/kernel" not in own else f"{path}/kernel": one for path, one in given.items()
        }
        for path in given:
            check_member("leaf of an expert", path, tuple(own))
        for path, one in given.items():
            variable, at = own[path]
            check_shape(path, jnp.asarray(one), variable.shape[2:])
        for path, one in given.items():
            variable, at = own[path]
            variable[...] = variable[...].at[self._repeat, at].set(jnp.asarray(one).astype(variable.dtype))

    def __repr__(self) -> str:
        own = self._bank.own_leaves(self._expert)
        leaves = ", ".join(f"{path} {list(variable.shape[2:])}" for path, (variable, _) in own.items())
        return f"<expert {self._expert} of {self._bank.num_experts}: {leaves}>"


def _at(module: Any, path: tuple[_Key, ...]) -> Any:
    """Returns the part of a module at a path of attributes and keys."""
    for key in path:
        module = module[key] if isinstance(key, int) or isinstance(module, nnx.Dict) else getattr(module, key)
    return module


def _slice(state: nnx.State, repeat: int) -> nnx.State:
    return jax.tree.map(lambda leaf: leaf[repeat], state)


def _shapes(state: nnx.State) -> list[tuple]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def _part(segment: Any, begin: int, end: int) -> Any:
    """Returns the repeats `begin` to `end` of a segment, a `BlockStack`."""
    graphdef, state = nnx.split(segment.blocks)
    blocks = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[begin:end], state))
    return type(segment)(segment.start + begin * len(segment.blocks), end - begin, blocks)
