"""How often every expert is chosen on a text."""

from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from moe_jax.nn import Decoder, load_per_layer
from moe_jax.nn.router_stats import StackedStats
from moe_jax.train.evaluation import check_seq_len, text_windows
from moe_jax.train.placement import batch_shards, local_rows, place


class ExpertLoad(NamedTuple):
    """Attributes:
    tokens: of the text.
    shares: by layer index, the share of the assignments that every routed expert got; float64[E], sums to 1.
    """

    tokens: int
    shares: dict[int, Float[np.ndarray, " E"]]


def measure_load(model: Decoder, ids: np.ndarray, *, seq_len: int, batch_size: int, mesh: Mesh) -> ExpertLoad:
    """Runs the model on a text, cut into windows as `Evaluator` cuts it, and counts where its tokens go.

    Args:
      model: with MoE layers, on the mesh.
      ids: Int32[n], the text.
      seq_len: tokens of a window.
      batch_size: windows computed at once; rounded up to what the mesh divides. No influence on the result.
      mesh: where the model lies.

    Raises:
      InputError: if `seq_len` is too small.
    """
    check_seq_len(seq_len)
    graphdef, state = nnx.split(model)
    shards = batch_shards(mesh)
    size = -(-min(batch_size, -(-len(ids) // seq_len)) // shards) * shards
    rows = local_rows(mesh, size)

    def router(state: nnx.State, batch: dict[str, jax.Array]) -> StackedStats:
        return nnx.merge(graphdef, state)(batch["tokens"], segment_ids=batch["segment_ids"]).router

    compiled = jax.jit(router, out_shardings=NamedSharding(mesh, P()))
    assigned: dict[int, np.ndarray] = {}
    with jax.set_mesh(mesh):
        for batch in text_windows(ids, seq_len=min(seq_len, len(ids)), batch_size=size):
            tokens = int(batch["segment_ids"].sum())
            stats = compiled(state, place({key: array[rows] for key, array in batch.items()}, rows, mesh, size))
            for layer, share in load_per_layer(model.config, stats).items():
                assigned[layer] = assigned.get(layer, 0) + tokens * np.asarray(share, np.float64)
    return ExpertLoad(len(ids), {layer: count / len(ids) for layer, count in assigned.items()})
