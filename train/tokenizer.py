"""Converts examples to token ids with a Hugging Face `tokenizer.json`."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tokenizers

from moe_jax.errors import InputError, clipped, first_line, shown
from moe_jax.json_toml import ANYTHING, read_json_object
from moe_jax.models import ModelConfig
from moe_jax.regular_files import read_regular
from moe_jax.train.sources import Example

Edge = Literal["auto", "always", "never"]
MAX_BYTES = 64 << 20  # of a tokenizer.json; those of 250,000 tokens have half


class Pairs(NamedTuple):
    """Examples as (token, next token) pairs: every token of a document except the first is a target exactly once.

    Attributes:
      tokens: Int32[n], the inputs.
      targets: Int32[n], the next tokens.
      weights: Float32[n], 0 for targets that are not scored.
      starts: Bool[n], true for the first token of a document.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    starts: np.ndarray


class Tokenizer:
    """A `tokenizer.json` together with the special tokens a model uses.

    Args:
      path: the file.
      config: the model the ids are for.
      bos, eos: see `recipe.DataSection`.

    Raises:
      FileNotFoundError, InputError: no such file, not a tokenizer, or a special token that is asked for but unknown.
    """

    def __init__(self, path: Path, config: ModelConfig, *, bos: Edge = "auto", eos: Edge = "auto"):
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}")
        content = read_regular(path, max_bytes=MAX_BYTES)
        self.path = path
        with self._faults():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # The file may contain truncation and padding settings from its last use.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocab_size = config.vocab_size
        own_bos = self._own_bos(config)
        known_bos = config.bos_id if own_bos is None else own_bos
        for name, setting, known in (("bos", bos, known_bos is not None), ("eos", eos, bool(config.eos_ids))):
            if setting == "always" and not known:
                raise InputError(f'data.{name} = "always", but the model names no {name.upper()} token')
        self._bos = {"auto": own_bos, "always": known_bos, "never": None}[bos]
        last = config.eos_ids[0] if config.eos_ids and eos != "never" else None
        self._eos_after_response = last
        self._eos_after_text = last if eos == "always" or self._bos is None else None

    def encode(self, text: str) -> np.ndarray:
        """Int32[n] ids of `text`, whole and without special tokens."""
        return self._checked(self._encoded(text).ids)

    def prompt(self, text: str) -> np.ndarray:
        """Int32[n] ids of `text` as the beginning of a document, with BOS before it where documents begin with one."""
        ids = self._encoded(text).ids
        return self._checked(ids if self._bos is None else [self._bos, *ids])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        with self._faults():
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def pairs(self, examples: Sequence[Example]) -> Pairs:
        """Tokenises the examples of a record, each a document of its own.

        Raises:
          InputError: if an id lies outside the model's vocabulary.
        """
        parts = [self._document(example) for example in examples]
        parts = [(ids, scored) for ids, scored in parts if len(ids) > 1]
        if not parts:
            return Pairs(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, bool))
        return Pairs(
            np.concatenate([ids[:-1] for ids, _ in parts]),
            np.concatenate([ids[1:] for ids, _ in parts]),
            np.concatenate([scored[1:] for _, scored in parts]),
            np.concatenate([np.arange(len(ids) - 1) == 0 for ids, _ in parts]),
        )

    def _document(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._encoded(example.text)
        ids = list(encoding.ids)
        # A token that spans the boundary between prompt and response belongs to the response.
        scored = [float(end > example.prompt_chars) for _, end in encoding.offsets]
        if example.begins and self._bos is not None:
            ids, scored = [self._bos, *ids], [0.0, *scored]
        eos = self._eos_after_response if example.is_response else self._eos_after_text
        if example.ends and eos is not None:
            ids, scored = [*ids, eos], [*scored, 1.0]
        if not example.prompt_chars:
            scored = [1.0] * len(ids)
        return self._checked(ids), np.asarray(scored, np.float32)

    def _encoded(self, text: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        with self._faults():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Makes errors of what the library does with the file ours."""
        try:
            yield
        except BaseException as error:
            # The library raises bare `Exception`; a panic of its Rust code is not even that, and has no public name.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise InputError(f"{self.path} is not a tokenizer.json: {clipped(first_line(error))}") from None

    def _own_bos(self, config: ModelConfig) -> int | None:
        """The BOS token that the tokenizer itself adds, if it adds one."""
        plain, special = self._encoded("a").ids, self._encoded("a", add_special_tokens=True).ids
        if len(special) > len(plain) and special[0] != plain[0]:
            return special[0]
        return config.bos_id if self._settings().get("add_bos_token") is True else None

    def _settings(self) -> dict[str, Any]:
        """tokenizer_config.json beside the file: some tokenizers (DeepSeek-Coder's) name their BOS only there."""
        file = self.path.with_name("tokenizer_config.json")
        return read_json_object(file, allow=ANYTHING) if file.exists() else {}

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        array = np.asarray(ids, np.int64)  # some are too large for the type that is returned
        if array.size and array.max() >= self._vocab_size:
            worst = int(array.max())
            raise InputError(
                f"{self.path} gives token id {worst} ({shown(self._tokenizer.id_to_token(worst))}), but the model's "
                f"vocabulary has {self._vocab_size} entries: the tokenizer is not this model's"
            )
        return array.astype(np.int32)


def find_tokenizer(files: Sequence[Path], where: object) -> Path:
    """The `tokenizer.json` among a model's files.

    Raises:
      InputError: if there is none.
    """
    for file in files:
        if Path(file).name == "tokenizer.json":
            return Path(file)
    raise InputError(f"{where} has no tokenizer.json; name one with data.tokenizer")
