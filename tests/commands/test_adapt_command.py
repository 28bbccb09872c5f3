"""`moe-jax adapt`, and `upcycle --method`, as a user runs them."""

import json
import re

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.peft import adapt as adapt_module
from moe_jax.peft.trained import parameter_sizes
from moe_jax.upcycling import UpcycleSpec, upcycled_config
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.peft_models import FFN, FULL, SHARED, model_of
from tests.support.tiers import long

METHODS = {
    "perft-r": "--method perft-r --adapter lora:3 --experts 3 --top-k 2",
    "perft-e": "--method perft-e --adapter parallel:3",
    "perft-d": "--method perft-d --adapter lora:3 --experts 2",
    "perft-s": "--method perft-s --adapter parallel:3",
    "lora": "--method lora --adapter lora:3 --targets q,v,up,router",
}
# By whom the tokens are routed: the router of the model, and that of the adapters.
ROUTERS = {
    "perft-r": ["the router is among them: no", "the adapters' own router is among them: yes"],
    "perft-e": ["the router is among them: no"],
    "lora": ["the router is among them: no, but LoRA beside it is"],
}


# Compiling two models takes longer than all the rest.
NO_CHECK = "--no-step0-check"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense model; an MoE of one layer; and, in bfloat16, a dense layer, full experts and experts over a base."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tokenizer.json").write_text("{}")
    dense, moe, mixed = model_of(FFN, FFN), model_of(FULL), model_of(FFN, FULL, SHARED, dtype="bfloat16")
    write_model(folder / "dense", dense, random_leaves(dense))
    write_model(folder / "moe", moe, random_leaves(moe))
    write_model(folder / "mixed", mixed, random_leaves(mixed), (folder / "tokenizer.json",))
    return folder


def run(command: str, *arguments) -> int:
    return cli.main([command, *(word for argument in arguments for word in str(argument).split())])


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_holds_the_adapters_alone_and_what_is_trained_is_said(method, models, tmp_path, capsys):
    out = tmp_path / "tuned"
    assert run("adapt", models / "mixed", out, METHODS[method], "--seed 3", NO_CHECK) == 0
    printed = capsys.readouterr().out
    tuned = open_source(out)
    own, sizes = own_leaves(tuned.config), parameter_sizes(tuned.config)
    assert tuned.own_specs().keys() == own and tuned.config.frozen_base
    assert (out / "tokenizer.json").read_text() == "{}"

    # Every parameter that will be trained is in the table once; and whether routers are.
    trained, total = sum(sizes[path] for path in own), sum(sizes.values())
    assert re.search(f"trained: {trained:,} of {total:,} parameters \\(([\\d.]+)%\\)", printed)[1] in (
        f"{100 * trained / total:.2f}", f"{100 * trained / total:.2g}"
    )  # fmt: skip
    rows = [line.split() for line in printed.splitlines() if line.startswith("layers/")]
    assert sum(int(row[1].replace(",", "")) for row in rows) == trained
    for line in ROUTERS.get(method, ["the router is among them: no"]):
        assert line in printed.splitlines()
    assert "step-0 difference: not checked" in printed

    entry = json.loads((out / "lineage.json").read_text())[-1]
    assert entry["command"] == "adapt" and entry["options"]["method"] == method and entry["options"]["seed"] == 3
    assert entry["measured"]["adapter_params"] == trained
    assert entry["sources"][0]["fingerprint"] == tuned.base.fingerprint()


def test_the_model_that_is_written_computes_what_its_base_does(models, tmp_path, capsys):
    assert run("adapt", models / "moe", tmp_path / "tuned", METHODS["perft-r"]) == 0
    assert re.search(r"step-0 difference from the model: 0 \(largest logit", capsys.readouterr().out)
    measured = json.loads((tmp_path / "tuned" / "lineage.json").read_text())[-1]["measured"]
    assert measured["step0_max_abs_difference"] == 0.0 < measured["step0_max_abs_logit"]


def test_the_seed_decides_what_adapters_begin_as(models, tmp_path):
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        assert run("adapt", models / "mixed", tmp_path / name, METHODS["perft-s"], "--seed", seed, NO_CHECK) == 0
    path = "layers/1/mlp/perft/adapters/down"
    one, same, other = (open_source(tmp_path / name).read(path) for name in ("one", "same", "other"))
    assert one.tobytes() == same.tobytes() != other.tobytes()


