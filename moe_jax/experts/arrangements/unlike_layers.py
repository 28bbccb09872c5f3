"""Joins modules of layers that differ only in the forms of their kernels, so that one loop goes over all of them.

Compression chooses for every layer in how many bits its kernels are stored. Layers of different forms are different
programs: those of a model of 30 layers take half a minute to compile, once to read a prompt and once to go on. Here a
linear map has the kernels of all layers, in an array for each form, and a turn of the loop takes its own
(`LinearOfForms`); a bank has the experts of all layers, and a layer knows the places of its own.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from moe_jax.experts.bank import KernelBank
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.forms.coding import CodedJointly, folder_of_part, own_of
from moe_jax.experts.forms.low_rank import LowRank
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.several_forms import SeveralForms
from moe_jax.experts.linear import BIAS, Fixed, Leaves, Linear, OfAllLayers, taken
from moe_jax.experts.shapes import shapes_of
from moe_jax.functional.dense import Product, linear

MOST_FORMS = 8
"""Most forms of the kernels of a map, or of experts: each is a program of its own, and takes time even for no rows."""

_M = TypeVar("_M", bound=nnx.Module)


def stand_in(config: BankConfig) -> BankConfig:
    """Returns a config that is the same for all banks that can be joined; another config as it is.

    It says whether there is a base, and has a form that none of the banks need have.
    """
    form = config.form
    if not isinstance(form, KernelForm) or isinstance(form, CodedJointly) or not (form.over_base and form.adds_to_base):
        return config
    # A joined bank has a base of every matrix or of none.
    lacks_bases = config.base_codes is not None and 0 in config.base_codes.own_bits.values()
    if form.shared_leaves or form.common_leaves or lacks_bases:
        return config
    return BankConfig(LowRank(rank=1), base=config.base)


def joining(modules: Sequence[_M]) -> Callable[[], _M] | None:
    """Returns what makes one module with the parameters [L, ...] of modules of several layers, each [1, ...].

    The layers are used up. They may differ in the forms of linear maps, and of banks that have the same `stand_in`.

    Args:
      modules: of the layers, in their order. Their arrays are on one device, or only shapes.

    Returns:
      The function, to be called once; None if the layers differ in anything else, or if a map, or the experts, have
      more than `MOST_FORMS` forms.
    """
    if len(modules) == 1:
        return lambda: modules[0]
    joins = _joins(modules)
    if joins is None or len({_without(module, joins) for module in modules}) > 1:
        return None
    return functools.partial(_join, modules, joins)


def _without(module: nnx.Module, joins: "_Joins") -> Hashable:
    """Returns all that there is to know of a module but for what is joined and the numbers in its arrays."""
    copy = nnx.merge(*nnx.split(module), copy=True)
    for path in joins:
        delattr(_at(copy, path[:-1]), path[-1])
    graphdef, state = nnx.split(copy)
    leaves, tree = jax.tree.flatten(state)
    return graphdef, tree, *((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _join(modules: Sequence[_M], joins: "_Joins") -> _M:
    joined = {path: join() for path, join in joins.items()}
    for module in modules:
        for path in joined:
            delattr(_at(module, path[:-1]), path[-1])
    graphdefs, states = zip(*map(nnx.split, modules), strict=True)
    leaves, trees = zip(*map(jax.tree.flatten, states), strict=True)
    for module in modules:
        for leaf in _variables(module).values():
            taken(leaf)
    del states
    together = map(_concatenated, zip(*leaves, strict=True))
    whole = nnx.merge(graphdefs[0], jax.tree.unflatten(trees[0], together))
    for path, module in joined.items():
        setattr(_at(whole, path[:-1]), path[-1], module)
    return whole


class LinearOfForms(Linear):
    """A linear map of several layers, whose kernels have different forms; in a loop over them it is one layer's.

    Attributes:
      forms: of the kernels.
      kernels: for each form, the arrays of the kernels that have it.
      which, place: of every layer, the form, and the place among the kernels that have it; int32.
    """

    which: nnx.Variable
    place: nnx.Variable

    def __init__(self, maps: Sequence[Linear]):
        """Takes the arrays [1, ...] of maps of one shape, and of their biases, which all or none of them have."""
        first, parts = maps[0], _Parts.of(map(_kind_of_map, maps))
        self.matrix, self.has_bias = first.matrix, first.has_bias
        self.forms = tuple(maps[own[0]].form for own in parts.members)
        self.which, self.place = Fixed(jnp.asarray(parts.which)), Fixed(jnp.asarray(parts.place))
        leaves = [_variables(one) for one in maps]
        if first.has_bias:
            self.bias = nnx.Param(_concatenated([taken(own.pop(BIAS)) for own in leaves]))
        self.kernels = nnx.List([_of_all_layers([leaves[layer] for layer in own]) for own in parts.members])

    def _product(self, x: Float[Array, "... i"], key: Array | None, more: Product | None) -> Float[Array, "... o"]:
        y = self._with_own(lambda form, arrays: form.apply(x, arrays, self.matrix, key))
        return y if more is None else y + linear(*more)

    @property
    def every_form(self) -> tuple[KernelForm, ...]:
        return self.forms

    def materialise(self) -> Float[Array, "i o"]:
        return self._with_own(lambda form, arrays: form.materialise(None, arrays, self.matrix).astype(jnp.float32))

    def operand(self) -> Float[Array, "i o"]:
        return self.materialise()

    def _with_own(self, function: Callable[[KernelForm, dict[str, Array]], Array]) -> Array:
        """Returns what a function makes of the kernel of this layer, given its form and its arrays."""
        place = self.place[...]

        def branch(form: KernelForm, kernels: Leaves) -> Array:
            arrays = kernels.arrays().items()
            return function(form, {path: lax.dynamic_index_in_dim(own, place, keepdims=False) for path, own in arrays})

        branches = [functools.partial(branch, *own) for own in zip(self.forms, self.kernels, strict=True)]
        return lax.switch(self.which[...], branches)


# ---- which modules differ, and what joins them ----------------------------------------------------------------------

_Joins = dict[tuple[str, ...], Callable[[], nnx.Module]]


def _joins(modules: Sequence[nnx.Module]) -> _Joins | None:
    """Returns what joins those below some modules that differ in the forms of kernels, by their paths; None if one has
    too many forms, or differs in more."""
    joins: _Joins = {}
    below = [{tuple(map(str, path)): one for path, one in nnx.iter_modules(module)} for module in modules]
    for path in sorted(below[0], key=len):
        if any(path[: len(above)] == above for above in joins):
            continue
        own: Any = [of_module.get(path) for of_module in below]
        forms: set[Hashable] = set()
        if len(set(map(_but_for_forms, own))) > 1:
            return None
        if isinstance(own[0], KernelBank):
            forms = {expert.kind for bank in own for expert in _experts(bank)}
            if len(forms) == 1 and all(bank.config == own[0].config for bank in own):
                continue
            of_bases = joining([bank.base for bank in own]) if own[0].config.has_base else None
            if own[0].config.has_base and of_bases is None:
                return None
            joins[path] = functools.partial(_joined_bank, own, of_bases)
        elif type(own[0]) is Linear and len(forms := set(map(_kind_of_map, own))) > 1:
            joins[path] = functools.partial(LinearOfForms, own)
        if len(forms) > MOST_FORMS:
            return None
    return joins


def _joined_bank(banks: Sequence[KernelBank], join_bases: Callable[[], nnx.Dict[Linear]] | None) -> KernelBank:
    """Returns the bank of the experts of all layers, those of a form together, with the `places` of a layer's own."""
    first, experts = banks[0], [expert for bank in banks for expert in _experts(bank)]
    parts = _Parts.of(expert.kind for expert in experts)
    forms, counts = [experts[own[0]].form for own in parts.members], [len(own) for own in parts.members]
    form = SeveralForms(forms=tuple(forms), counts=tuple(counts)) if len(forms) > 1 else forms[0]
    config = BankConfig(form, base=first.config.base, train_base=first.config.train_base)
    options = config, first.expert, first.num_experts, first.matrices["up"].shape[0]
    bank = shapes_of(lambda rngs: KernelBank(*options, rngs=rngs, dtype=jnp.dtype(jnp.float32)))
    bank.strategy, bank.exchange = first.strategy, first.exchange
    if join_bases is not None:
        bank.base = join_bases()
    places = np.cumsum([0, *counts[:-1]])[parts.which] + parts.place
    bank.places = Fixed(jnp.asarray(places.reshape(len(banks), -1), jnp.int32))
    _give_experts(bank, [[experts[number] for number in own] for own in parts.members])
    return bank


