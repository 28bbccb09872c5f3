"""The sections of a recipe that describe the data and how it becomes batches."""

import dataclasses
from pathlib import PurePath
from typing import Literal

from moe_jax.core.bad_documents import OnBad
from moe_jax.core.errors import MAX_FLOAT32, MAX_SIZE, InputError, is_finite, shown
from moe_jax.core.formatting import short_repr


def at_least(section: object, least: int, *names: str) -> None:
    """Raises `InputError` for the first of these fields that is below `least`, or not finite; None is not checked."""
    for name in names:
        value = getattr(section, name)
        if value is None:
            continue
        most = MAX_SIZE if isinstance(value, int) else MAX_FLOAT32
        if not value >= least:
            raise InputError(f"{name} = {shown(value)} must be at least {least}")
        if value > most:
            raise InputError(f"{name} = {shown(value)} must be at most {most:,}")


Format = Literal["auto", "text", "jsonl", "parquet", "arrow", "tokens"]
"""Formats of data files; see `SourceSection`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldsSection:
    """The keys of rows that are read: `text`, or `prompt` and `response`, or `messages`. Others are ignored.

    Attributes:
      text: key of a text.
      prompt, response: keys of a pair, of which the response is scored.
      messages: key of a conversation, a list of messages.
      role, content: keys of a message. Roles are those that the template knows, and human and gpt, which stand for user
        and assistant.
      system, tools: keys of what a row may hold beside its messages: the text of a first message of the system, and a
        list of what the assistant may call. None: neither is read.
      image: key of the pictures of a row, for a model that sees. None: none are read.
    """

    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    system: str | None = None
    tools: str | None = None
    image: str | None = None
    role: str = "role"
    content: str = "content"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        given = [kind for kind, keys in self.keys_by_kind().items() if keys]
        if len(given) != 1 or (self.prompt is None) != (self.response is None):
            raise InputError("name the key of text, or those of prompt and response, or that of messages")

    def keys_by_kind(self) -> dict[str, tuple[str, ...]]:
        """Returns the keys of rows by the kind of content; empty where they are not named."""
        return {
            "text": tuple(key for key in (self.text,) if key is not None),
            "pair": tuple(key for key in (self.prompt, self.response) if key is not None),
            "chat": tuple(key for key in (self.messages,) if key is not None),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceSection:
    """A set of files that share a format and a weight.

    Attributes:
      path: a file or a glob pattern, on a disk or in a bucket.
      format: `text`; `jsonl`, an object on every line, or a list of objects; `parquet` or `arrow` (that of Hugging Face
        too), a table whose rows are objects; or `tokens`, *.array_record that `moe-jax data tokenize` wrote. `auto`
        decides by the suffix (JSON: .jsonl, .jsonlines, .ndjson, .json; arrow: .arrow, .feather), and what would then
        be text, but is none by its name or its content, is an error. Texts and JSON may be compressed: .gz, .zst. An
        object is one of these:
        a text, `{"text": ...}`, whatever else it has, but for the keys `prompt`, `response`, `input`, `target`,
        `messages` and `conversations`;
        a pair, `{"prompt": ..., "response": ...}`, or with the keys `prompt` and `completion`, `input` and `target`, or
        as Alpaca has it, `instruction`, `input` (which may be missing) and `output`. Without `chat` the response
        follows its prompt at once, in Alpaca's form after a line end;
        a conversation, `{"messages": [{"role": ..., "content": ...}, ...]}`, or as ShareGPT has it, `{"conversations":
        [{"from": ..., "value": ...}, ...]}`, with `system` and `tools` beside it. `prompt` and `completion` may be
        lists of messages, too. Conversations are written with the chat template of the tokenizer, and the assistant's
        messages are scored (`chat_template`), but not those of a prompt, or with `"weight": 0` or `"train": false`.
        For a model that sees, `image` or `images` beside any of them names or holds the pictures (a name inside of
        `data.image_folder`, base64, a list, or a table's object with `bytes`), each of which stands where its text has
        `<image>`, or a message a part `{"type": "image"}`; such a part may hold its picture itself.
        Pairs and conversations may have keys that say where they come from, such as `id` and `source`; others are an
        error that names them. Models with an encoder are trained only on pairs.
      fields: the keys of the objects that hold the content, where they have other names, such as
        `{ prompt = "question", response = "answer" }`. All others are then ignored.
      chat: whether pairs are written with the chat template, as a question of the user and the assistant's answer.
      weight: share of the training text (in bytes) that comes from this source, relative to the other sources'.
        None: sources count by their size. Either all sources have a weight or none. Pictures count as text where rows
        hold them, and not where they name them.
      separator: in text files, the string that stands between documents. None: a file is one document.
    """

    path: str
    format: Format = "auto"
    fields: FieldsSection | None = None
    chat: bool = False
    weight: float | None = None
    separator: str | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.weight is not None and not (is_finite(self.weight) and self.weight > 0):
            raise InputError(f"weight = {self.weight} must be above 0; leave the source out instead")
        if self.separator == "":
            raise InputError("separator is empty; leave the key out for none")
        if self.form in ("text", "tokens") and (self.fields is not None or self.chat):
            raise InputError("fields and chat are for objects: JSON lines, parquet and arrow")

    @property
    def form(self) -> str:
        """The format; with `auto`, the one that the suffix stands for."""
        if self.format != "auto":
            return self.format
        return form_of_name(self.path)


COMPRESSED = (".gz", ".zst")
"""Suffixes of compressed files."""

_FORMS = {
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".array_record": "tokens",
}


def form_of_name(name: str | PurePath) -> str:
    """Returns the form that the suffix of a file, or of a pattern, stands for; `text` if it stands for none."""
    # A pattern such as `part.jsonl*` means files of all compressions.
    suffixes = [suffix.rstrip("*").lower() for suffix in PurePath(name).suffixes]
    suffixes = [suffix for suffix in suffixes if suffix not in (*COMPRESSED, ".", "")]
    return _FORMS.get(suffixes[-1] if suffixes else "", "text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSection:
    """The training data.

    Attributes:
      sources: the files. May be empty only for `--compile-only`.
      seq_len: length T of a packed sequence. For a model with an encoder, the length of targets: every pair has a row
        of its own, and is padded, or cut, to both lengths.
      input_len: length S of the encoder's inputs. None: that of the targets.
      tokenizer: a tokenizer.json. None: the model's own.
      chat_template: a file with the template for conversations, for example of a model that has none; it is kept with
        the trained model. Or `llava-v1` or `llava-plain`, in which LLaVA and MoE-LLaVA write conversations and
        captions. None: the tokenizer's own.
      bos: whether documents begin with the BOS token; `auto`: where the tokenizer itself puts one. A conversation has
        the tokens that its template writes, and no others.
      eos: whether documents end with the EOS token; `auto`: responses do, and other documents do unless they begin
        with a BOS token.
      packing: `split` fills every sequence and cuts documents at its end; `whole` starts a new sequence rather than
        cut a document that would fit into one.
      shuffle: whether documents are shuffled with the seed, differently in every epoch.
      epochs: passes over the data after which training ends early; where sources have weights, passes over the source
        that is used up first, and the others are then not read as often. None: no limit.
      piece_kib: a long text is read in pieces of about this many KiB, cut at line ends.
      prefetch: batches prepared ahead in the background.
      image_folder: the folder that names of pictures are inside of; no name leads out of it. None: the folder of the
        file whose rows name them.
      image_aspect: whether pictures are first put in the middle of a square (`pad`) or not (`square`). None: as the
        model's processing says.
      max_pictures: pictures in a row of the batch at most, for each of which there is room. None: as many as fill a row
        if a quarter of it are texts.
      on_bad_image: an example whose picture cannot be read ends the training (`stop`), or is left out and counted
        (`skip`), unless it is one of more than 1 % of the pictures.
      feature_cache: a folder in which what a frozen tower makes of pictures is kept, so that it looks at each only
        once. Several runs may share it. None: the tower looks at all pictures of every batch.
      pixel_cache: a folder in which pixels of pictures are kept, so that each is decoded and resized only once, where a
        tower that is trained looks at them. None: they are made anew in every epoch.
      cache_gib: size that each of these folders may have, in GiB; what was not used for longest is then deleted.
    """

    sources: tuple[SourceSection, ...] = ()
    seq_len: int = 512
    input_len: int | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    bos: Literal["auto", "always", "never"] = "auto"
    eos: Literal["auto", "always", "never"] = "auto"
    packing: Literal["split", "whole"] = "split"
    shuffle: bool = True
    epochs: int | None = None
    piece_kib: int = 64
    prefetch: int = 2
    image_folder: str | None = None
    image_aspect: Literal["pad", "square"] | None = None
    max_pictures: int | None = None
    on_bad_image: OnBad = "stop"
    feature_cache: str | None = None
    pixel_cache: str | None = None
    cache_gib: float = 32.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        at_least(self, 1, "seq_len", "piece_kib", "epochs")
        # An input has at least one token and EOS.
        at_least(self, 2, "input_len")
        at_least(self, 0, "prefetch")
        at_least(self, 1, "max_pictures")
        if not (is_finite(self.cache_gib) and self.cache_gib > 0):
            raise InputError(f"cache_gib = {shown(self.cache_gib)} must be a finite number above 0")
        for name in ("image_folder", "feature_cache", "pixel_cache"):
            if getattr(self, name) == "":
                raise InputError(f'{name} is empty; leave the key out, or name a folder ("." is the current one)')
        if len({source.weight is None for source in self.sources}) > 1:
            raise InputError("some sources have a weight and some have none; give all of them one, or none")


def input_length(data: DataSection) -> int:
    """Number of tokens of an encoder's inputs in training."""
    return data.seq_len if data.input_len is None else data.input_len


def check_seq_len(seq_len: int) -> None:
    """Raises `InputError` for windows so short that nothing could be scored."""
    if seq_len < 2:
        raise InputError(f"seq_len = {seq_len} must be at least 2, for the first token of a window is never scored")
