"""What a training step with adapters costs: memory from the compiler, time in turns.

    python benchmarks/peft_step.py [--rounds 5] [--only step|linear] [--out benchmarks/results]

- step: a decoder of 4 layers, d 512, 8 experts of width 1024, top-2, 1024 tokens, float32, AdamW. Full fine-tuning;
  LoRA beside all kernels of attention and experts, and the same function with every kernel made as W + AB before it is
  used; PERFT; LoRA over NF4 kernels. All take turns; ratios are of medians.
- linear: the gradient of one map [2048, 2048] with LoRA over 1024 tokens, to its factors and its input, at ranks 2 to
  512: operations and memory that come on top of the plain map's, beside those of W + AB.

OUT receives `peft_step.json`.
"""

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ders_layer import interleaved
from evidence.layouts import PEFT_LINEAR, PEFT_STEP
from evidence.results import RESULTS, Figures
from moe_jax.experts.linear import Linear
from moe_jax.models import (
    AdapterConfig,
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    LoRAConfig,
    ModelConfig,
    MoEConfig,
    PerftConfig,
)
from moe_jax.nn import Decoder, auxiliary_loss
from moe_jax.peft import split_model, trainable_paths
from tests.support.losses import next_token_loss

BATCH, LENGTH, RANK = 4, 256, 8
ATTENTION = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=64)
MOE = MoEConfig(expert=FFNConfig(dim=1024), num_experts=8, top_k=2)
BASE = ModelConfig(
    family="mixtral",
    vocab_size=2048,
    d_model=512,
    max_positions=LENGTH,
    layers=(LayerConfig(attention=ATTENTION, mlp=MOE),) * 4,
)
OPTIMIZER = optax.adamw(1e-4)


def tuned(attention: AttentionConfig = ATTENTION, moe: MoEConfig = MOE) -> ModelConfig:
    layers = (LayerConfig(attention=attention, mlp=moe),) * BASE.num_layers
    return dataclasses.replace(BASE, layers=layers, frozen_base=True)


def lora_config(*, nf4: bool = False) -> ModelConfig:
    """LoRA beside all kernels of attention and experts."""
    attention = dataclasses.replace(ATTENTION, nf4=nf4, lora=LoRAConfig(rank=RANK, targets=("q", "k", "v", "o")))
    experts = dataclasses.replace(MOE.expert, nf4=nf4, lora=LoRAConfig(rank=RANK, targets=("gate", "up", "down")))
    return tuned(attention, dataclasses.replace(MOE, expert=experts))


def perft_config(variant: str, num_experts: int, top_k: int | None = None) -> ModelConfig:
    adapter = AdapterConfig(rank=RANK, scale=2.0)
    perft = PerftConfig(variant=variant, adapter=adapter, num_experts=num_experts, top_k=top_k)
    return tuned(moe=dataclasses.replace(MOE, perft=perft))


def batch_of_tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(0), (BATCH, LENGTH + 1), 0, BASE.vocab_size)


def loss_of(model: Decoder, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    out = model(tokens[:, :-1])
    total, count = next_token_loss(out.logits, tokens[:, 1:], jnp.ones((BATCH, LENGTH)))
    return total / count + auxiliary_loss(config, out.router)


def with_added_up_kernels(state: Any, scale: float) -> Any:
    """`W + scale * A B` in place of every kernel that has LoRA, in a state as nested dicts."""
    if not isinstance(state, dict):
        return state
    if "lora" in state:
        product = jnp.einsum("...ir,...ro->...io", state["lora"]["a"], state["lora"]["b"])
        rest = {name: leaf for name, leaf in state.items() if name not in ("lora", "kernel")}
        return rest | {"kernel": state["kernel"] + scale * product}
    return {name: with_added_up_kernels(leaf, scale) for name, leaf in state.items()}


class Step:
    """A compiled training step, and the memory it takes."""

    def __init__(self, config: ModelConfig, *, add_up: bool = False):
        model = Decoder(config, rngs=nnx.Rngs(0))
        graphdef, params, frozen = split_model(model, trainable_paths(model))
        plain = nnx.graphdef(nnx.eval_shape(lambda: Decoder(BASE, rngs=nnx.Rngs(0))))
        scale = lora_config().layers[0].attention.lora.scale

        def step(params: Any, moments: Any, frozen: Any, tokens: jax.Array) -> tuple[Any, Any]:
            def loss(params: Any) -> jax.Array:
                if not add_up:
                    return loss_of(nnx.merge(graphdef, params, frozen), config, tokens)
                state = nnx.to_pure_dict(nnx.merge_state(params, frozen))
                whole = nnx.state(nnx.eval_shape(lambda: Decoder(BASE, rngs=nnx.Rngs(0))))
                nnx.replace_by_pure_dict(whole, with_added_up_kernels(state, scale))
                return loss_of(nnx.merge(plain, whole), config, tokens)

            updates, moments = OPTIMIZER.update(jax.grad(loss)(params), moments, params)
            return optax.apply_updates(params, updates), moments

        self._frozen, self._tokens = frozen, batch_of_tokens()
        self._state = params, OPTIMIZER.init(params)
        self.trained = sum(leaf.size for leaf in jax.tree.leaves(params))
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*self._state, frozen, self._tokens)
        self._program = lowered.compile()
        memory = self._program.memory_analysis()
        self.held, self.temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes

    def __call__(self) -> object:
        self._state = self._program(*self._state, self._frozen, self._tokens)
        return self._state


