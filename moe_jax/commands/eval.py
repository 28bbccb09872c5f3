"""`moe-jax eval MODEL`: perplexity on a text or on pairs (`--text FILE`), label accuracy (`--classify FILE`), or tasks
of lm-eval (`--tasks NAME,...`)."""

import collections
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from moe_jax.commands.options import OneModel, check_text_file
from moe_jax.core.bad_documents import OnBad, Skipped, skipped_lines, skipped_words
from moe_jax.core.errors import InputError, flag_of
from moe_jax.data.sections import check_seq_len
from moe_jax.files.staging import check_writable
from moe_jax.files.storage_path import as_path, nearest_path, raise_no_file

if TYPE_CHECKING:
    from moe_jax.api.model import Model
    from moe_jax.harness.task_files import TaskFolder

_BATCH_SIZE = 8
# Batch size of requests, which are mostly short.
_REQUESTS = 32
_OF_TASKS = ("tasks_dir", "data_dir", "image_folder", "image_aspect", "limit", "num_fewshot", "cache", "output",
             "samples")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(OneModel):
    """Measures a model: its perplexity on a text, how often it labels texts rightly, or how well it does tasks.

    Perplexity is e to the mean loss of a token; lower is better.

    A text is tokenised whole without special tokens and cut into consecutive windows, the last of which may be shorter;
    every token but the first of each window is scored. JSON (*.jsonl, *.json) and tables (*.parquet, *.arrow) hold
    documents {"text"}; pairs such as {"prompt", "response"} or {"input", "target"}, of which the second is scored,
    given the first; or conversations {"messages"}, in which the assistant's words are scored; see the sources of a
    recipe (moe-jax train --keys sources). All may be compressed (.gz, .zst).
    A model with an encoder is scored on pairs alone.

    Labelled texts are JSON lines of a label and a text, in the style of GLUE. A head for classes scores them at the
    last token; other models are asked how likely they are to say each label after the text, or in answer to it.

    Tasks (PIQA, ARC, GSM8K, ...) come from task files in lm-eval's YAML: those of this library and of --tasks-dir, over
    local files, and those of lm-eval, whose data is on the Hugging Face Hub. Models that see are asked about pictures,
    too (gqa_local, pope_local, vqa_rad_local, ...). pip install 'moe-jax[eval]'.
    """

    local_only: ClassVar[tuple[str, ...]] = ("tasks_dir", "data_dir", "image_folder", "cache", "output", "samples")

    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file; or documents, pairs or conversations as JSON lines or a table."""
    classify: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON lines with "label", a string or a number, and "text", "sentence", or "sentence1" and "sentence2", or the
    like. Prints the accuracy with its 95% interval (Wilson), and the labels given."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME,...")] = None
    """With --classify: names of the labels 0, 1, ..., which are also what is said. By default those of the model's
    classes, or the strings that occur as labels."""
    template: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """With --classify: what the model is given, as in "sst2 sentence: {sentence}"."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME,...")] = None
    """Tasks of lm-eval; `list` shows those of task files. Prints their figures with standard errors."""
    tasks_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """With --tasks: a folder of task files (*.yaml). They only describe: one that names code is refused."""
    data_dir: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: $MOE_JAX_EVAL_DATA)")
    ] = None
    """With --tasks: where the data files of task files begin. Without it, at the task file."""
    image_folder: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """With --tasks about pictures: the folder that documents name pictures in. By default as the tasks say."""
    image_aspect: Literal["pad", "square"] | None = None
    """With --tasks about pictures: they are padded to squares, or resized and cut. By default as the tasks say, or else
    the model."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --tasks: so many examples of every task, the first; by default all."""
    num_fewshot: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --tasks: so many examples with their answers before a question, unless a task says 0. By default as
    the task says."""
    apply_chat_template: bool = False
    """With --tasks: prompts are messages of a conversation, in the tokenizer's own template. With --text: pairs are a
    question of the user and the assistant's answer, as those of training with chat = true."""
    cache: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --tasks: a file that keeps the model's answers, so that none is asked for twice."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --tasks: the results as lm-eval's JSON."""
    samples: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --tasks: what the model wrote, for another program to judge: JSON lines for EvalPlus, or the file that a set
    of questions about pictures is uploaded as. Programs are never run here."""
    seq_len: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
    """Length of a window in tokens, or of targets; by default 1024, or the model's context length if shorter. With
    --tasks, tokens that the model is given at most; by default its context length."""
    input_len: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
    """Length of an encoder's inputs, or of texts to label; by default the same. Longer ones are cut, and counted."""
    batch_size: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint=f"(default: {_BATCH_SIZE}; with --tasks {_REQUESTS})")
    ] = None
    """Number of windows, pairs or requests computed at once. Does not change the result."""
    bad_documents: OnBad = "stop"
    """A document that cannot be scored (no row of its file, no answer, no known label) ends everything, or it is left
    out, named and counted."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the matrix products."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A tokenizer.json, or a directory that holds one, instead of the model's own."""
    split: bool = False
    """Splits the parameters over the devices, of all processes, instead of copying them to each."""
    json: bool = False
    """Prints JSON and nothing else: tokens, nll (mean, natural log), perplexity, total_nll, windows (or pairs), cut,
    seq_len; or accuracy, interval, correct, count, labels, confusion, predictions, by, cut; or lm-eval's results. With
    these, skipped and problems, of bad documents."""

    def check(self) -> None:
        """Raises `InputError` for options that do not go together or are out of range, and results that exist."""
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size} must be at least 1")
        if [self.text, self.classify, self.tasks].count(None) != 2:
            raise InputError("give one of --text FILE, --classify FILE and --tasks NAME,...")
        if self.tasks is None:
            for name in _OF_TASKS:
                if getattr(self, name) is not None:
                    raise InputError(f"{flag_of(name)} goes with --tasks")
        if self.classify is None and (self.labels is not None or self.template is not None):
            raise InputError("--labels and --template go with --classify FILE")
        if self.classify is not None and self.seq_len is not None:
            raise InputError("--seq-len goes with --text; with --classify, --input-len says how much of a text is read")
        if self.classify is not None and self.apply_chat_template:
            raise InputError("--apply-chat-template goes with --text and --tasks")
        if self.tasks is not None and self.input_len is not None:
            raise InputError("--input-len goes with --text and --classify")
        if self.text is not None and self.seq_len is not None:
            check_seq_len(self.seq_len)
        for name, least in (("input_len", 1), ("limit", 1), ("num_fewshot", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{flag_of(name)} {value} must be at least {least}")
        given = [path for path in (self.cache, self.output, self.samples) if path is not None]
        if len({path.resolve() for path in given}) < len(given):
            raise InputError("--cache, --output and --samples are one file each; give other names")
        for name in ("output", "samples"):
            path = getattr(self, name)
            if path is not None and path.exists():
                raise InputError(f"--{name} {path} exists already")
            if path is not None and not path.parent.is_dir():
                raise FileNotFoundError(f"--{name} {path}: there is no directory {path.parent}")

    def check_places(self) -> None:
        """Raises an error for files and folders that are not there, and a text that is empty."""
        check_text_file(self.text)
        check_text_file(self.classify, "file of labelled texts")
        if self.tokenizer is not None:
            _tokenizer_file(self.tokenizer)
        if self.tasks_dir is not None and not self.tasks_dir.is_dir():
            raise FileNotFoundError(f"no folder of task files at {self.tasks_dir}{nearest_path(self.tasks_dir)}")
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise FileNotFoundError(f"no folder of pictures at {self.image_folder}{nearest_path(self.image_folder)}")
        if self.tasks is not None:
            _data_folder(self)


GROUPS = {
    "what is measured (one of these)": ("text", "classify", "tasks"),
    "of --text and --tasks": ("apply_chat_template",),
    "of --text and all others": (
        "seq_len",
        "input_len",
        "batch_size",
        "bad_documents",
        "compute_dtype",
        "tokenizer",
        "split",
    ),
    "of --classify": ("labels", "template"),
    "of --tasks": _OF_TASKS,
}
EXAMPLES = """
moe-jax eval run/model --text held-out.txt --seq-len 1024
moe-jax eval run/model --tasks piqa,arc_easy --limit 200 --output results.json
moe-jax eval run/llava --tasks gqa_local,pope_local --data-dir eval
moe-jax eval run/model --classify sst2.jsonl --labels negative,positive
"""


def run(options: Options) -> None:
    """Scores the text, the labels or the tasks, and prints the result."""
    import jax

    from moe_jax.api.model import Loading, Model
    from moe_jax.distributed.processes import join_processes, let_first_work
    from moe_jax.distributed.sharding import make_mesh
    from moe_jax.model_io.loading import dtype_for_generation

    known = None
    if options.tasks is not None:
        known = _read_tasks(options)
        if options.tasks == "list":
            if let_first_work():
                _list_tasks(known)
            return
    join_processes()
    # Requests of tasks are divided among processes, each with a copy of the model, unless they hold it together.
    devices = None if options.tasks is None or options.split else jax.local_devices()
    mesh = make_mesh({"fsdp" if options.split else "data": -1}, devices)
    source = options.open()
    dtype = None if options.tasks is None else dtype_for_generation(source, options.compute_dtype, mesh)
    # A model that answers tasks may generate, and is arranged for that when it does.
    loading = Loading(dtype=dtype, compute_dtype=options.compute_dtype, mesh=mesh, joined=options.tasks is None)
    model = Model.of_source(source, loading)
    if options.tokenizer is not None:
        model.tokenizer_files = (as_path(_tokenizer_file(options.tokenizer)),)
    if known is not None:
        _evaluate_on_tasks(model, known, options)
    elif options.classify is not None:
        _classify(model, options)
    else:
        _evaluate(model, options)


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise_no_file("tokenizer", file)
    if file.name != "tokenizer.json":
        raise InputError(f"--tokenizer {path}: expected a file named tokenizer.json, or the directory that holds it")
    return file


def _evaluate(model: "Model", options: Options) -> None:
    from moe_jax.api.measure import default_seq_len, evaluate
    from moe_jax.data.sections import SourceSection
    from moe_jax.distributed.processes import is_first_process

    assert options.text is not None
    seq_len = default_seq_len(model.config) if options.seq_len is None else options.seq_len
    most = model.config.max_positions
    if seq_len > most and is_first_process():
        print(f"warning: {options.model} was made for {most} positions, not {seq_len}", file=sys.stderr)
    batch_size = _BATCH_SIZE if options.batch_size is None else options.batch_size
    result = evaluate(
        model,
        options.text,
        seq_len=seq_len,
        input_len=options.input_len,
        batch_size=batch_size,
        apply_chat_template=options.apply_chat_template,
        bad_documents=options.bad_documents,
    )
    _say_skipped(result.skipped, result.problems)
    if result.cut and is_first_process():
        print(f"note: {result.cut:,} of {result.windows:,} pairs are too long and were cut", file=sys.stderr)
    result = result._asdict() | {"seq_len": seq_len, "model": str(options.model), "text": str(options.text)}
    if options.json:
        print(json.dumps(result))
        return
    windows = f"windows of {seq_len}" if SourceSection(path=str(options.text)).form == "text" else "rows"
    print(f"{result['tokens']:,} tokens scored in {result['windows']:,} {windows}{_and_skipped(result['skipped'])}")
    print(f"nll {result['nll']:.6f}  perplexity {result['perplexity']:.4f}")


def _classify(model: "Model", options: Options) -> None:
    """Labels the texts and prints how many labels were right, and how often each label was given for each other one."""
    from moe_jax.api.measure import classify
    from moe_jax.distributed.processes import is_first_process

    labels = None if options.labels is None else [name.strip() for name in options.labels.split(",")]
    assert options.classify is not None
    result = classify(
        model,
        options.classify,
        labels=labels,
        template=options.template,
        input_len=options.input_len,
        batch_size=_BATCH_SIZE if options.batch_size is None else options.batch_size,
        bad_documents=options.bad_documents,
    )
    _say_skipped(result.skipped, result.problems)
    if result.cut and is_first_process():
        print(f"note: {result.cut:,} of {result.count:,} texts are too long and were cut", file=sys.stderr)
    if options.json:
        print(json.dumps(result._asdict() | {"model": str(options.model), "file": str(options.classify)}))
        return
    low, high = result.interval
    how = "the head" if result.by == "head" else "the likelihood of the labels"
    print(f"accuracy {result.accuracy:.4f} (95%: {low:.4f} to {high:.4f})")
    counts = f"{result.correct:,} of {result.count:,} texts"
    print(f"{counts} are labelled as they should be, by {how}{_and_skipped(result.skipped)}")
    width = max(5, *(len(name) for name in result.labels), len(f"{result.count:,}"))
    print(f"{'label':>{width}}  given " + "  ".join(f"{name:>{width}}" for name in result.labels))
    for name, row in zip(result.labels, result.confusion, strict=True):
        print(f"{name:>{width}}        " + "  ".join(f"{count:>{width},}" for count in row))


def _say_skipped(count: int, problems: Sequence[str]) -> None:
    from moe_jax.distributed.processes import is_first_process

    if count and is_first_process():
        for line in skipped_lines(count, problems):
            print(line, file=sys.stderr)


def _and_skipped(count: int) -> str:
    return f"; {skipped_words(count)}" if count else ""


def _read_tasks(options: Options) -> "TaskFolder":
    """Reads the task files and checks the options, before a model is read."""
    # The progress bars of lm-eval and `datasets` would stand between our own lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from moe_jax.harness.task_run import check_installed, known_tasks

    check_installed()
    for path in (options.output, options.samples):
        if path is not None:
            check_writable(path)
    return known_tasks(options.tasks_dir, data=_data_folder(options))


def _data_folder(options: Options) -> Path | None:
    """Returns the folder of the tasks' data, if one is named; raises `FileNotFoundError` if it is not there."""
    from moe_jax.harness.task_files import DATA_VARIABLE

    data = options.data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if data is not None and not data.is_dir():
        raise FileNotFoundError(f"no directory of data at {data}{nearest_path(data)}")
    return data


def _list_tasks(known: "TaskFolder") -> None:
    print("task files: " + ", ".join(sorted(known.tasks)))
    if known.groups or known.tags:
        print("several at once: " + ", ".join(sorted({*known.groups, *known.tags})))
    for name, why in sorted(known.refused.items()):
        print(f"refused: {name}: {why}")
    print("and lm-eval's own, whose data is on the Hugging Face Hub")


def _evaluate_on_tasks(model: "Model", known: "TaskFolder", options: Options) -> None:
    """Evaluates the model, and prints a table or JSON or writes files. All processes make the call."""
    from lm_eval.utils import handle_non_serializable, make_table

    from moe_jax.distributed.processes import is_first_process
    from moe_jax.harness.samples import check_samples, samples_file, without_unjudged
    from moe_jax.harness.task_files import sandboxed_templates
    from moe_jax.harness.task_run import load_tasks

    batch_size = _REQUESTS if options.batch_size is None else options.batch_size
    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    if not names:
        raise InputError("--tasks names no task; --tasks list shows those that there are")
    skipped = collections.defaultdict(lambda: Skipped(options.bad_documents))
    with sandboxed_templates():
        tasks = load_tasks(names, known, skipped)
        check_samples(tasks["tasks"], asked_for=options.samples is not None)
        found = _evaluated(model, tasks, skipped, options, batch_size)
        samples = samples_file(tasks["tasks"], found) if options.samples is not None else None
    if not is_first_process():
        return
    results = without_unjudged(found)
    results.pop("samples", None)
    if options.bad_documents == "skip":
        results["skipped"] = {name: {"count": one.count, "problems": one.problems} for name, one in skipped.items()}
    for one in skipped.values():
        _say_skipped(one.count, one.problems)
    results["config"] = {  # under the names that lm-eval gives them
        "model": "moe-jax",
        "model_args": {"path": str(options.model), "compute_dtype": model.loading.compute_dtype},
        "batch_size": batch_size,
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "apply_chat_template": options.apply_chat_template,
        "use_cache": None if options.cache is None else str(options.cache),
    }
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    if options.output is not None:
        as_path(options.output).replace_content((text + "\n").encode())
    if options.samples is not None and samples is not None:
        as_path(options.samples).replace_content(samples.content.encode())
        print(f"{samples.count:,} samples in {options.samples}", file=sys.stderr)
    if not options.json:
        # lm-eval's own table, with standard errors; tasks without figures are left out.
        tables = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
        text = "\n".join(table.rstrip() for table in tables)
        text += "".join(f"\n{name}{_and_skipped(one.count)}" for name, one in skipped.items() if one.count)
    print(text)


def _evaluated(
    model: "Model", tasks: dict[str, Any], skipped: Mapping[str, Skipped], options: Options, batch_size: int
) -> dict[str, Any]:
    from moe_jax.api.measure import tokenizer_of
    from moe_jax.core.terminal import progress_bars
    from moe_jax.distributed.processes import is_first_process
    from moe_jax.harness.answer_cache import AnswerCache
    from moe_jax.harness.language_model import HarnessModel, hash_of_tokenizer
    from moe_jax.harness.pictures.task_pictures import pictures_of_tasks
    from moe_jax.harness.task_run import evaluate_tasks

    tokenizer = tokenizer_of(model, "an evaluation on tasks", "name one (--tokenizer)")
    pictures = pictures_of_tasks(tasks["tasks"], options.image_folder, options.image_aspect)
    for name in pictures:
        model.config.check_sees(f"task {name!r} asks about pictures")
    if not pictures and (options.image_folder or options.image_aspect):
        raise InputError("--image-folder and --image-aspect: none of the tasks is about pictures")
    cache = None
    if options.cache is not None and is_first_process():
        tokenizer_key = hash_of_tokenizer(tokenizer)
        key = (model.source.fingerprint(), tokenizer_key, model.loading.compute_dtype, str(options.seq_len))
        cache = AnswerCache(options.cache, " ".join(key))
    try:
        with progress_bars(shown=is_first_process()) as progress:
            asked = HarnessModel(
                model.decoder,
                tokenizer,
                max_length=options.seq_len,
                batch_size=batch_size,
                mesh=model.mesh,
                cache=cache,
                pictures=pictures,
                progress=progress,
            )
            return evaluate_tasks(
                asked,
                tasks,
                limit=options.limit,
                num_fewshot=options.num_fewshot,
                apply_chat_template=options.apply_chat_template,
                skipped=skipped,
            )
    finally:
        if cache is not None:
            cache.close()
