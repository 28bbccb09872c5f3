"""`moe-jax generate MODEL --prompt "..."`: continues or answers prompts, all in one batch, or leads a conversation."""

import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from moe_jax.commands.options import OneModel, command_options, given_to, parse_mesh
from moe_jax.core.errors import InputError, first_sentence, shown
from moe_jax.data.chat_template import Message, load_chat_template
from moe_jax.data.pictures.picture_sources import MARK
from moe_jax.files.storage_path import nearest_path
from moe_jax.generation.spec import GenerateSpec

if TYPE_CHECKING:
    from moe_jax.api.generate import Continuation, Speed
    from moe_jax.api.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command(OneModel):
    """Continues prompts, or answers them: with a model that has an encoder, which is given the prompt.

    Greedy unless a temperature is given; greedy texts do not depend on the other prompts. Why every text ended, and how
    many tokens a second there were, is said on standard error.
    """

    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """A prompt; may be given several times. BOS is put before it where the tokenizer does so, and for an encoder EOS
    after it."""
    prompts_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A file of prompts: a text file with one per line, or *.jsonl with {"prompt": "..."} or {"messages": [...]}, which
    the chat template writes, on every line. Messages may have pictures, as parts {"type": "image", "image": NAME} with
    names inside of the file's folder, or base64. Empty lines are skipped."""
    ids: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="ID,ID,...")] = ()
    """A prompt as token ids, used unchanged; may be given several times. Needs no tokenizer."""
    chat: bool = False
    """Prompts are questions, each written by the model's chat template; a question without <image> is about all
    pictures. Without prompts, a conversation: lines from the terminal, or from standard input, are answered one after
    the other, with all that was said before; a line /image FILE shows a picture."""
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """With --chat, the message that says what the model is to be."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the activations."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Devices to split the model over, such as tensor=8 or data=2,tensor=4: `tensor` splits kernels, and caches by
    heads; `expert` splits experts; `data`, `fsdp` and `expert` split the prompts, if they divide them, and `sequence`
    what a prompt consists of. Without it, one device."""
    stream: bool = False
    """Prints the text as it comes; for one prompt. On a terminal, and in a conversation, this is done anyway."""
    json: bool = False
    """Prints JSON and nothing else: a list with prompt, prompt_ids, text, ids, stopped, reason (eos, stop_id, stop or
    length) and ended_by of every prompt."""


Options = command_options(_Command, GenerateSpec)
GROUPS = {
    "what the model is given": ("prompt", "prompts_file", "ids", "image", "chat", "system"),
    "which tokens are taken": ("temperature", "top_k", "top_p", "seed"),
    "when a text ends": ("max_new_tokens", "stop", "stop_ids"),
    "what is printed": ("stream", "json"),
    "where it is computed": ("compute_dtype", "mesh"),
}
EXAMPLES = """
moe-jax generate model-dir --prompt "Once upon a time" --max-new-tokens 100
moe-jax generate llava-dir --prompt "USER: <image> Where is this? ASSISTANT:" --image photo.jpg
moe-jax generate llava-dir --chat --prompt "Where is this?" --image photo.jpg
# a conversation
moe-jax generate SmolLM2-135M-Instruct --chat
moe-jax generate model-dir --chat --prompts-file questions.jsonl --json
"""


