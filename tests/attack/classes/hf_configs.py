"""config.json of Hugging Face, of every family."""

import dataclasses
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

from moe_jax.api.open_source import open_source
from moe_jax.conversion import HuggingFaceDirectory, read_hf_config, write_hf_config
from moe_jax.conversion.families import FAMILIES
from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import ANYTHING, read_json_object
from moe_jax.models import ModelConfig
from moe_jax.models.serialize import config_from_json, config_to_json
from tests.attack.attacks import Attack
from tests.attack.mutations import json_bytes, mutated_json
from tests.attack.wrong_keys import Change, changed, changes_of
from tests.support.hf_checkpoints import CONFIGS


def attack_on(name: str) -> Attack:
    """Mutations of the config of a family: every second one says something wrong of a key, the others are by chance."""

    def make(chance: random.Random, original: dict[str, Any], folder: Path) -> None:
        if chance.random() < 0.5:
            data = json_bytes(changed(original, chance.choice(_changes_of(name))))
        else:
            data = mutated_json(chance, original)
        (folder / "config.json").write_bytes(data)

    return Attack(name=f"config.json of {name}", original=lambda: CONFIGS[name], make=make, read=_read, wrong=_wrong,
                  quick=30, least=288)  # fmt: skip


@functools.cache
def _changes_of(name: str) -> list[Change]:
    return list(changes_of(CONFIGS[name]))


def _read(folder: Path, out: Path) -> ModelConfig:
    source = open_source(folder)
    assert isinstance(source, HuggingFaceDirectory)
    return source.config


def _wrong(original: dict[str, Any], folder: Path, config: ModelConfig) -> str | None:
    return wrong_about(original, read_json_object(folder / "config.json", allow=ANYTHING), config)


# Keys whose values may also be lists: of tokens, and in a family, of a number for every layer.
_LISTS_TOO = {(name, "eos_token_id") for name in FAMILIES} | {
    ("hunyuan_v1_moe", key) for key in ("num_experts", "moe_topk")
}


def wrong_about(original: dict[str, Any], written: dict[str, Any], config: ModelConfig) -> str | None:
    """Says what is wrong about a config that was read from the keys `written`, which those of `original` were."""
    faults = list(impossible_values("", config))
    if faults:
        return ", ".join(faults[:3])
    if config_from_json(json.loads(json.dumps(config_to_json(config)))) != config:
        return "it is another config after it was written as ours"
    try:
        theirs = json.loads(json.dumps(write_hf_config(config)))
    except InputError:  # as of a rotation by another base in layers with windows: read, but refused where it is written
        theirs = None
    if theirs is not None and read_hf_config(theirs) != config:
        return "it is another config after it was written as theirs"
    for key in original.keys() & written.keys() - config.foreign.keys():
        was, stands = original[key], written[key]
        if None not in (was, stands) and _kind(was) != _kind(stands) and (config.family, key) not in _LISTS_TOO:
            return f"{key} was taken although it is {str(stands)[:80]!r}"
    return None


def impossible_values(where: str, value: Any) -> Any:
    """What no config may hold: numbers that are not finite or of no use, and sizes that nothing has."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "foreign":
                yield from impossible_values(f"{where}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value[:100]:
            yield from impossible_values(where, item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where} is {value}"
    elif isinstance(value, int) and abs(value) >= 2**63:
        yield f"{where} has {value.bit_length()} bits"
    elif value is not None and not isinstance(value, bool | int | float | str):
        yield f"{where} is a {type(value).__name__}"


def _kind(value: Any) -> str:
    """The type of a JSON value as far as configs tell them apart."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return type(value).__name__


ATTACKS = tuple(attack_on(name) for name in CONFIGS)
