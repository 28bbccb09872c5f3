"""The quick demo: trains a small model on text that every Python has, upcycles it, makes it smaller, and compares."""

import json
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from moe_jax.core.errors import InputError
from moe_jax.demo.comparison import WAYS, compress_in_all_ways, measured_row, score, score_all
from moe_jax.demo.folder import open_folder
from moe_jax.demo.page import Page, finish, training_records
from moe_jax.demo.questions import ask, by_question
from moe_jax.demo.shell import Shell
from moe_jax.training.recipe_toml import toml_value

BOS, EOS = "<bos>", "<eos>"
# One in this many files is held out.
HELD_OUT_EVERY = 10


def write_text(folder: Path, held_out_bytes: int) -> tuple[int, int]:
    """Copies the standard library's top-level modules: `train/*.txt`, and `held-out.txt` made of other files.

    Returns the bytes of training and of held-out text, of which there are about `held_out_bytes`.
    """
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    (folder / "train").mkdir(parents=True, exist_ok=True)
    trained, held_out = 0, ""
    for index, module in enumerate(modules):
        text = module.read_text(encoding="utf-8", errors="replace")
        if index % HELD_OUT_EVERY != 0:
            trained += (folder / "train" / f"{module.stem}.txt").write_bytes(text.encode())
        elif len(held_out) < held_out_bytes:
            held_out += text[: held_out_bytes - len(held_out)]
    return trained, (folder / "held-out.txt").write_bytes(held_out.encode())


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are the 256 bytes, after BOS (id 0) and EOS (id 1)."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [BOS, EOS, *alphabet]
    model = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
RECIPE = """\
# Run from the folder in which `moe-jax demo` was started: paths are relative to it.
run_dir = {run}

[model]
{model}

[data]
seq_len = 256
tokenizer = {tokenizer}
sources = [{{ path = {text} }}]

[optimizer]
learning_rate = {learning_rate}

[schedule]
warmup_steps = 10

[train]
steps = {steps}
batch_size = 8

[log]
every = 20

[eval]
text = {held_out}
every = {eval_every}
seq_len = 256
"""
HELD_OUT_BYTES = 24 * 1024


DENSE, LONGER, TUNED = "dense", "dense, trained on", "upcycled, trained on"
UPCYCLED = "--experts 4 --top-k 2 --every 2 --delta full"
PROMPTS = ("def read(self, ", "import ")
NEW_TOKENS = 64
SEQ_LEN = 256
SAMPLES = 16


