"""A model shape compiled once: its training step and its score, for any parameters, seed, text and learning rates."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from evidence.studies.parameter_groups import GROUPS, group_of, groups_of
from moe_jax.distributed.sharding import path_name
from moe_jax.evaluation.held_out import next_token_row_losses, text_windows
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder
from moe_jax.peft import split_model, trainable_paths
from moe_jax.training.optimizer import learning_rate, make_optimizer
from moe_jax.training.recipe import OptimizerSection, ScheduleSection
from moe_jax.training.step import make_step
from moe_jax.training.train_state import TrainState, init_state

_SCORED_AT_ONCE = 16
# Steps whose losses are averaged.
_LAST = 25

Batches = Sequence[Mapping[str, np.ndarray]]


class Trained(NamedTuple):
    """Attributes:
    model: after training.
    loss: training loss, mean of the last steps, nats per token.
    auxiliary: what the auxiliary losses added to the first step's and to the last one's.
    """

    model: Decoder
    loss: float
    auxiliary: tuple[float, float]


class Trainer:
    """Trains and scores models of one config.

    What is trained is what the config says, of a model with a frozen base the adapters alone; the loss, with the
    auxiliary losses of all routers, the optimizer and the schedule are those of `moe-jax train`. There is no weight
    decay: it would pull deltas and adapters towards nothing, and with them towards the base.

    Attributes:
      groups: of the parameters that are trained (`training.optimizer`).
      trained_params: their number.
    """

    def __init__(self, config: ModelConfig, *, steps: int, warmup_steps: int):
        """Compiles nothing yet.

        Args:
          config: of the models.
          steps: of a run, which the schedule ends with.
          warmup_steps: at its beginning.
        """
        model = abstract_model(config)
        self._steps = steps
        self._trainable = trainable_paths(model)
        graphdef, params, _ = split_model(model, self._trainable)
        self.trained_params = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.groups = groups_of(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
        section = OptimizerSection(learning_rate=1.0, weight_decay=0.0)
        schedule = learning_rate(section, ScheduleSection(warmup_steps=warmup_steps), steps)

        # Rates and the seed are arguments: no run of the same shape is compiled again.
        def step(rates: jax.Array, seed: jax.Array, state: TrainState, frozen: nnx.State, batch: dict) -> tuple:
            optimizer = optax.chain(make_optimizer(section, schedule), _rates_by_group(rates))
            return make_step(graphdef, optimizer, schedule, seed=seed)(state, frozen, batch)

        def window_losses(params: nnx.State, frozen: nnx.State, batch: dict) -> jax.Array:
            return next_token_row_losses(nnx.merge(graphdef, params, frozen), batch)

        first = optax.chain(make_optimizer(section, schedule), _rates_by_group(jnp.ones(len(GROUPS))))
        self._init = jax.jit(lambda params: init_state(params, first))
        self._step = jax.jit(step, donate_argnums=2)
        self._window_losses = jax.jit(window_losses)

    def run(self, model: Decoder, batches: Batches, *, seed: int, rates: Mapping[str, float]) -> Trained:
        """Trains a model; it is not changed.

        Args:
          model: of this config.
          batches: as many as there are steps.
          seed: of what is random in a step (dropout).
          rates: the highest learning rate of every group.
        """
        graphdef, params, frozen = split_model(model, self._trainable)
        # The step donates its state, and a caller may go on from the same model.
        state = self._init(jax.tree.map(jnp.copy, params))
        by_group = jnp.asarray([rates.get(group, 0.0) for group in GROUPS], jnp.float32)
        losses, auxiliary = [], []
        for batch in batches[: self._steps]:
            state, metrics = self._step(by_group, jnp.uint32(seed), state, frozen, batch)
            losses.append(metrics.loss)
            auxiliary.append(metrics.auxiliary)
        loss = float(np.mean(losses[-_LAST:]))
        trained = nnx.merge(graphdef, state.params, frozen)
        return Trained(trained, loss, (float(auxiliary[0]), float(auxiliary[-1])))

    def score(self, model: Decoder, ids: np.ndarray, seq_len: int) -> float:
        """Mean loss of a text Int32[n], in windows as `moe-jax eval` cuts it, nats per token."""
        sums = self._sums(model, ids, seq_len)
        return float(sums.sum()) / (len(ids) - len(sums))

    def score_windows(self, model: Decoder, ids: np.ndarray, seq_len: int) -> list[float]:
        """The same of every whole window."""
        return (self._sums(model, ids, seq_len)[: len(ids) // seq_len] / (seq_len - 1)).tolist()

    def _sums(self, model: Decoder, ids: np.ndarray, seq_len: int) -> np.ndarray:
        """Float64[N]: of every window, the last of which may be shorter, the sum over the tokens that are predicted."""
        _, params, frozen = split_model(model, self._trainable)
        batches = text_windows(ids, seq_len=seq_len, batch_size=_SCORED_AT_ONCE)
        found = [np.asarray(self._window_losses(params, frozen, batch), np.float64) for batch in batches]
        return np.concatenate(found)[: -(-len(ids) // seq_len)]


def _rates_by_group(rates: jax.Array) -> optax.GradientTransformation:
    """Multiplies updates made with a learning rate of 1 by the rates of `GROUPS`, in this order."""

    def one(path: tuple, update: jax.Array) -> jax.Array:
        return update * rates[GROUPS.index(group_of(path_name(path)))].astype(update.dtype)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(one, updates))
