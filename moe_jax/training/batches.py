"""The batches of a recipe's data, in the order of the run, on the devices of a mesh."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.data.packing import Batch
from moe_jax.data.pipeline import open_data
from moe_jax.data.tokenizer import find_tokenizer
from moe_jax.distributed.sharding import check_batch_divides, local_rows, make_mesh, merge_positions, place
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.models import ModelConfig
from moe_jax.training.recipe import Recipe


class Batches(Iterator[dict[str, jax.Array]]):
    """The batches of the data as global arrays on a mesh, up to the end of the data if `ends`, else for ever.

    `data` yields local rows of endless batches, padding after the last record. A `tower` looks at their pictures, and
    the batches then have features in place of pixels. With several processes, only all of them
    together know whether any has data left. They find out one batch ahead, by a program of its own that the devices run
    before the step, so that no process waits for the answer before a step. Every process makes every call.
    """

    def __init__(
        self,
        data: grain.DatasetIterator,
        mesh: Mesh,
        batch_size: int,
        *,
        ends: bool,
        tower: FrozenTower | None = None,
    ):
        self._data, self._batch_size, self._ends, self._tower = data, batch_size, ends, tower
        self._place = partial(place, rows=local_rows(mesh, batch_size), mesh=mesh, batch_size=batch_size)
        self._asks = ends and jax.process_count() > 1
        # The batch after the last one returned, with the answer, and the position before it; None: not read yet.
        self._ahead: tuple[dict[str, jax.Array], jax.Array | bool] | None = None
        self._before: dict[str, Any] | None = None
        self._any = jax.jit(lambda ids: jnp.any(ids > 0), out_shardings=NamedSharding(mesh, P()))

    def __next__(self) -> dict[str, jax.Array]:
        batch, holds_some = self._ahead or self._read()
        self._ahead = self._before = None
        if self._asks:
            self._look_ahead()
        if not holds_some:
            raise StopIteration
        return batch

    def is_at_end(self) -> bool:
        """Whether no data is left after the batches returned so far: if need be, reads the next one to find out."""
        if not self._ends:
            return False
        if self._ahead is None:
            self._look_ahead()
        assert self._ahead is not None
        return not self._ahead[1]

    def position(self) -> dict[str, Any]:
        """Returns the position in the data after the batches returned so far, for all rows; JSON-able."""
        return merge_positions(self._before or self._data.get_state(), self._batch_size)

    def seek(self, position: dict[str, Any], *, skip: int = 0) -> None:
        """Goes on at a position, after as many batches as are to be skipped.

        Raises `InputError` if the position belongs to other data.
        """
        self._ahead = self._before = None
        self._data.set_state(position)
        for _ in range(skip):
            self._next()

    def close(self) -> None:
        """Ends what prepares batches in the background."""
        self._data.close()

    def _look_ahead(self) -> None:
        self._before = self._data.get_state()
        self._ahead = self._read()

    def _read(self) -> tuple[dict[str, jax.Array], jax.Array | bool]:
        """Returns the next batch, and whether it holds anything."""
        read = self._next()
        if self._asks:
            batch = self._placed(read)
            return batch, self._any(batch["segment_ids"])
        holds_some = not self._ends or bool(read["segment_ids"].any())
        return self._placed(read) if holds_some else {}, holds_some

    def _next(self) -> Batch:
        try:
            return next(self._data)
        except InputError as error:
            # Grain adds a note on its own frames, which would be behind the message.
            error.__notes__ = [note for note in getattr(error, "__notes__", ()) if "Grain has removed" not in note]
            raise

    def _placed(self, batch: Batch) -> dict[str, jax.Array]:
        return self._place(batch if self._tower is None else self._tower.fill(batch))


def open_batches(
    recipe: Recipe,
    config: ModelConfig,
    mesh: Mesh | None,
    *,
    tokenizer_files: Sequence[Path] = (),
    tower: FrozenTower | None = None,
    note: Callable[[str], object] = lambda line: None,
) -> Batches:
    """Opens the data of a recipe: an iterator over the batches that `moe-jax train` trains on, in its order.

    A batch of B = `train.batch_size` rows of T = `data.seq_len` tokens holds tokens, targets, segment_ids and positions
    Int32[B, T], and weights Float32[B, T]; for a model with an encoder also inputs Int32[B, S], inputs_valid
    Bool[B, S] and cut Int32[B, 2]; where rows of the data have pictures also slots Int32[B, T], and pixels
    UInt8[B, M, H, W, 3] or features [B, M, n, w]. Rows are divided over the mesh. Without `data.epochs`, there is no
    end.

    Args:
      recipe: its `data`, `seed`, and `train.batch_size` count.
      config: of the model.
      mesh: where the batches go, such as `Model.mesh`; None: the first device.
      tokenizer_files: of the model, among them tokenizer.json; `data.tokenizer` of the recipe comes before them.
      tower: of the model, where it is not trained: batches have its features of the pictures, and no pixels.
      note: called with remarks on the data, a line each.

    Raises:
      FileNotFoundError: a path or pattern that matches no file.
      InputError: no sources, no tokenizer, a malformed file, less text than one sequence, texts for a model with an
        encoder, or rows that the mesh does not divide.
    """
    mesh = make_mesh({}, jax.devices()[:1]) if mesh is None else mesh
    size, named = recipe.train.batch_size, recipe.data.tokenizer
    check_batch_divides(mesh.shape, size, recipe.train.accumulation)
    tokenizer = find_tokenizer(tokenizer_files, "the model") if named is None else as_path(named)
    rows = local_rows(mesh, size)
    how: dict[str, Any] = {"seed": recipe.seed, "batch_size": size, "rows": rows, "note": note, "known": tower}
    data = open_data(recipe.data, config, tokenizer, **how)
    return Batches(data, mesh, size, ends=recipe.data.epochs is not None, tower=tower)
