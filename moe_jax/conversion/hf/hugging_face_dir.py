"""`HuggingFaceDirectory`: a Hugging Face checkpoint, read leaf by leaf as if it were a model directory."""

import tempfile
import weakref
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_jax.conversion.checkpoint_source import CheckpointSource
from moe_jax.conversion.families import family_named
from moe_jax.conversion.formats.checkpoint_files import CheckpointFiles, open_checkpoint
from moe_jax.conversion.hf.hf_config import read_hf_config
from moe_jax.conversion.weights import Weights, match_weights
from moe_jax.core.errors import InputError
from moe_jax.files.byte_files import fingerprint_files
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.regular_files import hold
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import TOKENIZER, tokenizer_files_in
from moe_jax.model_io.lineage import read_lineage
from moe_jax.models.serialize import FORMAT


class HuggingFaceDirectory(CheckpointSource):
    """A directory with config.json and weights as safetensors or PyTorch files. A `ModelSource`.

    Weight files are opened when they are first needed: for `config`, a directory with just a config.json is enough. If
    another directory takes this one's place in the meantime, reading is an error: the two must not be mixed.
    """

    def __init__(self, path: Path | str, *, ignored_keys: Collection[str] = ()):
        """Reads the config.

        Args:
          path: of the directory.
          ignored_keys: unknown keys of config.json that are assumed to change nothing.

        Raises:
          FileNotFoundError: if there is no such directory.
          InputError: if there is no config.json that we can read.
        """
        super().__init__()
        self.path = as_path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"no Hugging Face directory at {path}")
        self._held = hold(self.path)
        data = read_json_object(Path("config.json"), allow=("nonfinite",), inside=self._held)
        if data.get("format") == FORMAT:
            raise InputError(f"{path} is a model directory, not a Hugging Face directory")
        try:
            self.config = read_hf_config(data, ignored=ignored_keys)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files that are copied with the model: tokenizer, generation settings, chat templates.

        If a family has a vocabulary in a format of its own, a tokenizer.json is made from it when these files are first
        needed. It vanishes with the object.

        Raises:
          InputError: if the vocabulary is damaged, or a file is a link out of the directory.
        """
        self._held.check_in_place()
        files = tokenizer_files_in(self.path)
        vocabulary = family_named(self.config.family).vocabulary
        if vocabulary is None or any(file.name == TOKENIZER for file in files):
            return files
        return (*files, *(self._made_tokenizer for file in files if file.name == vocabulary[0]))

    @cached_property
    def _made_tokenizer(self) -> Path:
        vocabulary = family_named(self.config.family).vocabulary
        assert vocabulary is not None
        name, make = vocabulary
        content = make(self.path / name)
        folder = tempfile.TemporaryDirectory(prefix="moe-jax-")
        weakref.finalize(self, folder.cleanup)
        made = Path(folder.name) / TOKENIZER
        made.write_text(content, encoding="utf-8")
        return made

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The history of the model: in a directory that `export` wrote, one entry per command; in others empty."""
        return read_lineage(self.path, inside=self._held)

    @cached_property
    def checkpoint(self) -> CheckpointFiles:
        """The files with the weights and the tensors in them."""
        found = open_checkpoint(self.path)
        self._held.check_in_place()
        return found

    @cached_property
    def weights(self) -> Weights:
        """The tensors that make up each leaf; raises `InputError` unless all fit the config."""
        from moe_jax.model_io.loading import leaf_specs

        return match_weights(self.checkpoint, self.config, leaf_specs(self.config), str(self.path))

    def fingerprint(self) -> str:
        """Returns a SHA-256 of config.json and the weight files: their names, sizes and samples of their contents."""
        return fingerprint_files([self.path / "config.json", *self.checkpoint.files])

    def _check_in_place(self) -> None:
        self._held.check_in_place()


def is_hugging_face_directory(path: Path | str) -> bool:
    """Whether a directory has a config.json in the style of Hugging Face."""
    try:
        data = read_json_object(as_path(path) / "config.json", allow=("nonfinite",))
    except (OSError, InputError):
        return False
    return "model_type" in data or "architectures" in data
