"""What can be said of options without JAX and without a model is said before JAX is imported."""

import os
from pathlib import Path

import pytest

from moe_jax.commands import cli, data, train
from moe_jax.commands import eval as evaluation
from moe_jax.commands import options as command_options
from moe_jax.commands.options import check_options
from moe_jax.core.errors import InputError
from tests.support.disks import run_python

# What is given, and what the message must hold.
CASES = [
    ("eval model --text empty.txt", "empty.txt is empty"),
    ("convert modle out", "did you mean 'model'"),
    ("inspect modle", "did you mean 'model'"),
    ("upcycle modle out", "did you mean 'model'"),
    ("compress model out --method up --keep 0.5 --base modle", "did you mean 'model'"),
    ("plan modle", "did you mean 'model'"),
    ("report modle", "did you mean 'model'"),
    ("eval model --text texxt.txt", "did you mean 'text.txt'"),
    ("eval model --tasks piqa --tasks-dir modle", "did you mean 'model'"),
    ("eval model --text text.txt --tokenizer modle", "did you mean 'model'"),
    ("adapt model out --method lora --adapter lora:2 --targets q --text texxt.txt", "did you mean 'text.txt'"),
    ("upcycle model out --router-from @texxt.txt a", "did you mean 'text.txt'"),
    ("generate model --prompts-file texxt.txt", "did you mean 'text.txt'"),
    ("inspect model --text text.txt", "--plots DIR"),
    ("inspect model --plots plots --text rows.jsonl", "no text at rows.jsonl"),
    ("train recipe.toml", "no model at m"),
    ("train recipe.toml --restart modle@5", "did you mean 'model'"),
    ("eval modle@5 --text text.txt", "no training run at modle"),
    ('train recipe.toml --set model.path=model data.sources=[{path="texxt.txt"}]', "did you mean 'text.txt'"),
    (
        'train recipe.toml --set model.path=model data.sources=[{path="text.txt"}] eval.text=mode/a',
        "did you mean 'model'",
    ),
    ("data inspect recipe.toml --set model.path=model", "no file matches x"),
    ("eval model --text missing.txt", "no text at missing.txt"),
    ("eval model --classify missing.txt", "no file of labelled"),
    ("eval model --text empty.txt --batch-size 0", "--batch-size 0"),
    ("eval model --text text.txt --seq-len 1", "seq_len = 1"),
    ("eval model --text text.txt --input-len 0", "--input-len 0"),
    ("eval model --tasks piqa --limit 0", "--limit 0"),
    ("generate model --prompt a --max-new-tokens 0", "max_new_tokens=0"),
    ("generate model --prompt a --temperature -1", "temperature=-1.0"),
    ("generate model --prompts-file empty.txt", "empty.txt has no prompts"),
    ("generate model --prompt a --mesh fsdp", "--mesh 'fsdp'"),
    ("generate model --prompt a --mesh fdsp=2", "did you mean 'fsdp'"),
    ("plan model --mesh tensor=0", "tensor=0"),
    ("export model out --format compressed-tensors --group-size 12", "--group-size 12"),
    ("compress model out --method up --keep 0.5 --calibrate text.txt --samples 0", "samples=0"),
    ("inspect model --plots plots --text text.txt --seq-len 1", "seq_len = 1"),
    ("demo --dense-steps 0", "at least 1"),
    ("demo --quick --model model", "--quick makes its own model"),
    ("demo --model modle", "did you mean 'model'"),
    ("serve model --port 99999", "port=99999"),
    ("serve model --seats 0", "seats=0"),
    ("upcycle model out --experts 0", "experts=0"),
    ("upcycle model out --balance-coef -1", "balance_coef=-1.0"),
    ("adapt model out --method perft-r --adapter lora:2 --experts 0", "experts=0"),
    ("upcycle model out --delta lowrank:4", "did you mean 'low-rank:4'"),
    ("upcycle model out --delta sparse:2", "rate=2.0"),
    ("upcycle model out --experts 2 --top-k 3", "top_k=3 is above"),
    ("upcycle model out --extended --every 0", "2 problems"),
    ("upcycle model out --freeze-base", "--freeze-base needs"),
    ("upcycle model out --method pesc --adapter 0", "--adapter '0'"),
    ("upcycle model out --method pesc --rest lora:0", "rank 0"),
    ("adapt model out --method lora --adapter lra:2 --targets q", "did you mean 'lora'"),
    ("adapt model out --method perft-r --adapter lora:0", "3 problems"),
    ("export model out --max-shard-size 0", "--max-shard-size '0'"),
    ("plan model --platform cpu --tokens 0", "tokens=0"),
    ("plan model --compress resmo", "did you mean 'resmoe'"),
    ("plan model --delta lowrank:4", "did you mean 'low-rank:4'"),
    ("compress model out", "--method is missing"),
    ("compress model out --method resmo", "did you mean 'resmoe'"),
    ("compress model out --method up --keeep 0.5", "did you mean '--keep'"),
    ("compress model out --method quantize --bits 5", "bits=5"),
    ("compress model out --method quantize --keep 0.5", "--keep does not"),
    ("compress model out --method resmoe --residual svd --keep 2", "keep=2"),
    ("compress model out --method resmoe --residual quantised:4", "quantized:BITS"),
    ("compress model out --method resmoe --keep 0.5 --centre-group-size 8", "centre_group_size=8"),
    ("compress model out --method up --keep 0.5 --calibrate missing.txt", "no text at missing.txt"),
    ("compress model out --sweep --text text.txt --method up,quantise", "did you mean 'quantize'"),
    ("compress model out --method up --keep 0.5 --layers top:x", "--layers 'top:x'"),
    ("plan model --platform xpu", "unknown platform 'xpu'"),
    ("export model model", "model already exists"),
    ("convert model model", "model already exists"),
    ("upcycle model model --experts 4", "model already exists"),
    ("compress model model --method up --keep 0.5", "model already exists"),
    ("adapt model model --method lora --adapter lora:2 --targets q", "model already exists"),
    ("merge model model", "model already exists"),
    ("attach model model --tower model", "model already exists"),
    ("attach model out", "--tower is missing"),
    ("attach model out --tower model --size 0", "--size 0"),
    ("report model --out model", "model already exists"),
    ("export model y.gguf", "leave out .gguf"),
    ("convert model y.safetensors", "leave out .safetensors"),
    ("train", "missing: RECIPE.toml"),
    ("train recipe.toml --skip-batches 1", "--skip-batches 1"),
    ("train recipe.toml --set train.steps=0", "steps = 0"),
    ("train recipe.toml --topology v5e:4x4", "go together"),
]
_PROGRAM = """
import sys
from moe_jax.commands import cli
for line in sys.argv[1:]:
    assert cli.main(line.split()) == 2, line
print("jax" in sys.modules)
"""


