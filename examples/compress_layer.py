"""The experts of one layer made smaller: arrays in, a bank of experts out.

    python examples/compress_layer.py

The experts are variations of one FFN with their neurons in different orders, as after training apart from a common
start. ResMoE finds the orders, keeps the barycenter, and prunes what is left. Beside it every expert is pruned alone,
to about as many bytes.
"""

import jax.numpy as jnp
import numpy as np

import moe_jax

EXPERTS, WIDTH, DIM = 4, 32, 64


def experts() -> dict[str, np.ndarray]:
    """Kernels of all experts: `gate` and `up` [E, d, f], `down` [E, f, d]."""
    random = np.random.default_rng(0)
    base = {"gate": (WIDTH, DIM), "up": (WIDTH, DIM), "down": (DIM, WIDTH)}
    base = {name: random.standard_normal(shape, np.float32) / WIDTH**0.5 for name, shape in base.items()}
    orders = [random.permutation(DIM) for _ in range(EXPERTS)]

    def variation(name: str, order: np.ndarray) -> np.ndarray:
        kernel = base[name] + 0.02 * random.standard_normal(base[name].shape, np.float32)
        return kernel[order] if name == "down" else kernel[:, order]

    return {name: np.stack([variation(name, order) for order in orders]) for name in base}


def main() -> dict[str, float]:
    """Returns the relative error of the kernels by method."""
    kernels, errors = experts(), {}
    stored = sum(kernel.nbytes for kernel in kernels.values())
    for method, keep in (("resmoe", 0.25), ("up", 0.5)):
        small = moe_jax.compress_experts(kernels, method=method, keep=keep)
        errors[method] = small.figures.relative_error
        print(f"{method:7} {stored:,} -> {small.bank.num_bytes():,} bytes, error {errors[method]:.3f}")

    # A bank is applied to tokens and the decision of a router, in the form that it is stored in.
    x = np.random.default_rng(1).standard_normal((10, WIDTH), np.float32)
    routing, _ = moe_jax.route(jnp.zeros((10, EXPERTS)), 2, "topk_softmax")
    print(f"outputs of the last bank for 10 tokens: {small.bank(jnp.asarray(x), routing).shape}")
    return errors


if __name__ == "__main__":
    main()
