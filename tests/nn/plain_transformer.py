"""The parts of a transformer in plain NumPy, float64, and how the leaves of a module are found by name."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.distributed.sharding import path_name
from moe_jax.model_io.loading import disk_paths
from moe_jax.models import AttentionConfig


def norm(leaves, at, x, eps):
    """LayerNorm where there is a bias, else RMSNorm."""
    if f"{at}/bias" in leaves:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return x * leaves[f"{at}/scale"] + leaves.get(f"{at}/bias", 0.0)


def linear(leaves, at, x):
    return x @ leaves[f"{at}/kernel"] + leaves.get(f"{at}/bias", 0.0)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rotate(x, r, theta):
    """Turns the pairs (i, i + r/2) of the first r dimensions of [B, T, H, D]."""
    angles = np.arange(x.shape[1])[:, None] / theta ** (np.arange(0, r, 2) / max(r, 1))
    pairs = (x[..., : r // 2] + 1j * x[..., r // 2 : r]) * np.exp(1j * angles)[None, :, None]
    return np.concatenate([pairs.real, pairs.imag, x[..., r:]], axis=-1)


def attention(leaves, at, config: AttentionConfig, x, source, seen, *, rotated=0, theta=1.0):
    """Multi-head attention of `x` to `source`; `seen` bool[B, T, S]."""

    def heads(name, a, count):
        return linear(leaves, f"{at}/{name}", a).reshape(*a.shape[:2], count, config.head_dim)

    q, k = heads("q", x, config.num_heads), heads("k", source, config.num_kv_heads)
    q, k, v = rotate(q, rotated, theta), rotate(k, rotated, theta), heads("v", source, config.num_kv_heads)
    k, v = (np.repeat(a, config.num_heads // config.num_kv_heads, axis=2) for a in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * (config.scale or config.head_dim**-0.5)
    shares = softmax(np.where(seen[:, None], scores, -np.inf))
    return linear(leaves, f"{at}/o", np.einsum("bhts,bshd->bthd", shares, v).reshape(*x.shape[:2], -1))


def ffn(leaves, at, x):
    """Gated with SiLU, or plain with the approximate GELU."""
    up = linear(leaves, f"{at}/up", x)
    if f"{at}/gate/kernel" in leaves:
        gate = linear(leaves, f"{at}/gate", x)
        h = gate / (1 + np.exp(-gate)) * up
    else:
        h = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return linear(leaves, f"{at}/down", h)


def causal(shape):
    return np.broadcast_to(np.tri(shape[1], dtype=bool), (shape[0], shape[1], shape[1]))


def randomised(make, seed=0):
    """The module that `make()` gives, with leaves that all matter: no zero biases, no scales of one."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    leaves, structure = jax.tree.flatten_with_path(state)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape)
        return 1 + 0.2 * noise if path_name(path).endswith("scale") else noise / leaf.shape[-1] ** 0.5

    drawn = [jnp.asarray(draw(path, leaf), leaf.dtype) for path, leaf in leaves]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, drawn))


def named(config, state):
    """Leaves as they are called on disk, float64."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = disk_paths(config, path_name(path))
        leaf = np.asarray(leaf, np.float64)
        found |= dict(zip(names, leaf if "segments/" in path_name(path) else [leaf], strict=True))
    return found


def check_values_and_gradients(module, reference, *inputs, **options):
    """`module(*inputs)` against `reference(leaves)`, and its gradient along a random direction of all leaves.

    Both give one array; the reference's derivative is a central difference in float64.
    """
    rng = np.random.default_rng(1)
    graphdef, state = nnx.split(module)
    leaves = named(module.config, state)
    expected = reference(leaves)
    weights = rng.standard_normal(expected.shape)

    @jax.jit
    def value(state):
        y = nnx.merge(graphdef, state)(*inputs, **options)[0]
        return jnp.sum(y * jnp.asarray(weights, jnp.float32)), y

    gradient, got = jax.jit(jax.grad(value, has_aux=True))(state)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    direction = {name: rng.standard_normal(leaf.shape) for name, leaf in leaves.items()}

    def along(step):
        moved = {name: leaf + step * direction[name] for name, leaf in leaves.items()}
        return np.sum(reference(moved) * weights)

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    found = sum(np.sum(leaf * direction[name]) for name, leaf in named(module.config, gradient).items())
    np.testing.assert_allclose(found, slope, rtol=1e-3)