def run_quick_demo(folder: Path, *, dense_steps: int, more_steps: int, shell: Shell) -> None:
    """Runs the demo: `dense_steps` of the dense model's training, and then `more_steps` of it and of the MoE.

    Everything goes into the folder; one made by an earlier demo is replaced, unless the shell resumes that demo. The
    shell's console also gets the demo's own output.

    Raises:
      InputError: if the folder holds something else, or a command fails.
      Stopped: after a signal that ended a training; the demo goes on there.
    """
    settings = {"model": None, "dense_steps": dense_steps, "more_steps": more_steps}
    with open_folder(folder, settings, resume=shell.resume) as done, shell.notes():
        _write_inputs(folder, dense_steps, more_steps, shell)
        moe, tuned, exported = folder / "moe", folder / "runs/moe/model", folder / "hf-moe"

        shell.console.rule("a small dense model, as a Hugging Face directory")
        with done.timed("train the dense model"):
            shell.train(folder / "dense.toml", folder / "runs/dense")
        with done.timed("convert"):
            shell.make(folder / "hf-dense", "export", folder / "runs/dense/model", folder / "hf-dense")
            shell.make(folder / "dense", "convert", folder / "hf-dense", folder / "dense")

        shell.console.rule("upcycle it to whole experts, and train both on the same text, as long")
        with done.timed("upcycle"):
            shell.make(moe, "upcycle", folder / "dense", moe, *UPCYCLED.split())
        with done.timed("train on"):
            for name, model in (("dense-longer", folder / "dense"), ("moe", moe)):
                run = folder / "runs" / name
                shell.train(folder / "continue.toml", run, f"model.path={model}", f"run_dir={run}")

        shell.console.rule("make it smaller in three ways")
        with done.timed("compress"):
            text = _write_calibration(folder)
            calibration = ("--calibrate", text, "--samples", SAMPLES, "--seq-len", SEQ_LEN)
            smaller = compress_in_all_ways(shell, tuned, folder, calibration)

        shell.console.rule("export, and reload")
        with done.timed("export"):
            shell.make(exported, "export", tuned, exported)

        shell.console.rule("compare on text that no model learnt from")
        held_out = ("--text", folder / "text/held-out.txt", "--seq-len", SEQ_LEN)
        models = {DENSE: folder / "dense", TUNED: tuned, **smaller}
        with done.timed("score"):
            rows = score_all(shell, done, models, held_out)
            longer = folder / "runs/dense-longer/model"
            scored = score(shell, done, LONGER, longer, held_out)
            rows.insert(1, measured_row(LONGER, longer, scored, whole=longer))
            merged = score(shell, done, "the export", exported, held_out)
        trained = next(row for row in rows if row.name == TUNED)
        if abs(merged["nll"] - trained.nll) > 1e-4:
            losses = f"{merged['nll']} nats per byte, the trained one {trained.nll}"
            raise InputError(f"the exported model scores {losses}: a fault of moe_jax")
        shell.console.print(
            "the exported model (Mixtral's format) gives the same held-out loss as the one that was trained"
        )
        with done.timed("ask"):
            asked = {DENSE: folder / "dense", TUNED: tuned, WAYS[-1].name: smaller[WAYS[-1].name]}
            answers = {
                name: ask(shell, done, name, place, PROMPTS, "--max-new-tokens", NEW_TOKENS)
                for name, place in asked.items()
            }
        page = Page(
            title="moe-jax demo: a small model of Python's source",
            answers=by_question(PROMPTS, answers),
            rows=rows,
            whole=TUNED,
            records=training_records(folder / "runs/moe"),
            learnt="Python's source",
            unit="byte",
            seconds=done.seconds,
        )
        finish(shell.console, folder, page, dense_steps=dense_steps, more_steps=more_steps)


def _write_inputs(folder: Path, dense_steps: int, more_steps: int, shell: Shell) -> None:
    trained, held_out = write_text(folder / "text", HELD_OUT_BYTES)
    console = shell.console
    console.print(f"text: the standard library's source, {trained:,} bytes to train on, {held_out:,} held out")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), "utf-8")
    config, trained_model = toml_value(str(folder / "config.json")), toml_value(str(folder / "dense"))
    new, trained_on = f'config = {config}\ninit = "random"', f"path = {trained_model}"
    dense = dict(model=new, learning_rate=3e-3, steps=dense_steps, eval_every=40)
    longer = dict(model=trained_on, learning_rate=1e-3, steps=more_steps, eval_every=10)
    _write_recipe(folder / "dense.toml", folder, "dense", dense)
    _write_recipe(folder / "continue.toml", folder, "dense-longer", longer)


def _write_recipe(file: Path, folder: Path, name: str, values: Mapping[str, object]) -> None:
    places = {"text": "text/train/*.txt", "held_out": "text/held-out.txt", "tokenizer": "tokenizer.json"}
    written = {key: toml_value(str(folder / place)) for key, place in (places | {"run": f"runs/{name}"}).items()}
    file.write_text(RECIPE.format(**written, **values), "utf-8")


def _write_calibration(folder: Path) -> Path:
    """Writes the first file that is learnt from and is long enough: held-out text chooses nothing."""
    file = folder / "text/calibration.txt"
    texts = (one.read_text("utf-8") for one in sorted((folder / "text/train").glob("*.txt")))
    file.write_text(next(text for text in texts if len(text) > 2 * SAMPLES * SEQ_LEN), "utf-8")
    return file
