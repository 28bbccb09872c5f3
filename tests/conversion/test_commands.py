"""`moe-jax convert` and `moe-jax export` as a user meets them: exit codes, one line per mistake, flat memory."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from moe_jax.commands.cli import main
from moe_jax.conversion.hugging_face_dir import open_checkpoint
from moe_jax.core.formatting import show_bytes
from tests.support.disks import run_python
from tests.support.hf_checkpoints import (
    BASE,
    CONFIGS,
    DTYPES,
    assert_same_bits,
    expected_tensors,
    random_tensors,
    read_tensors,
    write_checkpoint,
)
from tests.support.tiers import long

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_there_and_back(llama: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]):
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in llama.iterdir()}
    assert main(["convert", str(llama), str(tmp_path / "ours")]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--max-shard-size", "40kB"]) == 0
    printed = capfd.readouterr()
    assert printed.out == "" and "peak memory" in printed.err
    size = sum(tensor.nbytes for tensor in read_tensors(llama).values())
    assert printed.err.count(f": {show_bytes(size)} in ") == 2
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(llama))
    assert len(open_checkpoint(tmp_path / "back").files) > 2
    assert before == {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in llama.iterdir()}


def test_a_dry_run_needs_no_weights(llama: pathlib.Path, tmp_path: pathlib.Path, capfd):
    whole, alone = tmp_path / "whole", tmp_path / "config.json"
    assert main(["convert", str(llama), str(whole), "--dry-run"]) == 0
    mapping = capfd.readouterr().out
    alone.write_bytes((llama / "config.json").read_bytes())
    for source in (tmp_path, alone):
        assert main(["convert", str(source), str(whole), "--dry-run"]) == 0
        said = f"{alone} has no weights beside it; a checkpoint of this config holds:\n"
        assert capfd.readouterr().out == said + mapping
    assert main(["convert", str(tmp_path), str(whole)]) == 2
    assert "has no weights" in capfd.readouterr().err
    alone.write_text("{")
    assert main(["convert", str(tmp_path), str(whole), "--dry-run"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_dry_run_answers_on_standard_output(llama: pathlib.Path, tmp_path: pathlib.Path, capfd):
    assert main(["convert", str(llama), str(tmp_path / "ours"), "--dry-run"]) == 0
    assert "model.layers.{i}.self_attn.q_proj.weight" in capfd.readouterr().out
    assert main(["export", str(llama), str(tmp_path / "ours"), "--dry-run"]) == 0
    assert "layers/{i}/attention/q/kernel" in capfd.readouterr().out
    assert [child.name for child in tmp_path.iterdir()] == ["llama"]


def truncate(folder: pathlib.Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 100)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncate, "is truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100), "header should take"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt9"}'), "unknown model_type 'gpt9'"),
        (lambda folder: (folder.parent / "out").mkdir(), "already exists; choose"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "export"])
def test_mistakes_are_one_line_and_exit_code_2(llama: pathlib.Path, capfd, command: str, damage, expected: str):
    damage(llama)
    existed = (llama.parent / "out").exists()
    assert main([command, str(llama), str(llama.parent / "out")]) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith("moe-jax: error: ") and printed.err.count("\n") == 1 and printed.out == ""
    # What is no Hugging Face directory at all is refused by `export` in other words.
    assert expected in printed.err or (command == "export" and "not a model" in printed.err)
    children = sorted(child.name for child in llama.parent.iterdir())
    assert children == (["llama", "out"] if existed else ["llama"])


@pytest.mark.parametrize("name", ["absent", "absent.gguf"])
def test_a_path_at_which_there_is_nothing(tmp_path: pathlib.Path, capfd, name: str):
    assert main(["convert", str(tmp_path / name), str(tmp_path / "out")]) == 2
    expected = f"there is nothing at {tmp_path / name}; expected a Hugging Face directory or a GGUF file"
    assert capfd.readouterr().err == f"moe-jax: error: {expected}\n" and not list(tmp_path.iterdir())


def test_a_misspelt_choice(llama: pathlib.Path, capfd):
    assert main(["convert", str(llama), str(llama.parent / "out"), "--dtype", "bf61"]) == 2
    assert "bfloat16" in capfd.readouterr().err


LIMITED = """
import resource, sys
from moe_jax.commands.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_full_disk(tmp_path: pathlib.Path, command: str):
    """Files may not grow beyond 64 KiB: writing fails in the middle, as on a full disk."""
    config = {**BASE, "model_type": "llama", "vocab_size": 2000}
    source = write_checkpoint(tmp_path / "source", config, random_tensors(config))
    result = run_python(LIMITED, command, source, tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("moe-jax: error: ")
    assert "File too large" in result.stderr and "Traceback" not in result.stderr
    assert f"moe-jax clean {tmp_path / 'out'} removes it" in result.stderr
    assert sorted(child.name for child in tmp_path.iterdir()) == [".out.partial", "source"]
    assert main(["clean", str(tmp_path / "out")]) == 0
    assert [child.name for child in tmp_path.iterdir()] == ["source"]


PEAK = """
import sys
from moe_jax.commands.cli import main
from moe_jax.core.data_sheets import peak_memory_bytes
assert main(sys.argv[1:]) == 0
print(peak_memory_bytes())
"""


def peak_memory(*arguments: object) -> int:
    """Peak resident memory, in bytes, of a command in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(result.stdout)


@long
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: pathlib.Path):
    """Layers of 67 MB: 1 of them, or 4, take the same memory, within the noise of an allocator."""
    peaks = {}
    for layers in (1, 4):
        config = {
            **CONFIGS["mixtral"],
            "num_hidden_layers": layers,
            "num_local_experts": 8,
            "hidden_size": 512,
            "intermediate_size": 2730,
            "torch_dtype": "bfloat16",
        }
        zeros = {name: np.zeros(shape, DTYPES["bfloat16"]) for name, shape in expected_tensors(config).items()}
        source = write_checkpoint(tmp_path / f"source{layers}", config, zeros)
        peaks[layers] = (
            peak_memory("convert", source, tmp_path / f"ours{layers}"),
            peak_memory("export", tmp_path / f"ours{layers}", tmp_path / f"back{layers}"),
        )
    for few, many in zip(peaks[1], peaks[4], strict=True):
        assert many < few + 100e6, peaks
