"""Task files in lm-eval's YAML, read as data: a task is configured, and nothing that a file says is executed.

lm-eval itself imports the functions that a task file names (`!function`), runs Python files beside it, loads metrics as
scripts, and renders templates without a sandbox. Here a task file may have the keys that only describe a task, and the
rest is refused. Templates are rendered in a sandbox (`sandboxed_templates`).

A folder of task files is read whole; a refused file is an error only once its task is asked for.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError, clipped, first_sentence, nearest, shown
from moe_jax.core.template_sandbox import Template
from moe_jax.files.regular_files import read_regular
from moe_jax.files.storage_path import nearest_path
from moe_jax.harness.pictures.scoring import SETS

SHIPPED = Path(__file__).parent / "tasks"
"""The task files that come with the library."""
DATA_VARIABLE = "MOE_JAX_EVAL_DATA"
"""The environment variable that names the directory of the data of task files."""
_MAX_BYTES = 1 << 20
_MAX_FILES = 10_000
_MAX_DEPTH = 8
_EXECUTES = "which lm-eval would execute; a task file here only describes"
_REFUSED = {
    "class": f"names a Python class, {_EXECUTES}",
    "custom_dataset": f"names a function, {_EXECUTES}",
    "process_docs": f"names a function, {_EXECUTES}",
    "process_results": f"names a function, {_EXECUTES}",
    "use_prompt": "takes its prompt from a file of another library",
    "doc_to_audio": "is about sounds, which are not supported",
    "doc_to_decontamination_query": "is about decontamination, which is not supported",
}
_TASK_KEYS = (
    "task", "task_alias", "tag", "include", "dataset_path", "dataset_name", "dataset_kwargs", "training_split",
    "validation_split", "test_split", "fewshot_split", "doc_to_text", "doc_to_target", "doc_to_choice", "doc_to_image",
    "unsafe_code", "description", "target_delimiter", "fewshot_delimiter", "fewshot_config", "num_fewshot",
    "metric_list", "output_type", "generation_kwargs", "repeats", "filter_list", "should_decontaminate", "gen_prefix",
    "metadata",
)  # fmt: skip
_GROUP_KEYS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "include")
_FEWSHOT_KEYS = (
    "sampler", "split", "fewshot_indices", "samples", "doc_to_text", "doc_to_choice", "doc_to_target", "gen_prefix",
    "fewshot_delimiter", "target_delimiter",
)  # fmt: skip
_JSON_KEYS = ("data_files", "annotations", "scoring", "image_folder", "image_aspect")
ASPECTS = ("pad", "square")
"""How pictures that are no squares become some: padded, or resized and cut; LLaVA's words."""
_FILTERS = (
    "regex", "regex_pos", "multi_choice_regex", "remove_whitespace", "lowercase", "uppercase", "map", "take_first",
    "take_first_k", "majority_vote",
)  # fmt: skip


class TaskFolder(NamedTuple):
    """The task files of a folder.

    Attributes:
      tasks: configurations as lm-eval takes them, by name; data is not read yet.
      groups: configurations of groups of tasks, by name.
      tags: names of tasks, by tag.
      refused: reason why a task or group is refused, by name.
    """

    tasks: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    tags: dict[str, list[str]]
    refused: dict[str, str]

    def names(self) -> list[str]:
        """Returns all names that can be asked for."""
        return sorted({*self.tasks, *self.groups, *self.tags})


def read_task_folder(folder: Path, *, data: Path | None = None) -> TaskFolder:
    """Reads the files `*.yaml` of a folder and its folders.

    Args:
      folder: of task files. A file without `task` and `group` is there to be included.
      data: the folder that relative `data_files` start from; None: the task file's own folder.

    Raises:
      FileNotFoundError: no such folder.
      InputError: if a file is no YAML, or two define the same name.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder of task files at {folder}{nearest_path(folder)}")
    found = TaskFolder({}, {}, {}, {})
    for number, file in enumerate(sorted(folder.rglob("*.yaml"))):
        if number == _MAX_FILES:
            raise InputError(f"{folder} holds more than {_MAX_FILES:,} task files")
        _add(found, file, folder, data)
    return found


def _add(found: TaskFolder, file: Path, folder: Path, data: Path | None) -> None:
    raw = _read_yaml(file)
    if not raw.keys() & {"task", "group"} and "include" not in raw:
        return
    name = raw.get("group") if "group" in raw else raw.get("task")
    try:
        config = _with_includes(raw, file, folder)
        name = config.get("group") if "group" in config else config.get("task")
        if name is None:
            return
        if not isinstance(name, str) or not name or "," in name:
            raise InputError(f"{file}: the name {shown(name)} is none: expected a text without commas")
        checked = _checked_group(config) if "group" in config else _checked_task(config, file, data)
    except InputError as error:
        if not isinstance(name, str):
            raise
        found.refused[name] = str(error) if str(file) in str(error) else f"{file}: {error}"
        return
    if name in found.tasks or name in found.groups:
        raise InputError(f"{file}: a task {shown(name)} is in another file of {folder} as well")
    (found.groups if "group" in config else found.tasks)[name] = checked
    tags = config.get("tag") or []
    for tag in [tags] if isinstance(tags, str) else tags:
        found.tags.setdefault(str(tag), []).append(name)


def _read_yaml(file: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Loads plain values; functions become `_Function`s, which the checks refuse."""

    def refuse(loader: Any, suffix: str, node: Any) -> Any:
        return _Tagged(f"!{suffix} {shown(getattr(node, 'value', ''))}")

    Loader.add_multi_constructor("!", refuse)
    Loader.add_multi_constructor("tag:yaml.org,2002:python/", refuse)
    try:
        text = read_regular(file, max_bytes=_MAX_BYTES).decode("utf-8")
        # With aliases a small file can describe an endless value.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("aliases (*name) are not supported")
        config = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError, OverflowError) as error:
        raise InputError(f"{file} is not YAML: {first_sentence(error)}") from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise InputError(f"{file} is no task file: expected a mapping of names")
    return config


class _Tagged(str):
    """The value after a tag that is not one of plain YAML."""


def _with_includes(raw: Mapping[str, Any], file: Path, folder: Path, depth: int = 0) -> dict[str, Any]:
    """Returns a configuration merged with those that it includes, whose keys it overrides."""
    if depth > _MAX_DEPTH:
        raise InputError(f"{file}: includes are nested more than {_MAX_DEPTH} deep")
    own = {key: value for key, value in raw.items() if key != "include"}
    included: dict[str, Any] = {}
    named = raw.get("include", [])
    for name in named if isinstance(named, list) else [named]:
        if not isinstance(name, str):
            raise InputError(f"{file}: include {shown(name)} is no path")
        other = (file.parent / name).resolve()
        if not other.is_relative_to(folder.resolve()):
            raise InputError(f"{file}: include {shown(name)} leads out of {folder}")
        included |= _with_includes(_read_yaml(other), other, folder, depth + 1)
    return included | own


def _checked_group(config: dict[str, Any]) -> dict[str, Any]:
    _check_plain(config)
    _check_keys(config, _GROUP_KEYS, "a group")
    members = config.get("task")
    if not isinstance(members, list) or not members or not all(isinstance(one, str) for one in members):
        raise InputError(f"task: {shown(members)}: expected a list of names of tasks")
    return {key: value for key, value in config.items() if key != "tag"}


