"""The state that a step changes: made for a model and an optimizer, and divided over devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moe_jax.distributed.sharding import path_name
from moe_jax.training.balance.selection_bias import without_biases
from moe_jax.training.optimizer import Placed, state_specs


class TrainState(NamedTuple):
    """Everything that a step changes; `step` is the number of steps done.

    Beside trained parameters, `params` may hold biases of selection, which the optimizer knows nothing of. `ema` is the
    moving average of `params`, float32, if the recipe asks for one; its biases of selection are those of `params`.
    """

    step: Int[Array, ""]
    params: nnx.State
    opt_state: optax.OptState
    ema: nnx.State | None = None


def init_state(params: nnx.State, optimizer: optax.GradientTransformation, *, ema: bool = False) -> TrainState:
    """Returns the state before the first step.

    Moments, and the average, are divided over devices as their parameters are. The state holds `params` themselves, and
    no copy: they are gone after a step that the state is donated to.

    Args:
      params: the trained parameters, as `peft.split_model` returns them.
      optimizer: Optax's, or a recipe's.
      ema: whether an average of the parameters is kept, for a step with `ema_decay`.
    """

    def others(params: nnx.State) -> TrainState:
        return new_state(params, optimizer, ema=ema)._replace(params=None)

    leaves = jax.tree.leaves(params)
    if leaves and all(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves):
        where = shardings_of(abstract_state(params, optimizer, ema=ema))._replace(params=None)
        others = jax.jit(others, out_shardings=where)
    return others(params)._replace(params=params)


def new_state(params: nnx.State, optimizer: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """Returns the state before the first step, wherever the compiler puts it."""
    # A copy, even where a parameter is float32 already: both are donated to the step.
    average = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(without_biases(params)[0]), average)


def abstract_state(params: nnx.State, optimizer: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """Returns shapes, dtypes and shardings of the state for parameters on a mesh, which may be abstract.

    That of the optimizer is split as `state_specs` says.
    """
    state = jax.eval_shape(lambda params: new_state(params, optimizer, ema=ema), params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    placed = {path_name(path): Placed(leaf.shape, leaf.sharding.spec) for path, leaf in leaves}
    mesh, shardings = leaves[0][1].sharding.mesh, shardings_of(params)
    specs = state_specs(state.opt_state, placed)
    moments = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))
    replicated: Any = NamedSharding(mesh, P())
    return with_shardings(state, TrainState(replicated, shardings, moments, shardings if ema else None))


def averaged_params(state: TrainState, wanted: bool) -> nnx.State:
    """Returns the trained parameters, or if it is wanted their average, in their dtypes."""
    if not wanted:
        return state.params
    return jax.tree.map(lambda like, leaf: leaf.astype(like.dtype), state.params, state.ema)


def shardings_of(tree: Any) -> Any:
    """Returns the shardings of the leaves of a tree, of arrays or abstract ones."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Returns shapes and dtypes of a tree with other shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )
