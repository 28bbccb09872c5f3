"""`GGUFModel`: a GGUF file, or several that one model was split into, read leaf by leaf."""

import importlib.util
import json
import re
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.conversion.checkpoint_source import CheckpointSource, Weights, match_weights
from moe_jax.conversion.gguf.architectures.gguf_architectures import architecture_of
from moe_jax.conversion.gguf.architectures.gguf_description import ROPE_FACTORS
from moe_jax.conversion.gguf.gguf_config import hugging_face_config
from moe_jax.conversion.gguf.gguf_header import GGUFHeader, read_gguf_header
from moe_jax.conversion.gguf.gguf_vocabulary import tokenizer_of
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.conversion.tensors import DTYPES, TensorEntry
from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.files.byte_files import fingerprint_files, open_bytes
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import TOKENIZER

MAX_FILES = 10_000
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GGUFModel(CheckpointSource):
    """A model in a GGUF file: its config, its tensors and its tokenizer. A `ModelSource`.

    Tensors of float32, float16 and bfloat16 keep their bits; quantised ones are float32, decoded a few megabytes at a
    time. The tokenizer's files are made from the metadata when they are first needed, and vanish when the process ends.
    """

    def __init__(self, path: Path | str):
        """Reads the headers of all files.

        Raises:
          FileNotFoundError: if there is no such file.
          InputError: if a file is damaged, one of several is missing, or the architecture or a key of it is unknown.
        """
        super().__init__()
        self.path = as_path(path)
        self._headers = _read_all(self.path)
        self._metadata = next(iter(self._headers.values())).metadata
        tensors = {name: entry for header in self._headers.values() for name, entry in header.tensors.items()}
        try:
            _, self._architecture = architecture_of(self._metadata)
            self.config = read_hf_config(hugging_face_config(self._metadata, tensors, self._rope_factors(tensors)))
        except InputError as error:
            said = str(error).removeprefix("config.json: ")
            raise InputError(f"{self.path}: {said}") from None
        self._tensors = tensors

    @cached_property
    def weights(self) -> Weights:
        from moe_jax.model_io.loading import leaf_specs

        if self.quantized and importlib.util.find_spec("gguf") is None:
            raise InputError("quantised tensors of GGUF files need the package gguf: pip install 'moe-jax[gguf]'")
        tensors = {name: self._architecture.in_table(name, entry) for name, entry in self._tensors.items()}
        for i, layer in enumerate(self.config.layers if self._architecture.interleaved else ()):
            for which, heads in (("q", layer.softmax_attention.num_heads), ("k", layer.softmax_attention.num_kv_heads)):
                for name in (f"blk.{i}.attn_{which}.weight", f"blk.{i}.attn_{which}.bias"):
                    if name in tensors:
                        tensors[name] = tensors[name]._replace(interleaved=heads)
        leaves, table = leaf_specs(self.config), self._architecture.table_of(self.config, self._tensors)
        return match_weights(tensors, self.config, leaves, str(self.path), table=table, described_by="metadata")

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The files tokenizer.json and tokenizer_config.json, made from the metadata; none if there is no tokenizer."""
        return self._made_files(self._tokenizer)

    def _tokenizer(self) -> dict[str, str]:
        try:
            made = tokenizer_of(self._metadata)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        if made is None:
            return {}
        return {TOKENIZER: made[0], "tokenizer_config.json": json.dumps(made[1], indent=2) + "\n"}

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The history of the model, which is empty: GGUF files do not record it."""
        return []

    @property
    def quantized(self) -> dict[str, int]:
        """Number of tensors in each type of blocks."""
        return Counter(entry.blocks.name for entry in self._tensors.values() if entry.blocks is not None)

    def fingerprint(self) -> str:
        return fingerprint_files(self._headers)

    def _check_in_place(self) -> None:
        for path, header in self._headers.items():
            try:
                with open_bytes(path) as file:
                    same = file.identity == header.identity
            except FileNotFoundError:
                same = False
            if not same:
                raise InputError(f"{path} was replaced while it was read; start again")

    def _rope_factors(self, tensors: dict[str, TensorEntry]) -> np.ndarray | None:
        entry = tensors.get(ROPE_FACTORS)
        if entry is None:
            return None
        if len(entry.shape) != 1 or entry.blocks is not None or entry.shape[0] > 4096:
            raise InputError(f"{ROPE_FACTORS} has shape {shown(list(entry.shape))}, expected a few plain numbers")
        factors = np.empty(entry.shape, DTYPES[entry.dtype])
        self._files.read_into(entry, 0, factors)
        return factors.astype(np.float32)


def _read_all(path: Path) -> dict[Path, GGUFHeader]:
    """Reads the headers of all files of a model, of which `path` is the first, and checks that they belong together."""
    first = read_gguf_header(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return {path: first}
    if type(count) is not int or not 1 < count <= MAX_FILES:
        raise InputError(f"{path}: split.count is {shown(count)}, expected a number of files")
    found = _SPLIT.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise InputError(f"{path} is one of {count} files, which are called NAME-00001-of-{count:05d}.gguf and so on")
    if int(found["number"]) != 1 or first.metadata.get("split.no") != 0:
        raise InputError(f"{path} is one of {count} files; give the first, {found['stem']}-00001-of-{count:05d}.gguf")
    headers = {path: first}
    others = [path.with_name(f"{found['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(2, count + 1)]
    raise_if_any([f"{shown(other.name)} is missing; fetch it" for other in others if not other.is_file()], str(path))
    names = set(first.tensors)
    for number, other in enumerate(others, 1):
        headers[other] = header = read_gguf_header(other)
        if header.metadata.get("split.no") != number or header.metadata.get("split.count") != count:
            raise InputError(f"{other} does not say that it is file {number + 1} of {count}; fetch it again")
        if twice := names & header.tensors.keys():
            raise InputError(f"{shown(min(twice))} is in {other} and in a file before it")
        names |= header.tensors.keys()
    expected = first.metadata.get("split.tensors.count", len(names))
    if expected != len(names):
        raise InputError(f"{path} and its other files hold {len(names)} tensors, it says {shown(expected)}")
    return headers
