"""A training step of MoE-LLaVA-Phi at its true size, by the compilers of TPUs and GPUs: memory and the tower's share.

    python benchmarks/vision_step.py DATA [--topology v5e:4x4] [--out benchmarks/results]

DATA is a folder with `configs/`, among which is that of Phi-2. Layers 0, 2, 4, ... have 4 experts, of which a token
takes two; a picture in every row of 2,048 tokens becomes 576 of them, by CLIP-L/336 and two linear maps. There is
neither TPU nor GPU: TPUs need libtpu (`pip install -e '.[test]'`), on x86 Linux, and GPUs the extra `gpu`. It takes
minutes. OUT receives `vision_step.json`.
"""

import argparse
import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from evidence.layouts import VISION_STEP
from evidence.results import RESULTS, Figures
from evidence.stamp import current_stamp
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.data.sections import DataSection
from moe_jax.models import ModelConfig
from moe_jax.planning.compile_only import compile_only
from moe_jax.planning.planned_devices import prepare_environment
from moe_jax.training.recipe import MeshSection, ModelSection, Recipe, TrainSection
from moe_jax.upcycling.dense_to_moe import upcycled_config
from moe_jax.upcycling.spec import UpcycleSpec

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


def moe_llava_phi(keys: dict[str, Any]) -> ModelConfig:
    """The model, in bfloat16, of the keys of Phi-2's config."""
    dense = read_hf_config(keys | EYE)
    layers = tuple(range(0, dense.num_layers, 2))
    moe = upcycled_config(dense, UpcycleSpec(experts=EXPERTS, top_k=2, layers=layers))
    assert moe.vision is not None
    tower = dataclasses.replace(moe.vision.tower, dtype="bfloat16")
    return dataclasses.replace(moe, dtype="bfloat16", vision=dataclasses.replace(moe.vision, tower=tower))


def of_scores(arrays: list[str]) -> list[str]:
    """Those of the arrays that have a number for every two tokens of a row."""
    return [array for array in arrays if re.search(rf"\[(\d+,)*{SEQ_LEN},{SEQ_LEN}\]", array)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path, help="folder with configs/")
    parser.add_argument("--topology", choices=tuple(MESHES), default="v5e:4x4")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    config = moe_llava_phi(json.loads((options.data / "configs/derived/microsoft__phi-2.json").read_text("utf-8")))
    recipe = Recipe(
        run_dir="run",
        model=ModelSection(config="config.json", init="random", compute_dtype="bfloat16", remat="full"),
        data=DataSection(seq_len=SEQ_LEN),
        train=TrainSection(steps=10, batch_size=ROWS),
        mesh=MeshSection(**MESHES[options.topology]),
    )
    prepare_environment()
    found = compile_only(recipe, config, options.topology, pictures=1, largest=MANY)
    figures = Figures("vision_step", options.out, writes=True, stamp=partial(current_stamp, also=("libtpu",)))
    row = [
        options.topology,
        found["bytes"]["total"] / 1e9,
        found["bytes"]["hbm"] / 1e9,
        found["tower_share"],
        len(of_scores(found["largest"])),
        found["largest"][0].partition(" of ")[0],
    ]
    figures.put_row(VISION_STEP.name, options.topology, row)
    print(VISION_STEP.text(figures))


if __name__ == "__main__":
    main()
