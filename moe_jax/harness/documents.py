"""The documents of tasks: read from local files, and checked one by one before the model is asked about any."""

import collections
import contextlib
import copy
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.core.bad_documents import STOP, BadDocument, Skipped, naming
from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.files.regular_files import read_regular
from moe_jax.files.storage_path import raise_no_file
from moe_jax.harness.pictures.scoring import SETS

MAX_BYTES = 1 << 30
"""Most bytes of a file, and of the content of a compressed one."""
# Bad documents at the beginning of a file, after which it is the task that is wrong.
_MOST_AT_FIRST = 100
# A field that a template writes as it is; inside of a condition it may be absent.
_WRITTEN = re.compile(r"\{\{-?\s*(\w+)\s*-?\}\}")


def read_examples(path: Path, skipped: Skipped = STOP) -> dict[str, dict[str, Any]]:
    """Returns the objects of a file of JSON lines (blank ones are skipped) or of one JSON list, perhaps `.gz`.

    A file that is one object holds the list as its `questions`, and one named `.tsv` is a table. Examples are named by
    their places: the path, and the number of a line or entry. `skipped` decides about those that are no objects; by
    default the first ends it.

    Raises:
      FileNotFoundError: no such file.
      BadDocument: for anything but an object, unless it is skipped.
      InputError: if the file is neither, or holds nothing.
    """
    if not path.is_file():
        raise_no_file("data", path)
    content = _content(path)
    what, items = "line", content.split(b"\n")
    if path.name.removesuffix(".gz").endswith(".tsv"):
        what, items = "row", _rows(content, path)
    elif content.lstrip()[:1] == b"[":
        what, items = "example", _parsed(content, path)
    elif isinstance(found := _one_object(content, path).get("questions"), list):
        what, items = "example", found
    examples = {}
    for number, item in enumerate(items, start=1):
        where = f"{path}, {what} {number}"
        if not isinstance(item, bytes) or item.strip():
            with skipped.passed_over():
                examples[where] = _object(item, where)
    skipped.check_any_left(len(examples), str(path))
    if not examples:
        raise InputError(f"{path} holds no examples")
    return examples


def read_annotations(path: Path) -> Any:
    """Returns what a file of answers to questions holds: one JSON value, or the list of JSON lines; perhaps `.gz`.

    Raises:
      FileNotFoundError: no such file.
      InputError: if it is neither.
    """
    if not path.is_file():
        raise_no_file("annotations", path)
    content = _content(path)
    if content.lstrip()[:1] == b"[":
        return _parsed(content, path)
    return _one_object(content, path) or list(read_examples(path).values())


def _content(path: Path) -> bytes:
    content = read_regular(path, max_bytes=MAX_BYTES)
    return _unpacked(content, path) if path.suffix == ".gz" else content


def _parsed(content: bytes, path: Path) -> Any:
    return parse_json(content, where=str(path), allow=ANYTHING, max_values=len(content))


def _one_object(content: bytes, path: Path) -> dict[str, Any]:
    """Returns the object that a file consists of; an empty one for lines of objects and anything else."""
    lines = content.strip().split(b"\n", 1)
    is_one = lines[0][:1] == b"{" and (len(lines) == 1 or not lines[0].rstrip().endswith(b"}"))
    try:
        return _parsed(content, path) if is_one else {}
    except InputError:  # a bad line, which is named where lines are read
        return {}


