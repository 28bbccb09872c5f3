"""Token ids of examples, made with a Hugging Face `tokenizer.json`."""

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import UInt8

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.data.chat_template import FILE as CHAT_TEMPLATE
from moe_jax.data.chat_template import read_settings, template_file
from moe_jax.data.pictures.picture_sources import MARK, PictureSource, check_places
from moe_jax.data.rows import Example
from moe_jax.data.tokens.text_windows import Encoded, LongTexts
from moe_jax.data.tokens.token_bytes import TokenBytes
from moe_jax.data.tokens.token_lengths import most_characters
from moe_jax.data.tokens.tokenizer_bounds import check_growth
from moe_jax.files.json_toml import is_unicode
from moe_jax.files.regular_files import read_regular
from moe_jax.files.storage_path import as_path, raise_no_file
from moe_jax.files.tokenizer_files import TOKENIZER, read_tokenizer_file, tokenizer_files
from moe_jax.files.tokenizer_size import check_size
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import tokens_per_picture


class Document(NamedTuple):
    """A document, or a part of one, as tokens.

    Attributes:
      ids: Int32[n].
      scored: Float32[n], 0 for tokens that are not.
      slots: Int32[n], which feature of its pictures stands at a token, counted from 1 over all; 0: none. None: no
        pictures.
      pictures: in the order in which they stand in it.
    """

    ids: np.ndarray
    scored: np.ndarray
    slots: np.ndarray | None = None
    pictures: tuple[PictureSource, ...] = ()


Edge = Literal["auto", "always", "never"]
MAX_BYTES = 64 << 20  # of a tokenizer.json; those of 250,000 tokens have half


class Pairs(NamedTuple):
    """Examples as (token, next token) pairs: every token of a document except the first is a target exactly once.

    Attributes:
      tokens: Int32[n], the inputs.
      targets: Int32[n], the next tokens.
      weights: Float32[n], 0 for targets that are not scored.
      starts: Bool[n], true for the first token of a document.
      slots: Int32[n], which feature of the pictures of all examples stands at an input, counted from 1; 0: none.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    slots: np.ndarray


class Pair(NamedTuple):
    """An input and its target as model inputs: the model predicts every target from the tokens so far.

    Attributes:
      tokens: Int32[n]. With an encoder, the start token of the decoder and all targets but the last; without one, the
        whole document but its last token.
      targets: Int32[n], the next tokens.
      weights: Float32[n], 0 for targets that are not scored: those of a prompt.
      inputs: Int32[m], for the encoder; None: the model has none.
      input_was_cut, target_was_cut: whether input and target were longer than the lengths asked for.
      slots: Int32[n], as of a `Document`; None: no pictures.
      pictures: number of those that the slots count.
      pixels: returns theirs, UInt8[m, H, W, 3], as the model's processing makes them.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    inputs: np.ndarray | None = None
    input_was_cut: bool = False
    target_was_cut: bool = False
    slots: np.ndarray | None = None
    pictures: int = 0
    pixels: Callable[[], UInt8[np.ndarray, "m H W 3"]] | None = None