def _give_experts(bank: KernelBank, parts: Sequence[Sequence["_Expert"]]) -> None:
    """Gives a bank the arrays of experts, part by part, which the modules that had them lose."""
    bank.delta = Leaves({})
    biases: dict[str, list[Any]] = {}
    for number, experts in enumerate(parts):
        folder = folder_of_part(number) if len(parts) > 1 else ""
        for path in experts[0].arrays:
            name, leaf = path.split("/", 1)
            array = _stacked([expert.arrays[path] for expert in experts])
            if leaf == BIAS:
                biases.setdefault(name, []).append(array)
            else:
                bank.delta.add({f"{name}/{folder}{leaf}": OfAllLayers(array)})
    for name, arrays in biases.items():
        getattr(bank, name).add({BIAS: OfAllLayers(_concatenated(arrays))})
    for expert in (expert for experts in parts for expert in experts):
        for variable, _ in expert.arrays.values():
            taken(variable)


class _Expert(NamedTuple):
    """An expert of a layer: its form; that with the shapes of its arrays; and these by matrix and path, each a variable
    [1, E, ...] and a place in it."""

    form: KernelForm
    kind: Hashable
    arrays: dict[str, tuple[nnx.Variable, int]]


def _experts(bank: KernelBank) -> list[_Expert]:
    """Returns the experts of a bank; the paths of their arrays are without the folders of mixed ones."""
    form, leaves = bank.config.form, _variables(bank)
    assert isinstance(form, KernelForm)
    every = {path.removeprefix("delta/"): leaf for path, leaf in leaves.items() if not path.startswith("base/")}
    in_folders: dict[str, tuple[Hashable, dict[str, nnx.Variable]]] = {}
    found = []
    for number in range(bank.num_experts):
        own = own_of(form, number)
        if own.folder not in in_folders:
            arrays = {
                path.replace(f"/{own.folder}", "/", 1): leaf
                for path, leaf in every.items()
                if f"/{own.folder}" in path or _is_bias(path)
            }
            shapes = ((path, *_kind(leaf, 2)) for path, leaf in sorted(arrays.items()))
            in_folders[own.folder] = (own.form, *shapes), arrays
        kind, arrays = in_folders[own.folder]
        places = {path: (leaf, number if _is_bias(path) else own.index) for path, leaf in arrays.items()}
        found.append(_Expert(own.form, kind, places))
    return found


