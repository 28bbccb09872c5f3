"""A dense model becomes a Mixture-of-Experts in memory, is trained, saved, and exported for Transformers.

    python examples/upcycle.py [MODEL]

MODEL is a model directory or a Hugging Face directory of a dense model; by default a tiny one of random weights.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import moe_jax


def main(path: str | None = None) -> tuple[float, float]:
    """Returns the perplexity before and after training."""
    dense = moe_jax.load(path) if path else moe_jax.tiny_model()
    print(dense)

    options = {"experts": 4, "top_k": 2, "every": 1, "delta": "low-rank:4"}
    planned = moe_jax.plan(dense, upcycle=options)
    print(f"as an MoE it would have {planned.total_params:,} parameters, {planned.active_params:,} active per token")

    moe = moe_jax.upcycle(dense, **options)
    print(f"logits differ by {moe.lineage[-1]['measured']['step0_max_abs_difference']:.2g} from the dense model's")

    # Sequences of a little language in which every token follows from the one before.
    random = np.random.default_rng(0)
    follows = random.permutation(dense.config.vocab_size)
    rows = [random.integers(0, dense.config.vocab_size, 8)]
    for _ in range(16):
        rows.append(follows[rows[-1]])
    batch = np.stack(rows, axis=1)

    before = moe_jax.evaluate(moe, batch.reshape(-1), seq_len=17).perplexity
    recipe = {"optimizer": {"learning_rate": 1e-2}, "train": {"steps": 30}}
    trained = moe_jax.train(recipe, moe, [batch] * 30)
    after = moe_jax.evaluate(trained, batch.reshape(-1), seq_len=17).perplexity
    print(f"perplexity {before:.1f} -> {after:.1f}")

    with tempfile.TemporaryDirectory() as folder:
        moe_jax.save(trained, Path(folder) / "model")
        checkpoint = moe_jax.export(trained, Path(folder) / "checkpoint")
        print(f"exported {', '.join(sorted(file.name for file in checkpoint.iterdir()))}")
    return before, after


if __name__ == "__main__":
    main(*sys.argv[1:2])
