"""An MoE layer inside somebody else's Flax NNX model and training loop.

    python examples/moe_layer.py

The experts of the layer share one FFN, to which each adds a product of rank 4. The task is one for experts: each of
four groups of inputs is mapped by a matrix of its own.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import moe_jax

WIDTH, GROUPS = 16, 4


class Net(nnx.Module):
    """Your model: whatever it is made of, one of its layers is an MoE."""

    def __init__(self, rngs: nnx.Rngs):
        config = moe_jax.MoEConfig(
            expert=moe_jax.FFNConfig(dim=32),
            num_experts=GROUPS,
            top_k=2,
            bank=moe_jax.BankConfig(kind="low-rank", rank=4),
            balance_coef=0.01,
        )
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.moe = moe_jax.MoE(config, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.inner(x)
        y, stats = self.moe(x)
        return self.out(x + y), self.moe.auxiliary_loss(stats)


def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inputs [32, 8, WIDTH] around one of GROUPS centres, and their images under that group's matrix."""
    centres = 3 * jax.random.normal(jax.random.key(1), (GROUPS, WIDTH))
    matrices = jax.random.normal(jax.random.key(2), (GROUPS, WIDTH, WIDTH)) / WIDTH**0.5
    group_key, noise_key = jax.random.split(key)
    groups = jax.random.randint(group_key, (32, 8), 0, GROUPS)
    x = centres[groups] + jax.random.normal(noise_key, (32, 8, WIDTH))
    return x, jnp.einsum("btd,btde->bte", x, matrices[groups])


@nnx.jit
def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Your training step: the auxiliary loss is added to whatever you minimise."""

    def loss(model: Net) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y, auxiliary = model(x)
        error = jnp.mean((y - target) ** 2)
        return error + auxiliary, (error, auxiliary)

    grads, (error, auxiliary) = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return error, auxiliary


def main(steps: int = 200) -> tuple[float, float]:
    """Trains, and returns the error of the first and the last step."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    errors = []
    for index in range(steps):
        error, auxiliary = step(model, optimizer, *batch(jax.random.key(100 + index)))
        errors.append(float(error))
        if index % 50 == 0 or index == steps - 1:
            print(f"step {index:3}: error {error:.3f}, balance loss {auxiliary:.4f}")
    experts = model.moe.experts
    full = 3 * GROUPS * WIDTH * 32
    print(f"{experts.num_parameters():,} parameters in the experts; {full:,} if each had kernels of its own")
    return errors[0], errors[-1]


if __name__ == "__main__":
    main()
