"""Looking into the layers of a call, and changing their routers: the arguments, and the results by layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError, shown
from moe_jax.functional.array_shapes import check_shape
from moe_jax.nn.inputs import as_array, is_traced

OFF = -1e9
"""Added to the logit of an expert that is off. Its square is finite, which statistics contain."""

ChangeLogits = Callable[[Float[Array, "*B T E"]], Float[Array, "*B T E"]]
"""A function of the logits of a router, float32, which returns those that are used instead."""


class TokenRouting(NamedTuple):
    """The decision of a router for every token, with its logits.

    Attributes:
      experts: chosen experts, the one with the largest score first; -1 for padding and for what a capacity dropped.
      weights: their weights, float32.
      logits: of all experts, float32.
    """

    experts: Int[Array, "*B T k"]
    weights: Float[Array, "*B T k"]
    logits: Float[Array, "*B T E"]


class AtRouter(NamedTuple):
    """The change of the router of one layer, and the place for its decisions.

    Attributes:
      bias: added to its logits; None: nothing.
      change: a function that replaces the logits, after the bias; None: there is none.
      kept: a list that the decision is appended to; None: it is not asked for.
    """

    bias: Float[Array, " E"] | None = None
    change: ChangeLogits | None = None
    kept: list[TokenRouting] | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is asked."""
        return self.bias is None and self.change is None and self.kept is None


NOTHING_ASKED = AtRouter()


class Kept(NamedTuple):
    """By layer, what a call was asked to keep: decisions of routers, and inputs of layers."""

    routing: dict[int, TokenRouting]
    hidden_states: dict[int, Float[Array, "B T d"]]


class Inside(NamedTuple):
    """The layers that a call looks into, or changes the routers of, by their index.

    Attributes:
      hidden_states: layers whose inputs are kept; the number of layers stands for the output of the stack.
      biases: added to the logits of routers.
      changes: functions that replace the logits of routers.
    """

    hidden_states: frozenset[int] = frozenset()
    biases: Mapping[int, Float[Array, " E"]] = MappingProxyType({})
    changes: Mapping[int, ChangeLogits] = MappingProxyType({})


NOTHING_INSIDE = Inside()


def check_layers(given: Sequence[int], count: int) -> frozenset[int]:
    """Returns the numbers of layers; raises `InputError` for others than 0 to `count`."""
    if not isinstance(given, Iterable):
        raise InputError(f"hidden_states is {shown(given)}, expected a list of layers")
    found = []
    for layer in given:
        at = as_index(layer)
        if at is None or not 0 <= at <= count:
            raise InputError(
                f"hidden_states names {shown(layer)}; there are 0 to {count}, the last of which is the output"
            )
        found.append(at)
    return frozenset(found)


def as_index(value: Any) -> int | None:
    """Returns an integer of Python or NumPy; None: it is none."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_integer else None


def ask_routers(
    experts_of: Callable[[str, int], int],
    off: Mapping[int, Sequence[int]],
    added: Mapping[int, Float[Array, " E"]],
    changes: Mapping[int, ChangeLogits],
) -> tuple[dict[int, Float[Array, " E"]], dict[int, ChangeLogits]]:
    """Returns the biases and the changes of logits, by layer.

    Args:
      experts_of: `(name of an argument, layer) -> number of experts`; raises `InputError` where there is no MoE.
      off, added, changes: the arguments `experts_off`, `router_bias` and `router_logits` of a call.

    Raises:
      InputError: for layers or experts that are not there, biases of other shapes, or what is no function.
    """
    for name, given in {"experts_off": off, "router_bias": added, "router_logits": changes}.items():
        if not isinstance(given, Mapping):
            raise InputError(f"{name} is {shown(given)}, expected what it asks for by layer: {{layer: ...}}")
    found: dict[int, Array] = {}
    for name, layer in [("experts_off", layer) for layer in off] + [("router_bias", layer) for layer in added]:
        found[layer] = jnp.zeros(experts_of(name, layer), jnp.float32)
    for layer, bias in added.items():
        bias = as_array(f"router_bias[{layer}]", bias, "floating-point numbers", found[layer].shape)
        found[layer] = jnp.asarray(bias, jnp.float32)
    for layer, experts in off.items():
        count = len(found[layer])
        if not isinstance(experts, Iterable):
            raise InputError(f"experts_off[{layer}] is {shown(experts)}, expected a list of experts")
        named = [_index(expert, count, f"experts_off[{layer}]") for expert in experts]
        if len(set(named)) == count:
            raise InputError(f"experts_off[{layer}] names all {count} experts; leave one")
        found[layer] = found[layer].at[jnp.asarray(named, jnp.int32)].set(OFF)
    for layer, change in changes.items():
        experts_of("router_logits", layer)
        if not callable(change):
            raise InputError(f"router_logits[{layer}] is {shown(change)}, expected a function of logits")
    return found, dict(changes)


def _index(expert: Any, count: int, name: str) -> int:
    """Returns the index of an expert; raises `InputError` if it is none."""
    at = as_index(expert)
    if at is None or not 0 <= at < count:
        more = "; what is known only in the program goes into router_bias" if is_traced(expert) else ""
        raise InputError(f"{name} names {shown(expert)}; there are 0 to {count - 1}{more}")
    return at


def change_at(changes: Sequence[tuple[int, ChangeLogits]], layer: Int[Array, ""]) -> ChangeLogits | None:
    """Returns the change of a layer's logits, for layers of one place in a repeated pattern; None: none has any.

    Args:
      changes: of some of these layers.
      layer: the index of the one that is computed, which is not known before the program runs.
    """
    if not changes:
        return None

    def change(logits: Array) -> Array:
        branches: list[Any] = [lambda logits: logits]
        for index, function in changes:
            branches.append(lambda logits, index=index, function=function: _changed(logits, index, function))
        at = [(number + 1) * (layer == index) for number, (index, _) in enumerate(changes)]
        return lax.switch(jnp.sum(jnp.stack(at).astype(jnp.int32)), branches, logits)

    return change


def _changed(logits: Array, layer: int, function: ChangeLogits) -> Array:
    new = function(logits)
    if not hasattr(new, "shape"):
        raise InputError(f"router_logits[{layer}](logits) is {shown(new)}, expected an array like the logits")
    new = jnp.asarray(new)
    check_shape(f"router_logits[{layer}](logits)", new, logits.shape)
    return new.astype(jnp.float32)


def by_layer(kept: Mapping[int, Any], layer_at: Callable[[int, int], int], repeats: int) -> dict[int, Any]:
    """Returns by layer what is kept by place in a pattern, stacked over its repeats."""
    return {
        layer_at(repeat, position): jax.tree.map(lambda leaf, at=repeat: leaf[at], one)
        for repeat in range(repeats)
        for position, one in kept.items()
    }
