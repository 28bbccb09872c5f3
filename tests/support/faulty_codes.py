"""Checkpoints in codes with one fault, named or drawn at random, and what must come of them."""

import json
import pathlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from moe_jax.core.errors import InputError
from tests.support.compressed_weights import folded, read_whole

Stored = dict[str, torch.Tensor]
Change = Callable[[Stored], Any]
Written = Callable[[str], tuple[Stored, Any]]
"""`written(kind)`: the tensors of one matrix, and the `quantization_config`."""


def read(folder: pathlib.Path, stored: Stored, config: Any) -> None:
    """Reads every matrix in codes of a checkpoint with these tensors and this `quantization_config`."""
    for entry in folded(folder, stored, config).values():
        if entry.coded is not None:
            read_whole(entry)


def without(name: str) -> Change:
    """Drops a tensor."""
    return lambda stored: stored.pop(name)


def cut(name: str, axis: int = 0) -> Change:
    """Cuts off the last of a tensor along an axis."""

    def change(stored: Stored) -> None:
        stored[name] = stored[name].narrow(axis, 0, stored[name].shape[axis] - 1)

    return change


def with_first(name: str, value: float) -> Change:
    """Puts a value in the first place of a tensor."""

    def change(stored: Stored) -> None:
        stored[name].view(-1)[0] = value

    return change


def cast(name: str, dtype: torch.dtype) -> Change:
    """Casts a tensor."""

    def change(stored: Stored) -> None:
        stored[name] = stored[name].to(dtype)

    return change


# --- mutations ------------------------------------------------------------------------------------

VALUES = [None, True, 0, -1, 3, 1 << 70, 2.5, float("nan"), "", "x", "re:(", "group", [], [1], {}, {"a": 1}, "block"]
PARTS = [
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
    "qweight", "qzeros", "scales", "g_idx", "SCB", "weight_format", "weight.absmax", "weight.quant_map",
]  # fmt: skip
DTYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def mutated_config(config: Any, draw: random.Random) -> Any:
    """The config with one value in it, at any depth, replaced or removed."""
    if not isinstance(config, (dict, list)) or not config or draw.random() < 0.15:
        return draw.choice(VALUES)
    keys = list(config) if isinstance(config, dict) else list(range(len(config)))
    key = draw.choice(keys)
    changed = config.copy()
    if draw.random() < 0.2:
        changed.pop(key)
    else:
        changed[key] = mutated_config(config[key], draw)
    return changed


def mutated_tensors(stored: dict[str, torch.Tensor], draw: random.Random) -> dict[str, torch.Tensor]:
    """The tensors with one of them dropped, renamed, cast, cut, reshaped, or with other bytes in it."""
    name = draw.choice(sorted(stored))
    value, rest = stored[name].contiguous(), {key: tensor for key, tensor in stored.items() if key != name}
    kind = draw.randrange(6)
    if kind == 0:
        return rest
    if kind == 1:
        module, _, part = name.rpartition(".")
        return rest | {f"{module}.{draw.choice([*PARTS, part[1:]])}": value}
    if kind == 2:
        return rest | {name: value.to(torch.float32).to(draw.choice(DTYPES))}
    if kind == 3 and value.ndim:
        axis = draw.randrange(value.ndim)
        return rest | {name: value.narrow(axis, 0, draw.randrange(value.shape[axis] + 1))}
    if kind == 4:
        return rest | {name: draw.choice([value.reshape(-1), value[None], value[..., None], value.reshape(-1)[:1]])}
    content = bytearray(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    for _ in range(draw.randrange(1, 9)):
        content[draw.randrange(len(content))] = draw.choice([0, 1, 127, 128, 254, 255])
    return rest | {name: torch.frombuffer(content, dtype=value.dtype).reshape(value.shape)}


def assert_only_input_errors(
    folder: pathlib.Path, written: Written, kinds: Sequence[str], seeds: Iterable[int]
) -> None:
    """Asserts that mutations of checkpoints of these kinds are read, or refused in one line; and some of them each."""
    outcomes = set[str]()
    for seed in seeds:
        draw = random.Random(seed)
        kind = draw.choice(kinds)
        stored, config = written(kind)
        if draw.random() < 0.4:
            config = mutated_config(config, draw)
        else:
            stored = mutated_tensors(stored, draw)
        try:
            json.dumps(config)
            if not stored or config in (None, {}):
                continue
            read(folder, stored, config)
            outcomes.add("read")
        except InputError as error:
            assert "\n" not in str(error), seed
            outcomes.add("refused")
        except Exception as error:
            raise AssertionError(f"seed {seed}: {kind}, {error!r}") from error
    assert outcomes == {"read", "refused"}
