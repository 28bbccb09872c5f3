"""`HuggingFaceDirectory`: a Hugging Face checkpoint, read leaf by leaf as if it were a model directory."""

import contextlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from moe_jax.conversion.checkpoint_source import CheckpointSource, Weights, match_weights
from moe_jax.conversion.families import FAMILIES, family_named
from moe_jax.conversion.formats import check_no_codes, first_of_codes, format_beside, format_of
from moe_jax.conversion.formats.quantized_format import QuantizedFormat
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.conversion.model_table import plain_name, table_of
from moe_jax.conversion.safetensors_file import SAFETENSORS_INDEX, SINGLE_SAFETENSORS, read_header
from moe_jax.conversion.tensors import TensorEntry
from moe_jax.conversion.torch_file import read_torch_file
from moe_jax.conversion.vision_formats import MODEL_TYPES, vision_format_named
from moe_jax.conversion.vision_formats.elsewhere import (
    NOWHERE,
    PROJECTOR_FILE,
    Elsewhere,
    has_projector,
    of_projector,
    with_parts,
)
from moe_jax.conversion.vision_formats.language_parts import LANGUAGE_PARTS
from moe_jax.conversion.vision_formats.usual_format import with_tie
from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.files.byte_files import fingerprint_files
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.regular_files import hold
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.files.tokenizer_files import PREPROCESSOR, PROCESSOR, TOKENIZER, by_name, tokenizer_files_in
from moe_jax.model_io.lineage import OLD_GPTQ, SETTINGS, read_lineage
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import VisionConfig
from moe_jax.models.serialize import FORMAT

# In the order in which Transformers looks for them.
SINGLE_TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WEIGHTS = (SINGLE_SAFETENSORS, SAFETENSORS_INDEX, SINGLE_TORCH, TORCH_INDEX)
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
    for old in sorted(directory.glob(OLD_GPTQ))[:1]:
        return CheckpointFiles((old,), _read_file(old))
    shards = sorted(path.name for path in directory.glob("*-of-*.*"))
    found = f"only {shown(shards[0])} without an index; fetch {SAFETENSORS_INDEX}" if shards else "none of these"
    looked_for = f"{', '.join(_WEIGHTS[:-1])} and {TORCH_INDEX}"
    raise InputError(f"{directory} has no weights: looked for {looked_for}, found {found}")


def has_weights(directory: Path) -> bool:
    """Whether there are weight files in a directory, complete or not."""
    patterns = ("*-of-*.*", OLD_GPTQ)
    return any((directory / name).exists() for name in _WEIGHTS) or any(any(directory.glob(one)) for one in patterns)


def _open_sharded(index: Path) -> CheckpointFiles:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise InputError(f"{index} has no weight_map from names of tensors to names of files; fetch it again")
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise InputError(f"{index} names {len(shards):,} files, at most {MAX_SHARDS:,} are read")
    outside = [f"it names {shown(name)}, which is not inside its folder" for name in shards if not _is_inside(name)]
    raise_if_any(outside, str(index))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        there = pool.map(lambda name: (index.parent / name).is_file(), shards)
        absent = [name for name, is_there in zip(shards, there, strict=True) if not is_there]
        missing = [f"{shown(name)} is missing; fetch it" for name in absent]
        raise_if_any(missing, f"{index} names files that are not there")
        found = list(pool.map(lambda shard: _read_file(index.parent / shard), shards))

    tensors: dict[str, TensorEntry] = {}
    problems: list[str] = []
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


