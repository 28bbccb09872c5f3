"""A gate of one's own, through everything: weights are the squares of softmax probabilities, made to sum to 1.

python examples/own_gate.py FOLDER
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax


def weights(logits, scores):
    return jnp.square(scores) / jnp.sum(jnp.square(scores), axis=-1, keepdims=True)


squares = moe_jax.functional.Gate(jax.nn.softmax, weights, scores_sum_to_one=True, weights_sum_to_one=True)
moe_jax.functional.register_gate("own_gate:squares", squares)


def main(folder):
    moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, gate="own_gate:squares")
    batch = np.random.default_rng(0).integers(0, 64, (4, 17))
    trained = moe_jax.train({"train": {"steps": 3}}, moe, [batch] * 3)
    moe_jax.save(trained, f"{folder}/moe")
    return moe, trained, moe_jax.load(f"{folder}/moe")


if __name__ == "__main__":
    print(*main(sys.argv[1]), sep="\n")
