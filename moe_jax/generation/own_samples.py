"""Texts that a model writes itself, to calibrate on: what it is given in use is most like them, and no data is needed.

Tokens are drawn from the model's own distribution, at temperature 1, as in Self-calibration for Language Model
Quantization and Pruning (arXiv 2410.17170, section 3), here without its schedule of temperatures. A text begins with
the prompt that it is given, and ends with a token that ends texts, or at its full length.
"""

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int

from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.files.storage_path import as_path
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import stream
from moe_jax.nn import Decoder

AT_ONCE = 8
"""Texts that are sampled together. It is part of the result: programs for other numbers of rows round otherwise."""


def sample_texts(
    load: Callable[[], Decoder],
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    seed: int = 0,
    end_ids: Sequence[int] = (),
    keep: Path | None = None,
    progress: Progress = no_progress,
) -> list[Int[np.ndarray, " n"]]:
    """Continues prompts at temperature 1; the same seed gives the same texts.

    Args:
      load: returns the decoder; called if there is anything left to sample.
      prompts: token ids, each of 1 to `length - 1`.
      length: most tokens of a text, with its prompt.
      seed: of the sampling.
      end_ids: a text ends with the first of these.
      keep: a folder of this call alone, in which finished texts are kept, and found again by the same call; None: they
        are not kept.
      progress: called after every few texts.

    Returns:
      Int32[n] for each prompt: the prompt, what was added, and the token that ended it.

    Raises:
      InputError: for tokens outside the vocabulary, logits that are not finite, or files in `keep` that are damaged.
    """
    keys = jax.random.split(jax.random.key(seed), len(prompts))
    size, texts, model = min(AT_ONCE, len(prompts)), list[np.ndarray](), None
    for begin in range(0, len(prompts), size):
        progress("sampling", begin, len(prompts))
        file = None if keep is None else keep / f"{begin}.npz"
        found = None if file is None or not file.is_file() else _read(file)
        if found is None:
            model = load() if model is None else model
            # The last ones are filled up with others, which are not used, for one program to serve all.
            chosen = [number % len(prompts) for number in range(begin, begin + size)]
            found = _sample([prompts[i] for i in chosen], model, keys[np.array(chosen)], length, end_ids)
            if file is not None:
                _write(file, found)
        texts += found[: len(prompts) - begin]
    progress("sampling", len(prompts), len(prompts))
    return texts


def _sample(
    prompts: Sequence[Sequence[int]], model: Decoder, keys: jax.Array, length: int, end_ids: Sequence[int]
) -> list[np.ndarray]:
    wanted = GenerateSpec(max_new_tokens=length - min(map(len, prompts)), temperature=1.0)
    steps = np.stack(list(stream(model, prompts, wanted, key=keys, eos_ids=end_ids)))
    texts = []
    for prompt, added in zip(prompts, steps.T, strict=True):
        given = added[added >= 0]
        texts.append(np.concatenate([np.asarray(prompt), given]).astype(np.int32)[:length])
    return texts


def _write(file: Path, texts: Sequence[np.ndarray]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with as_path(file).replacing() as content:
        np.savez(content, allow_pickle=False, **{str(number): text for number, text in enumerate(texts)})


def _read(file: Path) -> list[np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return [arrays[str(number)] for number in range(len(arrays.files))]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{file.parent} is damaged ({file.name}: {error}); remove it") from None
