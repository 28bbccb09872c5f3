"""A program: logits of a model that sees and of the MoEs that it is upcycled to, computed in float64.

Norms, softmax and sums are float32 in models, by name. Here that name is float64's before anything else is imported;
parameters are drawn and upcycled in float32, and then taken as they are. Prints JSON: for every bank, the number of
logits that differ once they are rounded to float32, the largest difference before that, and the share of the logits
that float32 cannot hold.
"""

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

jnp.float32 = jnp.float64

import moe_jax  # noqa: E402
from moe_jax.functional import grouped  # noqa: E402
from moe_jax.model_io.loading import load_model  # noqa: E402
from tests.support.dense_models import dense_config, random_leaves  # noqa: E402
from tests.support.moe_models import MemorySource  # noqa: E402
from tests.support.seeing_models import BANKS, picture_batch, seeing  # noqa: E402

CONFIG = seeing(dense_config(num_layers=2))

# The product of CPUs counts with integers of 32 bits.
grouped._choose = lambda operation, backend: grouped.BACKENDS["ragged_dot"][operation]


def logits_of(decoder: moe_jax.nn.Decoder) -> np.ndarray:
    """Logits of rows with pictures, float64."""
    batch = picture_batch(CONFIG, 24, (2, 12), (5,))
    given = {"pixels": batch["pixels"], "slots": batch["slots"]}
    with jax.enable_x64(True):
        graphdef, state = nnx.split(decoder)
        wide = jax.tree.map(lambda leaf: leaf.astype("float64") if leaf.dtype == "float32" else leaf, state)
        decoder = nnx.merge(graphdef, wide)
        for _, module in nnx.iter_modules(decoder):
            if hasattr(module, "compute_dtype"):
                module.compute_dtype = jnp.dtype("float64")  # type: ignore[attr-defined]
        run = nnx.jit(lambda model, tokens, **given: model(tokens, **given).logits)
        found = np.asarray(run(decoder, batch["tokens"], **given))
    assert found.dtype == np.float64
    return found


def main() -> None:
    dense = moe_jax.Model(load_model(MemorySource(CONFIG, random_leaves(CONFIG))))
    before = logits_of(dense.decoder)
    rounded, found = before.astype(np.float32), {}
    for name, options in BANKS.items():
        moe = moe_jax.upcycle(dense, experts=4, every=1, step0_check=False, **options)
        after = logits_of(moe.decoder)
        found[name] = {
            "differ": int(np.sum(after.astype(np.float32) != rounded)),
            "largest": float(np.abs(after - before).max()),
            "finer": float(np.mean(after != after.astype(np.float32))),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
