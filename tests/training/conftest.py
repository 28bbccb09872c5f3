"""A byte-level tokenizer, and a run to continue, for the tests of the training program."""

import shutil
from pathlib import Path

import pytest
import tokenizers

from moe_jax.commands.line import cli

BOS, EOS = 256, 257


def byte_tokenizer(path: Path, *, adds_bos: bool = False) -> Path:
    """Writes a tokenizer.json whose ids are bytes; `<s>` is 256, `</s>` is 257."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    # ByteLevel shows the printable bytes as themselves and the others as code points from 256 on, in order.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shown = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in shown):
        shown[byte] = chr(256 + offset)
    assert set(shown.values()) == set(alphabet)
    vocab = {character: byte for byte, character in shown.items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    assert tokenizer.token_to_id("<s>") == BOS and tokenizer.token_to_id("</s>") == EOS
    if adds_bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


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
    # They import this module.
    from tests.training.models import FFN, config_of
    from tests.upcycling.conftest import random_leaves, write_model

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
