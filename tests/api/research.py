"""What a researcher asks of a model, with public names alone: python -m tests.api.research MODEL FOLDER"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import moe_jax


def answers(path: str, folder: Path) -> dict[str, float]:
    """Upcycles a model, looks into it, trains its routers, saves them, and swaps and ablates experts."""
    model = moe_jax.upcycle(path, experts=4, top_k=2, delta="full")
    decoder, ids = model.decoder, jnp.asarray([np.random.default_rng(0).integers(5, 200, 33)])
    batch, layer = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}, model.config.moe_layers[1]

    # Logits, routing per token, hidden states.
    out = decoder(batch["tokens"], routing=True, hidden_states=(layer,))
    found = {"largest logit": float(out.logits.max()), "layers": float(len(out.routing))}
    chosen = int(out.routing[layer].experts[0, 0, 0])
    found["its choices"] = float((out.routing[layer].experts == chosen).sum())
    found["width"] = float(out.hidden_states[layer].shape[-1])

    # An expert swapped for another one, turned round.
    other = decoder.layers[layer].mlp.experts[(chosen + 1) % 4].kernels()
    decoder.layers[layer].mlp.experts[chosen] = jax.tree.map(lambda kernel: -kernel, other)
    found["moved by a swap"] = float(jnp.abs(decoder(batch["tokens"]).logits - out.logits).max())

    # Gradients of the routers alone, and ten steps with balance, the routers' own rate.
    routers = nnx.DiffState(0, moe_jax.filters.routers)
    optimizer = nnx.Optimizer(decoder, optax.adam(1e-2), wrt=moe_jax.filters.routers)
    before = nnx.state(decoder.layers[layer].mlp.experts.module)

    @nnx.jit
    def step(decoder, optimizer):
        loss, grads = nnx.value_and_grad(lambda decoder: decoder.loss(batch), argnums=routers)(decoder)
        optimizer.update(decoder, grads)
        return loss

    losses = [float(step(decoder, optimizer)) for _ in range(10)]
    found |= {"first loss": losses[0], "last loss": losses[-1]}
    after = nnx.state(decoder.layers[layer].mlp.experts.module)
    found["experts moved"] = float(not jax.tree.all(jax.tree.map(jnp.array_equal, before, after)))

    # Orbax and back.
    with ocp.StandardCheckpointer() as checkpointer:
        state = nnx.to_pure_dict(nnx.state(decoder))
        checkpointer.save((folder / "state").absolute(), state)
        checkpointer.wait_until_finished()
        again = checkpointer.restore((folder / "state").absolute(), state)
    found["restored"] = float(jax.tree.all(jax.tree.map(jnp.array_equal, state, again)))

    # One ablated, parameters counted.
    without = decoder(batch["tokens"], experts_off={layer: [chosen]}, routing=True)
    found["its choices when it is off"] = float((without.routing[layer].experts == chosen).sum())
    found["parameters"] = float(sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param))))
    found["of a bank"] = float(decoder.layers[layer].mlp.experts.module.num_parameters())
    return found


if __name__ == "__main__":
    for name, value in answers(sys.argv[1], Path(sys.argv[2])).items():
        print(f"{name}: {value:.6g}")