class HuggingFaceDirectory(CheckpointSource):
    """A directory with config.json and weights as safetensors or PyTorch files. A `ModelSource`.

    Weight files are opened when they are first needed: for `config`, a directory with just a config.json is enough. If
    another directory takes this one's place in the meantime, reading is an error: the two must not be mixed.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        ignored_keys: Collection[str] = (),
        elsewhere: Elsewhere = NOWHERE,
        further: bool = False,
    ):
        """Reads the config; unknown keys of config.json that are `ignored_keys` are assumed to change nothing.

        The tower and the projector of a model that sees may be `elsewhere`. Layers that predict tokens after the next
        are left out unless `further`.

        Raises:
          FileNotFoundError: if there is no such directory.
          InputError: if there is a file, or no config.json that we can read.
        """
        super().__init__()
        self.path = as_path(path)
        if self.path.is_file():
            raise InputError(f"{path} is a file; expected a Hugging Face directory, or a GGUF file")
        if not self.path.is_dir():
            raise FileNotFoundError(f"no Hugging Face directory at {path}{nearest_path(path)}")
        self._held = hold(self.path)
        data = read_json_object(Path("config.json"), allow=("nonfinite",), inside=self._held)
        if data.get("format") == FORMAT:
            raise InputError(f"{path} is a model directory, not a Hugging Face directory")
        self._elsewhere = elsewhere
        try:
            names = self.checkpoint.tensors if _needs_names(data) and has_weights(self.path) else ()
            data = completed_config(data, elsewhere, names)
            self.quantized_as = self._format_of(data)
            how: dict[str, Any] = {"processing": self.processing_keys(), "further": further}
            self.config = read_hf_config(data, ignored=ignored_keys, **how)
            family = family_named(self.config.family)
            self._whole = LANGUAGE_PARTS.get(str(data.get("model_type")))
            keys = data if self._whole is None else self._whole.keys(data)
            self._table = (*table_of(self.config, reading=True), *family.left_out(self.config, keys))
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None

    def _format_of(self, data: Mapping[str, Any]) -> QuantizedFormat | None:
        """Returns the format in which it is quantised, as config.json says or an older file beside it; None: in none.

        Raises:
          InputError: if two of them contradict each other, or the format is one that is not read.
        """
        said = format_of(data)
        names = [name for name in SETTINGS if (self.path / name).is_file()]
        if said is None and not (names and has_weights(self.path) and first_of_codes(self.checkpoint.tensors)):
            return None
        found = {} if said is None else {"config.json": said}
        for name in names:
            try:
                found[name] = format_beside(name, read_json_object(Path(name), inside=self._held))
            except InputError:
                if said is None:
                    raise
        first, *others = found
        for other in others:
            is_alike = said is None or type(found[first]) is type(found[other])  # config.json may be the newer one
            if is_alike and found[first] != found[other]:
                raise InputError(
                    f"{first} and {other} say different things about the codes; remove the one that is wrong"
                )
        return found[first]

    def processing_keys(self) -> Mapping[str, Any] | None:
        """Returns how pictures are processed; None: nothing says it. The newest releases have it in another file."""
        tower = self._elsewhere.vision_tower
        places = [(self._held, Path(), name) for name in (PREPROCESSOR, PROCESSOR)]
        places += [] if tower is None else [(None, tower, name) for _, _, name in places]
        for held, folder, name in places:
            with contextlib.suppress(FileNotFoundError):
                keys = _of_pictures(name, read_json_object(folder / name, inside=held))
                if keys is not None:
                    return keys
        return None

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files that are copied with the model: tokenizer, generation settings, chat templates.

        If a family has a vocabulary in a format of its own, a tokenizer.json is made from it when these files are first
        needed. It vanishes when the process ends.
        """
        self._held.check_in_place()
        files = tokenizer_files_in(self.path)
        names = {file.name for file in files}
        own, make = family_named(self.config.family).vocabulary or ("", None)
        if make is None or TOKENIZER in names or own not in names:
            return files
        return (*files, *self._made_files(lambda: {TOKENIZER: make(self.path / own)}))

    @property
    def lineage(self) -> list[dict[str, Any]]:
        return read_lineage(self.path, inside=self._held)

    @cached_property
    def checkpoint(self) -> CheckpointFiles:
        """The files with the weights and the tensors in them."""
        found = open_checkpoint(self.path)
        self._held.check_in_place()
        return found

    @cached_property
    def weights(self) -> Weights:
        from moe_jax.model_io.loading import leaf_specs

        leaves, where = leaf_specs(self.config), str(self.path)
        tensors = {self._plain_name(name): entry for name, entry in self.checkpoint.tensors.items()}
        table = self._table
        if self._whole is not None:
            table = self._whole.table(table, {name: entry.shape for name, entry in tensors.items()})
        try:
            if self.quantized_as is None:
                check_no_codes(tensors)
            else:
                table = (*table, *self.quantized_as.ignored(tensors))
                tensors = self.quantized_as.folded(tensors)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        if family_named(self.config.family).sees is not None and self.config.vision is not None:
            try:
                tensors = self._with_parts(tensors, self.config.vision)
            except InputError as error:
                raise InputError(f"{self.path}: {error}") from None
        return match_weights(tensors, self.config, leaves, where, table=table)

    def _plain_name(self, tensor: str) -> str:
        """Returns the name of a tensor as the table has it."""
        return plain_name(self.config, tensor if self._whole is None else self._whole.plain_name(tensor))

    def _with_parts(self, own: Mapping[str, TensorEntry], vision: VisionConfig) -> dict[str, TensorEntry]:
        """Returns the tensors of the checkpoint, and those of its tower and its projector that are in other files."""
        prefix, tower, projector = vision_format_named(vision.family).tower_prefix, {}, {}
        if self._tower is not None:
            tower = {prefix + plain_name(vision.tower, name): entry for name, entry in self._tower.tensors.items()}
        if (file := self._projector) is not None:
            tensors = of_projector(read_torch_file(file), file)
            projector = {plain_name(self.config, name): entry for name, entry in tensors.items()}
        return with_parts(own, tower, projector, vision, prefix)

    @cached_property
    def _tower(self) -> CheckpointFiles | None:
        folder = self._elsewhere.vision_tower
        return None if folder is None else open_checkpoint(folder)

    @property
    def _projector(self) -> Path | None:
        """The file of a projector, named or, where the weights have none, found beside them."""
        beside = self.path / PROJECTOR_FILE
        if self._elsewhere.projector is not None or family_named(self.config.family).sees is None:
            return self._elsewhere.projector
        return beside if not has_projector(self.checkpoint.tensors) and beside.is_file() else None

    def fingerprint(self) -> str:
        folder, projector = self._elsewhere.vision_tower, self._projector
        tower = [] if folder is None or self._tower is None else [folder / "config.json", *self._tower.files]
        others = [*tower, *([] if projector is None else [projector])]
        settings = [self.path / name for name in SETTINGS if (self.path / name).is_file()]
        return fingerprint_files([self.path / "config.json", *settings, *self.checkpoint.files, *others])

    def _check_in_place(self) -> None:
        self._held.check_in_place()


