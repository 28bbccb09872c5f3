"""`moe-jax eval MODEL --tasks NAME,...`: tasks of lm-eval."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_jax.core.errors import InputError
from moe_jax.files.staging import check_writable
from moe_jax.files.storage_path import as_path

if TYPE_CHECKING:
    from moe_jax.api.model import Model
    from moe_jax.harness.task_files import TaskFolder


class TaskOptions(NamedTuple):
    """The options of `moe-jax eval` that concern tasks."""

    model: Path
    tasks: str
    folder: Path | None
    data: Path | None
    limit: int | None
    num_fewshot: int | None
    apply_chat_template: bool
    cache: Path | None
    output: Path | None
    samples: Path | None
    json: bool


def read_tasks(options: TaskOptions) -> "TaskFolder":
    """Reads the task files and checks the options, before a model is read.

    Raises:
      FileNotFoundError, InputError: bad options or task files, or lm-eval is absent.
    """
    # The progress bars of lm-eval and `datasets` would stand between our own lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from moe_jax.harness.task_files import DATA_VARIABLE
    from moe_jax.harness.task_run import check_installed, known_tasks

    check_installed()
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    for name in ("output", "samples"):
        path = getattr(options, name)
        if path is not None and path.exists():
            raise InputError(f"--{name} {path} exists already")
        if path is not None:
            _check_file(name, path)
    data = options.data or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if data is not None and not data.is_dir():
        raise FileNotFoundError(f"no directory of data at {data}")
    return known_tasks(options.folder, data=data)


def _check_file(option: str, path: Path) -> None:
    """Raises an error, before the evaluation, if its results could not be written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--{option} {path}: there is no directory {path.parent}")
    check_writable(path)


def list_tasks(known: "TaskFolder") -> None:
    """Prints the names of the tasks that `--tasks` can be given."""
    print("task files: " + ", ".join(sorted(known.tasks)))
    if known.groups or known.tags:
        print("several at once: " + ", ".join(sorted({*known.groups, *known.tags})))
    for name, why in sorted(known.refused.items()):
        print(f"refused: {name}: {why}")
    print("and lm-eval's own, whose data is on the Hugging Face Hub")


def evaluate_on_tasks(
    model: "Model", known: "TaskFolder", options: TaskOptions, *, batch_size: int, max_length: int | None
) -> None:
    """Evaluates the model, and prints a table or JSON or writes files, as the options say. All processes make the call.

    Raises:
      FileNotFoundError, InputError: bad task files or data, or a model without a tokenizer.
    """
    from moe_jax.distributed.processes import is_first_process
    from moe_jax.harness.task_files import sandboxed_templates
    from moe_jax.harness.task_run import load_tasks, samples_of, without_unjudged

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise InputError("--tasks names no task; --tasks list shows those that there are")
    with sandboxed_templates():
        tasks = load_tasks(names, known)
        written = [name for name, task in tasks["tasks"].items() if (task.get_config("metadata") or {}).get("samples")]
        if options.samples is None and written:
            raise InputError(f"{written[0]} is not judged here, but written for another program: give --samples FILE")
        if options.samples is not None and not written:
            raise InputError("--samples: none of the tasks says what its samples are (metadata.samples)")
        found = _evaluated(model, tasks, options, batch_size, max_length)
        lines = [json.dumps(line, ensure_ascii=False) for line in samples_of(found)] if options.samples else []
    if not is_first_process():
        return
    results = without_unjudged(found)
    results.pop("samples", None)
    results["config"] = _config(model, options, batch_size)
    text = json.dumps(results, indent=2, default=_plain, ensure_ascii=False)
    if options.output is not None:
        as_path(options.output).replace_content((text + "\n").encode())
    if options.samples is not None:
        as_path(options.samples).replace_content("".join(line + "\n" for line in lines).encode())
        print(f"{len(lines):,} samples in {options.samples}", file=sys.stderr)
    print(text if options.json else _table(results))


def _evaluated(
    model: "Model", tasks: dict[str, Any], options: TaskOptions, batch_size: int, max_length: int | None
) -> dict[str, Any]:
    from moe_jax.api.run import tokenizer_of
    from moe_jax.core.terminal import progress_bars
    from moe_jax.distributed.processes import is_first_process
    from moe_jax.harness.answer_cache import AnswerCache
    from moe_jax.harness.language_model import HarnessModel
    from moe_jax.harness.task_run import evaluate_tasks

    tokenizer = tokenizer_of(model, "an evaluation on tasks", "name one (--tokenizer)")
    cache = None
    if options.cache is not None and is_first_process():
        tokenizer_key = hashlib.sha256(tokenizer.path.read_bytes()).hexdigest()
        key = (model.source.fingerprint(), tokenizer_key, model.loading.compute_dtype, str(max_length))
        cache = AnswerCache(options.cache, " ".join(key))
    try:
        with progress_bars(shown=is_first_process()) as progress:
            asked = HarnessModel(
                model.decoder,
                tokenizer,
                max_length=max_length,
                batch_size=batch_size,
                mesh=model.mesh,
                cache=cache,
                progress=progress,
            )
            return evaluate_tasks(
                asked,
                tasks,
                limit=options.limit,
                num_fewshot=options.num_fewshot,
                apply_chat_template=options.apply_chat_template,
            )
    finally:
        if cache is not None:
            cache.close()


def _config(model: "Model", options: TaskOptions, batch_size: int) -> dict[str, Any]:
    """Returns the settings of a run under the names that lm-eval gives them."""
    return {
        "model": "moe-jax",
        "model_args": {"path": str(options.model), "compute_dtype": model.loading.compute_dtype},
        "batch_size": batch_size,
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "apply_chat_template": options.apply_chat_template,
        "use_cache": None if options.cache is None else str(options.cache),
    }


def _plain(value: Any) -> Any:
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)


def _table(results: dict[str, Any]) -> str:
    """Returns lm-eval's own table, with standard errors; tasks without figures are left out."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(table.rstrip() for table in tables)
