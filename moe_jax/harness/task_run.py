"""Evaluates a model on tasks: from task files of this library, from a folder's, and lm-eval's own."""

import collections
import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import socket
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.core.bad_documents import Skipped
from moe_jax.core.errors import InputError, first_sentence, nearest, shown
from moe_jax.data.chat_template import SHIPPED as TEMPLATES
from moe_jax.data.chat_template import ChatTemplate, template_file
from moe_jax.harness.documents import (
    LocalData,
    document_errors,
    good_documents,
    keep_good_examples,
)
from moe_jax.harness.pictures.scoring import scoring_keys
from moe_jax.harness.pictures.task_pictures import PicturesOf
from moe_jax.harness.task_files import SHIPPED, TaskFolder, is_local, read_task_folder

# As in lm-eval: equal examples before a question, and equal resampling, give equal figures.
_SEED = 1234
_HUB = "https://huggingface.co"
_SECONDS_TO_CONNECT = 5.0


def check_installed() -> None:
    """Raises `InputError` if lm-eval is absent."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("tasks are evaluated with lm-eval, which is not installed: pip install 'moe-jax[eval]'")


def known_tasks(folder: Path | None = None, *, data: Path | None = None) -> TaskFolder:
    """Returns the task files of this library and of a folder, which takes precedence.

    Raises:
      FileNotFoundError, InputError: see `read_task_folder`.
    """
    found = read_task_folder(SHIPPED, data=data)
    if folder is None:
        return found
    own = read_task_folder(folder, data=data)
    shipped = {name: one for name, one in found.tasks.items() if name not in own.refused}
    tags = {**found.tags, **own.tags}
    return TaskFolder({**shipped, **own.tasks}, {**found.groups, **own.groups}, tags, own.refused)


def load_tasks(names: Sequence[str], known: TaskFolder, skipped: Mapping[str, Skipped] | None = None) -> dict[str, Any]:
    """Loads tasks with their data for `evaluate_tasks`, by names of tasks, groups or tags.

    To be called in `sandboxed_templates`. Names that are not `known` are looked for among lm-eval's own tasks, whose
    data is on the Hub. `skipped` decides about bad documents, task by task (a `defaultdict`); None: the first ends it.

    Raises:
      InputError: for an unknown or refused task, or one whose data is not available.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry, Kind

    wanted = [member for name in names for member in known.tags.get(name, [name])]
    needed = {*wanted, *(one for name in wanted for one in known.groups.get(name, {}).get("task", []))}
    for name in [*names, *sorted(needed)]:
        if name in known.refused:
            raise InputError(f"task {name!r} is refused: {known.refused[name]}")
    ours = {*known.tasks, *known.groups}
    with _quiet():
        manager = TaskManager(include_defaults=not needed <= ours)
    theirs = set(manager.all_tasks) - ours
    for name in sorted(needed - ours - theirs):
        options = [*known.names(), *theirs]
        raise InputError(f"unknown task {shown(name)}{nearest(name, options)}; here are {', '.join(known.names())}")
    skipped = collections.defaultdict(Skipped) if skipped is None else skipped
    configs = {name: _with_functions(known.tasks[name]) for name in known.tasks}
    data = {name: LocalData(configs[name], skipped[name]) for name in needed & known.tasks.keys()
            if is_local(known.tasks[name])}  # fmt: skip
    configs |= {name: _with_data(configs[name], local) for name, local in data.items()}
    for kind, described in ((Kind.TASK, configs), (Kind.GROUP, known.groups)):
        manager.task_index.update({name: Entry(name, kind, None, config) for name, config in described.items()})
    on_hub = sorted(needed - data.keys() - known.groups.keys())
    with _quiet(), _loading_errors(sorted(needed)), _hub_errors(on_hub):
        loaded: dict[str, Any] = dict(manager.load(list(wanted)))
    for task in loaded["tasks"].values():
        _check_safe(task)
        # It does not belong to the description of a task in the results.
        task.set_config("custom_dataset", None)
    return loaded | {"places": {name: local.places for name, local in data.items()}}


