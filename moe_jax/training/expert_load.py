"""Statistics of routers on a text: how often each expert is chosen, and similarities for methods that merge experts."""

from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from moe_jax.distributed.sharding import batch_shards, local_rows, place
from moe_jax.evaluation.held_out_loss import check_seq_len, text_windows
from moe_jax.nn import Decoder
from moe_jax.nn.moe import RouterStatistics, RouterSums, StackedStats, stats_per_layer


class ExpertLoad(NamedTuple):
    """How often each expert is chosen.

    Attributes:
      tokens: number of tokens in the text.
      shares: by layer index, the share of the assignments that each routed expert got; float64[E], sums to 1.
    """

    tokens: int
    shares: dict[int, Float[np.ndarray, " E"]]


def measure_load(model: Decoder, ids: np.ndarray, *, seq_len: int, batch_size: int, mesh: Mesh) -> ExpertLoad:
    """Runs the model on a text, cut into windows as in `Evaluator`, and counts how often its tokens choose each expert.

    Args:
      model: with MoE layers, on the mesh.
      ids: Int32[n], the text.
      seq_len: tokens in a window.
      batch_size: windows computed at once, rounded up to a multiple of the mesh's batch shards. Does not affect the
        result.
      mesh: the mesh that the model is on.

    Raises:
      InputError: if `seq_len` is too small.
    """
    statistics = measure_router_statistics(model, ids, seq_len=seq_len, batch_size=batch_size, mesh=mesh)
    return ExpertLoad(len(ids), {layer: found.usage for layer, found in statistics.items()})


def measure_router_statistics(
    model: Decoder, ids: np.ndarray, *, seq_len: int, batch_size: int, mesh: Mesh
) -> dict[int, RouterStatistics]:
    """Returns router statistics on a text by layer index: shares, mean probabilities and similarities of logits.

    Args:
      model, ids, seq_len, batch_size, mesh: see `measure_load`.

    Raises:
      InputError: if `seq_len` is too small.
    """
    check_seq_len(seq_len)
    model.config.check_no_encoder("counting how experts are used on a text")
    graphdef, state = nnx.split(model)
    shards = batch_shards(mesh)
    size = -(-min(batch_size, -(-len(ids) // seq_len)) // shards) * shards
    rows = local_rows(mesh, size)

    def router(state: nnx.State, batch: dict[str, jax.Array]) -> StackedStats:
        return nnx.merge(graphdef, state)(batch["tokens"], segment_ids=batch["segment_ids"]).router

    compiled = jax.jit(router, out_shardings=NamedSharding(mesh, P()))
    sums: dict[int, RouterSums] = {}
    with jax.set_mesh(mesh):
        for batch in text_windows(ids, seq_len=min(seq_len, len(ids)), batch_size=size):
            tokens = int(batch["segment_ids"].sum())
            stats = compiled(state, place({key: array[rows] for key, array in batch.items()}, rows, mesh, size))
            for layer, found in stats_per_layer(model.config, stats).items():
                sums.setdefault(layer, RouterSums()).add(found, tokens)
    return {layer: total.statistics() for layer, total in sums.items()}