def test_several_adapters_stand_on_one_base_which_is_not_touched(models, tmp_path):
    before = {file: file.read_bytes() for file in (models / "mixed").rglob("*") if file.is_file()}
    for method in ("perft-e", "lora"):
        assert run("adapt", models / "mixed", tmp_path / method, METHODS[method], NO_CHECK) == 0
    assert before == {file: file.read_bytes() for file in (models / "mixed").rglob("*") if file.is_file()}
    bases = {open_source(tmp_path / method).base.fingerprint() for method in ("perft-e", "lora")}
    assert len(bases) == 1


def test_an_nf4_base_is_compared_with_itself(models, tmp_path, capsys):
    out = tmp_path / "tuned"
    assert run("adapt", models / "dense", out, "--method lora --adapter lora:2 --targets q --base nf4") == 0
    printed = capsys.readouterr().out
    assert "step-0 difference from the same model with NF4 kernels: 0 " in printed
    nf4 = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24)
    assert f"{nf4:,} of them as NF4 codes" in printed
    measured = json.loads((out / "lineage.json").read_text())[-1]["measured"]
    assert f"NF4 changes the logits by up to {measured['nf4_max_abs_difference']:.2g}\n" in printed
    assert 0.0 < measured["nf4_max_abs_difference"] and measured["step0_max_abs_difference"] == 0.0


def test_a_model_that_differs_is_not_written(models, tmp_path, capsys, monkeypatch):
    """Adapters that add something at once are a fault of ours; the check finds it."""
    initial = adapt_module.initial_leaves

    def wrong(config, seed):
        for path, leaf in initial(config, seed):
            yield path, np.full_like(leaf, 0.1)

    monkeypatch.setattr(adapt_module, "initial_leaves", wrong)
    assert run("adapt", models / "moe", tmp_path / "tuned", METHODS["perft-s"]) == 2
    assert "step-0 check" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "options", "messages"),
    [
        ("dense", METHODS["perft-e"], ["the model is dense; upcycle it first"]),
        ("mixed", "--method perft-r --adapter lora:3 --experts 2 --top-k 3", ["top_k=3 must lie between 1 and"]),
        ("mixed", "--method perft-s --adapter lora:0", ["lora:0: the rank must be at least 1"]),
        ("mixed", "--method perft-e --adapter lora:2 --experts 4", ["leave --experts out"]),
        ("mixed", "--method lora --adapter lora:2 --targets q,wq", ["wq matches no kernel; this model has q, k, v"]),
        ("mixed", "--method lora --adapter lora:0 --top-k 2", ["3 problems", "rank must", "--top-k", "--targets is"]),
        ("mixed", "--adapter lora:2", ["--method is missing"]),
        ("mixed", "--method perft-s", ["--adapter is missing"]),
        ("mixed", "--method perft --adapter lora:2", ["perft"]),
        ("mixed", METHODS["perft-s"] + " --seed -1", ["seed=-1 must not be negative"]),
        ("nowhere", METHODS["perft-s"], ["no model at"]),
    ],
)
def test_bad_input_is_refused(model, options, messages, models, tmp_path, capsys):
    assert run("adapt", models / model, tmp_path / "tuned", options) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moe-jax: error: ") and "Traceback" not in err
    assert all(message in err for message in messages)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_directory_and_a_taken_name_are_refused(models, tmp_path, capsys):
    first = tmp_path / "first"
    assert run("adapt", models / "dense", first, "--method lora --adapter lora:2 --targets q", NO_CHECK) == 0
    assert run("adapt", first, tmp_path / "second", "--method lora --adapter lora:2 --targets k") == 2
    assert "adapters already; merge" in capsys.readouterr().err
    assert run("adapt", models / "dense", first, "--method lora --adapter lora:2 --targets q") == 2
    assert f"{first} already exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


# ---- upcycle --method ------------------------------------------------------------------------------------------------


