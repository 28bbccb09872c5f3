"""Texts that end before a stop string."""

from collections.abc import Sequence
from typing import Any

from moe_jax.generation import stream
from moe_jax.nn import Decoder
from moe_jax.train.tokenizer import Tokenizer


def generate_until(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    stop: Sequence[str],
    max_new_tokens: int,
    eos_ids: Sequence[int],
    **sampling: Any,
) -> list[str]:
    """Continues prompts until each has a stop string, a token that ends texts, or `max_new_tokens`.

    Args:
      model: a decoder whose layers are not stacked, or they are copied first.
      tokenizer: of the model.
      prompts: token ids.
      stop: texts that end before the first of them.
      max_new_tokens: at most this many are added.
      eos_ids: tokens that end texts.
      sampling: `temperature`, `top_k`, `top_p`, `key` of `generation.stream`.

    Returns:
      The texts, without what ended them and without special tokens.
    """
    stop = [one for one in stop if one]
    ids: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for tokens in stream(model, prompts, max_new_tokens=max_new_tokens, eos_ids=eos_ids, **sampling):
        for row, token in enumerate(tokens.tolist()):
            if not ended[row]:
                if token not in eos_ids:
                    ids[row].append(token)
                ended[row] = token in eos_ids or (bool(stop) and _has_any(tokenizer.decode(ids[row]), stop))
        if all(ended):
            break
    return [_before(tokenizer.decode(row), stop) for row in ids]


def _has_any(text: str, stop: Sequence[str]) -> bool:
    return any(one in text for one in stop)


def _before(text: str, stop: Sequence[str]) -> str:
    for one in stop:
        text = text.split(one)[0]
    return text