def measure_step(figures: Figures, rounds: int) -> None:
    steps: dict[str, Step] = {
        "full fine-tuning": Step(BASE),
        "LoRA on all kernels of attention and experts": Step(lora_config()),
        "the same, W + AB made": Step(lora_config(), add_up=True),
        "LoRA over NF4": Step(lora_config(nf4=True)),
        "PERFT-E": Step(perft_config("embedded", 8)),
        "PERFT-R, 8 adapters, 2 for a token": Step(perft_config("routed", 8, 2)),
        "PERFT-S": Step(perft_config("single", 1)),
    }
    programs: dict[str, Callable[[], object]] = dict(steps)
    seconds = {name: statistics.median(values) for name, values in interleaved(programs, rounds).items()}
    full = steps["full fine-tuning"]
    print(f"\ntraining step, {BATCH * LENGTH} tokens, rank {RANK}; MiB by the compiler, times of full fine-tuning\n")
    rows = []
    for name, step in steps.items():
        peak = (step.held + step.temporary) / (full.held + full.temporary)
        ratio = seconds[name] / seconds["full fine-tuning"]
        rows.append([name, step.trained, step.held >> 20, step.temporary >> 20, peak, ratio])
    figures.put_rows(PEFT_STEP.name, rows)
    print(PEFT_STEP.text(figures))


def measure_linear(figures: Figures) -> None:
    width, tokens = 2048, 1024
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)

    def compiled(rank: int | None, added_up: bool) -> tuple[float, int]:
        lora = None if rank is None else LoRAConfig(rank=rank, targets=("q",))
        made = nnx.eval_shape(lambda: Linear((width, width), lora=lora, rngs=nnx.Rngs(0), dtype=jnp.float32))
        graphdef, factors, rest = nnx.split(made, lambda path, _: "lora" in path, ...)

        def loss(factors: Any, x: jax.Array, rest: Any) -> jax.Array:
            linear = nnx.merge(graphdef, factors, rest)
            return jnp.sum(jnp.square(x @ linear.materialise() if added_up else linear(x)))

        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(factors, x, rest).compile()
        return program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes

    plain_flops, plain_memory = compiled(None, False)
    print(f"\ngradient of one map [{width}, {width}], {tokens} tokens: on top of the plain map's\n")
    rows = []
    for rank in (2, 8, 32, 128, 512):
        (flops, memory), (made_flops, made_memory) = compiled(rank, False), compiled(rank, True)
        extra = [(f - plain_flops) / 1e9 for f in (flops, made_flops)]
        mib = [(m - plain_memory) / 2**20 for m in (memory, made_memory)]
        rows.append([rank, *extra, *mib])
    figures.put_rows(PEFT_LINEAR.name, rows)
    print(PEFT_LINEAR.text(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("step", "linear"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("peft_step", options.out, writes=True)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    if options.only in (None, "linear"):
        measure_linear(figures)
    if options.only in (None, "step"):
        measure_step(figures, options.rounds)


if __name__ == "__main__":
    main()
