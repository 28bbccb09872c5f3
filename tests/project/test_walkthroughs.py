"""The walkthroughs in docs/guides/: what they tell a reader to write and to type is written and typed."""

import importlib.util
from pathlib import Path

import pytest

from tests.support.environment import ROOT
from tests.support.tiers import long
from tests.support.walkthroughs import Ran, blocks_of, form, not_printed, read_by_parsers, run_document

# `make test` runs every second, and reads the commands of all.
DOCUMENTS = ("upcycle-and-train", "tune", "compress", "checkpoint-to-pod", "your-own-research")
# The numbers of the documents are those of a model of 30 layers; the tiny one has 1, 16 wide. Steps, and not kinds of
# steps, are left out. Batches are split over the eight devices of the tests.
SMALLER = {
    "--every 6": "--every 1",
    "every=6": "every=1",
    "low-rank:16": "low-rank:2",
    "seq_len = 256": "seq_len = 16",
    "seq_len = 2048": "seq_len = 16",
    "data.seq_len=256": "data.seq_len=16",
    "--seq-len 256": "--seq-len 16",
    "batch_size = 2\n": "batch_size = 8\n",
    "batch_size = 64": "batch_size = 16",
    "steps = 20": "steps = 4",
    "every = 10": "every = 2",
    "every = 5": "every = 2",
    "train.steps=30": "train.steps=6",
    "[:20_000]": "[:800]",
    "[:8_000]": "[:800]",
    "lora:8": "lora:2",
    "--max-new-tokens 48": "--max-new-tokens 4",
    "--keep 0.1,0.5 --bits 2,4": "--keep 0.5 --bits 4",
    "train.batch_size=2": "train.batch_size=8",
    "mesh.fsdp=1 ": "mesh.fsdp=8 ",
    "--tokens 8192": "--tokens 64",
    "--max-new-tokens 24": "--max-new-tokens 4",
}


def text_of(name: str) -> str:
    return (ROOT / "docs" / "guides" / f"{name}.md").read_text(encoding="utf-8")


def made_smaller(text: str) -> str:
    """A document as it is run here: of its commands and files, the numbers that cost time."""
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return text


@long
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_walkthrough_does_what_it_says(name, tiny_checkpoint, tmp_path, monkeypatch):
    if "--compile-only" in text_of(name) and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which holds the TPU compiler, is not installed")
    monkeypatch.chdir(tmp_path)
    Path("smollm").symlink_to(tiny_checkpoint)
    ran: list[Ran] = []
    for command in run_document(made_smaller(text_of(name))):
        assert command.code == 0, command
        assert not not_printed(command), command
        ran.append(command)
    assert len(ran) > 5


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_of_a_walkthrough_could_be_typed(name):
    blocks = blocks_of(text_of(name))
    for kind in ("console", "sh"):
        assert [command for block in blocks if block.kind == kind for command in read_by_parsers(block)]


def test_numbers_that_are_made_smaller_are_in_the_documents():
    documents = "".join(map(text_of, DOCUMENTS))
    assert not {number for number in SMALLER if number not in documents}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_walkthrough_is_of_a_length_to_be_read(name):
    assert 100 <= text_of(name).count("\n") <= 200
    assert f"docs/guides/{name}.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("│ bytes │ 269.0 MB │", "│ bytes    │ 17.8 kB │"),
        ("layers/{0..29}/mlp/up", "layers/{0,1}/mlp/up"),
        ("layers/3/mlp/up -1e-3", "layers/{0,1}/mlp/up 0.25"),
        ("5 of 30: 5, 11, 17", "1 of 2: 1"),
        ("10 tokens in 1 min 3 s", "9 tokens in 2.5 s"),
    ],
)
def test_lines_of_one_form(shown, printed):
    assert form(shown) == form(printed)


@pytest.mark.parametrize(
    ("shown", "printed"), [("loss 3.0", "lost 3.0"), ("llama2 is", "llama3 is"), ("loss 3.0", "loss -"), ("a", "a b")]
)
def test_lines_of_other_forms(shown, printed):
    assert form(shown) != form(printed)
