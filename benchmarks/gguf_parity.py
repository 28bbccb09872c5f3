"""GGUF files of `moe-jax export`, read by llama.cpp and by this library: losses, logits, tokens, and tokens per second.

    python benchmarks/gguf_parity.py MODEL TEXT [--types F16 Q8_0 Q4_K_M] [--rounds 3] [--out benchmarks/results]

MODEL is a language model with a tokenizer, such as SmolLM2-135M; TEXT a text, of which the first 1,024 tokens are
scored in windows of 256. It takes the package llama-cpp-python, which is built from source. The kinds beside the types
are small random models, of F32. Generation is greedy, of 64 tokens, by turns. Then the same F16 file is quantised here
and by llama.cpp, without an imatrix, and both are scored here, on 6,144 tokens. OUT receives `gguf_parity.json`.
"""

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import moe_jax
from evidence.layouts import GGUF_KINDS, GGUF_QUANTISED, GGUF_TYPES
from evidence.results import RESULTS, Figures
from moe_jax.commands.environment import ask_for_huge_pages, keep_compiled_programs
from moe_jax.conversion.gguf.gguf_types import FILE_TYPES

TOKENS, WINDOW, MADE = 1024, 256, 64
QUANTISED, MANY = ("Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K"), 6144
AWKWARD = (
    "Hello, world!  Two spaces,\ttab\nand lines\n\n",
    "ÄÖÜ ß café naïve 北京 東京 한국어 العربية 🙂👩‍👩‍👧",
    "x=3.14159;y=[1,2,3]; // don't isn't I'll",
    "<|im_start|>user\nHi<|im_end|>",
    "1234567890 0x1F 1e-5",
    "",
)
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
YARN: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "max_position_embeddings": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "head_dim": 16,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy", **YARN},
    "deepseek_v3": {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, **YARN},
}
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Theirs:
    """A GGUF file in llama.cpp, with a cache in float32."""

    def __init__(self, file: Path):
        import llama_cpp

        threads = os.cpu_count() or 1
        self._model = llama_cpp.Llama(
            str(file),
            n_ctx=WINDOW,
            n_batch=WINDOW,
            logits_all=True,
            verbose=False,
            n_threads=threads,
            type_k=0,
            type_v=0,
        )

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        self._model.reset()
        self._model.eval(list(tokens))
        return np.array(self._model.scores[: len(tokens)], np.float32)

    def tokens(self, text: str) -> list[int]:
        return self._model.tokenize(text.encode(), add_bos=False, special=True)

    def seconds(self, prompt: list[int]) -> float:
        """Of so many greedy tokens after a prompt that was read before."""
        self._model.reset()
        self._model.eval(prompt)
        start = time.perf_counter()
        for _ in range(MADE):
            self._model.eval([int(np.argmax(self._model.scores[self._model.n_tokens - 1]))])
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--types", nargs="+", default=["F16", "Q8_0", "Q4_K_M"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("gguf_parity", options.out, writes=True)
    tokenizer = moe_jax.load(options.model).tokenizer
    many = list(tokenizer.encode(options.text.read_text("utf-8")[: 16 * MANY])[:MANY])
    ids = many[:TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(options.model, kind, ids, options.rounds, Path(folder)) for kind in options.types]
        figures.put_rows(GGUF_TYPES.name, rows)
        print(GGUF_TYPES.text(figures), flush=True)
        figures.put_rows(GGUF_KINDS.name, [small_row(kind, Path(folder)) for kind in KINDS])
        print(GGUF_KINDS.text(figures), flush=True)
        figures.put_rows(GGUF_QUANTISED.name, quantised_rows(options.model, many, Path(folder)))
    print(GGUF_QUANTISED.text(figures))


def row(model: Path, kind: str, ids: list[int], rounds: int, folder: Path) -> list[Any]:
    """Of one type of SmolLM2's file: size, losses, tokens of awkward texts, and tokens per second."""
    file = folder / f"model-{kind}.gguf"
    moe_jax.export(model, file, format="gguf", gguf_type=kind)
    theirs, ours = Theirs(file), moe_jax.load(file)
    losses = []
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        log_probs = _log_softmax(theirs.logits(window)[:-1])
        losses.append(-log_probs[np.arange(len(window) - 1), window[1:]])
    scored = moe_jax.evaluate(ours, ids, seq_len=WINDOW)
    equal = sum(theirs.tokens(text) == list(ours.tokenizer.encode(text)) for text in AWKWARD)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    prompt = ids[:16]
    for number in range(rounds + 1):
        for name in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            taken = theirs.seconds(prompt) if name == "theirs" else _our_seconds(ours, prompt)
            if number:  # the first round compiles
                seconds[name].append(taken)
    rate = {name: MADE / statistics.median(found) for name, found in seconds.items()}
    size = file.stat().st_size / 1e6
    loss = float(np.concatenate(losses).mean())
    return [kind, size, scored.nll, loss, f"{equal} of {len(AWKWARD)}", rate["ours"], rate["theirs"]]


def _our_seconds(model: Any, prompt: list[int]) -> float:
    """The same here: the time for the prompt and a first token is taken off."""
    times = []
    for count in (1, MADE + 1):
        start = time.perf_counter()
        made = moe_jax.generate(model, prompt, max_new_tokens=count)
        times.append(time.perf_counter() - start)
        assert len(made.ids) == count, "the text ended; give another one"
    return times[1] - times[0]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def small_row(kind: str, folder: Path) -> list[Any]:
    """Of a small random model of a family: the largest difference of a logit, and the largest logit."""
    import torch
    import transformers

    torch.manual_seed(0)
    keys = SMALL | {"tie_word_embeddings": False} | KINDS[kind]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.1)
    checkpoint, file = folder / kind, folder / f"{kind}.gguf"
    model.save_pretrained(checkpoint, save_original_format=True)
    moe_jax.export(checkpoint, file, format="gguf")
    tokens = np.random.default_rng(0).integers(3, SMALL["vocab_size"], 64)
    theirs, decoder = Theirs(file).logits(tokens.tolist()), moe_jax.load(checkpoint, dtype="float32").decoder
    ours = np.asarray(decoder(tokens[None].astype(np.int32)).logits)[0]
    return [kind, float(np.abs(ours - theirs).max()), float(np.abs(ours).max())]


def quantised_rows(model: Path, ids: list[int], folder: Path) -> list[list[Any]]:
    """Losses of the same model quantised here and by llama.cpp; the sizes of the files differ by their metadata."""
    import llama_cpp

    whole = moe_jax.export(model, folder / "whole.gguf", format="gguf", gguf_type="F16")
    rows: list[list[Any]] = []
    for kind in QUANTISED:
        ours, theirs = folder / f"ours-{kind}.gguf", folder / f"theirs-{kind}.gguf"
        moe_jax.export(whole, ours, format="gguf", gguf_type=kind)
        given = llama_cpp.llama_model_quantize_default_params()
        given.ftype = FILE_TYPES[kind]
        assert llama_cpp.llama_model_quantize(str(whole).encode(), str(theirs).encode(), ctypes.byref(given)) == 0
        losses = [moe_jax.evaluate(moe_jax.load(file), ids, seq_len=512).nll for file in (ours, theirs)]
        rows.append([kind, ours.stat().st_size / 1e6, theirs.stat().st_size / 1e6, *losses])
        for file in (ours, theirs):
            file.unlink()
    return rows


if __name__ == "__main__":
    ask_for_huge_pages()
    keep_compiled_programs()
    main()
