"""The sources of an MoE besides a dense model: experts of several models, routers made from texts (methods.md 2.6).

Branch-Train-MiX takes experts from several models, and all other leaves from their mean. A router made from texts gives
an expert the tokens that look like those of its text.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.checks.streamed_model import StreamedModel
from moe_jax.core.data_sheets import available_memory
from moe_jax.core.errors import InputError, shown
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.data.tokenizer import parse_tokenizer
from moe_jax.files.regular_files import read_regular
from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import TOKENIZER
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig

# Fields of a config that do not change what a model with given leaves computes for a row of tokens.
_OF_NO_MATTER = frozenset(("family", "dtype", "bos_id", "eos_ids", "foreign"))
_MAX_BYTES = 64 << 20  # of a file of a tokenizer


class LazyLeaves(Mapping[str, np.ndarray]):
    """Leaves that are read each time they are asked for, so that none stays in memory."""

    def __init__(self, paths: Iterable[str], read: Callable[[str], np.ndarray]):
        self._paths, self._read = dict.fromkeys(paths), read

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._paths:
            raise KeyError(path)
        return self._read(path)

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class Branches:
    """Separately trained models of one architecture, read as the parts of an MoE. Leaves get the base's dtypes."""

    def __init__(self, base: ModelSource, models: Sequence[ModelSource], rest_from: Literal["mean", "base"]):
        """Checks the models, one for every copy of the FFN of the model `base` that is upcycled; reads no weights.

        A model that has another architecture or tokenizer than the base is an `InputError`.
        """
        for model in models:
            _check_alike(base, model)
        self._base, self._models, self._rest_from = base, models, rest_from
        self._dtypes = {path: spec.dtype for path, spec in base.specs().items()}

    def read(self, path: str) -> np.ndarray:
        """Returns a leaf that is not of an expert. Leaves of the models are added one after the other, in float32."""
        if self._rest_from == "base":
            return self._base.read(path)
        total = self._models[0].read(path).astype(np.float32)
        for model in self._models[1:]:
            total += model.read(path).astype(np.float32)
        total /= np.float32(len(self._models))
        return total.astype(self._dtypes[path])

    def ffn(self, prefix: str, names: Iterable[str]) -> Mapping[str, np.ndarray]:
        """Returns the FFN made of leaves that `read` returns, by the `names` of leaves below `prefix`."""
        return LazyLeaves(names, lambda name: self.read(prefix + name))

    def ffns(self, prefix: str, names: Iterable[str]) -> list[Mapping[str, np.ndarray]]:
        """Returns the FFN of every model, by the `names` of leaves below `prefix`."""
        names = tuple(names)

        def of(model: ModelSource) -> Mapping[str, np.ndarray]:
            return LazyLeaves(names, lambda name: model.read(prefix + name).astype(self._dtypes[prefix + name]))

        return [of(model) for model in self._models]


def _check_alike(base: ModelSource, model: ModelSource) -> None:
    """Raises `InputError`, naming the first difference, unless a model has the base's architecture and tokenizer."""
    where = f"--experts-from {model.path}"
    different = _difference(_comparable(base.config), _comparable(model.config))
    if different is None:
        ours, theirs = ({path: spec.shape for path, spec in one.specs().items()} for one in (base, model))
        different = _difference(ours, theirs)
    if different is not None:
        raise InputError(f"{where} has another architecture than {base.path}: {different}")
    different = _other_tokens(base, model)
    if different is not None:
        raise InputError(f"{where} has another tokenizer than {base.path}: {different}; ids must mean the same in both")


def _comparable(config: ModelConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if name not in _OF_NO_MATTER}


def _difference(ours: Any, theirs: Any, name: str = "") -> str | None:
    """Returns the first entry in which two nested values differ; None: they are equal."""
    if ours == theirs:
        return None
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        point = f"{name}." if name else ""
        pairs = [(f"{point}{key}", ours.get(key), theirs.get(key)) for key in dict.fromkeys((*ours, *theirs))]
    elif isinstance(ours, tuple) and isinstance(theirs, tuple):
        if len(ours) != len(theirs):
            return f"{len(theirs)} {name}, not {len(ours)}"
        pairs = [(f"{name}[{i}]", one, other) for i, (one, other) in enumerate(zip(ours, theirs, strict=True))]
    for inner, one, other in pairs:
        found = _difference(one, other, inner)
        if found is not None:
            return found
    return f"{name} is {shown(theirs)}, not {shown(ours)}"


