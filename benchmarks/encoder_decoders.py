"""A small T5 through all commands: trained on pairs, made a Switch, trained on, compressed, and asked for labels.

    python benchmarks/encoder_decoders.py DATA [--steps 300] [--out benchmarks/results]

DATA is a folder with `weights/stories260K/hf`, whose tokenizer the models have, and `text/tinystories`. The task: of a
sentence whose quotation marks were taken away, to say whether somebody speaks in it. Every model answers the same
sentences of stories that none was trained on. OUT receives `encoder_decoders.json`.
"""

import argparse
import json
import os
import random
import re
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from evidence.commands import refusal, run, write_recipe
from evidence.layouts import ENCODER_DECODERS
from evidence.results import RESULTS, Figures
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.model_io.loading import load_model

CONFIG = dict(
    vocab_size=512,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=4,
    num_heads=4,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
)
INPUT_LEN, TARGET_LEN, HELD_OUT = 64, 8, 400
SWITCH = ("--experts", 4, "--every", 2, "--gate", "top1", "--top-k", 1, "--no-step0-check")
COMPRESSED = {
    "ResMoE, keep 0.5": ("--method", "resmoe", "--keep", 0.5),
    "DeRS, 4 bits": ("--method", "ders-quantize", "--bits", 4),
}


def sentences(text: str) -> list[tuple[str, str]]:
    """Sentences without their quotation marks, and whether there were some: `yes` or `no`, as many of each."""
    found: dict[str, list[str]] = {"yes": [], "no": []}
    for paragraph in text.split("\n"):
        for sentence in re.findall(r'[A-Z][^.!?"]*(?:"[^"]*"[^.!?"]*)*[.!?]', paragraph):
            label = "yes" if '"' in sentence else "no"
            bare = " ".join(sentence.replace('"', "").split())
            if 20 <= len(bare) <= 120:
                found[label].append(bare)
    count = min(map(len, found.values()))
    pairs = [(sentence, label) for label, some in found.items() for sentence in some[:count]]
    random.Random(0).shuffle(pairs)
    return pairs


class Trial:
    """Models of one task, in a folder."""

    def __init__(self, folder: Path, data: Path, steps: int):
        self.folder, self.steps = folder, steps
        text = (data / "text" / "tinystories" / "tinystories_sample_2MiB.txt").read_text()
        cut = text.rindex("<|endoftext|>", 0, len(text) * 9 // 10)
        held_out = sentences(text[cut:])[:HELD_OUT]
        self._write("train.jsonl", sentences(text[:cut]), ("input", "target"))
        self._write("pairs.jsonl", held_out, ("input", "target"))
        self._write("labels.jsonl", held_out, ("text", "label"))
        self.foreign = folder / "foreign"
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**CONFIG))
        model.save_pretrained(self.foreign)
        shutil.copy(data / "weights" / "stories260K" / "hf" / "tokenizer.json", self.foreign)

    def _write(self, name: str, pairs: list[tuple[str, str]], keys: tuple[str, str]) -> None:
        lines = [json.dumps(dict(zip(keys, pair, strict=True))) for pair in pairs]
        (self.folder / name).write_text("\n".join(lines) + "\n")

    def row(self, name: str, model: Path) -> list[object]:
        """What is measured of a model."""
        nll = json.loads(run("eval", model, "--text", self.folder / "pairs.jsonl", "--json"))["nll"]
        labelled = json.loads(run("eval", model, "--classify", self.folder / "labels.jsonl", "--json"))
        right, interval = [labelled["correct"], labelled["count"]], [100 * end for end in labelled["interval"]]
        return [name, nll, right, interval, self.exported(model)]

    def exported(self, model: Path) -> str:
        """The class of Transformers that reads what is exported, and the largest difference of a logit, relative."""
        target = self.folder / f"{model.name}-{model.parent.name}-exported"
        why = refusal("export", model, target)
        if why is not None:
            return why.partition(";")[0].replace(str(model), "it")  # see `families.py`
        kind = getattr(transformers, json.loads((target / "config.json").read_text())["architectures"][0])
        theirs, report = kind.from_pretrained(target, output_loading_info=True, attn_implementation="eager")
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        draws = np.random.default_rng(0)
        inputs, tokens = (draws.integers(3, CONFIG["vocab_size"], (2, length)) for length in (INPUT_LEN, TARGET_LEN))
        with torch.no_grad():
            given = dict(input_ids=torch.tensor(inputs), decoder_input_ids=torch.tensor(tokens))
            expected = theirs.float().eval()(**given).logits.numpy()
        ours = load_model(HuggingFaceDirectory(target))
        got = ours(jnp.asarray(tokens, jnp.int32), inputs=jnp.asarray(inputs, jnp.int32)).logits
        return f"{kind.__name__}, {np.abs(got - expected).max() / np.abs(expected).max():.0e}"

    def train(self, model: Path, name: str, steps: int) -> Path:
        recipe = write_recipe(
            self.folder / "recipe.toml",
            self.folder / "train.jsonl",
            seq_len=TARGET_LEN,
            learning_rate=3e-3,
            warmup_steps=20,
            steps=steps,
        )
        run_dir = self.folder / name
        words = ("--set", f"model.path={model}", f"run_dir={run_dir}", f"data.input_len={INPUT_LEN}")
        run("train", recipe, *words)
        return run_dir / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("encoder_decoders", options.out, writes=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial = Trial(folder, options.data, options.steps)
        run("convert", trial.foreign, folder / "t5")
        rows = [trial.row("T5 as drawn", folder / "t5")]
        trained = trial.train(folder / "t5", "run", options.steps)
        rows.append(trial.row(f"trained, {options.steps} steps", trained))
        run("upcycle", trained, folder / "switch", *SWITCH)
        rows.append(trial.row("upcycled, as a Switch", folder / "switch"))
        switch = trial.train(folder / "switch", "switch-run", options.steps // 2)
        rows.append(trial.row(f"trained, {options.steps // 2} steps more", switch))
        for index, (way, words) in enumerate(COMPRESSED.items()):
            run("compress", switch, folder / f"small{index}", *words)
            rows.append(trial.row(f"compressed, {way}", folder / f"small{index}"))
    figures.put_rows(ENCODER_DECODERS.name, rows)
    print(ENCODER_DECODERS.text(figures))


if __name__ == "__main__":
    main()
