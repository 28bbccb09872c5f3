"""Whole directories of Hugging Face: configs against weights, indexes, tokenizers, and files that are no files."""

import json
import os
import random
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.api.open_source import open_source
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.data.tokenizer import Tokenizer
from tests.attack.attacks import Attack, command
from tests.attack.mutations import mutated_json
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint

INDEX = "model.safetensors.index.json"
Leaves = dict[str, np.ndarray]


class Original(NamedTuple):
    """A directory: its files, and the leaves of the model in it."""

    files: dict[str, bytes]
    leaves: Leaves

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def _original(name: str, shards: int) -> Original:
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        folder = write_checkpoint(Path(scratch), CONFIGS[name], random_tensors(CONFIGS[name]), shards=shards)
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
        (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        return Original(files, _read(folder, folder))


def _without_own_bos() -> Original:
    """A directory whose tokenizer leaves it to its settings whether documents begin with a token."""
    files, leaves = _original("llama", 1)
    return Original(files | {"tokenizer.json": json.dumps(_tokenizer() | {"post_processor": None}).encode()}, leaves)


def _tokenizer() -> dict[str, Any]:
    """A tokenizer of 64 tokens with the parts that most have."""
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *map(chr, range(33, 94))])}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": words[name], "content": name, **special} for name in ("<unk>", "<s>", "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "!"}, {"type": "NFC"}]},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteFallback"},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": words,
                  "merges": []},
    }  # fmt: skip


def _read(folder: Path, out: Path) -> Leaves:
    source = open_source(folder)
    assert isinstance(source, HuggingFaceDirectory)
    return {path: source.read(path) for path in source.specs()}


def _differs(original: Original, folder: Path, read: Leaves) -> str | None:
    """The weights are those that were written: nothing that was changed says how they are stored."""
    if read.keys() != original.leaves.keys():
        return "other leaves"
    changed = [path for path, leaf in read.items() if leaf.tobytes() != original.leaves[path].tobytes()]
    return f"other weights in {changed[0]}" if changed else None


def _edit(name: str) -> Callable[[random.Random, Original, Path], None]:
    """Another version of one of the JSON files."""

    def make(chance: random.Random, original: Original, folder: Path) -> None:
        original.write(folder)
        (folder / name).write_bytes(mutated_json(chance, json.loads(original.files[name])))

    return make


def _replace(chance: random.Random, original: Original, folder: Path) -> None:
    """One file is something else."""
    original.write(folder)
    file = folder / chance.choice(sorted(original.files))
    file.unlink()
    chance.choice(_NO_FILES)(file)


def _link(target: str) -> Callable[[Path], None]:
    return lambda file: os.symlink(target, file)


def _socket(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's path may have a hundred characters
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(file.name)
    os.chdir(here)


def _sparse(file: Path) -> None:
    with open(file, "wb") as content:
        content.truncate(1 << 40)


def _pipe_behind_link(file: Path) -> None:
    os.mkfifo(file.with_suffix(".pipe"))
    os.symlink(file.with_suffix(".pipe"), file)


_NO_FILES: tuple[Callable[[Path], None], ...] = (
    os.mkfifo, os.mkdir, _socket, _sparse, _pipe_behind_link, _link("/dev/zero"), _link("/dev/full"), _link("/dev/tty"),
    _link("/proc/self/mem"), _link("/proc/self/environ"), _link("/proc/kmsg"), _link("nothing"), _link("."),
    lambda file: os.symlink(file.name, file), lambda file: file.write_bytes(b""),
)  # fmt: skip


def _convert(folder: Path, out: Path) -> Leaves:
    command("convert", folder, out / "model")
    source = open_source(out / "model")
    return {path: source.read(path) for path in source.specs()}


def _tokenize(folder: Path, out: Path) -> list[int]:
    source = open_source(folder)
    tokenizer = Tokenizer(folder / "tokenizer.json", source.config)
    ids = tokenizer.prompt("AB! <s> \u00e9")
    tokenizer.decode(ids.tolist())
    return ids.tolist()


def _outside_vocabulary(original: Original, folder: Path, read: list[int]) -> str | None:
    return None if all(0 <= token < CONFIGS["llama"]["vocab_size"] for token in read) else f"ids {read[:10]}"


ATTACKS = (
    *(
        Attack(
            name=f"weights of {name} against config.json",
            original=lambda name=name: _original(name, 1),
            make=_edit("config.json"),
            read=_read,
            wrong=_differs,
            quick=60,
        )
        for name in ("llama-biases", "mixtral", "qwen2")
    ),
    Attack(name=INDEX, original=lambda: _original("llama", 2), make=_edit(INDEX), read=_read, wrong=_differs),
    Attack(name="files that are none", original=lambda: _original("llama", 2), make=_replace, read=_convert,
           wrong=_differs, quick=60),
    Attack(name="tokenizer.json", original=lambda: _original("llama", 1), make=_edit("tokenizer.json"), read=_tokenize,
           wrong=_outside_vocabulary),
    Attack(name="tokenizer_config.json", original=_without_own_bos, make=_edit("tokenizer_config.json"),
           read=_tokenize, wrong=_outside_vocabulary, quick=60),
)  # fmt: skip