def _other_tokens(base: ModelSource, model: ModelSource) -> str | None:
    """Returns how the tokenizers of two models differ; None if ids mean the same in both, or one model has none."""
    ours, theirs = ({file.name: as_path(file) for file in one.tokenizer_files} for one in (base, model))
    for name in sorted(ours.keys() & theirs.keys()):
        if name != TOKENIZER and not name.endswith((".model", ".tiktoken")):
            continue  # templates and settings may differ between models of one vocabulary
        first, second = (read_regular(files[name], max_bytes=_MAX_BYTES) for files in (ours, theirs))
        if first == second:
            continue
        if name != TOKENIZER:
            return f"{name} is another file"
        first, second = _vocabulary(first, ours[name]), _vocabulary(second, theirs[name])
        for token in dict.fromkeys((*first, *second)):
            if first.get(token) != second.get(token):
                return f"the token {shown(token)} is {_id(second, token)}, not {_id(first, token)}"
    return None


def _vocabulary(content: bytes, file: object) -> dict[str, int]:
    """Returns tokens and their ids, ordered by id; the library's own order is different every time."""
    vocabulary = parse_tokenizer(content, file).get_vocab(with_added_tokens=True)
    return dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"


MOST_TOKENS = 512
"""Number of tokens of a text that are read at most: all texts go through the model at once."""


class Prompt(NamedTuple):
    """A text for an expert."""

    ids: Int[np.ndarray, " n"]  # ids of its tokens
    first: int = 0  # index of the first token that is counted; BOS may be before it

    def fingerprint(self) -> str:
        """Returns a text that is the same for the same tokens only."""
        return hashlib.sha256(np.asarray([self.first, *self.ids], np.int64).tobytes()).hexdigest()


def router_kernels(
    source: ModelSource, prompts: Sequence[Prompt], layers: Sequence[int], progress: Progress = no_progress
) -> dict[int, Float[np.ndarray, "d C"]]:
    """Returns routers for a dense model's layers, made from the hidden states of texts, one for each copy of the FFN.

    The column of a text is the mean, over its tokens, of the inputs of the layer's FFN (after the norm before it,
    where there is one), divided by its Euclidean norm. So the logit of a token is the length of its own hidden state
    times the cosine between it and the text's mean. This is our definition of what mergekit calls gate mode "hidden";
    there, as far as we know, states are those between layers, and negative prompts can be subtracted.

    The model runs once for all texts, in float32, with one layer in memory at a time.

    Raises:
      InputError: if the model sees tokens after the present one, a text has no tokens or equals another one, the mean
        of its hidden states is zero or not finite, or a layer does not fit into memory.
    """
    config = source.config
    if config.has_encoder or any(layer.attention.mask != "causal" for layer in config.layers):
        raise InputError("routers are made from texts by models that read from left to right, and this one does not")
    most = min(MOST_TOKENS, config.max_positions)
    rows = [prompt.ids[:most] for prompt in prompts]
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), start=1):
        if len(row) <= prompt.first:
            raise InputError(f"text {number} for the router has no tokens")
        for other in range(number - 1):
            if np.array_equal(rows[other], row):
                raise InputError(
                    f"texts {other + 1} and {number} for the router are equal in their first {most} tokens, so that it "
                    "could not tell their experts apart"
                )
    # The tokens of a text do not see the padding after it.
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    model = StreamedModel(config, source.specs(), tokens, with_logits=False)
    available = available_memory()
    if available is not None and model.memory > available:
        raise InputError(
            f"the texts for the router need {show_bytes(model.memory)} in the largest layer, {show_bytes(available)} "
            "are free; give shorter texts, or use a larger machine"
        )
    kernels: dict[int, np.ndarray] = {}
    last = max(layers)

    def see(layer: int, states: Float[Array, "C T d"]) -> None:
        if layer in layers:
            wide = np.asarray(states, np.float64)
            means = [
                row[prompt.first : len(ids)].mean(axis=0) for row, prompt, ids in zip(wide, prompts, rows, strict=True)
            ]
            kernels[layer] = _normalised(np.stack(means, axis=1), layer)
        progress("reading texts for the router", layer + 1, last + 1)

    model.mlp_inputs(source.read, see, stop=last + 1)
    return kernels


def _normalised(columns: Float[np.ndarray, "d C"], layer: int) -> Float[np.ndarray, "d C"]:
    norms = np.linalg.norm(columns, axis=0)
    if not (np.isfinite(norms).all() and norms.all()):
        raise InputError(f"layer {layer}: the hidden states of a text have no direction: they are zero or not finite")
    return (columns / norms).astype(np.float32)
