"""Rows that are drawn of a file of data, without the rest of it being read."""

from pathlib import Path

import numpy as np

from moe_jax.core.bad_documents import naming
from moe_jax.core.errors import InputError
from moe_jax.data.pictures.picture_loading import picture_loader
from moe_jax.data.sections import DataSection, SourceSection, input_length
from moe_jax.data.sources import named_files, open_files, template_loader
from moe_jax.data.tokenizer import Pair, Tokenizer
from moe_jax.evaluation.held_out import rows_of
from moe_jax.files.storage_path import as_path, raise_no_file
from moe_jax.models import ModelConfig


def draw_rows(
    source: SourceSection,
    data: DataSection,
    config: ModelConfig,
    tokenizer_path: Path,
    *,
    most: int,
    at_least: int = 1,
    seed: int = 0,
) -> list[Pair]:
    """Draws rows of a file, none of them twice, and returns them in the order of the file.

    Rows are those of `held_out.read_held_out`. Of a text that is several windows all are taken, but the last ones
    where there are more than wanted.

    Args:
      source: a file of JSON or a table.
      data: lengths of rows, special tokens, chat template and folder of pictures.
      config: of the model, which has no encoder.
      tokenizer_path: a tokenizer.json.
      most: number of rows that are wanted.
      at_least: fewer rows are an error.
      seed: of the draw.

    Raises:
      FileNotFoundError: if there is no such file.
      BadDocument: for a row that cannot be read, or has a picture that cannot be, with its place.
      InputError: for a file that cannot be read or holds too few rows.
    """
    if not any(character in source.path for character in "*?[") and not as_path(source.path).is_file():
        raise_no_file("text", source.path)
    template = template_loader(data, tokenizer_path)
    tokenizer = Tokenizer(tokenizer_path, config, bos=data.bos, eos=data.eos)
    named = named_files(source.path)
    files = open_files(
        source, named, data, config, tokenizer_path, template=template, piece=1 + max(file.size for _, file in named)
    )
    load = None if config.vision is None else picture_loader(data, config)
    found: dict[int, list[Pair]] = {}
    count = 0
    for index in np.random.Generator(np.random.Philox(seed)).permutation(len(files)).tolist():
        if count >= most:
            break
        with naming(files.where(index)):
            rows = [
                row
                for example in files[index]
                for row in rows_of(example, tokenizer, load, input_len=input_length(data), seq_len=data.seq_len)
            ][: most - count]
        found[index] = rows
        count += len(rows)
    if count < at_least:
        raise InputError(
            f"{source.path} holds {count} rows of text, and {at_least} are asked for; ask for at most so many, or give "
            "a longer file"
        )
    return [row for index in sorted(found) for row in found[index]]
