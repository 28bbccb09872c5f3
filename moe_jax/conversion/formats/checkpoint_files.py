"""Finds the weight files of a Hugging Face directory, and the tensors in each."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from moe_jax.conversion.formats.safetensors_file import read_header
from moe_jax.conversion.formats.tensors import TensorEntry
from moe_jax.conversion.formats.torch_file import read_torch_file
from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.files.json_toml import read_json_object

# In the order in which Transformers looks for them.
SINGLE_SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
SINGLE_TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_SHARDS = 10_000
_AT_ONCE = 8  # files that are opened at the same time
_MAX_NAME = 255  # bytes, of most file systems


class CheckpointFiles(NamedTuple):
    """The files that hold the weights, including an index if there is one, and every tensor in them."""

    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Finds the weights of a Hugging Face directory and reads the headers of all their files.

    Raises:
      InputError: if there are none, a file is damaged, an index names files that are missing or outside the
        directory, a tensor is in two files, or index and files disagree.
    """
    for single, index in ((SINGLE_SAFETENSORS, SAFETENSORS_INDEX), (SINGLE_TORCH, TORCH_INDEX)):
        if (directory / single).is_file():
            return CheckpointFiles((directory / single,), _read_file(directory / single))
        if (directory / index).is_file():
            return _open_sharded(directory / index)
    shards = sorted(path.name for path in directory.glob("*-of-*.*"))
    found = f"only {shown(shards[0])} without an index; fetch {SAFETENSORS_INDEX}" if shards else "none of these"
    raise InputError(
        f"{directory} has no weights: looked for {SINGLE_SAFETENSORS}, {SAFETENSORS_INDEX}, {SINGLE_TORCH} "
        f"and {TORCH_INDEX}, found {found}"
    )


def has_weights(directory: Path) -> bool:
    """Whether there are weight files in a directory, complete or not."""
    names = (SINGLE_SAFETENSORS, SAFETENSORS_INDEX, SINGLE_TORCH, TORCH_INDEX)
    return any((directory / name).exists() for name in names) or any(directory.glob("*-of-*.*"))


def _open_sharded(index: Path) -> CheckpointFiles:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise InputError(f"{index} has no weight_map from names of tensors to names of files; fetch it again")
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise InputError(f"{index} names {len(shards):,} files, at most {MAX_SHARDS:,} are read")
    raise_if_any(
        [f"it names {shown(name)}, which is not inside its folder" for name in shards if not _is_inside(name)],
        str(index),
    )
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        there = list(pool.map(lambda name: (index.parent / name).is_file(), shards))
    absent = [name for name, is_there in zip(shards, there, strict=True) if not is_there]
    missing = [f"{shown(name)} is missing; fetch it" for name in absent]
    raise_if_any(missing, f"{index} names files that are not there")

    tensors: dict[str, TensorEntry] = {}
    problems: list[str] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda shard: _read_file(index.parent / shard), shards))
    for shard, entries in zip(shards, found, strict=True):
        for name, entry in entries.items():
            if name in tensors:
                first = tensors[name].file.name
                problems.append(f"{shown(name)} is in two files, {shown(first)} and {shown(shard)}")
            elif weight_map.get(name) != shard:
                says = f"says it is in {shown(weight_map[name])}" if name in weight_map else "does not name it"
                problems.append(f"{shown(name)} is in {shown(shard)}, but the index {says}")
            tensors[name] = entry
    unfound = [name for name in weight_map if name not in tensors]
    problems += [f"{shown(name)} should be in {shown(weight_map[name])}, but is not" for name in unfound]
    raise_if_any(problems, f"{index} and its files disagree")
    return CheckpointFiles((index, *(index.parent / shard for shard in shards)), tensors)


def _read_file(path: Path) -> dict[str, TensorEntry]:
    return read_header(path) if path.suffix == ".safetensors" else read_torch_file(path)


def _is_inside(name: str) -> bool:
    """Whether a name is inside its folder, on every operating system.

    Links are allowed to point elsewhere, because the hub's caches consist of links.
    """
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    is_relative = not posix.is_absolute() and not windows.anchor and not windows.is_absolute()
    is_name = name.isprintable() and len(name.encode()) <= _MAX_NAME and name not in ("", ".")
    return is_name and is_relative and ".." not in windows.parts