def test_upcycle_says_what_will_be_trained(models, tmp_path, capsys):
    options = "--method pesc --experts 3 --top-k 2 --adapter 4 --scale 0.5 --rest lora:2 --seed 1"
    assert run("upcycle", models / "dense", tmp_path / "pesc", options, NO_CHECK) == 0
    printed = capsys.readouterr().out
    tuned = open_source(tmp_path / "pesc")
    assert "the adapters' own router is among them: yes" in printed and "the router is among" not in printed
    assert "layers/{0,1}/mlp/experts/adapters/down" in printed
    moe = tuned.config.layers[1].mlp
    assert tuned.config.moe_layers == (0, 1)
    assert (moe.num_experts, moe.bank.form.adapter.rank, moe.bank.form.adapter.scale) == (3, 4, 0.5)
    assert (moe.bank.form.adapter.dropout, moe.expert.lora.rank, moe.expert.nf4) == (0.1, 2, False)
    options = json.loads((tmp_path / "pesc" / "lineage.json").read_text())[-1]["options"]
    assert options["method"] == "pesc" and options["adapter"]["rank"] == 4 and options["rest"]["kind"] == "lora"


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ("--method pesc --top-k 9", ["top_k=9 is above num_experts=8"]),
        ("--method pesc --adapter lora:4", ["it is the adapters' width, a whole number such as 512"]),
        ("--method pesc --adapter 0", ["a whole number such as 512"]),
        ("--method pesc --rest qlora", ["--rest 'qlora'"]),
        ("--method pesc --rest lora:0", ["rank 0 must be at least 1"]),
        ("--method pesc --delta low-rank:2 --freeze-base", ["2 problems", "--delta does not go", "--freeze-base does"]),
        ("--method vanilla --delta low-rank:2", ["its experts are copies"]),
        ("--method ders", ["--delta is missing: low-rank:R or sparse:RATE"]),
        ("--adapter 4 --rest frozen", ["--adapter goes with --method pesc only", "--rest goes with --method pesc"]),
        ("--method pesk", ["pesk"]),
    ],
)
def test_bad_options_of_upcycle_are_refused(options, messages, models, tmp_path, capsys):
    assert run("upcycle", models / "dense", tmp_path / "moe", options) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moe-jax: error: ") and all(message in err for message in messages)
    assert list(tmp_path.iterdir()) == []


def upcycled(**options):
    return upcycled_config(dense_config(), UpcycleSpec(**options))


def test_methods_of_upcycling_are_names_for_what_there_was():
    assert upcycled(method="vanilla") == upcycled()
    assert upcycled(method="ders", delta="low-rank:2") == upcycled(delta="low-rank:2")


def test_pesc_is_what_camelidae_was_unless_something_else_is_said():
    given = {"experts": 8, "top_k": 2, "every": 1, "adapter": "512", "scale": 0.25, "rest": "qlora:64"}
    assert upcycled(method="pesc") == upcycled(method="pesc", **given, balance_coef=0.01)


@pytest.mark.parametrize(
    "options", ["--method perft-s --adapter lora:2", "--method lora --adapter lora:2 --targets q,up"]
)
def test_a_model_with_adapter_experts_of_its_own_is_a_base(options, models, tmp_path, capsys):
    """One of PESC with nothing frozen is a model by itself: what stands beside it is new, its adapters are not."""
    base, tuned, merged = (tmp_path / name for name in ("pesc", "tuned", "merged"))
    pesc = "--method pesc --experts 2 --top-k 2 --adapter 3 --rest full"
    assert run("upcycle", models / "dense", base, pesc, NO_CHECK) == 0
    assert run("adapt", base, tuned, options) == 0
    assert "step-0 difference from the model: 0 " in capsys.readouterr().out
    opened = open_source(tuned)
    assert all("/perft/" in path or "/lora/" in path for path in own_leaves(opened.config))
    np.testing.assert_array_equal(
        opened.read("layers/0/mlp/experts/adapters/down"), opened.base.read("layers/0/mlp/experts/adapters/down")
    )
    code = run("merge", tuned, merged)
    error = capsys.readouterr().err
    if "perft" in options:
        assert code == 2 and "PERFT experts (single)" in error and "PESC" not in error
    else:
        assert code == 0
        assert run("adapt", merged, tmp_path / "again", options, NO_CHECK) == 0


@long
@pytest.mark.parametrize("compression", ["--method resmoe --keep 0.5", "--method ders-quantize --bits 4"])
def test_a_compressed_model_is_a_base(compression, models, tmp_path, capsys):
    """Its centre is held as NF4, its residuals stay as they are, and every expert gets an adapter."""
    small, tuned = tmp_path / "small", tmp_path / "tuned"
    assert run("compress", models / "moe", small, compression) == 0
    assert run("adapt", small, tuned, "--method perft-e --adapter lora:2 --base nf4") == 0
    assert "step-0 difference from the same model with NF4 kernels: 0 " in capsys.readouterr().out
    opened = open_source(tuned)
    (kind,) = {opened.config.layers[i].mlp.bank.kind for i in opened.config.moe_layers}
    assert kind == ModelDirectory(small).config.layers[0].mlp.bank.kind != "full"
    assert {"layers/0/mlp/experts/base/up/nf4/codes", "layers/0/mlp/perft/adapters/up"} <= opened.specs().keys()
