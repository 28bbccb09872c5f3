"""A form of experts of one's own, through everything: the shared base, and per expert a factor for every output.

python examples/own_form.py FOLDER
"""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import moe_jax


@moe_jax.experts.register("own_form:Scaled")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(moe_jax.experts.KernelForm):
    adds_to_base = False

    def fresh(self, rngs, matrix, stack, dtype):
        return {"factors": jnp.ones((*stack, matrix.shape[1]), dtype)}

    @classmethod
    def stored_specs(cls, split):
        return {"factors": P("expert", None)}

    def specs(self, split):
        return {"factors": P("expert", None if split == "in" else "tensor")}

    def tile(self, base, arrays, window):
        assert base is not None
        return base * window.columns(arrays["factors"][None, :].astype(jnp.float32))


def main(folder):
    moe = moe_jax.upcycle(moe_jax.tiny_model(), experts=4, delta=moe_jax.BankConfig(Scaled()))
    batch = np.random.default_rng(0).integers(0, 64, (4, 17))
    trained = moe_jax.train({"train": {"steps": 3}}, moe, [batch] * 3)
    moe_jax.save(trained, f"{folder}/moe")
    return moe, trained, moe_jax.load(f"{folder}/moe")


if __name__ == "__main__":
    print(*main(sys.argv[1]), sep="\n")
