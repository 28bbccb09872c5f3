"""Transformers and llama.cpp, as `decoding.py` measures them: greedy texts of random prompts, prompts read, scores."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = 16


def _prompts(vocabulary: int, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(3, vocabulary, (rows, length))


class Transformers:
    """A checkpoint in Transformers, on all cores of the CPU.

    Attributes:
      vocabulary: number of tokens.
    """

    def __init__(self, folder: Path, dtype: str | None):
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype or "float32")
        )
        self.vocabulary = int(self._model.config.vocab_size)

    def tell(self, rows: int, tokens: int) -> list[float]:
        """Returns the seconds of a token of greedy texts; what reads the prompt counts as one of them."""
        prompts = self._torch.tensor(_prompts(self.vocabulary, rows, PROMPT))
        lengths: Any = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        start = time.perf_counter()
        self._model.generate(prompts, attention_mask=self._torch.ones_like(prompts), do_sample=False, **lengths)
        return [(time.perf_counter() - start) / tokens]

    def read(self, length: int) -> Any:
        with self._torch.no_grad():
            return self._model(self._torch.tensor(_prompts(self.vocabulary, 1, length)), logits_to_keep=1)

    def score(self, ids: np.ndarray) -> float:
        tokens = self._torch.tensor(ids)
        with self._torch.no_grad():
            return float(self._model(tokens, labels=tokens).loss)


class LlamaCpp:
    """A GGUF file in llama.cpp, on all cores, one row at a time.

    Args:
      file: the GGUF file.
      room: most tokens that it has to remember.

    Attributes:
      vocabulary: number of tokens.
    """

    def __init__(self, file: Path, room: int):
        import llama_cpp

        self._options: Any = {
            "n_ctx": room,
            "n_batch": room,
            "n_threads": os.cpu_count(),
            "n_threads_batch": os.cpu_count(),
            "verbose": False,
        }
        self._open, self._file = llama_cpp.Llama, str(file)
        self._model, self._scoring = self._open(self._file, **self._options), None
        self.vocabulary = self._model.n_vocab()

    def tell(self, rows: int, tokens: int) -> list[float]:
        """Returns the seconds of a token of a greedy text after a prompt that was read before."""
        assert rows == 1
        model = self._model
        self.read(PROMPT)
        start = time.perf_counter()
        for _ in range(tokens):
            model.eval([int(model.sample(temp=0.0, top_k=1))])
        return [(time.perf_counter() - start) / tokens]

    def read(self, length: int) -> None:
        self._model.reset()
        self._model.eval(_prompts(self.vocabulary, 1, length)[0].tolist())

    def score(self, ids: np.ndarray) -> float:
        """Opens the file a second time: a context either keeps all logits or does not."""
        if self._scoring is None:
            self._scoring = self._open(self._file, logits_all=True, **self._options)
        total = 0.0
        for window in ids:
            self._scoring.reset()
            self._scoring.eval(window.tolist())
            logits = np.asarray(self._scoring.scores[: len(window) - 1], np.float32)
            largest = logits.max(axis=1)
            sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
            total += float((sums - np.take_along_axis(logits, window[1:, None], axis=1)[:, 0]).sum())
        return total
