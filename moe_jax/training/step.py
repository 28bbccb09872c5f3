"""One training step as a pure function of (state, frozen parameters, batch)."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import batch_spec
from moe_jax.evaluation.held_out import run_to_head
from moe_jax.functional.keys import round_stochastically
from moe_jax.functional.routing.router_stats import means_of, sums_of
from moe_jax.nn import Decoder
from moe_jax.nn.further.further_loss import further_loss, further_routers
from moe_jax.nn.inputs import Batch, as_ids, targets_and_weights
from moe_jax.nn.moe import StackedStats, sum_of_losses
from moe_jax.training.balance.selection_bias import biases_after_step, without_biases
from moe_jax.training.train_state import TrainState


def sum_of_gradients(
    loss: Callable[[nnx.State, Any], tuple[Float[Array, ""], Any]], params: nnx.State, microbatches: Any
) -> tuple[nnx.State, Any]:
    """Returns the sum of the gradients of all microbatches, float32, and the second results of the losses.

    Where parameters are float32, the backward pass of a layer adds to the sum in place, so that no microbatch has
    gradients of its own: they would take as much memory as the sum. JAX cannot add bfloat16 gradients to float32 sums.
    Where only a few parameters are in bfloat16, as the scales of quantised deltas are, the loss gets these in float32
    instead. Where all are, the gradients of a microbatch exist as a whole, in half as many bytes.

    Args:
      loss: `(params, microbatch) -> (loss, anything else)`, differentiated with respect to `params`.
      microbatches: a tree of arrays [number, ...], as the second results are.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    if any(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        sums = jax.tree.map(jax.new_ref, zeros)
        exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)

        def add_in_place(carry: None, micro: Any) -> tuple[None, Any]:
            _, backward, found = jax.vjp(lambda params: loss(params, micro), exact, has_aux=True)
            backward.with_refs(sums)(jnp.ones((), jnp.float32))
            return carry, found

        _, found = jax.lax.scan(add_in_place, None, microbatches)
        return jax.tree.map(jax.freeze, sums), found

    def add(sums: nnx.State, micro: Any) -> tuple[nnx.State, Any]:
        # Without the barrier XLA for TPUs tries to sum over devices after the loop, and fails on the conversion.
        grads, found = jax.lax.optimization_barrier(jax.grad(loss, has_aux=True)(params, micro))
        return jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), sums, grads), found

    return jax.lax.scan(add, zeros, microbatches)


# Separates the random keys of steps from those of initial parameters, which come from the same seed.
_STEPS = 0x57E95
# Folded into the key of a step, as the numbers of its microbatches are.
_ROUNDING = 0x7FFFFFFF


class StepMetrics(NamedTuple):
    """The metrics of a step; float32 scalars, except for the router statistics.

    Attributes:
      loss: mean negative log-likelihood of the scored tokens, before the update.
      auxiliary: the sum of the auxiliary losses, with their coefficients (methods.md 1), of all routers that ran.
      distillation: mean divergence of the scored tokens from the teacher, times the squared temperature, without its
        weight in the loss (methods.md 9); None: there is no teacher.
      grad_norm: global norm of the gradient, before clipping.
      learning_rate: of this step; None: the step was made without a schedule.
      scored: number of tokens scored.
      tokens: number of tokens that are not padding, the encoder's inputs aside.
      input_tokens: number of tokens of the encoder's inputs that are not padding; 0 without an encoder.
      cut: number of inputs and number of targets of pairs that were cut; zeros without an encoder.
      router: statistics of every router.
      picture_tokens: number of tokens whose places features of pictures took; None: the batch has no slots.
      further: mean of the losses of the layers that predict tokens after the next, without its weight in the loss;
        None: they have none.
      further_router: statistics of every router of these layers.
    """

    loss: Float[Array, ""]
    auxiliary: Float[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""] | None
    scored: Float[Array, ""]
    tokens: Int[Array, ""]
    input_tokens: Int[Array, ""]
    cut: Int[Array, "2"]
    router: StackedStats
    distillation: Float[Array, ""] | None = None
    picture_tokens: Int[Array, ""] | None = None
    further: Float[Array, ""] | None = None
    further_router: StackedStats = ()


class FurtherTokens(NamedTuple):
    """The loss of layers that predict tokens after the next: its weight, and the number of layers that have one."""

    weight: float
    depth: int


