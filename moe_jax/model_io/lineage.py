"""The origin of models: the Hugging Face Hub; and lineages, which say how a model was made, one entry per command.

`model_names` says how a model of the Hub is named. The config of a model, its tokenizer and its weights are downloaded,
as safetensors or, where there are none, as PyTorch files; code never is. Files lie in the Hub's own cache, which is
also used when there is no network.
"""

import contextlib
import datetime
import fnmatch
import glob
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import moe_jax
from moe_jax.core.errors import InputError, first_sentence, raise_if_any, shown
from moe_jax.files.byte_files import fingerprint_files
from moe_jax.files.json_toml import ANYTHING, read_json
from moe_jax.files.regular_files import Directory, hold, read_regular
from moe_jax.files.storage_path import StoragePath, as_path, nearest_path
from moe_jax.files.tokenizer_files import goes_with_model
from moe_jax.model_io.model_names import NAME, is_hub_name
from moe_jax.model_io.model_source import ModelSource

CONFIG, CARD = "config.json", "README.md"
SETTINGS = ("quantize_config.json", "quant_config.json")
"""Files in which AutoGPTQ and AutoAWQ said how a checkpoint is quantised, before config.json did."""
OLD_GPTQ = "gptq_model-*bit-*g.safetensors"
"""The name, as a pattern, that the first releases of AutoGPTQ gave to weights."""
_MAX_CARD = 1 << 20
_SNAPSHOT = re.compile(r"models--(?P<organisation>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")
_SHARD = r"(-\d+(-of-\d+)?)?"
_SAFETENSORS = re.compile(rf"model{_SHARD}\.safetensors(\.index\.json)?")
_TORCH = re.compile(rf"pytorch_model{_SHARD}\.bin(\.index\.json)?")


def local_model(path: Path | str, *, weights: bool = True) -> Path:
    """Returns a path as it is; for `org/name[@revision]` on the Hub, downloads the files and returns their folder.

    Without `weights` only the config is needed, and neither the weights nor the tokenizer.

    Raises:
      InputError: if the package is absent, or the Hub has no such model, does not give it, or cannot be reached and the
        cache does not have it.
    """
    if not is_hub_name(path):
        return as_path(path)
    found = NAME.fullmatch(os.fspath(path))
    assert found is not None
    if importlib.util.find_spec("huggingface_hub") is None:
        raise InputError(
            f"there is no path {path} in {Path.cwd()}{nearest_path(path)}; to fetch it from the Hugging Face Hub, pip "
            "install 'moe-jax[hub]', or give the path of a copy"
        )
    try:
        with _quiet():
            return _fetch(found["repository"], found["revision"], weights)
    except Exception as error:
        raise InputError(
            f"there is no path {path} in {Path.cwd()}{nearest_path(path)}; such a name is looked for on the Hugging "
            f"Face Hub too, but {_why(error)}"
        ) from None


def hub_origin(path: Path | str) -> str | None:
    """Returns `org/name@commit` for a folder in the Hub's cache; None for any other."""
    found = _SNAPSHOT.search(os.fspath(path))
    return None if found is None else f"{found['organisation']}/{found['name']}@{found['commit']}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the library's messages about its attempts: the error in the end says what is needed."""
    import huggingface_hub.utils.logging  # which sets the level of its logger when it is imported

    logger = logging.getLogger(huggingface_hub.__name__)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _fetch(repository: str, revision: str | None, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    # One request first: if the Hub cannot be reached, the library would retry a download for half a minute.
    try:
        about = huggingface_hub.HfApi().model_info(repository, revision=revision)
    except Exception as error:
        try:
            config = huggingface_hub.hf_hub_download(repository, CONFIG, revision=revision, local_files_only=True)
        except LocalEntryNotFoundError:
            raise error from None
        return Path(config).parent
    if not weights:
        return Path(huggingface_hub.hf_hub_download(repository, CONFIG, revision=revision)).parent
    names = [file.rfilename for file in about.siblings or ()]
    return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=files_of_model(names)))


def files_of_model(names: Iterable[str]) -> list[str]:
    """Returns the files of a repository that make up a model, those in folders by their paths there."""
    names = [*names]
    here = [name for name in names if "/" not in name]
    safetensors = [name for name in here if _SAFETENSORS.fullmatch(name)]
    safetensors = safetensors or fnmatch.filter(here, OLD_GPTQ)
    weights = safetensors or [name for name in here if _TORCH.fullmatch(name)]
    if not weights:
        raise InputError("it has neither safetensors nor PyTorch files there; if it has a GGUF file, fetch that alone")
    # The library takes names as patterns.
    others = (CONFIG, CARD, *SETTINGS)
    return [glob.escape(name) for name in names if name in others or name in weights or goes_with_model(name)]


