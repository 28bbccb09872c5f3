"""Every key of a saved config with other values: refused in a line, or read as exactly what the file then says."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.models import BankConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig, config_from_json, config_to_json
from tests.models.test_config import ATTENTION, CONFIG, FFN, MOE, SHARED
from tests.support.tiers import EVERY

MISSING = object()
VALUES: tuple[Any, ...] = (
    MISSING, None, True, False, -1, 0, 1, 3, -0.5, 0.5, 1e39, 1e308, 2**31, 2**63 - 1, 2**63, 10**400,
    float("nan"), float("inf"), -float("inf"), "", "x", "\ud800", "none", "x" * 10_000,
    [], [[]], [1], [0.5], ["q"], [None] * 2, [1] * 200, {}, {"a": 1},
)  # fmt: skip

LORA = moe_jax.LoRAConfig(rank=2, targets=("up",), dropout=0.1)
ADAPTER = moe_jax.AdapterConfig(rank=2, activation="gelu")
ROUTED = moe_jax.PerftConfig(variant="routed", adapter=ADAPTER, num_experts=3, top_k=2)


def _with(*layers: LayerConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(CONFIG, **{"layers": layers, "rope": RopeConfig(), **changes})


def _of_bank(bank: BankConfig, **changes: Any) -> ModelConfig:
    return _with(LayerConfig(attention=ATTENTION, mlp=dataclasses.replace(MOE, bank=bank, **changes)))


OWN = dataclasses.replace(
    ATTENTION,
    biases=("q", "o"),
    scale=0.5,
    clip_qkv=3.0,
    rope=RopeConfig(fraction=0.25, scaling="yarn", mscale=1.0, attention_factor=1.0),
    lora=dataclasses.replace(LORA, targets=("q",)),
)
CROSS = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, mask="bidirectional", source_dim=6)
CONFIGS = {
    "long rope": CONFIG,
    "head": _with(
        LayerConfig(attention=OWN, mlp=FFN, parallel=True, shared_norm=True),
        norm="layer", learned_positions=True, num_classes=3, logit_soft_cap=9.0, bos_id=1,
        rope=RopeConfig(scaling="llama3", factor=8.0, original_max_positions=32),
    ),
    "shared": _with(
        LayerConfig(
            attention=dataclasses.replace(ATTENTION, score_soft_cap=5.0),
            mlp=dataclasses.replace(SHARED, capacity_factor=2.0, universal_dim=3),
            cross=CROSS,
            norm_position="both",
        ),
        norm="rms_plus_one", bounded_positions=True,
    ),
    "low rank": _of_bank(BankConfig(kind="low-rank", rank=2), merged_experts=3, perft=ROUTED),
    "joint": _of_bank(BankConfig(kind="joint-low-rank", rank=20)),
    "bases": _of_bank(BankConfig(kind="mixture-of-bases", base="none", rank=2, bases=2)),
    "quantised": _of_bank(BankConfig(kind="quantized", bits=4, group_size=8)),
    "sparse": _of_bank(BankConfig(kind="sparse", rate=0.5, bits=4, entries=(3, 4, 5), encoding="coo")),
    "lora": _of_bank(BankConfig(), expert=dataclasses.replace(FFN, lora=dataclasses.replace(LORA, dropout=0.0)),
                     router_lora=dataclasses.replace(LORA, targets=("router",))),
    "pesc": _with(
        LayerConfig(
            attention=ATTENTION,
            mlp=MoEConfig(expert=FFN, num_experts=4, top_k=2, bank=BankConfig(kind="adapter", adapter=ADAPTER)),
        )
    ),
}  # fmt: skip


SAVED = {name: json.loads(json.dumps(config_to_json(config))) for name, config in CONFIGS.items()}


def places(node: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys and items; what is foreign is nobody's."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        yield (*before, key)
        if key != "foreign":
            yield from places(value, (*before, key))


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path; what lies beside the path is shared."""
    key, below = path[0], path[1:]
    changed = copy.copy(data)
    if below:
        changed[key] = put(data[key], below, value)
    elif value is MISSING:
        del changed[key]
    else:
        changed[key] = value
    return changed


