"""Models with weights that are NaN, infinite, huge, tiny or zero, through every command that computes with weights."""

import json
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import moe_jax
from moe_jax.api.open_source import open_source
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from tests.attack.attacks import Attack, command
from tests.support.hf_checkpoints import BASE, DTYPES, random_tensors, read_tensors, write_checkpoint

SMALL = {**BASE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
CONFIGS = {
    "dense": {**SMALL, "model_type": "llama"},
    "moe": {**SMALL, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
}
# At the edges of the dtypes, of what may be squared in them, and beyond.
VALUES = (
    math.nan, math.inf, -math.inf, 3.4e38, -3.39e38, 1e38, -1e30, 1e20, 1e16, 1e14, 1.4e5, -7e4, 65520.0, 65504.0,
    6e-8, 1e-20, -1e-30, 1e-38, -1e-40, 1e-45, 0.0, -0.0,
)  # fmt: skip
IDS = [1, 7, 3, 22, 5, 39, 0, 8, 13, 21, 34, 2]
ALLOW = "--allow-nonfinite"

# What is run, one after another: the arguments of each command; MODEL and OUT are put in.
CAST = [["--dtype", dtype] for dtype in DTYPES] + [[]]
TARGETS = ["--method", "lora", "--adapter", "lora:2", "--targets", "q,up,down", "--no-step0-check"]
MERGED = [("adapt", "MODEL", "OUT", *TARGETS), ("merge", "OUT", "OUT2")]
MERGED_NF4 = [(*MERGED[0], "--base", "nf4"), MERGED[1]]
UPCYCLED = [
    ("upcycle", "MODEL", "OUT", *options, "--no-step0-check")
    for options in (
        ["--experts", "3"],
        ["--experts", "3", "--delta", "low-rank:2"],
        ["--experts", "2", "--delta", "sparse:0.9"],
        ["--experts", "2", "--universal", "coder"],
        ["--method", "pesc", "--adapter", "4", "--rest", "full"],
    )
]
WRITTEN = {
    "dense": [
        *([(verb, "MODEL", "OUT", *cast)] for verb in ("convert", "export") for cast in CAST),
        *([job] for job in UPCYCLED),
        MERGED,
        MERGED_NF4,
    ],
    "moe": [([verb, "MODEL", "OUT", *cast],) for verb in ("convert", "export") for cast in CAST],
}
METHODS = (
    "ders-sparsify --drop 0.5", "ders-sparsify --drop 0.5 --keep magnitude", "ders-quantize --bits 4",
    "ders-quantize --bits 1 --group-size 0", "resmoe --keep 0.5", "resmoe --keep 0.5 --residual svd",
    "resmoe --residual quantized:2", "resmoe --residual up --budget-bits 20", "up --keep 0.25",
    "up --keep 0.25 --bits 4", "sp --keep 0.5", "svd --keep 0.5", "svd --keep 0.5 --design separate",
    "msmoe --keep 0.5", "meo --keep 0.5", "git-rebasin --keep 0.5", "mlp-fusion --keep 0.5", "quantize --bits 3",
)  # fmt: skip
COMPRESSED = {"moe": [[("compress", "MODEL", "OUT", "--json", "--method", *one.split())] for one in METHODS]}
# Of what these report, the error can be computed from what they wrote.
IN_PLACE = ("ders-quantize", "up", "svd", "quantize")
RUN = {
    "dense": [[("adapt", "MODEL", "OUT", *TARGETS[:-1])]],
    "moe": [[("evaluate",)], [("generate", "MODEL", "--ids", "1,5,9", "--max-new-tokens", "4", "--json")]],
}


def attack_on(name: str, jobs: dict[str, list[Any]], quick: int, share: int) -> Attack:
    def original() -> dict[str, dict[str, np.ndarray]]:
        tensors = {kind: random_tensors(CONFIGS[kind]) for kind in jobs}
        # All that has to be compiled is compiled here: it is no part of what an input costs.
        for kind, several in jobs.items():
            with tempfile.TemporaryDirectory() as folder:
                for number, job in enumerate(several):
                    model, dtype = Path(folder, f"{number}-model"), _dtype(number)
                    write_checkpoint(model, {**CONFIGS[kind], "torch_dtype": dtype}, _all_cast(tensors[kind], dtype))
                    _run(job, model, Path(folder, str(number)))
        return tensors

    def make(chance: random.Random, original: dict[str, dict[str, np.ndarray]], folder: Path) -> None:
        kind = chance.choice(sorted(jobs))
        number = chance.randrange(len(jobs[kind]))
        job, dtype = [list(one) for one in jobs[kind][number]], _dtype(number)
        if jobs is WRITTEN:  # nothing is compiled that depends on the dtype
            dtype = chance.choice(sorted(DTYPES))
            job = [[*one, ALLOW] for one in job] if chance.random() < 0.2 else job
        tensors = _all_cast(original[kind], dtype)
        for _ in range(chance.choice((1, 1, 2))):
            _spoil(chance, tensors)
        write_checkpoint(folder / "model", {**CONFIGS[kind], "torch_dtype": dtype}, tensors)
        (folder / "job.json").write_text(json.dumps(job))

    # Whole commands run here, some of which work on the weights for seconds.
    return Attack(
        name=name, original=original, make=make, read=_read, wrong=_wrong, quick=quick, share=share, max_seconds=60.0
    )


def _dtype(number: int) -> str:
    """In which the model of a job is stored: every job has one, so that not all is compiled for all dtypes."""
    return sorted(DTYPES)[number % len(DTYPES)]


def _all_cast(tensors: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    return {name: _cast(tensor, dtype) for name, tensor in tensors.items()}


def _spoil(chance: random.Random, tensors: dict[str, np.ndarray]) -> None:
    """Changes one entry, one row, one tensor, or all of them alike."""
    name = chance.choice([*tensors, *(name for name in tensors if "experts" in name or "mlp" in name)])
    tensor, value = tensors[name], _cast(np.asarray(chance.choice(VALUES)), str(tensors[name].dtype))
    match chance.randrange(8):
        case 0 | 1 | 2:
            tensor[tuple(chance.randrange(size) for size in tensor.shape)] = value
        case 3 | 4:
            tensor[chance.randrange(tensor.shape[0])] = value
        case 5:
            tensor[...] = value
        case 6:
            expert = name.rsplit(".", 2)[0]  # all matrices of an expert, or of an FFN
            for other in tensors:
                if other.startswith(expert):
                    tensors[other][...] = value
        case _:
            factor = 2.0 ** chance.choice((-100, -60, -30, 20, 50, 90))
            for other in tensors:
                tensors[other] = _cast(tensors[other].astype(np.float64) * factor, str(tensor.dtype))


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(DTYPES[dtype])


def _read(folder: Path, out: Path) -> list[str]:
    return _run(json.loads((folder / "job.json").read_text()), folder / "model", out)


def _run(job: Any, model: Path, out: Path) -> list[str]:
    """Runs the commands of a job; returns what each printed. One that refuses leaves nothing, and says one thing."""
    printed, paths = [], {"MODEL": model, "OUT": out / "first", "OUT2": out / "second"}
    for one in job:
        before = set(out.glob("*"))
        try:
            if one[0] == "evaluate":
                printed.append(json.dumps(moe_jax.evaluate(model, IDS, seq_len=8)._asdict()))
            else:
                printed.append(command(*(paths.get(word, word) for word in one)))
        except InputError as error:
            left = set(out.glob("*")) - before
            assert not left, f"{one[0]} left {left}"
            assert "Warning" not in str(error), f"{one[0]} warned besides: {error}"
            raise
    return printed


def _wrong(original: Any, folder: Path, printed: list[str]) -> str | None:
    job = json.loads((folder / "job.json").read_text())
    verb, out = job[0][0], folder.parent / "out" / "first"
    tensors = read_tensors(folder / "model")
    sound = all(np.isfinite(tensor).all() for tensor in tensors.values())
    allowed = ALLOW in job[0]
    if not (sound or allowed or verb in ("evaluate", "generate")):
        return f"{verb} took weights that are not finite"
    for line in "\n".join(printed).splitlines() if verb in ("compress", "evaluate", "generate") else ():
        wrong = list(_not_finite(json.loads(line))) if line.startswith("{") else []
        if wrong:
            return f"{verb} printed {wrong[0]}"
    if allowed or verb in ("evaluate", "generate"):
        return None
    for written in sorted(out.parent.iterdir()):
        source = open_source(written)
        for path in source.specs():
            leaf = source.read(path)
            if np.issubdtype(leaf.dtype, np.integer):
                continue
            if not np.isfinite(leaf).all():
                return f"{verb} wrote {path} that is not finite"
        wrong = list(_not_finite(source.lineage))
        if wrong:
            return f"the lineage says {wrong[0]}"
    if verb == "compress" and job[0][5] in IN_PLACE:
        return _wrong_error(folder / "model", out)
    return None


def _wrong_error(before: Path, after: Path) -> str | None:
    """Compares the errors that were reported with those of what was written, in float64."""
    source, written = open_source(before), open_source(after)
    for layer in written.lineage[-1]["measured"]["layers"]:
        norm = error = 0.0
        for name in ("gate", "up", "down"):
            kernels = [list(SourceLayer(one, layer["layer"]).kernels(name)) for one in (source, written)]
            for kernel, approximation in zip(*kernels, strict=True):
                kernel = kernel.astype(np.float64)
                norm += np.sum(kernel**2)
                error += np.sum((approximation.astype(np.float64) - kernel) ** 2)
        expected = math.sqrt(error / norm) if norm else 0.0
        # What is smaller than the smallest normal number of float32 may count as zero.
        if norm > 1e-72 and not math.isclose(layer["relative_error"], expected, rel_tol=0.02, abs_tol=1e-3):
            return f"layer {layer['layer']} has the error {expected:.6g}, reported was {layer['relative_error']:.6g}"
    return None


def _not_finite(tree: Any, where: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _not_finite(value, f"{where}.{key}")
    elif isinstance(tree, list):
        for item in tree:
            yield from _not_finite(item, where)
    elif isinstance(tree, float) and not math.isfinite(tree):
        yield f"{where[1:]} {tree}"


ATTACKS = (
    attack_on("odd weights, written", WRITTEN, quick=12, share=40),
    attack_on("odd weights, compressed", COMPRESSED, quick=10, share=30),
    attack_on("odd weights, run", RUN, quick=4, share=8),
)
