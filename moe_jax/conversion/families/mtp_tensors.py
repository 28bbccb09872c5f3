"""The tensors of layers that predict tokens after the next, as checkpoints of DeepSeek-V3 and GLM-4.5 have them.

They follow the last layer as if they were layers themselves: `model.layers.61` of a model with the layers 0 to 60. With
them stand copies of the embedding and of the head, which the model and its further layers share.
"""

from dataclasses import replace
from typing import TypeGuard

from moe_jax.conversion.families.family import Family
from moe_jax.conversion.table import Copied, Entry, Row, Table, linear, norm
from moe_jax.models import ModelConfig

_PLACE, _LEAF = "model.layers.{i}.", "layers/{i}/"
_EMBEDDING = Row("model.embed_tokens.weight", "embed/embedding")


def further_rows(family: Family, config: ModelConfig, *, reading: bool) -> Table:
    """Returns the rows of a model's further layers in the format of a family; none if it has none, or no form.

    Copies of the embedding and the head are written; where a checkpoint is read, they may be absent, and must be equal.
    """
    if family.further_form is None:
        return ()
    rows: list[Entry] = []
    for number in range(config.further_layers):
        place, leaf = f"model.layers.{config.num_layers + number}", f"further/{number}"
        rows += [
            *norm(f"{place}.enorm", f"{leaf}/embedding_norm"),
            *norm(f"{place}.hnorm", f"{leaf}/hidden_norm"),
            *linear(f"{place}.eh_proj", f"{leaf}/joint"),
            *norm(f"{place}.shared_head.norm", f"{leaf}/final_norm"),
            *(_of_further(row, place, f"{leaf}/block") for row in family.table if _is_of_layers(row)),
        ]
        head = _EMBEDDING if config.tie_embeddings else Row("lm_head.weight", "lm_head/kernel", transpose=True)
        for name, original in (("embed_tokens", _EMBEDDING), ("shared_head.head", head)):
            tensor = f"{place}.{name}.weight"
            copy = Copied(tensor, equals=original.tensor) if reading else replace(original, tensor=tensor)
            rows.append(copy)
    return tuple(rows)


def _is_of_layers(entry: Entry) -> TypeGuard[Row]:
    return isinstance(entry, Row) and entry.tensor.startswith(_PLACE)


def _of_further(row: Row, place: str, leaf: str) -> Row:
    """Returns a row of a layer as that of a further layer."""
    leaves = (row.leaves,) if isinstance(row.leaves, str) else row.leaves

    def moved(path: str | None) -> str | None:
        return None if path is None else path.replace(_LEAF, f"{leaf}/", 1)

    own = tuple(str(moved(one)) for one in leaves)
    return replace(
        row,
        tensor=row.tensor.replace(_PLACE, f"{place}.", 1),
        leaves=own[0] if isinstance(row.leaves, str) else own,
        beside=moved(row.beside),
        without=moved(row.without),
    )