def run(options: _Command) -> None:
    """Prints the continued prompts, or leads a conversation."""
    from moe_jax.distributed.job_place import find_place

    if options.system is not None and not options.chat:
        raise InputError("--system goes with --chat")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    texts: list[Any] = [*options.prompt, *_prompts_of(options.prompts_file)]
    wanted = given_to(GenerateSpec, options)
    if options.chat:
        if len(texts) == 1 and isinstance(texts[0], str) and wanted.images and MARK not in texts[0]:
            texts, wanted = [_about(wanted.images, texts[0])], dataclasses.replace(wanted, image=())
        texts = [one if _is_messages(one) else [{"role": "user", "content": one}] for one in texts]
        texts = [one if one[0]["role"] == "system" else [*system, *one] for one in texts]
    prompts: list[Any] = [*texts, *map(_parse_ids, options.ids)]
    converses = options.chat and not prompts
    if not prompts and not converses:
        raise InputError("nothing to continue: give --prompt, --prompts-file or --ids, or --chat for a conversation")
    joined = options.mesh is not None and find_place() is not None
    if joined and (converses or options.stream):
        raise InputError("a conversation and --stream need a model in one process; give --prompt, or no --mesh")
    if options.stream and (options.json or len(prompts) > 1):
        raise InputError("--stream is for one prompt, and not for --json")
    if converses and wanted.images:
        raise InputError("--image is for prompts; in a conversation, /image FILE shows a picture")
    if converses and options.json:
        raise InputError("--json is for prompts, and not for a conversation")
    sizes = None if options.mesh is None else parse_mesh(options.mesh)

    # All that needs neither JAX nor the model has been checked.
    from moe_jax.api.generate import continue_prompts, is_conversation, prompt_ids, with_pictures_apart
    from moe_jax.api.model import Loading, Model
    from moe_jax.commands.memory_of_compiling import return_memory_of_compiling
    from moe_jax.distributed.processes import is_first_process, join_processes, let_first_work
    from moe_jax.distributed.sharding import make_mesh

    if sizes is not None:
        join_processes()
    elif not let_first_work():
        return
    return_memory_of_compiling()
    mesh = None if sizes is None else make_mesh(sizes)
    source = options.open()
    rows = 1 if converses else len(prompts)
    loading = Loading.for_generation(source, compute_dtype=options.compute_dtype, mesh=mesh, rows=rows)
    model = Model.of_source(source, loading)
    if converses:
        _converse(model, system, wanted)
        return
    prompts, wanted = with_pictures_apart(prompts, wanted)
    ids = [prompt_ids(prompt, model, pictures=bool(wanted.images)) for prompt in prompts]
    # While somebody reads along, the time decides how many tokens are computed at once, which must be the same in all.
    streams = not joined and len(prompts) == 1 and not options.json and (options.stream or sys.stdout.isatty())
    streams = streams and model.tokenizer is not None
    beginnings = [_beginning(model, prompt, row) for prompt, row in zip(prompts, ids, strict=True)]

    begun = False

    def show(row: int, text: str) -> None:
        nonlocal begun
        sys.stdout.write(beginnings[row] + text)
        sys.stdout.flush()
        beginnings[row], begun = "", True

    try:
        chat = any(map(is_conversation, prompts))
        results, speed = continue_prompts(model, ids, wanted, show if streams else None, chat=chat)
    except BaseException:
        if begun:  # why it ended is not to stand in the line of the text
            print(flush=True)
        raise
    if options.json:
        print(json.dumps([result._asdict() for result in results], indent=2, ensure_ascii=False))
    elif streams:
        print(beginnings[0])
    else:
        for index, result in enumerate(results):
            if len(results) > 1:
                print(f"--- {index + 1} ---")
            print(" ".join(map(str, result.ids)) if result.text is None else beginnings[index] + result.text)
    sys.stdout.flush()
    if not is_first_process():
        return
    plain = [result for prompt, result in zip(prompts, results, strict=True) if isinstance(prompt, str)]
    notes = [*_endings(results), _show_speed(speed), *_advice(model, plain), *_notes_on_length(model, results, wanted)]
    for note in notes:
        print(f"moe-jax: {note}", file=sys.stderr)


def _about(pictures: Sequence[Any], text: str) -> list[dict[str, Any]]:
    """Returns the content of a message that shows pictures before its text."""
    return [*({"type": "image", "image": one} for one in pictures), {"type": "text", "text": text}]


def _is_messages(prompt: Any) -> bool:
    """Whether a prompt is a conversation, and not the content of a message."""
    return isinstance(prompt, list) and "role" in prompt[0]


