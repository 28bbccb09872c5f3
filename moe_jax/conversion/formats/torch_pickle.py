"""Reads the pickle in a PyTorch checkpoint with an interpreter that knows tensors and nothing else.

A pickle is a program. This one may build strings, numbers, tuples, lists and dictionaries, and may call three
functions, by names that stand for inert ones here; any other name and any other operation is an error. Its cost is
proportional to its length, which is limited: only short strings and small numbers are hashed, and nothing is compared
or written out.
"""

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

from moe_jax.conversion.formats.tensors import MAX_RANK
from moe_jax.core.errors import InputError, shown

MAX_PICKLE_BYTES = 32 << 20
_MAX_OPERATIONS = 1_000_000  # some twenty-five thousand tensors in one file

_STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


class Storage(NamedTuple):
    """The elements that tensors are views of: their dtype, named as in safetensors, and the KEY of `data/KEY`."""

    dtype: str
    key: str


class StoredTensor(NamedTuple):
    """A view of a storage; offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _StorageType(NamedTuple):
    dtype: str


class _Function(NamedTuple):
    call: Callable[..., Any]


class _Unexpected(Exception):
    """A pickle does something that none of PyTorch's does."""


def read_torch_pickle(data: bytes) -> Any:
    """Returns what a pickle builds: `StoredTensor`s in dictionaries, lists and tuples.

    Args:
      data: of protocol 2 or later, as PyTorch writes it.

    Raises:
      InputError: if it is damaged, wants to run anything, or does what a state dict never needs. The caller puts the
        name of the file before the message.
    """
    try:
        return _Machine().run(data)
    except InputError:
        raise
    except _Unexpected as error:
        raise InputError(f"its data.pkl is damaged, or not of plain tensors ({error}); fetch the file again") from None
    except (ValueError, LookupError, TypeError) as error:
        # Errors of `pickletools`, and of operations that find too few values on the stack.
        raise InputError(f"its data.pkl is damaged ({type(error).__name__}); fetch the file again") from None


class _Machine:
    """The interpreter of a pickle: a stack, marks in it, and a memo."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Runs a pickle; returns the one value that it leaves."""
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count >= _MAX_OPERATIONS:
                raise _Unexpected(f"more than {_MAX_OPERATIONS:,} operations")
            name = operation.name
            if name in _PUSHED:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
            elif name == "STOP":
                return self._stack.pop()
            else:
                raise _Unexpected(f"the operation {name}")

    def mark(self, _: Any) -> None:
        """Puts a mark on the stack."""
        self._marks.append(len(self._stack))

    def to_mark(self) -> list[Any]:
        """Takes the values above the last mark."""
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def last(self, count: int) -> list[Any]:
        """Takes the last `count` values."""
        if len(self._stack) < count:
            raise IndexError
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def put(self, index: int | None) -> None:
        """Stores the last value in the memo."""
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def get(self, index: int) -> None:
        """Puts a value of the memo on the stack."""
        self._stack.append(self._memo[index])

    def tuple(self, items: list[Any]) -> None:
        """Puts a tuple on the stack."""
        self._stack.append(tuple(items))

    def append(self, items: list[Any]) -> None:
        """Appends values to the list below them."""
        target = self._stack[-1]
        if type(target) is not list:
            raise _Unexpected("items of what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Sets items of the dictionary below them."""
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _Unexpected("keys of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise _Unexpected(f"a {type(key).__name__.strip('_')} as a key")
            if key in target:
                raise _Unexpected(f"the key {shown(key)} twice")
            target[key] = value

    def build(self, _: Any) -> None:
        """Drops the attributes of a state dict (`_metadata`), which nobody needs."""
        self._stack.pop()
        if type(self._stack[-1]) is not dict:
            raise _Unexpected("attributes of what is no dictionary")

    def reduce(self, _: Any) -> None:
        """Calls one of the allowed functions."""
        function, arguments = self.last(2)
        if type(function) is not _Function or type(arguments) is not tuple:
            raise _Unexpected("a call of what is no function")
        self._stack.append(function.call(*arguments))

    def look_up(self, module: Any, name: Any) -> None:
        """Puts the function or type of this name on the stack, if it is allowed."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Unexpected("a name that is no string")
        if module == "torch" and name in _STORAGES:
            self._stack.append(_StorageType(_STORAGES[name]))
        elif (module, name) in _FUNCTIONS:
            self._stack.append(_FUNCTIONS[module, name])
        else:
            raise InputError(
                f"it wants to run {shown(f'{module}.{name}')[1:-1]}; only plain tensors are read. "
                "If you trust it, load it with PyTorch and save it as safetensors"
            )

    def storage(self, _: Any) -> None:
        """Puts the storage that a persistent id describes on the stack."""
        reference = self._stack.pop()
        kind, storage_type, key, _device, _count = reference
        if kind != "storage" or type(storage_type) is not _StorageType or not isinstance(key, str):
            raise _Unexpected("a reference to something else than a storage")
        self._stack.append(Storage(storage_type.dtype, key))


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    if type(storage) is not Storage:
        raise _Unexpected("a tensor without a storage")
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= MAX_RANK:
        raise _Unexpected("a tensor without one stride for every axis")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *shape, *strides)):
        raise _Unexpected(f"a tensor with offset {shown(offset)}, shape {shown(shape)}, strides {shown(strides)}")
    return StoredTensor(storage, offset, shape, strides)


def _new_dictionary() -> dict[Any, Any]:
    return {}


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


_FUNCTIONS = {
    ("collections", "OrderedDict"): _Function(_new_dictionary),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_rebuild_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function(_rebuild_parameter),
}
_PUSHED = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"))
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.tuple(machine.to_mark()),
    "TUPLE1": lambda machine, _: machine.tuple(machine.last(1)),
    "TUPLE2": lambda machine, _: machine.tuple(machine.last(2)),
    "TUPLE3": lambda machine, _: machine.tuple(machine.last(3)),
    "APPEND": lambda machine, _: machine.append(machine.last(1)),
    "APPENDS": lambda machine, _: machine.append(machine.to_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.to_mark()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "BUILD": _Machine.build,
    "REDUCE": _Machine.reduce,
    "GLOBAL": lambda machine, name: machine.look_up(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.look_up(*machine.last(2)),
    "BINPERSID": _Machine.storage,
}