def _checked_task(config: dict[str, Any], file: Path, data: Path | None) -> dict[str, Any]:
    for key, why in _REFUSED.items():
        if config.get(key) is not None:
            raise InputError(f"{key} {why}")
    _check_plain(config)
    _check_keys(config, _TASK_KEYS, "a task")
    if config.get("unsafe_code"):
        raise InputError("unsafe_code: the task would run code that the model writes, which is never done here")
    if config.get("should_decontaminate"):
        raise InputError("should_decontaminate is not supported")
    fewshot = config.get("fewshot_config") or {}
    if not isinstance(fewshot, dict):
        raise InputError(f"fewshot_config: {shown(fewshot)}: expected a mapping")
    _check_keys(fewshot, _FEWSHOT_KEYS, "fewshot_config")
    _check_metrics(config.get("metric_list") or [])
    _check_filters(config.get("filter_list") or [])
    _check_pictures(config)
    checked = {key: value for key, value in config.items() if key != "tag"}
    return checked | _dataset(config, file, data)


def _check_plain(value: Any, where: str = "") -> None:
    if isinstance(value, _Tagged):
        at = f"{where} has " if where else ""
        raise InputError(f"{at}{clipped(str(value))}, {_EXECUTES}")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, where)
            _check_plain(item, f"{where}.{key}" if where else str(key))
    if isinstance(value, list):
        for item in value:
            _check_plain(item, where)


def _check_keys(config: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in config:
        if key not in known:
            raise InputError(f"{shown(key)} is no key of {what}{nearest(str(key), known)}")


def _check_metrics(metrics: Any) -> None:
    from lm_eval.api import metrics as _  # noqa: F401  registers them
    from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_REGISTRY

    for one in _entries(metrics, "metric_list", "metric"):
        if one.get("hf_evaluate"):
            raise InputError("hf_evaluate loads a metric as a script, which is never done here")
        for key, known in (("metric", METRIC_REGISTRY), ("aggregation", AGGREGATION_REGISTRY)):
            if one.get(key) is not None and (not isinstance(one[key], str) or one[key] not in known):
                raise InputError(f"{shown(one[key])} is no {key} of lm-eval{nearest(str(one[key]), list(known))}")


def _check_filters(filters: Any) -> None:
    for pipeline in _entries(filters, "filter_list", "name"):
        for one in _entries(pipeline.get("filter"), "filter", "function"):
            if one["function"] not in _FILTERS:
                known = ", ".join(_FILTERS)
                raise InputError(f"{shown(one['function'])} is no filter that a task file may have: {known}")


def _check_pictures(config: Mapping[str, Any]) -> None:
    named = config.get("doc_to_image")
    if named is None:
        return
    if not isinstance(named, str | list) or not named or not all(isinstance(one, str) and one for one in named):
        raise InputError(f"doc_to_image {shown(named)}: expected the name of a field, or a template, or a list of them")
    if config.get("output_type", "generate_until") != "generate_until":
        raise InputError("doc_to_image: only what is written about pictures is evaluated (output_type: generate_until)")
    if config.get("num_fewshot"):
        raise InputError("num_fewshot: examples before a question have no pictures here")


def _entries(value: Any, what: str, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) and isinstance(one.get(key), str) for one in value):
        raise InputError(f"{what}: {shown(value)}: expected a list of mappings with {key!r}")
    return value


