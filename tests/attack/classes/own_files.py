"""Files that this library writes itself: configs, references to bases, lineages, recipes, lines of training data."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import moe_jax
from moe_jax.data.file_records import JsonLines
from moe_jax.model_io.adapter_dir import ModelReference
from moe_jax.model_io.lineage import read_lineage
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import (
    AttentionConfig,
    BankConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    config_from_json,
    config_to_json,
)
from moe_jax.training import recipe_toml
from moe_jax.training.recipe import Recipe, load_recipe
from moe_jax.training.run_directory import RunRecord, read_record, write_record
from tests.attack.attacks import Attack
from tests.attack.classes.hf_configs import impossible_values
from tests.attack.mutations import mutated_bytes, mutated_json

_ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, biases=("q",), sliding_window=7)
_FFN = FFNConfig(dim=24)
_BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=2),
    "sparse": BankConfig(kind="sparse", rate=0.5, bits=4, entries=(3, 4, 5)),
    "quantised": BankConfig(kind="quantized", bits=4, group_size=8),
    "pesc": BankConfig(kind="adapter", adapter=moe_jax.AdapterConfig(rank=2)),
}


def _config(bank: BankConfig) -> ModelConfig:
    moe = MoEConfig(expert=_FFN, num_experts=4, top_k=2, bank=bank)
    layers = (LayerConfig(attention=_ATTENTION, mlp=_FFN), LayerConfig(attention=_ATTENTION, mlp=moe)) * 2
    return ModelConfig(
        family="llama", vocab_size=32, d_model=16, max_positions=64, layers=layers, bos_id=1, eos_ids=(2, 3),
        rope=RopeConfig(scaling="llama3", factor=8.0, original_max_positions=32),
        foreign={"initializer_range": 0.02, "nested": {"kept": [1, None]}},
    )  # fmt: skip


def _attack_on_config(name: str) -> Attack:
    return Attack(
        name=f"config.json of ours, {name} experts",
        original=lambda: json.loads(json.dumps(config_to_json(_config(_BANKS[name])))),
        make=lambda chance, original, folder: _write(folder / "config.json", mutated_json(chance, original)),
        read=lambda folder, out: ModelDirectory(folder).config,
        wrong=_wrong_config,
        quick=60,
    )


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _wrong_config(original: dict[str, Any], folder: Path, config: ModelConfig) -> str | None:
    faults = list(impossible_values("", config))
    if faults:
        return ", ".join(faults[:3])
    if config_from_json(json.loads(json.dumps(config_to_json(config)))) != config:
        return "it is another config after it was written"
    return None


# --- what refers to a base, and how a model was made ----------------------------------------------

_REFERENCE = {"format": "moe_jax.adapter", "version": 1, "path": "../base", "absolute": "/models/base",
              "fingerprint": "0123456789abcdef" * 4}  # fmt: skip
_LINEAGE = [
    {
        "command": "upcycle",
        "options": {"experts": 4, "delta": "low-rank:2"},
        "sources": [{"path": "dense", "fingerprint": "0123456789abcdef" * 4}],
        "versions": {"jax": "0.10.0"},
        "date": "2026-01-01T00:00:00+00:00",
        "measured": {"step0_difference": 0.0},
    }
] * 2


def _read_reference(folder: Path, out: Path) -> ModelReference:
    from moe_jax.model_io.adapter_dir import read_base_reference

    reference = read_base_reference(folder)
    reference.locate(folder)
    return reference


def _read_lineage(folder: Path, out: Path) -> list[dict[str, Any]]:
    from moe_jax.commands.inspect import _lineage_line

    entries = read_lineage(folder)
    for entry in entries:
        _lineage_line(entry)
    return entries


def _run_record() -> dict[str, Any]:
    """What run.json holds of a run that was restarted."""
    return {
        "format": "moe_jax.run",
        "version": 1,
        "source": {key: _REFERENCE[key] for key in ("path", "absolute", "fingerprint")},
        "config": json.loads(json.dumps(config_to_json(_config(_BANKS["full"])))),
        "tokenizer": "0123456789abcdef" * 4,
        "data": ["0123456789abcdef" * 4] * 2,
        "restarts": [
            {"run": "/runs/a", "step": 3, "skipped_batches": 2, "changed": {"optimizer.eps": [1e-8, 1e-6]}},
        ],
    }


def _read_run_record(folder: Path, out: Path) -> RunRecord:
    record = read_record(folder)
    assert record is not None
    if record.source is not None:
        record.source.locate(folder)
    config_from_json(dict(record.config), where="run.json")
    write_record(out, record)
    return record


def _wrong_run_record(original: Any, folder: Path, record: RunRecord) -> str | None:
    # What a restart changed is said in whatever words the recipe has.
    restarts = tuple(dataclasses.replace(restart, changed=None) for restart in record.restarts)
    if any(restart.step < 0 or restart.skipped_batches < 0 for restart in restarts):
        return "a negative number of steps or batches"
    parts = (record.source, record.data, restarts, config_from_json(dict(record.config), where="run.json"))
    return next((fault for part in parts for fault in impossible_values("", part)), None)


# --- recipes and training data --------------------------------------------------------------------

_RECIPE = b"""run_dir = "runs/a"
seed = 3
[model]
path = "model"
remat = "full"
[data]
seq_len = 64
[[data.sources]]
path = "a.txt"
weight = 2
[[data.sources]]
path = "b.jsonl"
weight = 1.5
[partition]
train = ["layers/.*/mlp/.*"]
[optimizer]
learning_rate = 1e-3
eps = 1e-8
[schedule]
warmup_steps = 3
[train]
steps = 10
batch_size = 8
[mesh]
data = -1
fsdp = 1
[eval]
text = "held_out.txt"
"""
_TOML_VALUES = (
    b"inf", b"-inf", b"nan", b"1e39", b"-1", b"0", b"true", b"9223372036854775808", b"9" * 400, b"9" * 5000, b"''",
    b"[]", b"{}", b"[" * 1000, b"[" * 60_000, b"{a=" * 60_000, b"'''", b'"\\ud800"', b'"a\\u0000b"', b"'gs://a'",
    b"2026-01-01", b"0x7fffffffffffffff", b"'" + b"x" * 100_000 + b"'", b"0.5", b"[1, 'a']", b".5",
)  # fmt: skip


def _mutated_recipe(chance: random.Random, text: bytes) -> bytes:
    lines = text.splitlines()
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(len(lines))
        key, equals, _ = lines[at].partition(b"=")
        choice = chance.random()
        if choice < 0.6 and equals:
            lines[at] = key + b"= " + chance.choice(_TOML_VALUES)
        elif choice < 0.7:
            lines[at] = b".".join([b"a"] * chance.choice((2, 17, 50_000))) + b" = 1"
        elif choice < 0.8:
            lines.insert(at, lines[chance.randrange(len(lines))])
        elif choice < 0.9:
            del lines[at]
        else:
            return mutated_bytes(chance, b"\n".join(lines))
        if not lines:
            return b""
    return b"\n".join(lines)


def _read_recipe(folder: Path, out: Path) -> Recipe:
    return load_recipe(folder / "recipe.toml")


def _wrong_recipe(original: bytes, folder: Path, recipe: Recipe) -> str | None:
    faults = list(impossible_values("", recipe))
    if faults:
        return ", ".join(faults[:3])
    (folder / "again.toml").write_text(recipe_toml.to_toml(recipe), encoding="utf-8")
    return None if load_recipe(folder / "again.toml") == recipe else "it is another recipe after it was written"


def _read_lines(folder: Path, out: Path) -> list[Any]:
    records = JsonLines(folder / "a.jsonl")
    return [example for index in range(len(records)) for example in records[index]]


def _wrong_lines(original: Any, folder: Path, examples: list[Any]) -> str | None:
    for example in examples:
        example.text.encode()
    return None


ATTACKS = (
    *map(_attack_on_config, _BANKS),
    Attack(
        name="base.json",
        original=lambda: _REFERENCE,
        make=lambda chance, original, folder: _write(folder / "base.json", mutated_json(chance, original)),
        read=_read_reference,
        quick=100,
        wrong=lambda original, folder, read: next(impossible_values("", read), None),
    ),
    Attack(
        name="run.json",
        original=_run_record,
        make=lambda chance, original, folder: _write(folder / "run.json", mutated_json(chance, original)),
        read=_read_run_record,
        wrong=_wrong_run_record,
        quick=60,
    ),
    Attack(
        name="lineage.json",
        original=lambda: _LINEAGE,
        make=lambda chance, original, folder: _write(folder / "lineage.json", mutated_json(chance, original)),
        read=_read_lineage,
        quick=100,
    ),
    Attack(
        name="recipe",
        original=lambda: _RECIPE,
        make=lambda chance, original, folder: _write(folder / "recipe.toml", _mutated_recipe(chance, original)),
        read=_read_recipe,
        quick=100,
        wrong=_wrong_recipe,
    ),
    Attack(
        name="JSONL",
        original=lambda: {"prompt": "a é", "response": "b", "more": {"x": [1, 2.5, None]}},
        make=lambda chance, original, folder: _write(
            folder / "a.jsonl", b'{"text": "a"}\n' + mutated_json(chance, original).replace(b"\n", b" ") + b"\n"
        ),
        read=_read_lines,
        quick=100,
        wrong=_wrong_lines,
    ),
)
