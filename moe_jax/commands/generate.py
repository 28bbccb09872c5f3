"""`moe-jax generate MODEL --prompt "..."`: continues prompts, all of them as one batch."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from moe_jax.errors import InputError

if TYPE_CHECKING:
    from moe_jax.model_source import ModelSource
    from moe_jax.train.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Options:
    """Continues prompts. Greedy unless a temperature is given; a prompt's result does not depend on the others."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory or a Hugging Face directory."""
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """A prompt; may be given several times. BOS is put before it where the tokenizer does so."""
    prompts_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file with one prompt per line; empty lines are skipped."""
    ids: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="ID,ID,...")] = ()
    """A prompt as token ids, taken as they are; may be given several times. Needs no tokenizer."""
    max_new_tokens: int = 128
    """At most so many tokens are added."""
    temperature: float = 0.0
    """Divides the logits before sampling; 0 takes the most likely token."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Samples from this many of the most likely tokens."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Samples from the most likely tokens whose probabilities sum to this."""
    seed: int = 0
    """Of sampling."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a text, besides those that the model names as EOS."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the activations."""
    json: bool = False
    """Prints JSON and nothing else: a list with prompt, prompt_ids, text, ids and stopped of every prompt."""


def run(options: Options) -> None:
    """Prints the continued prompts.

    Raises:
      FileNotFoundError: if there is no model or no file of prompts.
      InputError: for bad prompts or sampling options, or a text prompt for a model without tokenizer.
    """
    import jax

    from moe_jax.generation import generate
    from moe_jax.loading import load_model
    from moe_jax.open_source import open_source

    source = open_source(options.model)
    texts = [*options.prompt, *_lines(options.prompts_file)]
    tokenizer = _tokenizer(source, required=bool(texts))
    prompts = [tokenizer.prompt(text).tolist() for text in texts] + [_parse_ids(text) for text in options.ids]
    if not prompts:
        raise InputError("nothing to continue: give --prompt, --prompts-file or --ids")
    results = generate(
        load_model(source, compute_dtype=options.compute_dtype),
        prompts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        key=jax.random.key(options.seed),
        eos_ids=(*_eos_ids(source), *options.stop_ids),
    )
    longest = max(map(len, prompts)) + options.max_new_tokens
    if longest > source.config.max_positions:
        print(
            f"moe-jax: note: {longest} positions, but the model was trained for {source.config.max_positions}",
            file=sys.stderr,
        )
    described = [
        _describe(tokenizer, prompt, ids, stopped=len(ids) < options.max_new_tokens)
        for prompt, ids in zip(prompts, results, strict=True)
    ]
    if options.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
        return
    for index, entry in enumerate(described):
        if len(described) > 1:
            print(f"--- {index + 1} ---")
        print(" ".join(map(str, entry["ids"])) if tokenizer is None else entry["prompt"] + entry["text"])


def _describe(
    tokenizer: "Tokenizer | None", prompt: Sequence[int], ids: Sequence[int], *, stopped: bool
) -> dict[str, Any]:
    entry: dict[str, Any] = {"prompt": None, "prompt_ids": list(prompt), "text": None, "ids": list(ids)}
    if tokenizer is not None:
        # A token's text depends on what stands before it: what is new is what the whole has more than the prompt.
        before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
        text = whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(ids)
        entry |= {"prompt": before, "text": text}
    return entry | {"stopped": stopped}


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path} has no prompts: one per line is expected")
    return prompts


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--ids {text!r}: expected token ids joined by commas, as in 1,15,7") from None


def _tokenizer(source: "ModelSource", *, required: bool) -> "Tokenizer | None":
    from moe_jax.train.tokenizer import Tokenizer

    file = next((file for file in source.tokenizer_files if file.name == "tokenizer.json"), None)
    if file is not None:
        return Tokenizer(file, source.config)
    if required:
        raise InputError(
            f"{source.path} has no tokenizer.json, which a text prompt needs (other formats, such as tokenizer.model, "
            "are not read); put one there, or give the prompt as token ids with --ids"
        )
    return None


def _eos_ids(source: "ModelSource") -> tuple[int, ...]:
    """Tokens that end a text: those of the config and of generation_config.json, where chat models name theirs."""
    file = next((file for file in source.tokenizer_files if file.name == "generation_config.json"), None)
    if file is None:
        return source.config.eos_ids
    try:
        eos = json.loads(file.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError):
        raise InputError(f"{file} is not a JSON object; mend or remove it") from None
    more = eos if isinstance(eos, list) else [eos]
    return (*source.config.eos_ids, *(token for token in more if isinstance(token, int)))
