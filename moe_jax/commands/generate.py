"""`moe-jax generate MODEL --prompt "..."`: continues or answers prompts, all in one batch."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from moe_jax.commands import BaseFlag
from moe_jax.commands.mesh_option import parse_mesh
from moe_jax.errors import InputError, shown

if TYPE_CHECKING:
    from moe_jax.api.generate import Continuation, Speed


@dataclasses.dataclass(frozen=True)
class Options(BaseFlag):
    """Continues prompts, or answers them: with a model that has an encoder, which is given the prompt.

    Greedy unless a temperature is given; a prompt's result does not depend on the others. Why every text ended, and how
    many tokens a second there were, is said on standard error.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory, an adapter directory, a Hugging Face directory, or RUN@STEP: a checkpoint of a run."""
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """A prompt; may be given several times. BOS is put before it where the tokenizer does so, and for an encoder EOS
    after it."""
    prompts_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A file of prompts: a text file with one per line, or *.jsonl with one {"prompt": "..."} per line. Empty lines are
    skipped."""
    ids: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="ID,ID,...")] = ()
    """A prompt as token ids, used unchanged; may be given several times. Needs no tokenizer."""
    max_new_tokens: int = 128
    """The largest number of tokens to add."""
    temperature: float = 0.0
    """Divides the logits before sampling; 0 takes the most likely token."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Samples from this many of the most likely tokens."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Samples from the most likely tokens whose probabilities sum to this."""
    seed: int = 0
    """Seed of the sampling."""
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """A text that ends what is generated, and is no part of it; may be given several times."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a text, besides those that the model names as EOS, in its config or in generation_config.json
    (of which nothing else is used)."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the activations."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Devices to split the model over, such as tensor=8 or data=2,tensor=4: `tensor` splits kernels, and caches by
    heads; `expert` splits experts; all but `tensor` split the prompts, if they divide them. Without it, one device."""
    stream: bool = False
    """Prints the text as it comes; for one prompt. On a terminal this is done anyway."""
    json: bool = False
    """Prints JSON and nothing else: a list with prompt, prompt_ids, text, ids, stopped, reason (eos, stop_id, stop or
    length) and ended_by of every prompt."""


def run(options: Options) -> None:
    """Prints the continued prompts.

    Raises:
      FileNotFoundError: if there is no model or no file of prompts.
      InputError: for bad prompts or sampling options, a text prompt for a model without tokenizer, or a mesh that does
        not fit the devices.
    """
    from moe_jax.api.generate import Prompt, Wanted, continue_prompts, prompt_ids
    from moe_jax.api.model import Loading, Model
    from moe_jax.sharding import make_mesh

    prompts: list[Prompt] = [*options.prompt, *_prompts_of(options.prompts_file), *map(_parse_ids, options.ids)]
    if not prompts:
        raise InputError("nothing to continue: give --prompt, --prompts-file or --ids")
    if options.stream and (options.json or len(prompts) > 1):
        raise InputError("--stream is for one prompt, and not for --json")
    mesh = None if options.mesh is None else make_mesh(parse_mesh(options.mesh))
    source = options.open(options.model)
    loading = Loading.for_generation(source, compute_dtype=options.compute_dtype, mesh=mesh)
    model = Model.of_source(source, loading)
    ids = [prompt_ids(prompt, model) for prompt in prompts]
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(Wanted)}
    streams = len(prompts) == 1 and not options.json and (options.stream or sys.stdout.isatty())
    streams = streams and model.tokenizer is not None
    beginnings = ["" if model.config.has_encoder or not model.tokenizer else model.tokenizer.decode(row) for row in ids]

    def show(row: int, text: str) -> None:
        nonlocal beginnings
        sys.stdout.write(beginnings[row] + text)
        sys.stdout.flush()
        beginnings[row] = ""

    results, speed = continue_prompts(model, ids, Wanted(**asked), show if streams else None)
    longest, added = max(len(result.prompt_ids) for result in results), options.max_new_tokens
    longest = max(longest, added) if model.config.has_encoder else longest + added
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
    notes = [*endings(results), show_speed(speed)]
    if longest > model.config.max_positions:
        notes.append(f"note: {longest} positions, but the model was trained for {model.config.max_positions}")
    for note in notes:
        print(f"moe-jax: {note}", file=sys.stderr)


def endings(results: Sequence["Continuation"]) -> list[str]:
    """Why texts ended: a line for each reason, with the numbers of the prompts if there are several."""
    rows: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        rows.setdefault(_ending(result), []).append(index + 1)
    if len(results) == 1:
        return [f"ended {why}" for why in rows]
    return [f"{_numbers(numbers)} ended {why}" for why, numbers in rows.items()]


def show_speed(speed: "Speed") -> str:
    """Tokens, seconds and tokens per second in one line."""
    if speed.tokens == 1:
        return f"1 token in {speed.seconds:.1f} s"
    rate = f"the first after {speed.first:.1f} s, then {speed.per_second:.1f} a second"
    return f"{speed.tokens} tokens in {speed.seconds:.1f} s: {rate}"


def _ending(result: "Continuation") -> str:
    if result.reason == "length":
        return f"at {len(result.ids)} tokens (--max-new-tokens)"
    what = {"eos": "EOS", "stop_id": "--stop-ids", "stop": "--stop"}[result.reason]
    by = shown(result.ended_by) if result.reason == "stop" else result.ended_by
    return f"with {by} ({what})" if result.ids else f"at once with {by} ({what}): nothing was added"


def _numbers(numbers: Sequence[int]) -> str:
    """`prompts 1-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    joined = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"prompt{'s' if len(numbers) > 1 else ''} {joined}"


def _prompts_of(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from None
    is_jsonl = path.suffix == ".jsonl"
    prompts = [
        _prompt_of(line, f"{path}, line {number}") if is_jsonl else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise InputError(f"{path} has no prompts: one per line is expected")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    from moe_jax.json_toml import parse_json

    value = parse_json(line.encode(), where=where)
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise InputError(f'{where}: expected an object with a text "prompt", got {shown(value)}')
    return value["prompt"]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--ids {shown(text)}: expected token ids joined by commas, as in 1,15,7") from None