def test_before_jax_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.toml").write_text('run_dir = "run"\nmodel = {path = "m"}\ndata = {sources = [{path = "x"}]}\n')
    done = run_python(_PROGRAM, *(line for line, _ in CASES), imports=None)
    assert done.returncode == 0 and done.stdout == "False\n", done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("moe-jax: error: ")]
    assert len(errors) == len(CASES)
    for (line, message), error in zip(CASES, errors, strict=True):
        assert message in error, (line, error)


def test_what_can_be_read_only_once_is_not_read_for_a_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("recipe")
    read = []
    monkeypatch.setattr("moe_jax.commands.train.run", lambda options: read.append(options.recipe.name))
    assert cli.main(["train", "recipe"]) == 0 and read == ["recipe"]


def test_what_a_command_does_not_read_may_be_absent(tmp_path, monkeypatch):
    """A recipe names more than is read to show its data, or to compile its step for a config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "recipe.toml").write_text(
        'run_dir = "run"\nmodel = {path = "gone"}\ndata = {sources = [{path = "x"}]}\n'
    )
    shown = ("model.path=model", 'data.sources=[{path="text.txt"}]', "distill.teacher=gone", "eval.text=gone")
    data.Options(task="inspect", recipe=Path("recipe.toml"), set=(shown,)).check_places()
    compiled = {"recipe": Path("recipe.toml"), "compile_only": True, "topology": "v5e:4x4"}
    train.Options(**compiled, config=Path("model")).check_places()
    for options in (compiled, compiled | {"config": Path("absent")}, {"recipe": Path("recipe.toml"), "set": (shown,)}):
        with pytest.raises(FileNotFoundError, match="no model at"):
            train.Options(**options).check_places()


def test_of_several_processes_each_looks_for_what_is_in_the_way_and_none_for_what_is_there(tmp_path, monkeypatch):
    """What one of them misses, all have to hear of, when they have joined."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.json").touch()
    options = {"model": Path("absent"), "tasks": "piqa", "data_dir": Path("absent")}
    with pytest.raises(FileNotFoundError):
        check_options(evaluation.Options(**options))
    monkeypatch.setattr(command_options, "find_place", lambda: "the second of two")
    check_options(evaluation.Options(**options))
    with pytest.raises(InputError, match="results.json exists already"):
        check_options(evaluation.Options(**options, output=Path("results.json")))