def _is_bias(path: str) -> bool:
    return path.endswith(f"/{BIAS}")


class _Parts(NamedTuple):
    """Things of several kinds, in parts of one kind.

    Attributes:
      members: the numbers of the things in every part.
      which, place: of every thing, its part, and its place there; int32.
    """

    members: list[list[int]]
    which: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, kinds: Iterable[Hashable]) -> "_Parts":
        members: dict[Hashable, list[int]] = {}
        places = []
        for number, kind in enumerate(kinds):
            members.setdefault(kind, []).append(number)
            places.append((kind, len(members[kind]) - 1))
        parts = list(members)
        which = [parts.index(kind) for kind, _ in places]
        return cls([*members.values()], np.asarray(which, np.int32), np.asarray([n for _, n in places], np.int32))


def _but_for_forms(module: Any) -> Hashable:
    """Returns what modules have in common, apart from those below them, if only the forms of their kernels differ."""
    if isinstance(module, KernelBank):
        shape = module.expert, module.num_experts, module.matrices["up"].shape
        return KernelBank, stand_in(module.config), *shape, module.strategy, module.exchange
    return (type(module), module.matrix, module.has_bias) if type(module) is Linear else type(module)


def _kind_of_map(module: Linear) -> Hashable:
    return module.form, *((path, *_kind(leaf, 1)) for path, leaf in sorted(_variables(module).items()))


def _kind(leaf: nnx.Variable, axes: int) -> tuple[Hashable, ...]:
    """Returns the shape of a leaf without its first axes, and its dtype."""
    value = leaf.get_value()
    return (*value.shape[axes:], str(value.dtype))


def _variables(module: nnx.Module) -> dict[str, nnx.Variable]:
    leaves = nnx.iter_graph(module)
    return {"/".join(map(str, path)): leaf for path, leaf in leaves if isinstance(leaf, nnx.Variable)}


def _at(module: Any, path: Sequence[str]) -> Any:
    return functools.reduce(getattr, path, module)


# ---- arrays, or shapes -----------------------------------------------------------------------------------------------


def _of_all_layers(maps: Sequence[dict[str, nnx.Variable]]) -> Leaves:
    leaves = Leaves({})
    leaves.add({path: OfAllLayers(_concatenated([taken(one[path]) for one in maps])) for path in maps[0]})
    return leaves


def _concatenated(arrays: Sequence[Any]) -> Any:
    """Returns arrays along their first axis, copied by NumPy, as it takes nothing to compile."""
    first = arrays[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((sum(array.shape[0] for array in arrays), *first.shape[1:]), first.dtype)
    return jax.device_put(np.concatenate([np.asarray(array) for array in arrays]), may_alias=True)


def _stacked(leaves: Sequence[tuple[nnx.Variable, int]]) -> Any:
    """Returns those at the places of experts in leaves [1, E, ...], stacked."""
    values = [(leaf.get_value(), place) for leaf, place in leaves]
    first = values[0][0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(values), *first.shape[2:]), first.dtype)
    return jax.device_put(np.stack([np.asarray(value)[0, place] for value, place in values]), may_alias=True)
