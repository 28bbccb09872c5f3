"""Time of the gradient of a language model where few tokens are scored, as in training on answers.

    python benchmarks/scored_answers.py MODEL [--tokens 344] [--rounds 5] [--out benchmarks/results]

MODEL is a dense language model, such as SmolLM2-135M. Of the tokens of a row, the same share is scored in every row.
The program that leaves out the logits of other tokens, and the one that computes all, take turns; a ratio is the median
of those of the rounds. Loss and gradients are compared. OUT receives `scored_answers.json`.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from evidence.layouts import SCORED_ANSWERS
from evidence.results import RESULTS, Figures
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.functional import head_chunks

SHARES = (0.1, 0.25, 0.5, 1.0)
ROWS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=344, help="of the batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    ask_for_huge_pages()
    figures = Figures("scored_answers", options.out, writes=True)
    model = moe_jax.load(options.model, dtype="float32")
    graphdef, params = nnx.split(model.decoder)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (ROWS, options.tokens // ROWS + 1)).astype(np.int32)
    least = head_chunks.LEAST_PRODUCT
    programs = {}
    for name, product in (("scored", least), ("all", 1 << 62)):
        head_chunks.LEAST_PRODUCT = product
        batch = _batch(tokens, 1.0)
        step = jax.jit(jax.value_and_grad(lambda params, batch: nnx.merge(graphdef, params).loss(batch)))
        programs[name] = step.lower(params, batch).compile()
    rows = []
    for share in SHARES:
        batch = _batch(tokens, share)
        found = {name: program(params, batch) for name, program in programs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(options.rounds):
            for name in (*programs,) if number % 2 else (*reversed(programs),):
                start = time.perf_counter()
                jax.block_until_ready(programs[name](params, batch))
                seconds[name].append(time.perf_counter() - start)
        ratios = [one / other for one, other in zip(seconds["scored"], seconds["all"], strict=True)]
        medians = [statistics.median(seconds[name]) for name in programs]
        rows.append([100 * share, *medians, statistics.median(ratios), min(ratios), max(ratios), _difference(found)])
    figures.put_rows(SCORED_ANSWERS.name, rows)
    print(SCORED_ANSWERS.text(figures))


def _batch(tokens: np.ndarray, share: float) -> dict[str, Any]:
    weights = np.zeros(tokens[:, 1:].shape, np.float32)
    weights[:, : round(share * weights.shape[1])] = 1
    return {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "weights": jnp.asarray(weights),
    }


def _difference(found: dict[str, Any]) -> float:
    """The largest difference of a gradient, relative to the largest entry of its leaf."""
    pairs = zip(*(jax.tree.leaves(gradients) for _, gradients in found.values()), strict=True)
    return max(float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other))) for one, other in pairs)


if __name__ == "__main__":
    main()