class Teacher(NamedTuple):
    """A frozen model whose logits are distilled; its parameters are an argument of the step.

    Attributes:
      graphdef: of the teacher.
      weight: of the divergence from it in the loss, in (0, 1].
      temperature: of the logits.
    """

    graphdef: nnx.GraphDef
    weight: float
    temperature: float


def make_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule | None = None,
    *,
    seed: int = 0,
    accumulation: int = 1,
    ema_decay: float | None = None,
    bias_update_rate: float = 0.0,
    further: FurtherTokens | None = None,
    teacher: Teacher | None = None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Makes the step of `moe-jax train`, a pure function: jit it with the state donated, call it under `jax.set_mesh`.

    It is `(state, frozen, batch) -> (state, metrics)`: a `TrainState`, the parameters that are not trained, and a
    batch as `Decoder.loss` takes it. Where it is traced it raises `InputError` for a batch of other shapes or dtypes,
    rows that `accumulation` does not divide, and where an average, a teacher or a bias that moves is named only here or
    only there.

    The loss is the mean over all scored tokens of the batch, plus the auxiliary losses, which are those of all tokens
    of the batch, whatever the number of microbatches it is computed in. With several, and auxiliary losses, the model
    runs once more: what a token counts in the loss of a router depends on the loads that all tokens make. Gradients are
    added up in float32. Everything random depends only on the seed and the numbers of the step and the microbatch: it
    is the same after an interruption and on every mesh.

    Args:
      graphdef: from `peft.split_model`.
      optimizer: Optax's, or a recipe's; it gets float32 gradients, and parameters in their dtypes.
      schedule: learning rate by steps done, for the metrics alone: the optimizer has its own.
      seed: of all that is random.
      accumulation: number of microbatches, a divisor of B.
      ema_decay: of the average that the state then has.
      bias_update_rate: by how much biases of selection move, up or down, which are then among the state's parameters
        (`moved_biases`); no gradient reaches them, and neither does the optimizer.
      further: the loss of the model's `further_layers`, which is added; None: they have none.
      teacher: its parameters are then a fourth argument of the step, which leaves them as they are.
    """
    if accumulation < 1:
        raise InputError(f"accumulation = {accumulation}: expected a number of microbatches from 1")
    loss_of = make_loss(graphdef, teacher=teacher, further=further)

    def step(
        state: TrainState, frozen: nnx.State, batch: Batch, taught: nnx.State | None = None
    ) -> tuple[TrainState, StepMetrics]:
        if not isinstance(state, TrainState):
            raise InputError(f"the state is a {type(state).__name__}, expected what init_state returns")
        if (ema_decay is None) != (state.ema is None):
            raise InputError("an average takes both: init_state(..., ema=True), and ema_decay of make_step")
        if (teacher is None) != (taught is None):
            raise InputError("a teacher takes both: teacher of make_step, and its parameters after the batch")
        targets, weights = targets_and_weights(batch)
        batch = {**batch, "targets": targets, "weights": weights}
        params, biases = without_biases(state.params)
        if bias_update_rate and not jax.tree.leaves(biases):
            raise InputError("bias_update_rate moves biases of selection, and params has none: see moved_biases")
        frozen = nnx.merge_state(frozen, biases)
        model = nnx.merge(graphdef, params, frozen)
        as_ids("tokens", batch["tokens"], model.config.vocab_size)
        scored = jnp.sum(weights)
        # A batch that consists only of prompts has loss 0 and gradient 0 instead of 0/0.
        divisor = jnp.maximum(scored, 1.0)
        key = step_key(seed, state.step)

        def loss_of_micro(
            params: nnx.State, scanned: tuple[Batch, Array | int], slopes: StackedStats | None = None
        ) -> tuple:
            micro, index = scanned
            return loss_of(params, frozen, micro, divisor, jax.random.fold_in(key, index), taught, slopes)

        if accumulation == 1:
            found = jax.grad(loss_of_micro, has_aux=True)(params, (batch, 0))
            grads, (loss, router, distillation, (predicted, further_router)) = found
            grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
        else:
            microbatches = {key: split_batch(array, accumulation) for key, array in batch.items()}
            numbered = microbatches, jnp.arange(accumulation, dtype=jnp.int32)
            slopes = None
            if any(any(router.coefficients) for router in model.routers()):
                of_batch = router_statistics(graphdef, params, frozen, numbered, key, further)
                slopes = slopes_of_auxiliary_loss(model, *of_batch)
            of_micro = partial(loss_of_micro, slopes=slopes)
            grads, (losses, stats, divergences, (each, of_further)) = sum_of_gradients(of_micro, params, numbered)
            loss, router, further_router = jnp.sum(losses), over_microbatches(stats), over_microbatches(of_further)
            distillation = None if divergences is None else jnp.sum(divergences)
            predicted = None if each is None else jnp.sum(each)

        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        metrics = StepMetrics(
            loss=loss,
            auxiliary=_auxiliary_loss(model, router, further_router),
            grad_norm=optax.tree.norm(grads),
            learning_rate=None if schedule is None else jnp.asarray(schedule(state.step), jnp.float32),
            scored=scored,
            tokens=_counted(batch, "tokens", "segment_ids"),
            input_tokens=_counted(batch, "inputs", "inputs_valid"),
            cut=jnp.sum(batch["cut"], axis=0) if "cut" in batch else jnp.zeros(2, jnp.int32),
            router=router,
            distillation=distillation,
            picture_tokens=jnp.sum(batch["slots"] > 0) if "slots" in batch else None,
            further=predicted,
            further_router=further_router,
        )
        params, average = updated_params(params, updates, jax.random.fold_in(key, _ROUNDING)), None
        if state.ema is not None and ema_decay is not None:
            learnt, _ = without_biases(state.ema)
            average = _next_average(learnt, params, state.step + 1, ema_decay)
        if jax.tree.leaves(biases):
            moved = biases_after_step(biases, model, router, bias_update_rate, further_router)
            params = nnx.merge_state(params, moved)
            if average is not None:
                # No average concerns them: they belong to the loads that there are now. A copy, for both are donated.
                average = nnx.merge_state(average, jax.tree.map(jnp.copy, moved))
        return TrainState(state.step + 1, params, opt_state, average), metrics

    return step


def _counted(batch: Batch, name: str, valid: str) -> Int[Array, ""]:
    """Returns the number of tokens that are not padding; all are where the batch does not say what counts."""
    if valid in batch:
        return jnp.sum(batch[valid].astype(bool))
    return jnp.asarray(batch[name].size if name in batch else 0, jnp.int32)


def make_loss(
    graphdef: nnx.GraphDef, *, teacher: Teacher | None = None, further: FurtherTokens | None = None
) -> Callable[..., tuple]:
    """Makes the loss of a microbatch, which a step differentiates by its first argument; arguments as in `make_step`.

    It is `(params, frozen, batch, scored, key, taught, slopes) -> (loss, (cross-entropy of the tokens, router
    statistics, divergence from the teacher, (loss of further tokens, statistics of their routers)))`, where `scored` is
    the weight of all tokens of the batch, and `taught` has a teacher's parameters; without one, it and the divergence
    are None, and so is the loss of further tokens without `further`. `slopes` are those of the auxiliary losses
    (`slopes_of_auxiliary_loss`); None: the microbatch is the batch.
    """

    def microbatch_loss(
        params: nnx.State,
        frozen: nnx.State,
        batch: Batch,
        scored: Array,
        key: Array,
        taught: nnx.State | None = None,
        slopes: StackedStats | None = None,
    ) -> tuple[Array, tuple]:
        model = nnx.merge(graphdef, params, frozen)
        out = run_to_head(model, batch, key)
        # The divisor is part of the weights, so that the gradient is not rounded before it is divided.
        targets, weights = batch["targets"], batch["weights"] / scored
        if teacher is None:
            loss = cross_entropy = model.weighted_loss(out.x, targets, weights)
            divergence = None
        else:
            right = nnx.merge(teacher.graphdef, taught)
            # Without a key, as at evaluation, nothing in the teacher is random.
            of_teacher = {"teacher": right, "teacher_x": run_to_head(right, batch).x, "weight": teacher.weight}
            loss, cross_entropy, divergence = model.distilled_loss(
                out.x, targets, weights, temperature=teacher.temperature, **of_teacher
            )
        predicted, of_further = None, ()
        if further is not None:
            predicted, of_further = further_loss(
                model, out.x, {**batch, "weights": weights}, depth=further.depth, key=key
            )
            loss = loss + further.weight * predicted
        if slopes is None:
            auxiliary = _auxiliary_loss(model, out.router, of_further)
        else:
            auxiliary = optax.tree.vdot(slopes, tuple(map(sums_of, (*out.router, *of_further))))
        return loss + auxiliary, (cross_entropy, out.router, divergence, (predicted, of_further))

    return microbatch_loss


def router_statistics(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    frozen: nnx.State,
    numbered: tuple[Batch, Array],
    key: Array,
    further: FurtherTokens | None,
) -> tuple[StackedStats, StackedStats]:
    """Returns the statistics of all routers over all microbatches, with the random keys of the loss; no gradients.

    Those of the layers that predict tokens after the next are apart.
    """

    def statistics(carry: None, scanned: tuple[Batch, Array]) -> tuple[None, tuple[StackedStats, StackedStats]]:
        micro, index = scanned
        model, key_of_micro = nnx.merge(graphdef, params, frozen), jax.random.fold_in(key, index)
        out = run_to_head(model, micro, key_of_micro)
        if further is None:
            return carry, (out.router, ())
        return carry, (out.router, further_loss(model, out.x, micro, depth=further.depth, key=key_of_micro)[1])

    own, of_further = jax.lax.scan(statistics, None, numbered)[1]
    return over_microbatches(own), over_microbatches(of_further)


def over_microbatches(stats: StackedStats) -> StackedStats:
    """Returns the statistics of all tokens of the microbatches that the leading axis of `stats` counts."""
    return tuple(means_of(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums_of(one))) for one in stats)


def slopes_of_auxiliary_loss(model: Decoder, router: StackedStats, further: StackedStats) -> StackedStats:
    """Returns the derivatives of the auxiliary losses of a batch by the sums over its tokens (`sums_of`).

    Multiplied by the sums over the tokens of a microbatch they give a loss; the gradients of these losses of all
    microbatches sum to that of the batch. Those by the sums of the further layers' routers follow the others.
    """

    def loss(sums: StackedStats) -> Float[Array, ""]:
        means = tuple(map(means_of, sums))
        return _auxiliary_loss(model, means[: len(router)], means[len(router) :])

    return jax.grad(loss)(tuple(map(sums_of, (*router, *further))))


def _auxiliary_loss(model: Decoder, router: StackedStats, further: StackedStats) -> Float[Array, ""]:
    """Returns what `Decoder.auxiliary_loss` does, of the statistics alone, with the losses of the further layers.

    These layers' routers count each by itself, also where the model's own have one balance loss together.
    """
    positions = further_routers(model.config, model.config.further_layers)[: len(further)]
    own = sum_of_losses(model.config.balance_over, model.routers(), router)
    return own + sum_of_losses("layer", positions, further) if further else own


def updated_params(params: nnx.State, updates: optax.Updates, key: Array) -> nnx.State:
    """Returns the parameters after an update, float32.

    Parameters in bfloat16 are rounded stochastically, as most of their updates are smaller than a step of bfloat16.
    """

    def one(number: int, param: Array, update: Array) -> Array:
        moved = param.astype(jnp.float32) + update
        if param.dtype == jnp.bfloat16:
            return round_stochastically(moved, jax.random.fold_in(key, number))
        return moved.astype(param.dtype)

    leaves, structure = jax.tree.flatten(params)
    moved = [one(number, *pair) for number, pair in enumerate(zip(leaves, jax.tree.leaves(updates), strict=True))]
    return jax.tree.unflatten(structure, moved)


def _next_average(average: nnx.State, params: nnx.State, step: Int[Array, ""], decay: float) -> nnx.State:
    """Returns the average after `step` steps, of which it keeps the share `decay` of itself in the last.

    Early steps keep less, (1 + step) / (10 + step), so that it does not stay near the first parameters for long.
    """
    done = jnp.asarray(step, jnp.float32)
    new = 1.0 - jnp.minimum(decay, (1.0 + done) / (10.0 + done))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return cast(nnx.State, optax.incremental_update(cast(Any, params), cast(Any, average), new))


def step_key(seed: int, step: int | Int[Array, ""]) -> Array:
    """Returns the random key of the step that follows `step` steps."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), step)


def split_batch(array: Array, parts: int) -> Array:
    """Reshapes `[B, ...]` to `[parts, B / parts, ...]`; part p takes rows p, p + parts, ...: none changes its device.

    The tokens of `[B, T]` are split over devices like those of the batch; the pictures of a row stay together.
    """
    rows, *rest = array.shape
    if rows % parts:
        raise InputError(f"a batch of {rows} rows is not {parts} microbatches of equal size (accumulation)")
    microbatches = array.reshape(rows // parts, parts, *rest).swapaxes(0, 1)
    if jax.sharding.get_abstract_mesh().empty:
        return microbatches
    spec = batch_spec() if len(rest) == 1 else batch_spec()[:1]
    return jax.lax.with_sharding_constraint(microbatches, P(None, *spec))