def _beginning(model: "Model", prompt: Any, ids: Sequence[int]) -> str:
    """Returns the text printed before the added one: the prompt, unless the added text is an answer to it."""
    from moe_jax.api.generate import is_conversation

    is_answered = model.config.has_encoder or is_conversation(prompt)
    return "" if is_answered or model.tokenizer is None else model.tokenizer.decode(ids)


def _advice(model: "Model", results: Sequence["Continuation"]) -> list[str]:
    """Returns advice about texts that ended at once, if there is any."""
    from moe_jax.data.chat_template import find_chat_template

    silent = any(result.reason == "eos" and not result.ids for result in results)
    if not silent or model.tokenizer is None or find_chat_template(model.tokenizer.path) is None:
        return []
    return ["note: the model takes the prompt for a text that is finished; to ask it something, add --chat"]


def _notes_on_length(model: "Model", results: Sequence["Continuation"], wanted: GenerateSpec) -> list[str]:
    """Returns a note if texts may become longer than those that the model was trained for."""
    longest, added = max(len(result.prompt_ids) for result in results), wanted.max_new_tokens
    longest, most = max(longest, added) if model.config.has_encoder else longest + added, model.config.max_positions
    return [f"note: {longest} positions, but the model was trained for {most}"] if longest > most else []


def _endings(results: Sequence["Continuation"]) -> list[str]:
    """Returns a line for each reason why texts ended, with the numbers of the prompts if there are several."""
    rows: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        rows.setdefault(_ending(result), []).append(index + 1)
    if len(results) == 1:
        return [f"ended {why}" for why in rows]
    return [f"{_numbers(numbers)} ended {why}" for why, numbers in rows.items()]


def _show_speed(speed: "Speed") -> str:
    """Returns tokens, seconds and tokens per second in one line."""
    if speed.tokens == 1:
        return f"1 token in {speed.seconds:.1f} s"
    rate = "" if speed.per_second is None else f", {speed.per_second:.1f} a second once compiled"
    return f"{speed.tokens} tokens in {speed.seconds:.1f} s: the first after {speed.first:.1f} s{rate}"


def _ending(result: "Continuation") -> str:
    if result.reason == "length":
        return f"at {len(result.ids)} tokens (--max-new-tokens)"
    what = {"eos": "EOS", "stop_id": "--stop-ids", "stop": "--stop"}[result.reason]
    by = shown(result.ended_by) if result.reason == "stop" else result.ended_by
    return f"with {by} ({what})" if result.ids else f"at once with {by} ({what}): nothing was added"