def _with_functions(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config with functions of this library for what a task file only names."""
    scoring = (config.get("dataset_kwargs") or {}).get("scoring")
    images = config.get("doc_to_image")
    return {
        **config,
        **({} if images is None else {"doc_to_image": PicturesOf(images)}),
        **({} if scoring is None else scoring_keys(scoring)),
    }


def _with_data(config: dict[str, Any], local: LocalData) -> dict[str, Any]:
    # A function, for lm-eval copies the configuration, and a method would be copied with its object.
    return config | {"custom_dataset": lambda **given: local.read(**given)}


def evaluate_tasks(
    model: Any,
    tasks: Mapping[str, Any],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    skipped: Mapping[str, Skipped] | None = None,
) -> dict[str, Any]:
    """Evaluates an `lm_eval.api.model.LM` on tasks that `load_tasks` loaded.

    Args:
      model: a `HarnessModel` if documents are skipped: it is asked which it can score.
      limit: number of examples of every task, the first ones; None: all.
      num_fewshot: number of examples with answers before a question; None: as the task says. A task that says 0 keeps
        0, as with lm-eval.
      apply_chat_template: whether prompts are messages of a conversation; examples are turns of it.
      skipped: as for `load_tasks`.

    Returns:
      lm-eval's results, JSON except `samples`: `results`, `groups`, `configs`, `versions`, `n-shot`, `n-samples`, ...
    """
    import lm_eval.evaluator

    if limit is not None and limit < 1:
        raise InputError(f"{limit=} must be at least 1")
    if num_fewshot is not None and num_fewshot < 0:
        raise InputError(f"{num_fewshot=} must be at least 0")
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config("num_fewshot", own or 0 if num_fewshot is None or own == 0 else num_fewshot)
        task.set_fewshot_seed(seed=_SEED)
        if getattr(task, "MULTIMODAL", False) and task.get_config("num_fewshot"):
            raise InputError(
                f"{task.config.task}: examples before a question have no pictures here; give no num_fewshot"
            )
        if not apply_chat_template:
            _write_conversation(task)
    skipped = collections.defaultdict(Skipped) if skipped is None else skipped
    began = time.time()
    chat: dict[str, Any] = {"apply_chat_template": apply_chat_template, "fewshot_as_multiturn": apply_chat_template}
    given, places = dict(tasks), tasks["places"]
    del given["places"]
    which: dict[str, Any] = {"limit": limit}
    with _quiet():
        good = {}
        for name, task in tasks["tasks"].items():
            of_task = skipped[name]
            check = functools.partial(_check_requests, model, task, chat) if of_task.skips else lambda *_: None
            good[name] = good_documents(task, check, of_task, places=places.get(name), limit=limit)
            if task.get_config("num_fewshot"):
                keep_good_examples(task, of_task, is_local=name in places)
            _check_fewshot(name, task)
        if any(skipped[name].count for name in good):
            which = {"samples": good}
        found = lm_eval.evaluator.evaluate(lm=model, task_dict=given, **which, **chat)
    assert found is not None
    return dict(found) | {"date": began, "lm_eval_version": importlib.metadata.version("lm_eval")}


def _write_conversation(task: Any) -> None:
    """Makes the prompts of a task turns of a conversation, in the chat template of ours that its metadata names."""
    name, turn = (task.get_config("metadata") or {}).get("conversation"), task.get_config("doc_to_text")
    if name is None:
        return
    known = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
    if name not in known or not isinstance(turn, str):
        raise InputError(f"{task.config.task}: metadata.conversation {shown(name)}: expected {' or '.join(known)}")
    template = ChatTemplate(template_file(name).read_text(encoding="utf-8"))
    mark = "(turn)"
    text = template([{"role": "user", "content": mark}], add_generation_prompt=True)
    task.set_config("doc_to_text", text.replace(mark, f"{{{{ {turn} }}}}" if turn in task.features else turn))


def _check_fewshot(name: str, task: Any) -> None:
    """Raises `InputError` if there are fewer examples to stand before a question than are wanted."""
    wanted, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    if wanted and sampler is not None:
        examples = sampler.fewshot_indices or sampler.df
        count = len(examples)
        if task.fewshot_cfg.split == task.config.test_split:
            # Of one more than are wanted, lm-eval takes out those that equal the question.
            count -= max(collections.Counter(map(repr, examples)).values(), default=0)
        if wanted > count:
            raise InputError(f"{name}: num_fewshot is {wanted}, but there are {count:,} examples with their answers")


def _check_requests(model: Any, task: Any, chat: Mapping[str, bool], number: int, document: Any) -> None:
    """Raises `BadDocument` if the model cannot answer what a task asks of a document, without examples before it."""
    template = model.apply_chat_template if chat["apply_chat_template"] else None
    with document_errors():
        context = task.fewshot_context(
            document, num_fewshot=0, chat_template=template, gen_prefix=task.doc_to_prefix(document), **chat
        )
        asked = task.construct_requests(
            doc=document,
            ctx=context,
            metadata=(task.config.task, number, 1),
            apply_chat_template=chat["apply_chat_template"],
            chat_template=template,
        )
        for one in asked if isinstance(asked, list) else [asked]:
            model.check_request(one)


@contextlib.contextmanager
def _loading_errors(names: Sequence[str]) -> Iterator[None]:
    """Reports in one line what lm-eval finds wrong in a task when it loads it: it looks at the first document."""
    try:
        yield
    except (IndexError, KeyError, TypeError, AttributeError, AssertionError) as error:
        hint = "; are all its answers texts that are not empty?" if isinstance(error, IndexError) else ""
        problem = f"{type(error).__name__}: {first_sentence(error)}"
        raise InputError(f"{', '.join(names)}: lm-eval cannot load a task ({problem}){hint}") from None


def _check_safe(task: Any) -> None:
    """Raises `InputError` for tasks that run what a model writes, as some of lm-eval's own do."""
    if getattr(task, "UNSAFE_CODE", False) or task.get_config("unsafe_code"):
        raise InputError(
            f"task {task.config.task!r} runs code that the model writes, which is never done here; write samples for "
            "EvalPlus: --tasks humaneval_local --samples FILE"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences lm-eval and its libraries except for warnings."""
    names = ("lm_eval", "datasets", "huggingface_hub", "evaluate", "httpx")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _hub_errors(names: Iterable[str]) -> Iterator[None]:
    """Reports a problem with a task's data on the Hub in one line, and at once if there is no network.

    Data that was fetched before is found without a network.
    """
    names = list(names)
    if not names:
        yield
        return
    from datasets import config as of_datasets
    from huggingface_hub import constants

    online = not constants.HF_HUB_OFFLINE and _reaches_hub(constants.ENDPOINT or _HUB)
    before = constants.HF_HUB_OFFLINE, of_datasets.HF_HUB_OFFLINE
    if not online:
        constants.HF_HUB_OFFLINE = of_datasets.HF_HUB_OFFLINE = True
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        task = ", ".join(names)
        if online:
            raise InputError(f"{task}: {type(error).__name__}: {first_sentence(error)}") from None
        raise InputError(
            f"the data of {task} is on the Hugging Face Hub, which cannot be reached, and not in its cache; tasks over "
            "local files need no network: see --tasks-dir"
        ) from None
    finally:
        constants.HF_HUB_OFFLINE, of_datasets.HF_HUB_OFFLINE = before


def _reaches_hub(endpoint: str) -> bool:
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied:  # then the connection is not ours to try
        return True
    parts = urllib.parse.urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=_SECONDS_TO_CONNECT):
            return True
    except OSError:
        return False
