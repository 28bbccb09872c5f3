"""Image encoders on the CPU, side by side with Transformers: the same threads, float32, batches of 1 and 8.

    python benchmarks/vision_tower.py [--only TOWER ...] [--batches 1 8] [--turns 5] [--out benchmarks/results]

Weights are random: times do not depend on them. Both take turns, so that what else the machine does slows both, and of
every one the fastest turn counts. "features" are those that LLaVA takes, of the layer before the last: this library
does not run the last one. Transformers has attention as PyTorch computes it (`sdpa`). OUT receives `vision_tower.json`.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
import transformers
from flax import nnx

from evidence.layouts import VISION_TOWER
from evidence.results import RESULTS, Figures
from moe_jax.conversion import read_hf_config
from moe_jax.nn.vision import VisionTower

TOWERS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "DINOv2-S/14, 224": (
        "Dinov2Model",
        "Dinov2Config",
        dict(hidden_size=384, num_attention_heads=6, num_hidden_layers=12, image_size=224, patch_size=14),
        224,
    ),
    "CLIP-L/14, 336": (
        "CLIPVisionModel",
        "CLIPVisionConfig",
        dict(hidden_size=1024, num_attention_heads=16, num_hidden_layers=24, intermediate_size=4096, image_size=336,
             patch_size=14),
        336,
    ),
}  # fmt: skip


def fastest(programs: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Seconds of the fastest of some turns of every program; the first, which compiles, does not count."""
    found = dict.fromkeys(programs, np.inf)
    for turn in range(turns + 1):
        for name, program in programs.items():
            begun = time.perf_counter()
            program()
            if turn:
                found[name] = min(found[name], time.perf_counter() - begun)
    return found


def measured(name: str, batches: list[int], turns: int) -> list[list[Any]]:
    """A row for every batch, of the whole tower and of its features."""
    model, config, keys, side = TOWERS[name]
    given = getattr(transformers, config)(**keys)
    theirs = getattr(transformers, model)._from_config(given, attn_implementation="sdpa").float().eval()
    layers = keys["num_hidden_layers"]
    ours = VisionTower(read_hf_config(given.to_dict()), rngs=nnx.Rngs(0), cuts=(layers - 1,))
    graphdef, state = nnx.split(ours)
    count = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert abs(count - theirs.num_parameters()) < 0.01 * count, (count, theirs.num_parameters())

    @jax.jit
    def whole(state: nnx.State, pixels: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(pixels).x

    @jax.jit
    def features(state: nnx.State, pixels: jax.Array) -> jax.Array:
        seen = nnx.merge(graphdef, state)(pixels, hidden_states=(layers - 1,), stop=layers - 1)
        return seen.hidden_states[layers - 1]

    def of_theirs(pixels: torch.Tensor, **options: Any) -> Any:
        with torch.inference_mode():
            return theirs(pixels, **options)

    rows = []
    for batch in batches:
        pixels = np.random.default_rng(0).normal(size=(batch, side, side, 3)).astype(np.float32)
        ours_in, theirs_in = jax.device_put(pixels), torch.tensor(np.moveaxis(pixels, -1, 1)).contiguous()
        seconds = fastest(
            {
                "ours": lambda x=ours_in: whole(state, x).block_until_ready(),
                "theirs": lambda x=theirs_in: of_theirs(x),
                "our features": lambda x=ours_in: features(state, x).block_until_ready(),
                "their features": lambda x=theirs_in: of_theirs(x, output_hidden_states=True).hidden_states[-2],
            },
            turns,
        )
        for what, one, other in (("all layers", "ours", "theirs"), ("features", "our features", "their features")):
            speed = seconds[other] / seconds[one]
            rows.append([name, what, batch, 1e3 * seconds[one], 1e3 * seconds[other], speed])
            print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(TOWERS), default=tuple(TOWERS), metavar="TOWER")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    figures = Figures("vision_tower", options.out, writes=True)
    for name in options.only:
        for row in measured(name, options.batches, options.turns):
            figures.put_row(VISION_TOWER.name, f"{row[0]}, {row[1]}, {row[2]}", row)
    print(VISION_TOWER.text(figures))


if __name__ == "__main__":
    main()