def processing_keys_of(source: ModelSource) -> Mapping[str, Any] | None:
    """Returns how pictures are processed, by the files that a model of any kind came with; None: nothing says it."""
    if isinstance(source, HuggingFaceDirectory):
        return source.processing_keys()
    files = by_name(source.tokenizer_files)
    found = (_of_pictures(name, read_json_object(files[name])) for name in (PREPROCESSOR, PROCESSOR) if name in files)
    return next((keys for keys in found if keys is not None), None)


def _of_pictures(name: str, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    keys = content.get("image_processor", content if name == PREPROCESSOR else None)
    return keys if isinstance(keys, Mapping) else None


def completed_config(data: Mapping[str, Any], elsewhere: Elsewhere, tensors: Collection[str]) -> Mapping[str, Any]:
    """Returns the keys of a config.json with what the names of `tensors`, and a tower's own config, say beside it.

    Raises:
      InputError: if parts are elsewhere that the format has in it, or are not there.
    """
    name = str(data.get("model_type"))
    family, format_ = FAMILIES.get(name), MODEL_TYPES.get(name)
    elsewhere.check(takes_parts=family is not None and family.sees is not None)
    if format_ is not None and format_.completed_by_names is not None:
        return format_.completed_by_names(data, tensors)
    if name in LANGUAGE_PARTS and LANGUAGE_PARTS[name].tied_by_names:
        return with_tie(data, tensors)
    if family is None or family.sees is None:
        return data
    if family.completed is not None:
        data = family.completed(data, tensors)
    if elsewhere.vision_tower is None:
        return data
    tower = read_json_object(elsewhere.vision_tower / "config.json", allow=("nonfinite",))
    return {**data, vision_format_named(family.sees).tower_key: tower}


def _needs_names(data: Mapping[str, Any]) -> bool:
    """Whether names of tensors say something about the model that its config.json does not."""
    name = str(data.get("model_type"))
    family, format_ = FAMILIES.get(name), MODEL_TYPES.get(name)
    if name in LANGUAGE_PARTS:
        return LANGUAGE_PARTS[name].tied_by_names
    return any(one is not None for one in (family and family.completed, format_ and format_.completed_by_names))


def is_hugging_face_directory(path: Path | str) -> bool:
    """Whether a directory has a config.json in the style of Hugging Face."""
    try:
        data = read_json_object(as_path(path) / "config.json", allow=("nonfinite",))
    except (OSError, InputError):
        return False
    return "model_type" in data or "architectures" in data
