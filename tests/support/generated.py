"""Tokens that a decoder adds to prompts, with the options of `generate` as keywords."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moe_jax.generation import texts
from moe_jax.generation.spec import GenerateSpec
from moe_jax.nn import Decoder


def stream(
    model: Decoder, prompts: Sequence[Sequence[int]], *, key: Any = None, eos_ids: Sequence[int] = (), **options: Any
) -> Iterator[np.ndarray]:
    """Yields the next token of every row; -1 where it has ended."""
    return texts.stream(model, prompts, GenerateSpec(**options), key=key, eos_ids=eos_ids)


def generate(
    model: Decoder, prompts: Sequence[Sequence[int]], *, eos_ids: Sequence[int] = (), **options: Any
) -> list[list[int]]:
    """Returns the new tokens of every prompt, without those that ended it."""
    results: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, eos_ids=eos_ids, **options):
        for result, token in zip(results, tokens.tolist(), strict=True):
            if token >= 0 and token not in eos_ids:
                result.append(token)
    return results
