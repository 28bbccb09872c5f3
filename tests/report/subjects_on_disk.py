"""One of everything that a report can show, small, with contents that would break a page that does not escape them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.compression import LayerReport, Report, Sweep
from moe_jax.compression.report import Point
from moe_jax.figures import ExpertUse, measure_similarity, plots_of_use, use_numbers, write_figures
from moe_jax.figures.expert_use import SeenPatches
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.model_dir import ModelDirectory
from tests.model_io.test_adapter_dir import write_adapter, write_base
from tests.support.figure_models import BANKS, EXPERTS, moe_config, write_model

EVIL = "</style><script>nothing.there()</script><img src='http://localhost:9/x.png'>"
STEPS = 30


def write_subjects(folder: Path) -> dict[str, Path]:
    """By kind, the path of every subject."""
    model = write_model(folder / "of-two-layers", moe_config(BANKS["low-rank"], BANKS["full"])).path
    compressed = write_model(folder / "compressed", moe_config(BANKS["sparse"])).path
    write_base(folder / "base")
    return {
        "model": with_lineage(
            model, [new_lineage_entry("upcycle", {"delta": EVIL}, [ModelDirectory(model)], {"param_bytes": 12345})]
        ),
        "run": write_run(folder / "run", folder / "base"),
        "compressed": with_lineage(compressed, [compression_entry()]),
        "adapter": write_adapter(folder / "adapter", folder / "base"),
        "sweep": write_sweep(folder / "sweep"),
        "figures": write_measured(folder / "figures", model),
        **write_evaluations(folder, model),
    }


def with_lineage(model: Path, entries: list[dict[str, Any]]) -> Path:
    (model / "lineage.json").write_text(json.dumps(entries))
    return model


def compression_entry() -> dict[str, Any]:
    layer = LayerReport(
        layer=0,
        base=f"mean {EVIL}",
        bytes_before=4000,
        bytes_after=1000,
        relative_error=0.25,
        error_per_neuron=0.01,
        uniform_usage=True,
    )
    report = Report(layers=(layer,), bytes_before=10_000, bytes_after=7000)
    return new_lineage_entry("compress", {"method": "ders-sparsify"}, [], report.to_json())


def write_run(run: Path, model: Path, *, losses: float = 4.0) -> Path:
    """A run of two MoE layers; what it has made is another model, whose experts need not be drawn once more."""
    run.mkdir()
    (run / "recipe.toml").write_text(f'run_dir = "run" # {EVIL}\n')
    (run / "run.json").write_text("{}")
    random = np.random.default_rng(0)
    records = []
    for step in range(1, STEPS + 1):
        load = {str(layer): random.dirichlet(np.ones(EXPERTS)).tolist() for layer in range(2)}
        record = {"step": step, "loss": losses / step, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens": 64}
        record |= {"tokens_per_second": 100.0, "balance_loss": 1.0, "expert_load": load}
        records.append(record | ({"eval_loss": 3.0} if step % 10 == 0 else {}))
    records[3]["grad_norm"] = float("nan")
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "checkpoints" / "30").mkdir(parents=True)
    shutil.copytree(model, run / "model")
    return run


def write_sweep(folder: Path) -> Path:
    points = [
        Point(method=method, option="keep", value=keep, expert_bytes=int(4000 * keep), kept=keep,
              relative_error=1 - keep, nll=2.0, perplexity=8.0 / keep)
        for method in ("resmoe", "up") for keep in (0.25, 0.5)
    ]  # fmt: skip
    sweep = Sweep(nll=2.0, perplexity=7.4, expert_bytes=4000, points=tuple(points), warnings=(EVIL,))
    folder.mkdir()
    entry = new_lineage_entry("compress --sweep", {"method": ["resmoe", "up"]}, [], dataclasses.asdict(sweep))
    (folder / "sweep.json").write_text(json.dumps(entry))
    return folder


def write_measured(folder: Path, model: Path) -> Path:
    source = ModelDirectory(model)
    shares = {layer: np.full(EXPERTS, 1 / EXPERTS) for layer in range(2)}
    text = {"path": f"a/{EVIL}", "tokens": 10, "seq_len": 5}
    counts = {layer: np.arange(EXPERTS, dtype=np.float64) + layer for layer in range(2)}
    seen = SeenPatches(np.full((4, 4, 3), 90, np.uint8), {layer: np.array([[0, 1], [1, -1]]) for layer in range(2)})
    use = ExpertUse(counts, counts, [seen], (1234, 567))
    similar = [measure_similarity(source, layer) for layer in range(2)]
    more = {"more": plots_of_use(use, name="m"), "numbers": {"use": use_numbers(use)}}
    write_figures(folder, similar, name="m", shares=shares, text=text, **more)
    return folder


def write_evaluations(folder: Path, model: Path) -> dict[str, Path]:
    """Of the three kinds, two of a model that is there."""
    text = {"tokens": 117, "nll": 1.5, "perplexity": 4.4817, "total_nll": 175.5, "windows": 3, "cut": 0, "seq_len": 64,
            "model": str(model), "text": "held-out.txt"}  # fmt: skip
    labelled = {"accuracy": 0.75, "interval": [0.5, 0.9], "correct": 3, "count": 4, "labels": ["no", EVIL],
                "confusion": [[2, 1], [0, 1]], "predictions": [0, 1, 1, 0], "by": "head", "cut": 0, "model": EVIL,
                "file": "a.jsonl"}  # fmt: skip
    tasks = {
        "results": {"piqa": {"alias": "piqa", "acc,none": 0.7, "acc_stderr,none": 0.01, "acc_norm,none": 0.71,
                             "acc_norm_stderr,none": "N/A", "sample_len": 200}},
        "n-samples": {"piqa": {"original": 1838, "effective": 200}},
        "config": {"model": "moe-jax", "model_args": {"path": str(model)}},
    }  # fmt: skip
    paths = {}
    for name, found in {"text": text, "labels": labelled, "tasks": tasks}.items():
        paths[name] = folder / f"{name}.json"
        paths[name].write_text(json.dumps(found))
    return paths
