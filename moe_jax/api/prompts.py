"""The texts that routers are made from, as tokens."""

import os
from collections.abc import Sequence

import numpy as np

from moe_jax.core.errors import InputError, shown
from moe_jax.data.tokens.tokenizer import Tokenizer, find_tokenizer
from moe_jax.evaluation.held_out_loss import read_text
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.model_source import ModelSource
from moe_jax.upcycling.prompted_router import Prompt


def read_prompts(source: ModelSource, texts: Sequence[str]) -> list[Prompt]:
    """The tokens of texts, with BOS before them where documents of the model begin with one.

    Args:
      source: the model that will read them.
      texts: each a text, or `@` and the path of a file with it.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if the source has no tokenizer, a file is not UTF-8, or a text is the path of a file.
    """
    if not texts:
        return []
    tokenizer = Tokenizer(find_tokenizer(source.tokenizer_files, source.path), source.config)
    begin = tokenizer.prompt("")
    prompts = []
    for text in texts:
        if text.startswith("@"):
            ids = read_text(as_path(text[1:]), tokenizer)
        elif os.path.isfile(text):
            raise InputError(f"--router-from {shown(text)} is a file; write @{text} for the text in it")
        else:
            ids = tokenizer.encode(text)
        prompts.append(Prompt(np.concatenate([begin, np.asarray(ids, np.int32)]).astype(np.int32), len(begin)))
    return prompts
