"""A real language model on a CPU, beside Transformers in the same run: forward, training, decoding, and start-up.

    python benchmarks/real_llm.py MODEL [--rounds 5] [--only speed|decoding|start] [--out benchmarks/results]

MODEL is SmolLM2-135M-Instruct as a Hugging Face directory. All is float32. Transformers runs eagerly and compiled
(`torch.compile`; training with fused AdamW, decoding with a static cache), for which a C++ compiler is needed; ratios
are to the faster of the two in the same round's figures, medians to medians and best to best.

- speed: forward (to the logits) and training step (loss, gradient, AdamW) of SmolLM2 with 4 x 512 tokens, and of a
  Mixtral-shaped model with random weights: d 512, f 1024, 4 layers, 8 experts, top-2, vocabulary 4096, 4 x 512 tokens.
  The two libraries take turns, and so do the matrix products of each model alone, made by XLA and by PyTorch: the ratio
  of these is what the products allow.
- decoding: 64 tokens after 32, greedily, for 1, 4 and 16 rows.
- start: whole commands on a small model, each a process of its own, for the second time: programs that were compiled
  the first time are found, and so is Python's byte code, as in any installed package. Of training, which goes on for
  as long as one likes, also the time until the figures of the first step are in metrics.jsonl.

Times are medians; the best are in brackets; in every turn the second run counts. OUT receives `real_llm.json`. Needs
torch and transformers
(`pip install -e '.[test]'`).
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from flax import nnx

import moe_jax
from evidence.commands import write_recipe
from evidence.layouts import LLM_DECODING, LLM_SPEED, LLM_START
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT, current_stamp
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import stream
from moe_jax.model_io.loading import load_model
from moe_jax.nn import Decoder
from moe_jax.peft import split_model, trainable_paths
from moe_jax.training.step import make_step
from moe_jax.training.train_state import init_state
from products import Product, in_torch, in_xla, products_of

ROWS, LENGTH = 4, 512
PROMPT, NEW_TOKENS = 32, 64
Seconds = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("speed", "decoding", "start"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    ask_for_huge_pages()  # as commands do
    figures = Figures("real_llm", options.out, writes=True, stamp=lambda: current_stamp(also=("torch", "transformers")))
    with tempfile.TemporaryDirectory() as name:
        if options.only in (None, "speed"):
            measure_speed(figures, options.model, Path(name), options.rounds)
        if options.only in (None, "decoding"):
            measure_decoding(figures, options.model, options.rounds)
        if options.only in (None, "start"):
            measure_start(figures, options.model, Path(name))


def measure_speed(figures: Figures, smollm2: Path, work: Path, rounds: int) -> None:
    save_mixtral_shaped(work / "mixtral")
    rows = []
    for name, folder in (("SmolLM2-135M", smollm2), ("Mixtral-shaped", work / "mixtral")):
        ours, theirs = our_model(folder), their_model(folder)
        tokens = np.random.default_rng(0).integers(0, ours.config.vocab_size, (ROWS, LENGTH))
        check_equal(ours, theirs, tokens)
        products = products_of(ours.config, ROWS, LENGTH)
        compiled = torch.compile(theirs)
        programs = {
            "forward": (our_forward(ours, tokens), *(their_forward(one, tokens) for one in (theirs, compiled))),
            "training step": (our_training(ours, tokens), *(their_training(one, tokens) for one in (theirs, compiled))),
        }
        for kind, runs in programs.items():
            seconds = in_turns(dict(zip(("ours", "eager", "compiled"), runs, strict=True)), rounds)
            allowed = allowed_by_products(products, rounds, training=kind != "forward")
            reached = beside_the_faster(seconds)
            share = [a / b for a, b in zip(reached, allowed, strict=True)]
            rows.append([f"{name}, {kind}", *map(tokens_per_second, seconds.values()), reached, allowed, share])
            figures.put_rows(LLM_SPEED.name, rows)
        del ours, theirs, compiled, programs
    print(LLM_SPEED.text(figures))


def beside_the_faster(seconds: Seconds) -> list[float]:
    """By how much we are faster than the faster of the other programs: in the median, and in the best round."""
    others = [some for name, some in seconds.items() if name != "ours"]
    return [min(map(pick, others)) / pick(seconds["ours"]) for pick in (statistics.median, min)]


def tokens_per_second(seconds: Sequence[float]) -> list[float]:
    """In the median and in the best round."""
    return [ROWS * LENGTH / statistics.median(seconds), ROWS * LENGTH / min(seconds)]


def in_turns(programs: dict[str, Callable[[], object]], rounds: int) -> Seconds:
    """Seconds of every round. In each turn a run that does not count comes first.

    It compiles; and where another program has run meanwhile, memory has to be had from the system again, which no
    program that goes on has to wait for.
    """
    seconds: Seconds = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            run()
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def allowed_by_products(products: dict[Product, int], rounds: int, *, training: bool) -> list[float]:
    """How many times as long PyTorch takes for all products, each made alone, as XLA; by medians and by best rounds.

    The two take turns at every product: what slows the machine down for a while then slows both.
    """
    totals = {make: [0.0, 0.0] for make in (in_xla, in_torch)}
    for product, times in products.items():
        # Small ones are over before a clock is read.
        repeats = max(1, int(2e9 // product.flops))
        runs = {make: make(product, training=training) for make in totals}
        programs = {make.__name__: partial(_repeated, run, repeats) for make, run in runs.items()}
        for total, seconds in zip(totals.values(), in_turns(programs, rounds).values(), strict=True):
            for place, pick in enumerate((statistics.median, min)):
                total[place] += pick(seconds) / repeats * times
    return [torch_seconds / xla_seconds for xla_seconds, torch_seconds in zip(*totals.values(), strict=True)]


def _repeated(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def our_model(folder: Path, *, stacked: bool = True) -> Decoder:
    return load_model(HuggingFaceDirectory(folder), param_dtype="float32", stacked=stacked)


def their_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_equal(ours: Decoder, theirs: transformers.PreTrainedModel, tokens: np.ndarray) -> None:
    first = tokens[:1, :64]
    with torch.no_grad():
        expected = theirs(torch.tensor(first), use_cache=False).logits.numpy()
    difference = np.abs(np.asarray(ours(jnp.asarray(first, jnp.int32)).logits) - expected).max()
    if not difference < 1e-3:
        raise SystemExit(f"the two models do not compute the same: logits differ by {difference}")


def our_forward(model: Decoder, tokens: np.ndarray) -> Callable[[], object]:
    graphdef, params, frozen = split_model(model, trainable_paths(model))
    ids = jnp.asarray(tokens, jnp.int32)
    run = jax.jit(lambda *parts: nnx.merge(graphdef, *parts)(ids).logits)
    return lambda: jax.block_until_ready(run(params, frozen))


def our_training(model: Decoder, tokens: np.ndarray) -> Callable[[], object]:
    """The step of `moe-jax train`."""
    graphdef, params, frozen = split_model(model, trainable_paths(model))
    params = jax.tree.map(jnp.copy, params)  # they are given up to the step
    optimizer = optax.adamw(1e-4)
    step = make_step(graphdef, optimizer, optax.constant_schedule(1e-4))
    ids = jnp.asarray(tokens, jnp.int32)
    batch = {
        "tokens": ids,
        "targets": jnp.roll(ids, -1, axis=1),
        "weights": jnp.ones(ids.shape).at[:, -1].set(0),
        "segment_ids": jnp.ones_like(ids),
        "positions": jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), ids.shape),
    }
    held = [init_state(params, optimizer)]
    compiled = jax.jit(step, donate_argnums=0).lower(held[0], frozen, batch).compile()

    def run() -> float:
        held[0], metrics = compiled(held[0], frozen, batch)
        jax.block_until_ready(held[0])
        return float(metrics.loss)

    return run


def their_forward(model: transformers.PreTrainedModel, tokens: np.ndarray) -> Callable[[], object]:
    ids = torch.tensor(tokens)

    def run() -> object:
        with torch.no_grad():
            return model(ids, use_cache=False, **without_router_logits(model)).logits

    return run


def without_router_logits(model: transformers.PreTrainedModel) -> dict[str, bool]:
    """Of an MoE: only its loss needs them."""
    return {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}


def their_training(model: transformers.PreTrainedModel, tokens: np.ndarray) -> Callable[[], object]:
    ids = torch.tensor(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> float:
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return run


def save_mixtral_shaped(folder: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).float().save_pretrained(folder)


def measure_decoding(figures: Figures, folder: Path, rounds: int) -> None:
    ours, theirs = our_model(folder, stacked=False), their_model(folder)
    theirs.generation_config.eos_token_id = None
    table = []
    for rows in (1, 4, 16):
        prompts = np.random.default_rng(rows).integers(0, ours.config.vocab_size, (rows, PROMPT))
        ids = torch.tensor(prompts)

        def run(prompts: np.ndarray = prompts) -> object:
            return list(stream(ours, prompts.tolist(), GenerateSpec(max_new_tokens=NEW_TOKENS)))

        def run_theirs(ids: torch.Tensor = ids, **how: object) -> object:
            lengths = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            with torch.no_grad():
                return theirs.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **how)

        static = {"cache_implementation": "static", "compile_config": compiled_everywhere()}
        seconds = in_turns({"ours": run, "eager": run_theirs, "compiled": partial(run_theirs, **static)}, rounds)
        tokens = rows * NEW_TOKENS
        speeds = [[tokens / statistics.median(one), tokens / min(one)] for one in seconds.values()]
        table.append([rows, *speeds, beside_the_faster(seconds)])
        figures.put_rows(LLM_DECODING.name, table)
    print(LLM_DECODING.text(figures))


def compiled_everywhere() -> transformers.CompileConfig:
    """Transformers compiles decoding on accelerators alone, unless it is told otherwise."""
    config = transformers.CompileConfig(fullgraph=False, mode="default")
    config._compile_all_devices = True
    return config


def measure_start(figures: Figures, smollm2: Path, work: Path) -> None:
    config = HuggingFaceDirectory(smollm2).config
    layer = config.layers[0]
    attention = dataclasses.replace(layer.attention, num_heads=4, num_kv_heads=2, head_dim=16)
    layer = dataclasses.replace(layer, attention=attention, mlp=dataclasses.replace(layer.mlp, dim=128))
    small = dataclasses.replace(config, d_model=64, layers=(layer,) * 4)
    tokenizer = smollm2 / "tokenizer.json"
    dense = moe_jax.save(moe_jax.Model(Decoder(small, rngs=nnx.Rngs(0)), tokenizer_files=[tokenizer]), work / "dense")
    text = work / "text.txt"
    text.write_text("A program that is run for the second time need not be compiled.\n" * 200)
    recipe = write_recipe(work / "recipe.toml", text, seq_len=64, learning_rate=1e-4, warmup_steps=1, steps=2)
    rest = ("--experts", 4, "--delta", "low-rank:4")

    def commands(at: str) -> dict[str, tuple[object, ...]]:
        """With outputs of their own in every round."""
        out = work / at
        run_of_train = (f"model.path={out / 'moe'}", f"run_dir={out / 'run'}")
        return {
            "inspect": ("inspect", dense),
            "plan": ("plan", dense),
            "export": ("export", dense, out / "exported"),
            "convert": ("convert", out / "exported", out / "converted"),
            "generate": ("generate", dense, "--prompt", "A program", "--max-new-tokens", 16),
            "eval": ("eval", dense, "--text", text, "--seq-len", 64),
            "upcycle": ("upcycle", dense, out / "moe", *rest),
            "train": ("train", recipe, "--set", *run_of_train),
            "compress": ("compress", out / "moe", out / "compressed", "--method", "ders-quantize", "--bits", 4),
        }

    rows: list[list[object]] = []
    for name in commands(""):
        first, second = (
            seconds_of(commands(at)[name], work, work / at / "run" / "metrics.jsonl") for at in ("first", "second")
        )
        if name == "train":
            rows.append([f"`{name}`, until the loss of its first step is there", first.to_first, second.to_first])
        rows.append([f"`{name}`", first.whole, second.whole])
        figures.put_rows(LLM_START.name, rows)
    print(LLM_START.text(figures))


class Took(NamedTuple):
    """Seconds of a command.

    Attributes:
      whole: until its process ended.
      to_first: until its first figures were on the disk; None: it writes none.
    """

    whole: float
    to_first: float | None


def seconds_of(words: Sequence[object], work: Path, figures: Path) -> Took:
    """Runs a command in a process of its own; programs are kept in a folder of this run.

    Args:
      words: of the command.
      work: the folder.
      figures: the file of its first figures.
    """
    others = ("JAX_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment = {**kept, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(work / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moe_jax.commands.cli", *map(str, words)]
    to_first = None
    with (work / "printed").open("w+") as printed:
        begin = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=printed)
        while process.poll() is None:
            if to_first is None and figures.exists() and figures.stat().st_size:
                to_first = time.perf_counter() - begin
            time.sleep(0.01)
        whole = time.perf_counter() - begin
        printed.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {printed.read()[-400:]}")
    return Took(whole, to_first)


if __name__ == "__main__":
    main()