def _why(error: Exception) -> str:
    """Says why a download failed, and what to do."""
    from huggingface_hub import errors

    hub = "the Hugging Face Hub"
    kinds: tuple[tuple[Any, str], ...] = (
        (errors.GatedRepoError, f"{hub} gives it only to those who were granted access: ask for it on its page, then "
                                "log in with `hf auth login`"),
        (errors.RevisionNotFoundError, f"the model on {hub} has no such revision"),
        (errors.RepositoryNotFoundError, f"{hub} has no such model, or it is private: log in with `hf auth login` if "
                                         "it is yours"),
        (errors.OfflineModeIsEnabled, f"{hub} is switched off (HF_HUB_OFFLINE) and its cache does not have the model"),
        (errors.LocalEntryNotFoundError, f"{hub} cannot be reached and its cache does not have the model"),
        (errors.EntryNotFoundError, f"the model on {hub} has no {CONFIG}"),
        (InputError, f"of the model on {hub}: {error}"),
    )  # fmt: skip
    otherwise = f"{hub} cannot be reached: {type(error).__name__}, {first_sentence(error)}"
    return next((why for kind, why in kinds if isinstance(error, kind)), otherwise)


LINEAGE_FILE = "lineage.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def new_lineage_entry(
    command: str,
    options: Mapping[str, Any],
    sources: Iterable[ModelSource | Path],
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describes one command, with the versions of the packages and the date.

    Args:
      command: name of the command.
      options: JSON-able, or paths.
      sources: models and files that it read; for a model from the Hugging Face Hub, name and commit are recorded.
      measured: JSON-able measurements (errors, bytes, perplexity).
    """
    versions = {"moe_jax": moe_jax.__version__, "python": platform.python_version()}
    return {
        "command": command,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "sources": [_describe(source) for source in sources],
        "versions": versions | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "measured": dict(measured or {}),
    }


def job_of(lineage: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the identity of the work that a lineage describes: all but date, versions and measurements."""
    return [{name: entry.get(name) for name in ("command", "options", "sources")} for entry in lineage]


def read_lineage(path: Path, *, inside: Directory | None = None) -> list[dict[str, Any]]:
    """Returns the lineage of a model directory; no entries for a directory without one, such as Hugging Face's.

    `inside` is the directory itself, if it is open already.

    Raises:
      InputError: if lineage.json is not a list of entries.
    """
    held = inside or hold(path)
    if not held.is_file(LINEAGE_FILE):
        return []
    entries = read_json(Path(LINEAGE_FILE), allow=ANYTHING, inside=held)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "command" in entry for entry in entries):
        raise InputError(f"{held.path / LINEAGE_FILE} is not a list of entries, each with a 'command'")
    for i, entry in enumerate(entries):
        _check_entry(entry, f"{held.path / LINEAGE_FILE}, entry {i}")
    return entries


_TYPES = {"command": str, "options": dict, "sources": list, "versions": dict, "date": str, "measured": dict}


def _check_entry(entry: Mapping[str, Any], where: str) -> None:
    """Raises `InputError` unless the values of an entry have the types that `new_lineage_entry` writes."""
    wrong = [name for name, kind in _TYPES.items() if name in entry and type(entry[name]) is not kind]
    raise_if_any([f"{name} is {shown(entry[name])}" for name in wrong], where)
    for source in entry.get("sources", ()):
        if not isinstance(source, dict) or not all(type(source.get(key)) is str for key in ("path", "fingerprint")):
            raise InputError(f"{where}: a source is {shown(source)}, expected an object with 'path' and 'fingerprint'")


def _describe(source: ModelSource | Path) -> dict[str, str]:
    if isinstance(source, Path):
        return {"path": str(source), "fingerprint": fingerprint_files([source])}
    origin = hub_origin(source.path)
    described = {"path": str(source.path), "fingerprint": source.fingerprint()}
    more = {"hub": origin, "license": _licence_beside(as_path(source.path))}
    return described | {name: text for name, text in more.items() if text is not None}


def _licence_beside(directory: StoragePath) -> str | None:
    """Returns the licence that the model card of a Hugging Face directory names at its head; None: none."""
    card = directory / CARD
    if not directory.renames or not card.is_file():
        return None
    try:
        text = read_regular(card, max_bytes=_MAX_CARD).decode()
    except (InputError, UnicodeDecodeError):  # a card is no part of the model
        return None
    head = re.match(r"---\n(.*?)\n---\n", text.replace("\r\n", "\n"), re.DOTALL)
    found = head and re.search(r"^license: *([\w.+-]{1,60}) *$", head[1], re.MULTILINE)
    return found[1] if found else None
