"""The loss of the targets of pairs, given their inputs and the preceding tokens of the target."""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.data.tokenizer import Pair
from moe_jax.distributed.sharding import batch_shards, local_rows, make_mesh, place
from moe_jax.evaluation.forward import Batch, run_to_head
from moe_jax.evaluation.held_out_loss import Evaluation, exp_or_inf

# Pairs are padded to a power of two of tokens, at least this: few programs for pairs of all lengths.
_SHORTEST = 16


RowScore = Callable[[nnx.GraphDef, tuple[nnx.State, ...], Batch], jax.Array]


class RowScores:
    """Computes a score for each of many rows, which are padded and batched with others of similar length.

    Args:
      score: a function of this library, `score(graphdef, states, batch) -> [B, ...]`.
      graphdef: of the model.
      pairs: at least one, as `Tokenizer.pair` makes them for the model.
      batch_size: rows computed at once, rounded up to a multiple of the mesh's batch shards. Affects only the last bits
        of the result.
      mesh: the mesh that the model is on; None: the first device.
    """

    def __init__(
        self,
        score: RowScore,
        graphdef: nnx.GraphDef,
        pairs: Sequence[Pair],
        *,
        batch_size: int,
        mesh: Mesh | None = None,
    ):
        self._pairs = pairs
        self._mesh = make_mesh({}, jax.devices()[:1]) if mesh is None else mesh
        shards = batch_shards(self._mesh)
        self._batch_size = -(-min(batch_size, len(pairs)) // shards) * shards
        self._score = _compiled(score, graphdef, self._mesh)

    def __call__(self, *states: nnx.State) -> Float[np.ndarray, "n ..."]:
        """Returns the score of every pair, float64, given parameters as states."""
        rows = local_rows(self._mesh, self._batch_size)
        found: dict[int, np.ndarray] = {}
        with jax.set_mesh(self._mesh):
            for indices, batch in self._batches():
                placed = place({name: array[rows] for name, array in batch.items()}, rows, self._mesh, self._batch_size)
                scores = np.asarray(self._score(states, placed), np.float64)
                found |= {index: scores[row] for row, index in enumerate(indices)}
        return np.stack([found[index] for index in range(len(self._pairs))])

    def _batches(self) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
        """Yields batches of pairs of similar length, and the indices of the pairs in their first rows."""
        # Imported here because it imports Grain, which commands that evaluate nothing should not load.
        from moe_jax.data.pipeline import stack_pairs

        groups: dict[tuple[int, int | None], list[int]] = {}
        for index, pair in enumerate(self._pairs):
            input_len = None if pair.inputs is None else _padded(len(pair.inputs))
            groups.setdefault((_padded(len(pair.tokens)), input_len), []).append(index)
        for (seq_len, input_len), indices in groups.items():
            for start in range(0, len(indices), self._batch_size):
                chunk = indices[start : start + self._batch_size]
                pairs = [self._pairs[index] for index in chunk]
                yield chunk, stack_pairs(pairs, self._batch_size, input_len=input_len, seq_len=seq_len)


class PairEvaluator:
    """Scores the targets of pairs, teacher-forced: each token is predicted from the input and the tokens before it.

    Args:
      graphdef: of the model.
      pairs, batch_size, mesh: see `RowScores`.
    """

    def __init__(self, graphdef: nnx.GraphDef, pairs: Sequence[Pair], *, batch_size: int, mesh: Mesh | None = None):
        self._pairs = pairs
        self._losses = RowScores(_row_losses, graphdef, pairs, batch_size=batch_size, mesh=mesh)

    def __call__(self, *states: nnx.State) -> Evaluation:
        """Scores the pairs, given parameters as the states of `nnx.merge(graphdef, *states)`."""
        total = float(self.losses(*states).sum())
        tokens = int(sum(pair.weights.sum() for pair in self._pairs))
        cut = sum(pair.input_was_cut or pair.target_was_cut for pair in self._pairs)
        nll = total / tokens
        return Evaluation(tokens, nll, exp_or_inf(nll), total, len(self._pairs), cut)

    def losses(self, *states: nnx.State) -> Float[np.ndarray, " n"]:
        """Returns the negative log-likelihood of every pair's target, float64; parameters as in the call."""
        return self._losses(*states)


def _row_losses(graphdef: nnx.GraphDef, states: tuple[nnx.State, ...], batch: Batch) -> Float[Array, " B"]:
    model = nnx.merge(graphdef, *states)
    losses = model.token_losses(run_to_head(model, batch).x, batch["targets"])
    return jnp.sum(losses * batch["weights"], axis=1)


@functools.lru_cache(maxsize=16)
def _compiled(score: RowScore, graphdef: nnx.GraphDef, mesh: Mesh) -> Callable[..., jax.Array]:
    """Compiled once for all files that a model is evaluated on."""
    return jax.jit(functools.partial(score, graphdef), out_shardings=NamedSharding(mesh, P()))


def _padded(length: int) -> int:
    return max(_SHORTEST, 1 << (length - 1).bit_length())
