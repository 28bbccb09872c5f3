"""What upcycling adds to the language models of MoE-LLaVA and Med-MoE, and what these see with: parameters, of shapes.

    python benchmarks/vision_counts.py DATA [--out benchmarks/results]

DATA is a folder with `configs/`, the config.json files of StableLM-2-1.6B, Qwen-1.8B and Phi-2. Nothing is computed or
drawn: `plan` counts what the configs describe. OUT receives `vision_counts.json`.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import moe_jax
from evidence.layouts import VISION_ADDED, VISION_PARTS
from evidence.results import RESULTS, Figures
from moe_jax.api.open_source import read_config
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig
from moe_jax.planning.model_costs import make_plan
from moe_jax.upcycling.dense_to_moe import upcycled_config

MODELS = {
    "StableLM-2-1.6B": "derived/stabilityai__stablelm-2-1_6b.json",
    "Qwen-1.8B": "as_found/Qwen__Qwen-1_8B.json",
    "Phi-2": "derived/microsoft__phi-2.json",
}
DELTAS = {"vanilla": "full", "DeRS-SM, .9999": "sparse:0.9999", "DeRS-LM, r = 1": "low-rank:1"}
PAPER = {("StableLM-2-1.6B", "vanilla"): "1.24B", ("StableLM-2-1.6B", "DeRS-SM, .9999"): "0.29M (Table 2, Med-MoE)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path, help="folder with configs/")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    dense = {name: read_config(options.data / "configs" / file) for name, file in MODELS.items()}
    figures = Figures("vision_counts", options.out, writes=True)
    figures.put_rows(VISION_ADDED.name, [row for name, model in dense.items() for row in added(name, model)])
    figures.put_rows(VISION_PARTS.name, parts(options.data / "configs" / MODELS["Phi-2"], dense))
    for table in (VISION_ADDED, VISION_PARTS):
        print(f"{table.text(figures)}\n")


def added(name: str, dense: ModelConfig) -> list[list[Any]]:
    """The parameters that 4 experts in every second layer add, by method, and what Med-MoE adds to these."""
    before, rows = make_plan(dense).total_params, []
    for method, delta in DELTAS.items():
        spec = moe_jax.UpcycleSpec(experts=4, top_k=2, every=2, delta=delta)
        of_moe = make_plan(upcycled_config(dense, spec)).total_params
        med = upcycled_config(dense, dataclasses.replace(spec, top_k=1, universal="med", router_bias=True))
        biases = sum(med.moe(i).num_experts for i in med.moe_layers)
        universal = make_plan(med).total_params - of_moe - biases
        rows.append([name, method, of_moe - before, of_moe - before + biases, universal, PAPER.get((name, method))])
    return rows


def parts(phi: Path, dense: dict[str, ModelConfig]) -> list[list[Any]]:
    """The parameters of CLIP-L/336 and of a projector to every width."""
    rows: dict[str, int] = {}
    for name, model in dense.items():
        keys = json.loads(phi.read_text()) | {
            **{"model_type": "llava_phi", "hidden_size": model.d_model, "num_attention_heads": 32},
            **{"mm_image_tower": "openai/clip-vit-large-patch14-336", "image_projector_type": "mlp2x_gelu"},
            **{"mm_vision_select_layer": -2, "mm_vision_select_feature": "patch", "image_aspect_ratio": "pad"},
        }
        leaves = leaf_specs(read_hf_config(keys))
        counts = {
            part: sum(math.prod(leaf.shape) for path, leaf in leaves.items() if path.startswith(f"vision/{part}/"))
            for part in ("tower", "projector")
        }
        rows["CLIP-L/336"] = counts["tower"]
        rows[f"projector to {name}, mlp2x_gelu"] = counts["projector"]
    return [[name, count] for name, count in rows.items()]


if __name__ == "__main__":
    main()
