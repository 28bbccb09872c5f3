"""Training steps of MoE-LLaVA-Phi and Med-MoE-StableLM at their true sizes, by the compilers of TPUs and GPUs.

    python benchmarks/vision_step.py DATA [--topology v5e:4x4] [--only STEP ...] [--out benchmarks/results]

DATA is a folder with `configs/`, among which are those of Phi-2 and StableLM-2-1.6B. Layers 0, 2, 4, ... have 4
experts; a picture in every row of 2,048 tokens becomes 576 of them, by CLIP-L/336 and two linear maps. Stage 3 is that
of the recipes in `train/recipes`, whose sizes of batches and trained parameters are the published ones; another step
trains everything but the tower. There is neither TPU nor GPU: TPUs need libtpu (`pip install -e '.[test]'`), on x86
Linux, and GPUs the extra `gpu`. A step takes minutes. OUT receives `vision_step.json`.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from evidence.layouts import VISION_STEP
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT, current_stamp
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.data.sections import DataSection
from moe_jax.models import ModelConfig, config_from_json
from moe_jax.planning.compile_only import compile_only
from moe_jax.planning.planned_devices import prepare_environment
from moe_jax.training.recipe import MeshSection, ModelSection, Recipe, TrainSection, load_recipe
from moe_jax.upcycling.dense_to_moe import upcycled_config
from moe_jax.upcycling.spec import UpcycleSpec

RECIPES = ROOT / "train" / "recipes"
ROWS, SEQ_LEN, EXPERTS = 32, 2048, 4
MESHES = {"v5e:4x4": {"fsdp": 16}, "h100:8": {"fsdp": 8}}
# Of the arrays that the program makes, so many shapes are looked through for one of scores.
MANY = 500
EYE = {
    "model_type": "llava_phi",
    "mm_image_tower": "openai/clip-vit-large-patch14-336",
    "image_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "image_aspect_ratio": "pad",
}


class Step(NamedTuple):
    """Attributes:
    config: makes that of the model, of the folder DATA.
    recipe: of the training; None: all but the tower is trained, in batches of 32 rows.
    """

    config: Callable[[Path], ModelConfig]
    recipe: str | None = None


def moe_llava_phi(data: Path, **capacity: Any) -> ModelConfig:
    """MoE-LLaVA-Phi in bfloat16, made of the keys of Phi-2's config."""
    keys = json.loads((data / "configs/derived/microsoft__phi-2.json").read_text("utf-8"))
    dense = read_hf_config(keys | EYE)
    moe = upcycled_config(dense, UpcycleSpec(experts=EXPERTS, top_k=2, every=2, first=0, **capacity))
    assert moe.vision is not None
    tower = dataclasses.replace(moe.vision.tower, dtype="bfloat16")
    return dataclasses.replace(moe, dtype="bfloat16", vision=dataclasses.replace(moe.vision, tower=tower))


def med_moe_stablelm(data: Path) -> ModelConfig:
    """The config that the recipes come with."""
    return config_from_json(json.loads((RECIPES / "configs" / "med_moe_stablelm.json").read_text("utf-8")))


_CAPACITY = dict(balance_choices="first", capacity_factor=1.5, capacity_rows=8)
STEPS = {
    "MoE-LLaVA-Phi, all but the tower": Step(moe_llava_phi),
    "MoE-LLaVA-Phi, stage 3": Step(partial(moe_llava_phi, **_CAPACITY), "moe_llava_stage3"),
    "Med-MoE-StableLM, stage 3": Step(med_moe_stablelm, "med_moe_stage3"),
}


def recipe_of(step: Step, topology: str) -> Recipe:
    """The recipe, on the mesh of a topology."""
    mesh = MeshSection(**MESHES[topology])
    if step.recipe is not None:
        return dataclasses.replace(load_recipe(RECIPES / f"{step.recipe}.toml"), mesh=mesh)
    return Recipe(
        run_dir="run",
        model=ModelSection(config="config.json", init="random", compute_dtype="bfloat16", remat="full"),
        data=DataSection(seq_len=SEQ_LEN),
        train=TrainSection(steps=10, batch_size=ROWS),
        mesh=mesh,
    )


def of_scores(arrays: list[str]) -> list[str]:
    """Those of the arrays that have a number for every two tokens of a row."""
    return [array for array in arrays if re.search(rf"\[(\d+,)*{SEQ_LEN},{SEQ_LEN}\]", array)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path, help="folder with configs/")
    parser.add_argument("--topology", choices=tuple(MESHES), default="v5e:4x4")
    parser.add_argument(
        "--only", nargs="+", metavar="STEP", choices=STEPS, default=list(STEPS), help="leave the others"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    prepare_environment()
    figures = Figures("vision_step", options.out, writes=True, stamp=partial(current_stamp, also=("libtpu",)))
    for name in options.only:
        step = STEPS[name]
        recipe, config = recipe_of(step, options.topology), step.config(options.data)
        found = compile_only(recipe, config, options.topology, pictures=1, largest=MANY)
        row = [
            name,
            options.topology,
            recipe.train.batch_size,
            found["bytes"]["total"] / 1e9,
            found["bytes"]["hbm"] / 1e9,
            found["tower_share"],
            # Where the model is as wide as a row is long, its kernels have the same shape.
            None if config.d_model == SEQ_LEN else len(of_scores(found["largest"])),
            found["largest"][0].partition(" of ")[0],
        ]
        figures.put_row(VISION_STEP.name, f"{name}, {options.topology}", row)
    print(VISION_STEP.text(figures))


if __name__ == "__main__":
    main()
