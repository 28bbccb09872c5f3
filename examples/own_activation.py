"""An activation of one's own, through everything: the square of ReLU, in a dense model and its experts.

python examples/own_activation.py FOLDER
"""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax


def squared_relu(x):
    return jnp.square(jnp.maximum(x, 0))


moe_jax.functional.register_activation("own_activation:squared_relu", squared_relu)


def dense_model():
    config, ffn = moe_jax.tiny_model().config, moe_jax.FFNConfig(dim=32, activation="own_activation:squared_relu")
    config = dataclasses.replace(config, layers=tuple(dataclasses.replace(one, mlp=ffn) for one in config.layers))
    return moe_jax.Model(moe_jax.Decoder(config, rngs=nnx.Rngs(0)))


def main(folder):
    moe = moe_jax.upcycle(dense_model(), experts=4)
    batch = np.random.default_rng(0).integers(0, 64, (4, 17))
    trained = moe_jax.train({"train": {"steps": 3}}, moe, [batch] * 3)
    moe_jax.save(trained, f"{folder}/moe")
    return moe, trained, moe_jax.load(f"{folder}/moe")


if __name__ == "__main__":
    print(*main(sys.argv[1]), sep="\n")