class Tokenizer:
    """A `tokenizer.json` together with the special tokens a model uses; `bos` and `eos` are as in `DataSection`.

    Attributes:
      path: of the file.
      per_picture: number of tokens that a picture takes; 0: the model takes no pictures.

    Raises:
      FileNotFoundError, InputError: no such file, not a tokenizer, or a special token that is asked for but unknown.
    """

    def __init__(self, path: Path, config: ModelConfig, *, bos: Edge = "auto", eos: Edge = "auto"):
        if not path.is_file():
            raise_no_file("tokenizer", path)
        content = read_regular(path, max_bytes=MAX_BYTES)
        self.path = path
        self._tokenizer = parse_tokenizer(content, path)
        # The file may contain settings of its last use: truncation, padding, and BPE's dropout of merges in training,
        # with which the tokens of a text are random.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None
        with self._library_errors():
            try:
                check_growth(self._tokenizer)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
            self._texts = LongTexts(self._tokenizer)
        self._vocab_size = config.vocab_size
        self._decoder_start = config.decoder_start_id
        vision = config.vision
        self.per_picture = 0 if vision is None else tokens_per_picture(vision, config.d_model)
        self._picture = -1 if vision is None or vision.placeholder is None else vision.placeholder
        self._frame = ("", "") if vision is None else vision.frame
        own_bos = self._own_bos(config)
        known_bos = config.bos_id if own_bos is None else own_bos
        for name, setting, known in (("bos", bos, known_bos is not None), ("eos", eos, bool(config.eos_ids))):
            if setting == "always" and not known:
                raise InputError(f'data.{name} = "always", but the model names no {name.upper()} token')
        self._bos = {"auto": own_bos, "always": known_bos, "never": None}[bos]
        last = config.eos_ids[0] if config.eos_ids and eos != "never" else None
        self._eos_after_response = last
        self._response_end = np.array([] if last is None else [last], np.int32)
        self._eos_after_text = last if eos == "always" or self._bos is None else None

    @property
    def has_encoder(self) -> bool:
        """Whether the ids are for a model with an encoder."""
        return self._decoder_start is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the file knows."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, pictures: bool = False) -> np.ndarray:
        """Returns the ids of `text`, Int32[n], whole and without special tokens.

        With `pictures`, each `<image>` in it is one id: the token that the model has for pictures, or else -1; and the
        texts that frame a picture (`VisionConfig.frame`) are added where they are not.
        """
        return self._checked(self._encoded_around_pictures(text).ids if pictures else self._encoded(text).ids)

    def prompt(self, text: str, *, pictures: bool = False) -> np.ndarray:
        """Returns the ids, Int32[n], of `text` as the beginning of a document, after BOS if documents begin so; with
        `pictures` as of `encode`."""
        ids = self._encoded_around_pictures(text).ids if pictures else self._encoded(text).ids
        return self._checked(ids if self._bos is None else np.append(ids.dtype.type(self._bos), ids))

    @property
    def bos(self) -> int | None:
        """The BOS token that `prompt` puts before a text; None: it puts none."""
        return self._bos

    def placed(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the ids of `encode(text)`, and where in the text each of them begins, in characters.

        While long texts are tokenised, other threads go on.
        """
        ids, offsets = self._encoded(text)
        begins, end = [], 0
        for first, last in offsets.tolist():
            between = text[end:first]  # spaces at the beginning of a token may not be counted to it
            begins.append(first - len(between) + len(between.rstrip()))
            end = max(end, last)
        return self._checked(ids).tolist(), begins

    def most_characters(self) -> int | None:
        """Returns how many characters of a text become one token at most; None: there is no bound that is known."""
        return most_characters(self._tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text: none if it is special; see `TokenBytes`."""
        with self._library_errors():
            return self._token_bytes(token_id)

    @functools.cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of ids, with or without special tokens.

        An id of -1, for a picture that no token stands for, becomes `<image>`.
        """
        given, texts = list(ids), list[list[int]]()
        while min(given, default=0) < 0:
            end = next(index for index, one in enumerate(given) if one < 0)
            texts.append(given[:end])
            given = given[end + 1 :]
        texts.append(given)
        with self._library_errors():
            return MARK.join(self._tokenizer.decode(text, skip_special_tokens=not special) for text in texts)

    def id_of(self, text: str) -> int | None:
        """Returns the id of the token with this text; None if there is none."""
        with self._library_errors():
            return self._tokenizer.token_to_id(text)

    def first_special(self, text: str) -> int | None:
        """Returns the id of the token of its own, such as `<|im_end|>`, that a text begins with; None: it has none."""
        with self._library_errors():
            added = self._tokenizer.get_added_tokens_decoder()
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids[:1]
        return next((one for one in ids if one in added and text.startswith(added[one].content)), None)

    def token(self, token_id: int) -> str:
        """Returns the text of a token in the vocabulary, special ones too; its id where it has none."""
        with self._library_errors():
            return self._tokenizer.id_to_token(token_id) or str(token_id)

    def documents(self, examples: Sequence[Example | Document]) -> list[Document]:
        """Tokenises the examples of a record, each a document of its own; tokenised documents stay as they are."""
        return [example if isinstance(example, Document) else self._document(example) for example in examples]

    def pairs(self, examples: Sequence[Example | Document]) -> Pairs:
        """Returns the `documents` of a record as pairs; a document of a single token has none."""
        return pairs_of(self.documents(examples), self.per_picture)

    def inputs(self, text: str) -> np.ndarray:
        """Returns the ids, Int32[n], of `text` for an encoder, with EOS at the end where the model names one."""
        return np.append(self.prompt(text), self._response_end)

    def pair(self, example: Example, *, input_len: int | None = None, seq_len: int | None = None) -> Pair:
        """Tokenises an input and its target, each of which ends with EOS where the model names one.

        For a model with an encoder, the end of a text that is too long is left out; inputs keep their EOS. Without an
        encoder, both are one document, whose beginning is left out.

        Args:
          input_len: most tokens of the encoder's input, the prompt of the example; None: no limit.
          seq_len: most tokens of the target, or without an encoder of both; None: no limit.

        Raises:
          BadDocument: if nothing would be left to predict.
          InputError: if ids lie outside the vocabulary.
        """
        if self._decoder_start is None:
            tokens, targets, weights, *_ = self.pairs([example])
            if not weights.any():
                raise BadDocument(f"a pair whose target {shown(example.text[example.prompt_chars :])} has no tokens")
            was_cut, kept = seq_len is not None and len(tokens) > seq_len, slice(-(seq_len or 0), None)
            return Pair(tokens[kept], targets[kept], weights[kept], target_was_cut=was_cut)
        eos = self._response_end
        inputs = self.inputs(example.text[: example.prompt_chars])
        input_was_cut = input_len is not None and len(inputs) > input_len
        if input_len is not None and input_was_cut:
            inputs = np.append(inputs[: input_len - len(eos)], inputs[len(inputs) - len(eos) :])
        targets = np.append(self.encode(example.text[example.prompt_chars :]), eos)
        for name, ids in (("input", inputs), ("target", targets)):
            if not len(ids):
                raise BadDocument(f"a pair whose {name} has no tokens, for it is empty and no EOS ends it")
        target_was_cut = seq_len is not None and len(targets) > seq_len
        targets = targets[:seq_len]
        tokens = np.append(np.int32(self._decoder_start), targets[:-1])
        return Pair(tokens, targets, np.ones(len(targets), np.float32), inputs, input_was_cut, target_was_cut)

    def _document(self, example: Example) -> Document:
        if example.pictures:
            return self._with_pictures(example)
        return Document(*self._scored(example, *self._encoded(example.text)))

    def _with_pictures(self, example: Example) -> Document:
        """Returns a document in which as many tokens stand for a picture as it has features.

        None of them is scored, nor what frames a picture: a model is given these tokens, and never writes them.
        """
        ids, scored = self._scored(example, *self._encoded_around_pictures(example.text))
        stand = ids == self._picture
        try:
            check_places(len(example.pictures), int(stand.sum()), "what the chat template writes")
        except InputError as error:
            raise BadDocument(f"{example.pictures[0].where}: {error}") from None
        scored = np.where(self._of_pictures(ids, stand), np.float32(0), scored)
        times = np.where(stand, self.per_picture, 1)
        stand, ids, scored = (np.repeat(array, times) for array in (stand, ids, scored))
        slots = np.where(stand, np.cumsum(stand), 0).astype(np.int32)
        # Without a token of its own, any does: its embedding is not used.
        return Document(np.maximum(ids, 0), scored, slots, example.pictures)

    def _of_pictures(self, ids: np.ndarray, stand: np.ndarray) -> np.ndarray:
        """Returns which tokens stand for pictures or frame them; `stand` says which do the first."""
        found = stand.copy()
        before, after = (self._encoded(one).ids for one in self._frame)
        for place in np.flatnonzero(stand).tolist():
            for begin, frame in ((place - len(before), before), (place + 1, after)):
                if begin >= 0 and np.array_equal(ids[begin : begin + len(frame)], frame):
                    found[begin : begin + len(frame)] = True
        return found

    def _encoded_around_pictures(self, text: str) -> Encoded:
        """Returns tokens with one for every picture: the model's own, or else -1, with the text between apart.

        What frames a picture for the model is added, unless the text has it.
        """
        own = None if self._picture < 0 else self.token(self._picture)
        if own == MARK and not any(self._frame):
            ids, offsets = self._encoded(text)
            return Encoded(ids.astype(np.int64), offsets)
        names = {MARK, own} if own is not None and any(self._frame) else {MARK}
        before, after = (self._encoded(one).ids.astype(np.int64) for one in self._frame)
        mark = "|".join(map(re.escape, sorted(names)))
        ids, offsets, begin = [], [], 0

        def add(new: np.ndarray, places: np.ndarray) -> None:
            ids.append(new)
            offsets.append(places)

        for run in (*re.finditer(f"(?:{mark})+", text), None):
            encoded = self._encoded(text[begin:] if run is None else text[begin : run.start()])
            add(encoded.ids.astype(np.int64), encoded.offsets + begin)
            if run is None:
                break
            begin = run.end()
            is_framed = text.endswith(self._frame[0], 0, run.start()) and text.startswith(self._frame[1], run.end())
            for place in re.finditer(mark, run[0]):
                new = np.array([self._picture], np.int64)
                new = new if is_framed else np.concatenate([before, new, after])
                span = np.array([place.span()], np.int32) + run.start()
                add(new, np.repeat(span, len(new), axis=0))
        return Encoded(np.concatenate(ids), np.concatenate([one.reshape(-1, 2) for one in offsets]).astype(np.int32))

    def _scored(self, example: Example, ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of an example with those at its edges, and for each whether it is scored."""
        if example.spans is not None:
            return self._checked(ids), _within(example.spans, offsets)
        # A token that spans the boundary between prompt and response belongs to the response.
        scored = (offsets[:, 1] > example.prompt_chars).astype(np.float32)
        if example.begins and self._bos is not None:
            ids, scored = np.append(ids.dtype.type(self._bos), ids), np.append(np.float32(0), scored)
        eos = self._eos_after_response if example.is_response else self._eos_after_text
        if example.ends and eos is not None:
            ids, scored = np.append(ids, ids.dtype.type(eos)), np.append(scored, np.float32(1))
        if not example.prompt_chars:
            scored = np.ones(len(ids), np.float32)
        return self._checked(ids), scored

    def _encoded(self, text: str) -> Encoded:
        with self._library_errors(text):
            return self._texts(text)

    def _library_errors(self, text: str = "") -> contextlib.AbstractContextManager[None]:
        return _library_errors(self.path, text)

    def _own_bos(self, config: ModelConfig) -> int | None:
        """Returns the BOS token that the tokenizer itself adds, if it adds one."""
        with self._library_errors():
            plain, special = (self._tokenizer.encode("a", add_special_tokens=one).ids for one in (False, True))
        if len(special) > len(plain) and special[0] != plain[0]:
            return special[0]
        # Some (DeepSeek-Coder's) name their BOS only beside the file.
        settings = read_settings(self.path.with_name("tokenizer_config.json"))
        return config.bos_id if settings.get("add_bos_token") is True else None

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if ids.size and (worst := int(ids.max())) >= self._vocab_size:
            raise InputError(
                f"{self.path} gives token id {worst} ({shown(self._tokenizer.id_to_token(worst))}), but the model's "
                f"vocabulary has {self._vocab_size} entries: the tokenizer is not this model's"
            )
        return ids.astype(np.int32)


def pairs_of(documents: Sequence[Document], per_picture: int = 0) -> Pairs:
    """Returns documents as pairs; one of a single token has none. `per_picture` is a tokenizer's."""
    parts, slots, before = [], [], 0
    for document in documents:
        if len(document.ids) > 1:
            parts.append(document)
            own = np.zeros(len(document.ids), np.int32) if document.slots is None else document.slots
            slots.append(np.where(own > 0, own + before, 0)[:-1])
        before += len(document.pictures) * per_picture
    if not parts:
        parts, slots = [Document(np.zeros(1, np.int32), np.zeros(1, np.float32))], [np.zeros(0, np.int32)]
    return Pairs(
        np.concatenate([document.ids[:-1] for document in parts]),
        np.concatenate([document.ids[1:] for document in parts]),
        np.concatenate([document.scored[1:] for document in parts]),
        np.concatenate([np.arange(len(document.ids) - 1) == 0 for document in parts]),
        np.concatenate(slots).astype(np.int32),
    )


def parse_tokenizer(content: bytes, file: object) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer for the content of a tokenizer.json.

    Raises:
      InputError: with the name of the file, if it is none or too large for what it is (`check_size`).
    """
    try:
        check_size(content)
    except InputError as error:
        raise InputError(f"{file} is not a tokenizer.json: {error}") from None
    with _library_errors(file):
        return tokenizers.Tokenizer.from_buffer(content)


@contextlib.contextmanager
def _library_errors(file: object, text: str = "") -> Iterator[None]:
    """Turns errors of the library into ours; `text` is what it is given."""
    try:
        yield
    except BaseException as error:
        # The library raises bare `Exception`; a panic of its Rust code is not even that, and has no public name.
        if isinstance(error, InputError) or not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):
            raise
        if not is_unicode(text):
            raise BadDocument("the text holds one half of a character in UTF-16") from None
        raise InputError(f"{file} is not a tokenizer.json: {first_sentence(error)}") from None


def _within(spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
    """Returns Float32[n], 1 for tokens that have a character in one of the spans, which are in order."""
    if not spans or not len(offsets):
        return np.zeros(len(offsets), np.float32)
    (begins, ends), (first, last) = np.asarray(spans).T, offsets.T
    # The first span that ends after the token's beginning is the only one that the token can begin in, or run into.
    which = np.searchsorted(ends, first, side="right")
    begins = np.append(begins, np.iinfo(begins.dtype).max)
    return (begins[which] < last).astype(np.float32)


def tokenizer_identity(tokenizer: Path, chat_template: str | None = None) -> str:
    """Returns a SHA-256 of everything that token ids depend on, in conversations too.

    The files beside the tokenizer.json count too; a file with a template may replace the tokenizer's own.
    """
    files = tokenizer_files(tokenizer)
    if chat_template is not None:
        files[CHAT_TEMPLATE] = template_file(chat_template)
    digest = hashlib.sha256()
    for name in (TOKENIZER, "tokenizer_config.json"):
        digest.update(hashlib.sha256(read_tokenizer_file(files[name]) if name in files else b"").digest())
    if CHAT_TEMPLATE in files:
        digest.update(hashlib.sha256(read_tokenizer_file(files[CHAT_TEMPLATE])).digest())
    return digest.hexdigest()


def find_tokenizer(files: Sequence[Path], where: object) -> Path:
    """Returns the `tokenizer.json` among a model's files; raises `InputError` if there is none."""
    for file in files:
        if Path(file).name == "tokenizer.json":
            return as_path(file)
    raise InputError(f"{where} has no tokenizer.json; name one with data.tokenizer")
