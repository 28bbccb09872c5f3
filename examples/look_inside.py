"""Looks at what routers decide and layers compute, changes an expert, leaves one out, and trains the routers alone.

    python examples/look_inside.py [MODEL]

MODEL is a model directory or a Hugging Face directory of a dense model; by default a tiny one of random weights.
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import moe_jax


def main(path: str | None = None) -> dict[str, float]:
    """Returns what is printed, by name."""
    dense = moe_jax.load(path) if path else moe_jax.tiny_model()
    model = moe_jax.upcycle(dense, experts=4, top_k=2, every=1, delta="full")
    decoder, layer = model.decoder, model.config.moe_layers[-1]
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 33)))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    # Logits, the routing of every token, and the input of a layer.
    out = decoder(batch["tokens"], routing=True, hidden_states=(layer,))
    chosen = int(out.routing[layer].experts[0, 0, 0])
    found = {
        "layers with routers": len(out.routing),
        "norm of hidden states": float(jnp.linalg.norm(out.hidden_states[layer], axis=-1).mean()),
        "choices of the expert": int((out.routing[layer].experts == chosen).sum()),
    }

    # It becomes the opposite of its neighbour, in this layer alone.
    kernels = decoder.layers[layer].mlp.experts[(chosen + 1) % 4].kernels()
    decoder.layers[layer].mlp.experts[chosen] = jax.tree.map(jnp.negative, kernels)
    found["logits moved by"] = float(jnp.abs(decoder(batch["tokens"]).logits - out.logits).max())

    # Ten steps of the routers alone, with their own losses.
    routers = moe_jax.filters.routers
    optimizer = nnx.Optimizer(decoder, optax.adam(1e-2), wrt=routers)

    @nnx.jit
    def step(decoder: moe_jax.Decoder, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda decoder: decoder.loss(batch), argnums=nnx.DiffState(0, routers))(
            decoder
        )
        optimizer.update(decoder, grads)
        return loss

    losses = [float(step(decoder, optimizer)) for _ in range(10)]
    found |= {"loss before": losses[0], "loss after": losses[-1]}

    # All parameters to the disk, with Orbax alone, and back.
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        state = nnx.to_pure_dict(nnx.state(decoder))
        checkpointer.save(Path(folder) / "state", state)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(Path(folder) / "state", state)
    found["leaves that differ"] = sum(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state, again)))

    # And without the expert.
    without = decoder(batch["tokens"], experts_off={layer: [chosen]}, routing=True)
    found["choices when it is off"] = int((without.routing[layer].experts == chosen).sum())
    found["parameters of the layer's experts"] = decoder.layers[layer].mlp.experts.num_parameters()
    for name, value in found.items():
        print(f"{name}: {value:,.6g}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
