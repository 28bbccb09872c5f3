"""Tasks of lm-eval on a real language model: our model beside lm-eval's own backend for Transformers, item by item.

    python benchmarks/lm_eval_parity.py MODEL DATA [--only TASK ...] [--items 200] [--exact] [--out benchmarks/results]

MODEL is SmolLM2-135M-Instruct as a Hugging Face directory, DATA the data of the task files (docs, evaluate.md). All is
float32. The first items of five tasks of multiple choice, and of GSM8K (no examples before a question, 64 tokens,
greedily) a tenth as many. With --exact, instead, how far both are from that backend in float64, for the tasks of
multiple choice. OUT receives `lm_eval_parity.json`. Needs lm-eval, torch and transformers (`pip install -e '.[test]'`).
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM

import moe_jax
from evidence.layouts import LM_EVAL_EXACT, LM_EVAL_LIKELIHOODS, LM_EVAL_TEXTS
from evidence.results import RESULTS, Figures
from evidence.stamp import current_stamp
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.harness.language_model import HarnessModel
from moe_jax.harness.task_files import sandboxed_templates
from moe_jax.harness.task_run import evaluate_tasks, known_tasks, load_tasks

CHOICES = ("piqa_local", "arc_easy_local", "openbookqa_local", "winogrande_local", "boolq_local")
TEXTS = "gsm8k_local"
NEW_TOKENS = 64
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    names = (*CHOICES, TEXTS)
    parser.add_argument("--only", nargs="+", metavar="TASK", choices=names, default=names, help="leave the others")
    parser.add_argument("--items", type=int, default=200, help="of every task")
    parser.add_argument("--exact", action="store_true", help="compare both with float64")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    ask_for_huge_pages()  # as commands do
    stamped = ("lm_eval", "torch", "transformers")
    figures = Figures("lm_eval_parity", options.out, writes=True, stamp=lambda: current_stamp(also=stamped))
    loaded = moe_jax.load(options.model, dtype="float32")
    assert loaded.tokenizer is not None
    ours = HarnessModel(loaded.decoder, loaded.tokenizer, batch_size=BATCH)
    theirs = HFLM(pretrained=str(options.model), dtype="float32", device="cpu", batch_size=BATCH)
    if options.exact:
        exact = HFLM(pretrained=str(options.model), dtype="float64", device="cpu", batch_size=BATCH)
        for name in options.only:
            if name != TEXTS:
                cells = from_exact(ours, theirs, exact, name, options.data, options.items)
                figures.put_row(LM_EVAL_EXACT.name, name, cells)
        print(LM_EVAL_EXACT.text(figures))
        return
    for name in options.only:
        if name == TEXTS:
            cells = texts(ours, theirs, options.data, max(1, options.items // 10))
            figures.put_row(LM_EVAL_TEXTS.name, name, cells)
        else:
            figures.put_row(
                LM_EVAL_LIKELIHOODS.name, name, likelihoods(ours, theirs, name, options.data, options.items)
            )
        print(name, flush=True)
    for table in (LM_EVAL_LIKELIHOODS, LM_EVAL_TEXTS):
        if any(name == TEXTS for name in options.only) or table is LM_EVAL_LIKELIHOODS:
            print(table.text(figures))


def likelihoods(ours: HarnessModel, theirs: HFLM, name: str, data: Path, items: int) -> list[Any]:
    """A row of `LM_EVAL_LIKELIHOODS`."""
    (mine, my_figures), (other, other_figures) = (evaluated(one, name, data, items) for one in (ours, theirs))
    difference = largest_difference(mine, other)
    alike = sum(one[1] == another[1] for one, another in zip(mine, other, strict=True))
    accuracies = [[one["acc,none"], one["acc_stderr,none"]] for one in (my_figures, other_figures)]
    return [f"`{name}`", items, len(mine), difference, [alike, len(mine)], *accuracies]


def from_exact(ours: HarnessModel, theirs: HFLM, exact: HFLM, name: str, data: Path, items: int) -> list[Any]:
    """A row of `LM_EVAL_EXACT`."""
    mine, other, right = (evaluated(one, name, data, items)[0] for one in (ours, theirs, exact))
    return [f"`{name}`", items, largest_difference(mine, right), largest_difference(other, right)]


def largest_difference(some: list[Any], others: list[Any]) -> float:
    """Of the log-likelihoods of the same requests."""
    return float(np.max(np.abs(np.asarray([one[0] for one in some]) - np.asarray([one[0] for one in others]))))


def texts(ours: HarnessModel, theirs: HFLM, data: Path, items: int) -> list[Any]:
    """A row of `LM_EVAL_TEXTS`."""
    mine, other = (evaluated(one, TEXTS, data, items)[0] for one in (ours, theirs))
    tokens = [[ours.tok_encode(text) for text in made] for made in (mine, other)]
    alike = sum(one == another for one, another in zip(*tokens, strict=True))
    return [f"`{TEXTS}`", items, sum(map(len, tokens[0])), [alike, items]]


def evaluated(model: HarnessModel | HFLM, name: str, data: Path, items: int) -> tuple[list[Any], dict[str, Any]]:
    """The answers to all requests of a task, and its figures."""
    with sandboxed_templates(), torch.no_grad():
        tasks = load_tasks([name], known_tasks(data=data))
        if name == TEXTS:
            tasks["tasks"][name].set_config("generation_kwargs", {"max_gen_toks": NEW_TOKENS}, update=True)
        found = evaluate_tasks(model, tasks, limit=items, num_fewshot=0)
    samples = {sample["doc_id"]: sample for sample in found["samples"][name]}.values()
    return [answer for sample in samples for (answer,) in sample["resps"]], found["results"][name]


if __name__ == "__main__":
    main()
