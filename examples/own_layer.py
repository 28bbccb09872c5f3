"""A layer of one's own in a pattern of others, through everything: a learned factor for what every second one adds.

python examples/own_layer.py FOLDER
"""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax


class Scaled(moe_jax.nn.Block):
    def __init__(self, config, model, *, rngs, dtype):
        super().__init__(config, model, rngs=rngs, dtype=dtype)
        self.alpha = nnx.Param(jnp.ones((), dtype))

    def __call__(self, x, context, cache, key=None):
        y, cache, stats = super().__call__(x, context, cache, key)
        return x + self.alpha[...].astype(x.dtype) * (y - x), cache, stats


moe_jax.nn.register_layer("own_layer:Scaled", Scaled)


def dense_model():
    config = moe_jax.tiny_model().config
    pattern = config.layers[0], dataclasses.replace(config.layers[0], module="own_layer:Scaled")
    return moe_jax.Model(moe_jax.Decoder(dataclasses.replace(config, layers=pattern * 2), rngs=nnx.Rngs(0)))


def main(folder):
    moe = moe_jax.upcycle(dense_model(), experts=4)
    batch = np.random.default_rng(0).integers(0, 64, (4, 17))
    trained = moe_jax.train({"train": {"steps": 3}}, moe, [batch] * 3)
    moe_jax.save(trained, f"{folder}/moe")
    return moe, trained, moe_jax.load(f"{folder}/moe")


if __name__ == "__main__":
    print(*main(sys.argv[1]), sep="\n")
