"""Pictures of training data on the CPU: how many are read for a second of one core, and what the tower costs a step.

    python benchmarks/picture_data.py LANGUAGE_MODEL TOWER [--pictures 200] [--out benchmarks/results]

LANGUAGE_MODEL and TOWER are Hugging Face directories, such as SmolLM2-135M and DINOv2-small. First, pictures of 640 x
480 pixels (JPEG, PNG), read, decoded and resized as CLIP's 336 pixels want them, counted in seconds of the processor
on one thread. Then two epochs over some of them: of a step, the share that the frozen tower takes, with features kept
(`data.feature_cache`) and without. OUT receives `picture_data.json`.
"""

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from PIL import Image

import moe_jax
from evidence.layouts import PICTURE_SHARE, PICTURES_READ
from evidence.results import RESULTS, Figures
from moe_jax.data.pictures.picture_loading import PictureLoader
from moe_jax.data.pictures.picture_sources import PictureFiles, PictureSource
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenizer import Document
from moe_jax.images.image_config import ImageProcessing
from moe_jax.model_io.frozen_tower import FrozenTower

CLIP = ImageProcessing(size=(336, 336), shortest=336, mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28))
TRAINED, ROWS, STEPS = 32, 4, 8  # pictures, rows of a batch, and steps of an epoch
DATA: dict[str, Any] = {"seq_len": 48, "packing": "whole", "max_pictures": 1, "chat_template": "llava-plain"}
TRAINING = {"train": {"steps": 2 * STEPS}, "partition": {"train": ["vision/projector/.*"]}}


def photograph(number: int, form: str) -> bytes:
    """A picture that is smooth here and rough there, as photographs are."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((640, 480), Image.Resampling.BICUBIC)
    pixels = np.asarray(coarse, np.float32) + rng.normal(0, 4, (480, 640, 3))
    out = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(out, form, quality=90)
    return out.getvalue()


def read_per_second(folder: Path, form: str, count: int, pad: bool) -> float:
    """Pictures for a second of the processor."""
    names = [f"{number}.{form.lower()}" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(photograph(number, form))
    load = PictureLoader(PictureFiles(folder), ImageProcessing(**{**vars(CLIP), "pad": pad}))
    nothing = np.zeros(0, np.int32)
    documents = [Document(nothing, nothing, nothing, (PictureSource(name, None, name),)) for name in names]
    load(documents[:8])
    begun = time.process_time()
    for document in documents:
        load([document])
    return count / (time.process_time() - begun)


def share_of_tower(folder: Path, model: moe_jax.Model) -> list[list[Any]]:
    """Of each epoch, seconds of a step, and the share of them that a step with all features kept does not take."""
    for number in range(TRAINED):
        (folder / f"{number}.jpeg").write_bytes(photograph(number, "JPEG"))
    rows = [
        {"image": f"{number}.jpeg", "conversations": [{"from": "human", "value": "<image>"},
         {"from": "gpt", "value": f"a picture with the number {number}"}]}
        for number in range(TRAINED)
    ]  # fmt: skip
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert model.tokenizer is not None
    found = []
    for kept in (False, True):
        tower = FrozenTower(model.source) if kept else None
        if tower is not None:
            tower.keep_in(folder / "features", max_bytes=1 << 30)
        section = DataSection(sources=(SourceSection(path=str(folder / "a.jsonl")),), **DATA)
        how: dict[str, Any] = {"seed": 0, "batch_size": ROWS, "rows": range(ROWS), "known": tower}
        data = open_data(section, model.config, model.tokenizer.path, **how)
        marks = [time.perf_counter()]

        def batches(data: Any = data, tower: FrozenTower | None = tower) -> Iterator[Any]:
            while True:
                batch = next(data)
                yield batch if tower is None else tower.fill(batch)

        moe_jax.train(TRAINING, model, batches(), on_step=lambda _, marks=marks: marks.append(time.perf_counter()))
        for epoch in (0, 1):
            # The first step of a run compiles.
            seconds = (marks[(epoch + 1) * STEPS] - marks[epoch * STEPS + 1]) / (STEPS - 1)
            found.append(["kept" if kept else "none kept", epoch + 1, seconds])
            print(*found[-1], flush=True)
    least = found[-1][-1]
    return [[*row, 1 - least / row[-1]] for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("language_model", type=Path)
    parser.add_argument("tower", type=Path)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("picture_data", options.out, writes=True)
    with tempfile.TemporaryDirectory() as folder:
        for form in ("JPEG", "PNG"):
            for pad in (False, True):
                speed = read_per_second(Path(folder), form, options.pictures, pad)
                row = [form, "padded" if pad else "not padded", options.pictures, speed]
                figures.put_row(PICTURES_READ.name, f"{form}, {pad}", row)
                print(*row, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        steps = "pixel_shuffle:4,linear"
        seeing = moe_jax.attach(options.language_model, tower=options.tower, size=224, projector=steps)
        rows = share_of_tower(Path(folder), seeing)
    figures.put_rows(PICTURE_SHARE.name, rows)
    print(PICTURES_READ.text(figures), PICTURE_SHARE.text(figures), sep="\n")


if __name__ == "__main__":
    main()