def read(data: Any) -> ModelConfig | None:
    """The config; None if it is refused as it should be: in one short line, or one for each problem."""
    try:
        return config_from_json(data)
    except InputError as error:
        assert max(map(len, str(error).splitlines())) < 400, error
        return None


def impossible(where: str, value: Any) -> Iterator[str]:
    """What no config may hold."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "foreign":
                yield from impossible(f"{where}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from impossible(where, item)
    elif isinstance(value, bool | None):
        return
    elif isinstance(value, int):
        if not 0 <= value < 2**31:
            yield f"{where} is {value}"
    elif isinstance(value, float):
        if not abs(value) < 3.5e38:
            yield f"{where} is {value}"
    elif not isinstance(value, str) or not value.isprintable():
        yield f"{where} is a {type(value).__name__}"


def unrolled(data: dict[str, Any]) -> dict[str, Any]:
    """The file with every layer written by itself: other runs of layers can be the same layers."""
    runs = data.get("segments", [])
    return {**data, "segments": [layer for run in runs for layer in run["pattern"] * run["repeats"]]}


def unlike(where: str, written: Any, read: Any) -> Iterator[str]:
    """Where a file says something else than the config that was read from it. Keys left out have their defaults."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            if key not in read:
                yield f"{where}.{key} was not read"
            # The options of the experts' form may be null: files of the first version listed those of all forms.
            elif value is not None or not where.endswith(".bank") or key in ("kind", "base", "train_base"):
                yield from unlike(f"{where}.{key}", value, read[key])
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for i, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from unlike(f"{where}[{i}]", one, other)
    elif type(written) is int and type(read) is float:
        if float(written) != read:
            yield f"{where} is {written}, read as {read}"
    elif type(written) is not type(read) or written != read:
        yield f"{where} is {str(written)[:80]}, read as {str(read)[:80]}"


def test_every_value_is_refused_or_read_as_it_is():
    faults, seen = [], set()
    read_otherwise = tried = 0
    for name, original in SAVED.items():
        assert read(original) == CONFIGS[name] and not list(unlike("", original, original))
        for path in places(original):
            # What several configs have alike is changed in one of them. Versions are tested on their own.
            alike = (*(key for key in path if isinstance(key, str)), str(at(original, path)))
            if alike in seen or path == ("version",):
                continue
            seen.add(alike)
            # By default every second value at every place, in turn.
            for value in VALUES if EVERY else VALUES[len(seen) % 2 :: 2]:
                data = put(original, path, value)
                config = read(data)
                tried += 1
                if config is not None and config != CONFIGS[name]:
                    again = json.loads(json.dumps(config_to_json(config)))
                    faults += [f"{path}: {fault}" for fault in impossible("", config)]
                    faults += [f"{path}: {fault}" for fault in unlike("", unrolled(data), unrolled(again))]
                    read_otherwise += 1
    assert not faults, "\n".join(faults[:20])
    assert tried > (5000 if EVERY else 2500) and tried / 20 < read_otherwise < tried / 4


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_that_there_are_not(name):
    original = SAVED[name]
    for path in [(), *places(original)]:
        if isinstance(at(original, path), dict) and "foreign" not in path:
            for key in ("x", "layers", ""):
                assert read(put(original, (*path, key), 1)) is None, (path, key)


def test_sizes_that_nothing_has_are_refused_before_anything_is_made():
    data = SAVED["long rope"]
    for repeats in (10**6, 2**31 - 1, 2**63 - 1):
        with pytest.raises(InputError, match=r"repeats|a model of \d+ layers .* 10,000 are the most"):
            config_from_json(put(data, ("segments", 0, "repeats"), repeats), where="c.json")
    with pytest.raises(InputError, match="num_experts=10000000 must .* most 100,000"):
        config_from_json(put(data, ("segments", 0, "pattern", 1, "moe", "num_experts"), 10**7))


@pytest.mark.parametrize(("key", "value"), [("bos_id", 32), ("bos_id", -1), ("eos_ids", [2, 32])])
def test_special_tokens_are_in_the_vocabulary(key, value):
    data = SAVED["long rope"]
    with pytest.raises(InputError, match=f"{key}: token .* vocabulary of 32"):
        config_from_json({**data, key: value})