def _rows(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a table with tabs and a line of names; values that are missing are None."""
    import pandas

    try:
        table = pandas.read_table(io.BytesIO(content), dtype=str)
    except (ValueError, pandas.errors.ParserError) as error:
        raise InputError(f"{path} is no table with tabs: {first_sentence(error)}") from None
    return table.astype(object).where(table.notna(), None).to_dict("records")


def _object(item: Any, where: str) -> dict[str, Any]:
    if isinstance(item, bytes):
        try:
            item = parse_json(item, where=where, allow=ANYTHING, max_values=len(item))
        except InputError as error:
            raise BadDocument(str(error)) from None
    if not isinstance(item, dict):
        raise BadDocument(f"{where}: expected an object, got a JSON {type(item).__name__}")
    return item


def _unpacked(content: bytes, path: Path) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as file:
            unpacked = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a gzip file: {error}") from None
    if len(unpacked) > MAX_BYTES:
        raise InputError(f"{path} unpacks to more than {MAX_BYTES:,} bytes")
    return unpacked


class LocalData:
    """The local data of a task, which lm-eval asks for when it makes the task.

    Attributes:
      places: where the documents of every split are, in order.
    """

    def __init__(self, config: Mapping[str, Any], skipped: Skipped = STOP):
        self.places: dict[str, list[str]] = {}
        self._splits: dict[str, Any] = {}
        self._config, self._skipped = config, skipped

    def read(self, *, data_files: Mapping[str, str], **_: Any) -> dict[str, Any]:
        """Returns the splits of local JSON files, as lm-eval takes the data of a task.

        Raises:
          FileNotFoundError, InputError: see `read_examples`; or if a document has values of other types than the
            others, or the first one cannot be used: lm-eval looks at that at once.
        """
        import datasets
        import pyarrow

        if self._splits:  # the task is in a group, and asked for by its name too
            return self._splits
        evaluated = self._config.get("test_split") or self._config.get("validation_split")
        for split, file in data_files.items():
            kept = self._alike(self._of_set(read_examples(Path(file), self._skipped), file), file)
            places = list(kept)
            try:
                # A key that the first lacks would be taken from all.
                keys = dict.fromkeys(key for one in kept.values() for key in one)
                found = datasets.Dataset.from_list([{key: one.get(key) for key in keys} for one in kept.values()])
            except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise InputError(f"{file}: its examples are not alike: {first_sentence(error)}") from None
            first = self._first_good(found, places, file) if split == evaluated else 0
            self._splits[split], self.places[split] = found.select(range(first, len(found))), places[first:]
        return self._splits

    def _of_set(self, examples: dict[str, dict[str, Any]], file: str) -> dict[str, dict[str, Any]]:
        """Returns the documents of the set as which a task is scored, if it is: with their answers."""
        kwargs = self._config.get("dataset_kwargs") or {}
        if kwargs.get("scoring") is None:
            return examples
        named = kwargs.get("annotations") or {}
        annotations = {name: read_annotations(Path(one)) for name, one in named.items()}
        with _naming_files(named):
            read = SETS[kwargs["scoring"]].reader(annotations)
        kept = {}
        for where, one in examples.items():
            with self._skipped.passed_over(), naming(where):
                document = read(one)
                if document is not None:
                    kept[where] = document
        self._skipped.check_any_left(len(kept), file)
        if not kept:
            raise InputError(f"{file} holds no questions of the set")
        return kept

    def _alike(self, examples: Mapping[str, dict[str, Any]], file: str) -> dict[str, dict[str, Any]]:
        """Returns the examples whose values have the types that most have under their keys."""
        kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for one in examples.values():
            for key, value in one.items():
                kinds[key][_kind(value)] += value is not None
        usual = {key: counts.most_common(1)[0][0] for key, counts in kinds.items()}
        kept = {}
        for where, one in examples.items():
            with self._skipped.passed_over(), naming(where):
                for key, value in one.items():
                    if value is not None and _kind(value) != usual[key]:
                        raise BadDocument(f"{key!r} is {shown(value)}, where others have a {usual[key]}")
                kept[where] = one
        self._skipped.check_any_left(len(kept), file)
        return kept

    def _first_good(self, documents: Any, places: Sequence[str], file: str) -> int:
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.config.task import TaskConfig

        # What turns a document into texts, without the rest of a task, which cannot be made of a bad document.
        task = object.__new__(ConfigurableTask)
        config = TaskConfig(**copy.deepcopy({**self._config, "custom_dataset": None}))
        task._config, task.prompt, task.features = config, None, list(documents.features)
        task.OUTPUT_TYPE = config.output_type
        why = ""
        for index, document in enumerate(itertools.islice(documents, _MOST_AT_FIRST)):
            with self._skipped.passed_over(), naming(places[index]):
                try:
                    check_document(task, document, is_local=True)
                except BadDocument as error:
                    why = f"{places[index]}: {error}"
                    raise
                return index
        raise InputError(f"{file}: the task can use none of its first documents: {why}")


@contextlib.contextmanager
def _naming_files(files: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{', '.join(files.values()) or 'a task'}: {error}") from None


def _kind(value: Any) -> str:
    """The type of a JSON value, as far as those of one column must agree."""
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float):
        return "number"
    return {str: "text", list: "list", dict: "object"}.get(type(value), type(value).__name__)


def check_document(task: Any, document: Mapping[str, Any], *, is_local: bool) -> None:
    """Raises `BadDocument` for a document that a task of lm-eval makes no question or no answer of.

    lm-eval counts one whose right answer is none of the choices as answered wrongly, and writes `None` for a field that
    a document of a local file lacks (`is_local`).
    """
    from lm_eval.api.task import ConfigurableTask

    if not isinstance(task, ConfigurableTask):
        return  # it has rules of its own
    config = task.config
    templates = [
        one for one in (config.doc_to_text, config.doc_to_target, config.doc_to_choice) if isinstance(one, str)
    ]
    for name in (name for one in templates for name in (one, *_WRITTEN.findall(one))):
        if is_local and name in document and document[name] is None:
            raise BadDocument(f"it has no {name!r}")
    with document_errors():
        text, target = task.doc_to_text(document), task.doc_to_target(document)
        choices = task.doc_to_choice(document) if config.doc_to_choice is not None else None
        task.doc_to_image(document)
    # Where the choices are inputs, the text is the number of the right one, in all documents or in none.
    are_inputs = bool(getattr(task, "multiple_input", isinstance(text, int)))
    if not isinstance(text, int if are_inputs else str):
        raise BadDocument(f"its doc_to_text is {shown(text)}, expected {'a number' if are_inputs else 'a text'}")
    if target is None and is_local:
        raise BadDocument("its doc_to_target is None")
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    if not isinstance(choices, Sequence) or not choices or not all(isinstance(one, str) for one in choices):
        raise BadDocument(f"its doc_to_choice is {shown(choices)}, expected a list of answers")
    if is_local and not all(choices):
        raise BadDocument(f"one of its answers is empty: {shown(choices)}")
    if callable(config.process_results):
        return
    right = text if are_inputs else target
    for one in right if isinstance(right, list) else [right]:
        is_one = 0 <= one < len(choices) if isinstance(one, int) else one in choices
        if not is_one:
            raise BadDocument(f"its right answer {shown(one)} is none of {len(choices)} choices")


@contextlib.contextmanager
def document_errors() -> Iterator[None]:
    """Reports what lm-eval and templates raise for a document that they were not made for."""
    try:
        yield
    except BadDocument:
        raise
    except InputError as error:
        raise BadDocument(str(error)) from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, SyntaxError, TypeError, ValueError) as error:
        raise BadDocument(f"lm-eval makes nothing of it ({type(error).__name__}: {first_sentence(error)})") from None


def good_documents(
    task: Any, check: Any, skipped: Skipped, *, places: Mapping[str, Sequence[str]] | None, limit: int | None
) -> list[int]:
    """Returns the numbers of the documents, from 0, that a task is evaluated on: the first `limit` that can be used.

    Args:
      task: of lm-eval.
      check: called with the number of a document and the document, after `check_document`; raises `BadDocument`.
      skipped: decides about bad ones, and counts them.
      places: where the documents of every split are; None: they are on the Hub.
      limit: None: all.

    Raises:
      BadDocument: for one that cannot be used, unless it is skipped.
      InputError: if none is left.
    """
    config, found = task.config, list[int]()
    split = config.test_split if task.has_test_docs() else config.validation_split
    where = None if places is None else places.get(split)
    for number, document in enumerate(task.eval_docs):
        if limit is not None and len(found) == limit:
            break
        name = f"{config.task}, document {number} (from 0)" if where is None else f"{config.task}, {where[number]}"
        with skipped.passed_over(), naming(name):
            check_document(task, document, is_local=places is not None)
            check(number, document)
            found.append(number)
    skipped.check_any_left(len(found), str(config.task))
    return found


def keep_good_examples(task: Any, skipped: Skipped, *, is_local: bool) -> None:
    """Takes bad documents out of those that a task gives as examples with their answers.

    `skipped` decides about them, and counts them, unless they are evaluated too and were counted there. Raises
    `BadDocument` for one that cannot be used, unless it is skipped.
    """
    sampler = getattr(task, "sampler", None)
    if sampler is None or sampler.fewshot_indices is not None:
        return
    kept = []
    for one in sampler.df:
        with skipped.passed_over(), naming(f"{task.config.task}, an example with its answer"):
            try:
                check_document(task, one, is_local=is_local)
            except BadDocument:
                if skipped.skips and any(one == other for other in task.eval_docs):
                    continue
                raise
            kept.append(one)
    if len(kept) < len(sampler.df):
        sampler.replace_df(kept)
