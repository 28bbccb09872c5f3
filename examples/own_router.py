"""A router of one's own, through everything: logits are cosines of tokens and experts.

python examples/own_router.py FOLDER
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax


class Cosine(nnx.Module):
    def __init__(self, d_model, num_experts, *, rngs, dtype):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (d_model, num_experts), dtype))

    def __call__(self, x):
        kernel = self.kernel[...].astype(jnp.float32)
        lengths = jnp.linalg.norm(x, axis=1, keepdims=True) * jnp.linalg.norm(kernel, axis=0, keepdims=True)
        return 10 * (x.astype(jnp.float32) @ kernel) / lengths


moe_jax.nn.register_router("own_router:Cosine", Cosine)


def main(folder):
    moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, router="own_router:Cosine")
    batch = np.random.default_rng(0).integers(0, 64, (4, 17))
    trained = moe_jax.train({"train": {"steps": 3}}, moe, [batch] * 3)
    moe_jax.save(trained, f"{folder}/moe")
    return moe, trained, moe_jax.load(f"{folder}/moe")


if __name__ == "__main__":
    print(*main(sys.argv[1]), sep="\n")
