"""`moe-jax generate MODEL --prompt "..."`: continues or answers prompts, all in one batch."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from moe_jax.commands import BaseFlag
from moe_jax.commands.mesh_option import parse_mesh
from moe_jax.errors import InputError, shown


@dataclasses.dataclass(frozen=True)
class Options(BaseFlag):
    """Continues prompts, or answers them: with a model that has an encoder, which is given the prompt.

    Greedy unless a temperature is given; a prompt's result does not depend on the others.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model directory, an adapter directory, a Hugging Face directory, or RUN@STEP: a checkpoint of a run."""
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """A prompt; may be given several times. BOS is put before it where the tokenizer does so, and for an encoder EOS
    after it."""
    prompts_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file with one prompt per line; empty lines are skipped."""
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
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a text, besides those that the model names as EOS."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the activations."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Devices to split the model over, such as tensor=8 or data=2,tensor=4: `tensor` splits kernels, and caches by
    heads; `expert` splits experts; all but `tensor` split the prompts, if they divide them. Without it, one device."""
    json: bool = False
    """Prints JSON and nothing else: a list with prompt, prompt_ids, text, ids and stopped of every prompt."""


def run(options: Options) -> None:
    """Prints the continued prompts.

    Raises:
      FileNotFoundError: if there is no model or no file of prompts.
      InputError: for bad prompts or sampling options, a text prompt for a model without tokenizer, or a mesh that does
        not fit the devices.
    """
    from moe_jax.api.model import Loading, Model
    from moe_jax.api.run import Prompt, generate
    from moe_jax.sharding import make_mesh

    prompts: list[Prompt] = [*options.prompt, *_lines(options.prompts_file), *map(_parse_ids, options.ids)]
    if not prompts:
        raise InputError("nothing to continue: give --prompt, --prompts-file or --ids")
    mesh = None if options.mesh is None else make_mesh(parse_mesh(options.mesh))
    source = options.open(options.model)
    loading = Loading.for_generation(source, compute_dtype=options.compute_dtype, mesh=mesh)
    model = Model.of_source(source, loading)
    results = generate(
        model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_ids=options.stop_ids,
    )
    longest, added = max(len(result.prompt_ids) for result in results), options.max_new_tokens
    longest = max(longest, added) if model.config.has_encoder else longest + added
    most = model.config.max_positions
    if longest > most:
        print(f"moe-jax: note: {longest} positions, but the model was trained for {most}", file=sys.stderr)
    described = [result._asdict() for result in results]
    if options.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
        return
    for index, entry in enumerate(described):
        if len(described) > 1:
            print(f"--- {index + 1} ---")
        before = "" if model.config.has_encoder else entry["prompt"]
        print(" ".join(map(str, entry["ids"])) if entry["text"] is None else before + entry["text"])


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
        raise InputError(f"--ids {shown(text)}: expected token ids joined by commas, as in 1,15,7") from None