def _dataset(config: Mapping[str, Any], file: Path, data: Path | None) -> dict[str, Any]:
    """Returns the data of a configuration: local files are read by us, anything else is a name on the Hub."""
    path, kwargs = config.get("dataset_path"), config.get("dataset_kwargs") or {}
    if not isinstance(path, str) or not isinstance(kwargs, dict):
        raise InputError(f"dataset_path {shown(path)}: expected 'json', or the name of a data set on the Hub")
    if kwargs.get("trust_remote_code"):
        raise InputError("dataset_kwargs.trust_remote_code: code of a data set is never run here")
    if path != "json":
        if (file.parent / path).exists() or Path(path).exists() or path.startswith((".", "/")) or path.endswith(".py"):
            raise InputError(f"dataset_path {shown(path)}: of local data only 'json' with data_files is read")
        _check_keys(kwargs, ("trust_remote_code", "revision"), "dataset_kwargs of a data set on the Hub")
        return {"dataset_kwargs": {key: value for key, value in kwargs.items() if key == "revision"}}
    _check_keys(kwargs, _JSON_KEYS, "dataset_kwargs of 'json'")
    files = kwargs.get("data_files")
    if isinstance(files, str):
        files = {"train": files}
    if not isinstance(files, dict) or not files or not all(isinstance(one, str) for one in files.values()):
        raise InputError(f"dataset_kwargs.data_files: {shown(files)}: expected a file for every split")
    splits = {str(split): str((data or file.parent) / Path(name).expanduser()) for split, name in files.items()}
    for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if config.get(key) is not None and config[key] not in splits:
            raise InputError(f"{key} {shown(config[key])} is none of the splits of data_files: {', '.join(splits)}")
    if config.get("test_split") is None and config.get("validation_split") is None:
        raise InputError("neither test_split nor validation_split says what is evaluated")
    return {"dataset_kwargs": {"data_files": splits} | _about_pictures(config, kwargs, data or file.parent)}


def _about_pictures(config: Mapping[str, Any], kwargs: Mapping[str, Any], beginning: Path) -> dict[str, Any]:
    """Returns what data say of their pictures and of how answers are scored, with whole paths."""
    found: dict[str, Any] = {}
    scoring, aspect, folder = (kwargs.get(key) for key in ("scoring", "image_aspect", "image_folder"))
    if scoring is not None:
        if not isinstance(scoring, str) or scoring not in SETS:
            raise InputError(
                f"scoring {shown(scoring)}{nearest(str(scoring), list(SETS))}: known are {', '.join(SETS)}"
            )
        if config.get("metric_list") or config.get("doc_to_choice"):
            raise InputError("scoring says how answers are scored: metric_list and doc_to_choice do not go with it")
        found["scoring"] = scoring
    if aspect is not None:
        if aspect not in ASPECTS:
            raise InputError(f"image_aspect {shown(aspect)}: expected {' or '.join(ASPECTS)}")
        found["image_aspect"] = aspect
    if folder is not None:
        if not isinstance(folder, str):
            raise InputError(f"image_folder {shown(folder)}: expected a path")
        found["image_folder"] = str(beginning / Path(folder).expanduser())
    given = kwargs.get("annotations")
    files = {"": given} if isinstance(given, str) else {} if given is None else given
    if not isinstance(files, dict) or not all(isinstance(one, str) for pair in files.items() for one in pair):
        raise InputError(f"annotations {shown(given)}: expected a file, or files by name")
    if files and scoring is None:
        raise InputError("annotations go with scoring, which reads them")
    if files:
        found["annotations"] = {name: str(beginning / Path(one).expanduser()) for name, one in files.items()}
    return found


def is_local(config: Mapping[str, Any]) -> bool:
    """Whether the data of a task of a `TaskFolder` is in local files."""
    return config["dataset_path"] == "json"


@contextlib.contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Renders the templates of lm-eval inside of the block in a sandbox, within limits, with the same result.

    An error of a template becomes an `InputError`.
    """
    from lm_eval import utils

    before: Any = utils.env
    utils.env = _Sandbox()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        utils.env = before


class _Prompt:
    def __init__(self, source: str):
        self._source = source
        with _template_errors(source):
            self._template = Template(source, of_task=True)

    def render(self, /, **example: Any) -> str:
        """Returns the text of an example."""
        with _template_errors(self._source):
            return self._template.render(example).text


class _Sandbox:
    """The part of a Jinja environment that lm-eval uses, which compiles a template anew for every example."""

    from_string = staticmethod(functools.lru_cache(maxsize=256)(_Prompt))


@contextlib.contextmanager
def _template_errors(source: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template can do anything that raises
        raise InputError(f"the template {shown(source)} fails: {first_sentence(error)}") from None
