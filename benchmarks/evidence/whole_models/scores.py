"""What a model says of texts that nothing was calibrated with, beside what it said before it was compressed."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from evidence.studies.jobs import Place
from evidence.studies.probes import agreement, answers
from evidence.studies.texts import read_text
from evidence.whole_models.small_models import TEXTS
from evidence.whole_models.task import Task

PROMPT, NEW_TOKENS = 32, 32
_ROWS = 4
_AFTER_THE_END = -1


def scores(task: Task, path: Path, *, probes: bool = True, asked: bool = False) -> dict[str, Any]:
    """Scores a model in any format, in float32.

    Args:
      task: the model that it was made of.
      path: of the model.
      probes: whether it goes on with prompts too.
      asked: whether it answers the questions of the task, too.

    Returns:
      losses: of every text, nats per token. window_losses: of every window.
      kl: of every text, KL(p || q) in nats per token, p being what the whole model predicts. window_kl: of every
      window.
      agreement, same_until: of greedy tokens, answers: of questions; see `probes.probed`.
    """
    model = moe_jax.load(path, dtype="float32")
    windows = _windows(task)
    flat, before = np.concatenate(list(windows.values())), _of_whole(task)
    parts = [
        _figures(model.decoder, jnp.asarray(flat[rows]), jnp.asarray(before[rows])) for rows in _batches(len(flat))
    ]
    nll, kl = np.concatenate(parts, axis=1).astype(np.float64)
    if not np.isfinite(nll).all():
        raise FloatingPointError(f"{path} has losses that are not finite")
    found: dict[str, Any] = {"losses": {}, "window_losses": {}, "kl": {}, "window_kl": {}}
    for number, name in enumerate(windows):
        own = slice(number * task.sizes.windows, (number + 1) * task.sizes.windows)
        found["losses"][name] = float(nll[own].mean())
        found["window_losses"][name] = np.round(nll[own], 5).tolist()
        found["kl"][name] = float(kl[own].mean())
        found["window_kl"][name] = np.round(kl[own], 6).tolist()
    if probes:
        found |= agreement(_continued(task, model), _continued_by_whole(task))
        del found["same_positions"]
    if asked and task.questions:
        place = Place(task.data, task.work)
        found["answers"] = answers(place, model.decoder, model.tokenizer, task.questions)
    jax.clear_caches()
    return found


def _windows(task: Task) -> dict[str, np.ndarray]:
    """Int32[windows, length] of every text, as far from each other as can be."""
    tokenizer, sizes = moe_jax.load(task.model).tokenizer, task.sizes
    found = {}
    for name in TEXTS:
        ids = np.asarray(tokenizer.encode(read_text(name, task.data).test))
        starts = np.linspace(0, len(ids) - sizes.length, sizes.windows).astype(int)
        found[name] = np.stack([ids[start : start + sizes.length] for start in starts]).astype(np.int32)
    return found


def _batches(count: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS) for start in range(0, count, _ROWS))


@nnx.jit
def _log_probs(decoder: nnx.Module, ids: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(decoder(ids).logits[:, :-1].astype(jnp.float32))


@nnx.jit
def _figures(decoder: nnx.Module, ids: jax.Array, before: jax.Array) -> jax.Array:
    """Float32[2, rows]: means over tokens of the loss, and of the divergence from what was predicted before."""
    after = jax.nn.log_softmax(decoder(ids).logits[:, :-1].astype(jnp.float32))
    nll = -jnp.take_along_axis(after, ids[:, 1:, None], 2)[..., 0].mean(1)
    p = before.astype(jnp.float32)
    return jnp.stack([nll, jnp.sum(jnp.exp(p) * (p - after), axis=2).mean(1)])


def _of_whole(task: Task) -> np.ndarray:
    """Log-probabilities of the whole model, Float16[windows, length - 1, V], kept for the next entry.

    Half of the digits are enough: the divergences of interest are of 1e-3 nats and more.
    """
    file = task.work / "whole.npy"
    if not file.exists():
        decoder, windows = moe_jax.load(task.model, dtype="float32").decoder, np.concatenate([*_windows(task).values()])
        parts = [np.asarray(_log_probs(decoder, jnp.asarray(windows[rows]))) for rows in _batches(len(windows))]
        partial = file.with_suffix(".partial.npy")
        np.save(partial, np.concatenate([part.astype(np.float16) for part in parts]))
        partial.replace(file)
    return np.load(file, mmap_mode="r")


def _continued(task: Task, model: moe_jax.Model) -> np.ndarray:
    """Int[prompts, new tokens]: how a model goes on with stretches of windows, their beginnings first."""
    windows = np.concatenate([*_windows(task).values()])
    chosen = np.linspace(0, len(windows) - 1, min(task.sizes.prompts, len(windows))).astype(int)
    stretches = (windows[number][start : start + PROMPT] for start in range(0, task.sizes.length, PROMPT)
                 for number in chosen)  # fmt: skip
    prompts = [stretch.tolist() for stretch in islice(stretches, task.sizes.prompts)]
    found = np.full((len(prompts), NEW_TOKENS), _AFTER_THE_END)
    for row, one in zip(found, moe_jax.generate(model, prompts, max_new_tokens=NEW_TOKENS), strict=True):
        row[: len(one.ids)] = one.ids
    return found


def _continued_by_whole(task: Task) -> np.ndarray:
    file = task.work / "continued.npy"
    if not file.exists():
        np.save(file, _continued(task, moe_jax.load(task.model, dtype="float32")))
    return np.load(file)
