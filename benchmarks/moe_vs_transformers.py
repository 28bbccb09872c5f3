"""Forward and training step of a Mixtral-shaped model, against Transformers on the same weights in the same run.

    python benchmarks/moe_vs_transformers.py [--rounds 5] [--out benchmarks/results]

d 512, f 1024, 4 layers, 8 experts, top-2, vocabulary 4096, 4 x 512 tokens, float32. A training step is loss,
gradient and AdamW update. The two take turns, so that both see the same machine; the ratio of the best rounds is
reported beside the medians. OUT receives `moe_vs_transformers.json`.
Needs torch and transformers (`pip install -e '.[test]'`).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from flax import nnx

from evidence.layouts import MOE_VS_TRANSFORMERS
from evidence.results import RESULTS, Figures
from moe_jax.convert import HuggingFaceDirectory
from moe_jax.functional.losses import next_token_loss
from moe_jax.loading import load_model
from moe_jax.nn import auxiliary_loss

BATCH, LENGTH = 4, 512


def transformers_model(folder: str) -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).float()
    model.save_pretrained(folder)
    return model


def transformers_steps(model: transformers.PreTrainedModel, tokens: np.ndarray) -> tuple[Callable, Callable]:
    ids = torch.tensor(tokens).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def forward() -> np.ndarray:
        with torch.no_grad():
            return model(ids, use_cache=False, output_router_logits=False).logits.numpy()

    def train() -> float:
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return forward, train


def moe_jax_steps(folder: str, tokens: np.ndarray) -> tuple[Callable, Callable]:
    model = load_model(HuggingFaceDirectory(folder))
    graphdef, params = nnx.split(model)
    optimizer = optax.adamw(1e-4)
    ids = jnp.asarray(tokens, jnp.int32)
    state = {"params": params, "moments": optimizer.init(params)}
    run = jax.jit(lambda params: nnx.merge(graphdef, params)(ids).logits)

    def loss(params: nnx.State) -> jax.Array:
        out = nnx.merge(graphdef, params)(ids)
        total, weight = next_token_loss(out.logits[:, :-1], ids[:, 1:], jnp.ones((BATCH, LENGTH - 1)))
        return total / weight + auxiliary_loss(model.config, out.router)

    def step(params: nnx.State, moments: optax.OptState) -> tuple:
        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return value, optax.apply_updates(params, updates), moments

    step = jax.jit(step, donate_argnums=(0, 1))

    def train() -> float:
        value, state["params"], state["moments"] = step(state["params"], state["moments"])
        jax.block_until_ready(state["params"])
        return float(value)

    return lambda: np.asarray(run(state["params"])), train


def best_and_median(seconds: list[float]) -> tuple[float, float]:
    """Tokens per second of the fastest and of the median round."""
    return BATCH * LENGTH / min(seconds), BATCH * LENGTH / statistics.median(seconds)


def product_speed(size: int = 2048) -> float:
    """GFLOP/s of one float32 matrix product: what no step on this machine can exceed."""
    matrix = jnp.ones((size, size))
    product = jax.jit(lambda a: a @ a)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(product(matrix))
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    rounds = options.rounds
    figures = Figures("moe_vs_transformers", options.out, writes=True)
    tokens = np.random.default_rng(0).integers(0, 4096, (BATCH, LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        theirs = transformers_steps(transformers_model(folder), tokens)
        ours = moe_jax_steps(folder, tokens)
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (jax, torch, transformers))
    print(f"{versions}, {os.cpu_count()} cores")
    print(f"one float32 product of 2048 x 2048: {product_speed():.0f} GFLOP/s")
    difference = np.max(np.abs(theirs[0]() - ours[0]()))
    print(f"largest difference of logits: {difference:.2e}")
    assert difference < 1e-3, "the two models do not compute the same thing"
    rows = []
    training = "training step (loss, gradient, AdamW)"
    for name, one, other in (("forward", ours[0], theirs[0]), (training, ours[1], theirs[1])):
        # Twice: the second step's arrays are already on the device, for which JAX compiles once more.
        for _ in range(2):
            one(), other()
        seconds: dict[str, list[float]] = {"moe_jax": [], "transformers": []}
        for _ in range(rounds):
            for who, run in (("moe_jax", one), ("transformers", other)):
                begin = time.perf_counter()
                run()
                seconds[who].append(time.perf_counter() - begin)
        (our_best, our_median), (their_best, their_median) = (best_and_median(s) for s in seconds.values())
        ratios = [our_median / their_median, our_best / their_best]
        rows.append([name, [our_median, our_best], [their_median, their_best], ratios])
    figures.put_rows(MOE_VS_TRANSFORMERS.name, rows)
    print(MOE_VS_TRANSFORMERS.text(figures))


if __name__ == "__main__":
    main()