def _numbers(numbers: Sequence[int]) -> str:
    """Returns numbers as text with ranges, such as `prompts 1-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    joined = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"prompt{'s' if len(numbers) > 1 else ''} {joined}"


def _prompts_of(path: Path | None) -> list[Any]:
    """Returns the prompts of a file: texts, or in a file of JSON lines also conversations."""
    if path is None:
        return []
    if not path.exists():
        raise FileNotFoundError(f"no prompts at {path}{nearest_path(path)}")
    try:
        # A line ends at "\n" alone: `str.splitlines` also cuts at characters that texts and JSON hold, such as U+2028.
        lines = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from None
    is_jsonl = path.suffix == ".jsonl"
    prompts = [
        _prompt_of(line, path.parent, f"{path}, line {number}") if is_jsonl else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise InputError(f"{path} has no prompts: one per line is expected")
    return prompts


def _prompt_of(line: str, folder: Path, where: str) -> Any:
    from moe_jax.data.chat_template import check_messages
    from moe_jax.data.pictures.picture_messages import replaced_pictures, taken_pictures
    from moe_jax.files.json_toml import parse_json

    value = parse_json(line.encode(), where=where)
    if isinstance(value, dict) and "messages" in value:
        try:
            messages = replaced_pictures(value["messages"], partial(_picture_beside, folder))
            check_messages(taken_pictures(messages, lambda picture, _: picture).messages, pictures=True)
            return messages
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise InputError(f'{where}: expected an object with a text "prompt" or with "messages", got {shown(value)}')
    return value["prompt"]


def _picture_beside(folder: Path, value: Any, where: str) -> dict[str, Any]:
    """Returns a part of a message with a picture; a name does not lead out of the folder."""
    from moe_jax.generation.pictures import given_picture
    from moe_jax.images.picture_files import PictureFolder

    picture = given_picture(value, where)
    if isinstance(picture, str):
        PictureFolder(folder).check(picture)
        picture = folder / picture
    return {"type": "image", "image": picture}


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--ids {shown(text)}: expected token ids joined by commas, as in 1,15,7") from None


_HELP = "/clear forgets what was said, /exit ends; Ctrl-C ends an answer"
_HELP_ON_PICTURES = "/image FILE shows a picture, with what you write next"


def _converse(model: "Model", system: Sequence[Message], wanted: GenerateSpec) -> None:
    """Answers the lines of standard input one after the other, until the input ends or a line is /exit.

    For every answer the whole conversation, which begins with the messages of `system`, is read anew, because a
    template may write earlier messages in another way. Answers are printed as they come; Ctrl-C ends one, and its text
    so far stays in the conversation. A picture that /image names is shown with the line after it.
    """
    from moe_jax.api.generate import continue_prompts, prompt_ids, with_pictures_apart
    from moe_jax.api.measure import tokenizer_of

    load_chat_template(tokenizer_of(model, "a conversation", "give prompts as token ids (--ids)").path)
    model.read()
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # lines can be edited and called back
        print(_HELP, *([] if model.config.vision is None else [_HELP_ON_PICTURES]), sep="\n", file=sys.stderr)
    said: list[Message] = [*system]
    shown_next: list[Any] = []
    for line in _lines():
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            said, shown_next = [*system], []
            continue
        if line.split()[0] == "/image":
            shown_next += _picture_to_show(model, line.removeprefix("/image").strip())
            continue
        said.append({"role": "user", "content": _about(shown_next, line) if shown_next else line})
        shown_next = []
        pieces: list[str] = []

        def show(row: int, text: str, pieces: list[str] = pieces) -> None:
            pieces.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()

        notes = []
        try:
            (prompt,), seen = with_pictures_apart([said], wanted)
            ids = [prompt_ids(prompt, model, pictures=bool(seen.images))]
            (result,), speed = continue_prompts(model, ids, seen, show, chat=True)
            notes = [*_endings([result]), _show_speed(speed), *_notes_on_length(model, [result], wanted)]
        except KeyboardInterrupt as interrupt:
            if type(interrupt) is not KeyboardInterrupt:  # a signal that is not Ctrl-C ends the program
                print(flush=True)
                raise
            notes = ["ended by Ctrl-C"]
        print(flush=True)
        for note in notes:
            print(f"moe-jax: {note}", file=sys.stderr)
        said.append({"role": "assistant", "content": "".join(pieces)})


def _picture_to_show(model: "Model", name: str) -> list[Any]:
    """Returns the picture of a file, and says what it is; none, and what is wrong, if it cannot be shown."""
    from moe_jax.images.picture_files import read_picture
    from moe_jax.nn.projector import tokens_per_picture

    try:
        vision = model.config.check_sees("pictures")
        if not name:
            raise InputError("/image FILE: the name of a picture is missing")
        pixels = read_picture(Path(name).expanduser())
    except (InputError, OSError) as error:
        print(f"moe-jax: {first_sentence(error)}", file=sys.stderr)
        return []
    height, width, _ = pixels.shape
    tokens = tokens_per_picture(vision, model.config.d_model)
    print(f"moe-jax: {name}, {width} x {height}, {tokens} tokens: shown with what you write next", file=sys.stderr)
    return [pixels]


def _lines() -> Iterator[str]:
    """Yields the lines that the user writes, but for empty ones. On a terminal Ctrl-C drops the line being written."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not text in {error.encoding}: {error.reason}") from None
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt as interrupt:
            if type(interrupt) is not KeyboardInterrupt or not sys.stdin.isatty():
                raise
            print(f"\n{_HELP}", file=sys.stderr)
            continue
        if not line and not sys.stdin.isatty():
            return
        if line.strip():
            yield line.strip()
