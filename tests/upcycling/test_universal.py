"""Upcycling with a universal FFN (methods.md 2.4): options, leaves, the command, and every command after it."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import leaf_specs, load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig, FFNConfig, MoEConfig, config_from_json, config_to_json
from moe_jax.planning.model_costs import trained_leaves
from moe_jax.upcycling import UpcycleSpec, keeps_the_function, moe_leaves, upcycled_config
from tests.support.dense_models import dense_config, random_leaves
from tests.support.numerics import logits_of
from tests.support.tiers import long, one_in

EXPERTS = 3


def run(*arguments) -> int:
    return cli.main(list(map(str, arguments)))


# ---- options ----------------------------------------------------------------------------------------------------


def test_options_reach_the_moe():
    options = UpcycleSpec(delta="low-rank:2", universal="coder", extended=True, cv_coef=0.5)
    config = upcycled_config(dense_config(), options)
    moe = config.layers[1].mlp
    assert (moe.universal, moe.extended, moe.cv_coef, moe.bank_experts, moe.bank_top_k) == ("coder", True, 0.5, 9, 3)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_coder_keeps_the_function_and_med_does_not():
    for top_k in (1, 2, 8):
        assert keeps_the_function(UpcycleSpec(universal="coder", top_k=top_k))
        assert not keeps_the_function(UpcycleSpec(universal="med", top_k=top_k))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"universal": "codes"}, "unknown universal 'codes' .did you mean 'coder'"),
        ({"extended": True, "bank": BankConfig(kind="low-rank", rank=2)}, "needs a universal FFN"),
        ({"universal": "med", "extended": True}, "extended needs experts"),
        ({"universal": "coder", "gate": "top1", "top_k": 1}, "gate 'top1' does .* universal 'coder'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    fields = {"expert": FFNConfig(dim=8), "num_experts": 4, "top_k": 2} | options
    with pytest.raises(InputError, match=message):
        MoEConfig(**fields)


# ---- leaves -----------------------------------------------------------------------------------------------------


def upcycle_layer(delta: str, universal: str, *, extended: bool, seed=0, **dense) -> tuple[dict, dict, dict]:
    """Leaves of an FFN, of the MoE made from it, and their description."""
    config = dense_config(bias=True, dtype="bfloat16", **dense)
    options = UpcycleSpec(experts=EXPERTS, every=1, delta=delta, universal=universal, extended=extended)
    moe_config = upcycled_config(config, options)
    prefix = "layers/0/mlp/"
    ffn = {path.removeprefix(prefix): leaf for path, leaf in random_leaves(config).items() if path.startswith(prefix)}
    specs = {
        path.removeprefix(prefix): spec for path, spec in leaf_specs(moe_config).items() if path.startswith(prefix)
    }
    return ffn, dict(moe_leaves(ffn, moe_config.layers[0].mlp, UpcycleSpec(seed=seed), layer=0)), specs


@pytest.mark.parametrize(
    ("delta", "universal", "extended"),
    [
        ("full", "coder", False),
        ("low-rank:3", "coder", True),
        ("sparse:0.7", "coder", True),
        ("sparse:0.7", "med", False),
        ("low-rank:3", "med", True),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
def test_leaves_are_those_of_the_model(delta, universal, extended, gated):
    ffn, moe, specs = upcycle_layer(delta, universal, extended=extended, gated=gated)
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in moe.items()} == {
        path: (spec.shape, spec.dtype) for path, spec in specs.items()
    }
    for path, leaf in ffn.items():
        if extended:
            assert f"universal/{path}" not in moe
        else:
            np.testing.assert_array_equal(moe[f"universal/{path}"], leaf)
        if path.endswith("bias"):
            np.testing.assert_array_equal(moe[f"experts/{path}"], np.stack([leaf] * (EXPERTS + extended)))


def test_the_gate_network_is_drawn_and_its_noise_is_zero():
    _, moe, _ = upcycle_layer("full", "coder", extended=False, d_model=512, dim=8)
    hidden, out, noise = (moe[f"router/{name}/kernel"] for name in ("hidden", "out", "noise"))
    assert hidden.shape == noise.shape == (512, EXPERTS) and out.shape == (EXPERTS, EXPERTS)
    assert hidden.dtype == out.dtype == noise.dtype == ml_dtypes.bfloat16
    assert abs(hidden.astype(np.float32).std() - 0.02) < 0.002 and not noise.any()
    assert len(np.unique(out)) == EXPERTS**2 and np.abs(out).max() < 0.1
    _, again, _ = upcycle_layer("full", "coder", extended=False, d_model=512, dim=8)
    _, other, _ = upcycle_layer("full", "coder", extended=False, d_model=512, dim=8, seed=1)
    for path in ("router/hidden/kernel", "router/out/kernel"):
        assert moe[path].tobytes() == again[path].tobytes() != other[path].tobytes()


def test_the_universal_delta_differs_from_the_experts():
    _, moe, _ = upcycle_layer("low-rank:3", "coder", extended=True)
    factors = moe["experts/delta/up/a"]
    assert len({factor.tobytes() for factor in factors}) == EXPERTS + 1
    # A delta more does not change what a seed gives the others.
    _, plain, _ = upcycle_layer("low-rank:3", "none", extended=False)
    np.testing.assert_array_equal(factors[:EXPERTS], plain["experts/delta/up/a"])


def test_a_frozen_base_leaves_the_universal_ffn_to_be_trained():
    for extended in (False, True):
        frozen = {"delta": "low-rank:2", "freeze_base": True}
        config = upcycled_config(dense_config(), UpcycleSpec(**frozen, universal="coder", extended=extended))
        trained = trained_leaves(config)
        assert not any("/base/" in path for path in trained)
        assert ("layers/1/mlp/universal/up/kernel" in trained) == (not extended)
        assert {"layers/1/mlp/experts/delta/up/b", "layers/1/mlp/router/noise/kernel"} <= trained


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--delta", "sparse:0.9", "--top-k", 3, "--extended", "--freeze-base"),
    ],
    ids=str,
)
def test_stories260k_with_coder_starts_as_the_dense_model(options, data_dir, tmp_path, capsys):
    source = data_dir / "weights" / "stories260K" / "hf"
    assert run("upcycle", source, tmp_path / "moe", "--universal", "coder", "--experts", 4, *options) == 0
    out = capsys.readouterr().out
    assert "step-0 difference" in out and "coder" in out
    entry = json.loads((tmp_path / "moe" / "lineage.json").read_text())[-1]
    # 1e-5 of logits up to 18, less than a millionth: what the order of additions in a product makes.
    allowed = 1e-6 * entry["measured"]["step0_max_abs_logit"]
    assert entry["measured"]["step0_max_abs_difference"] <= allowed
    extended = "--extended" in options
    assert (entry["options"]["universal"], entry["options"]["extended"]) == ("coder", extended)
    assert entry["options"]["gate"] is None
    dense, moe = open_source(source), open_source(tmp_path / "moe")
    text = (data_dir / "text" / "tinystories" / "tinystories_sample_2MiB.txt").read_bytes()[:192]
    tokens = jnp.asarray(np.frombuffer(text, np.uint8).reshape(2, 96).astype(np.int32))
    np.testing.assert_allclose(logits_of(load_model(moe), tokens), logits_of(load_model(dense), tokens), atol=allowed)


@long
def test_med_says_by_how_much_it_begins_elsewhere(dense_model, tmp_path, capsys):
    assert run("upcycle", dense_model, tmp_path / "moe", "--universal", "med") == 0
    assert "as is meant: universal 'med' adds the experts to the FFN" in " ".join(capsys.readouterr().out.split())
    entry = json.loads((tmp_path / "moe" / "lineage.json").read_text())[-1]
    assert entry["measured"]["step0_max_abs_difference"] > 0.01 and entry["options"]["universal"] == "med"
    dense, moe = ModelDirectory(dense_model), ModelDirectory(tmp_path / "moe")
    for name in ("up/kernel", "down/bias"):
        assert moe.read(f"layers/1/mlp/universal/{name}").tobytes() == dense.read(f"layers/1/mlp/{name}").tobytes()


@one_in(4)
@pytest.mark.parametrize("command", ["upcycle", "plan"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--universal", "codes"), "codes"),
        (("--extended",), "extended needs a universal FFN"),
        (("--universal", "coder", "--extended"), "extended needs experts over a shared base"),
        (("--universal", "coder", "--gate", "top1"), "--gate does not go with --universal coder"),
        (("--universal", "coder", "--gate", "topk_softmax"), "--gate does not go with --universal coder"),
        (("--universal", "coder", "--top-k", 9), "top_k=9 is above num_experts=8"),
        (("--delta", "low-rank:0"), "rank=0 must be a positive integer"),
        (("--delta", "low-rank:17"), "rank 17 is above min(d, f) = 16"),
        (("--delta", "sparse:1"), "rate=1.0 must lie in [0, 1)"),
        (("--delta", "sparse:-0.5"), "rate=-0.5 must lie in [0, 1)"),
    ],
)
def test_bad_options_are_refused(command, options, message, dense_model, tmp_path, failing_command):
    target = (tmp_path / "moe",) if command == "upcycle" else ()
    assert message in failing_command(command, dense_model, *target, *options)


# ---- what comes after -------------------------------------------------------------------------------------------

RECIPE = """
run_dir = "{folder}/run"
[model]
path = "{folder}/moe"
[data]
seq_len = 64
sources = [{{ path = "{folder}/train.txt" }}]
[optimizer]
learning_rate = 1e-3
[train]
steps = 4
batch_size = 8
[mesh]
fsdp = 8
"""


@long
@pytest.mark.parametrize("options", [("--delta", "low-rank:4", "--extended")], ids=["extended"])
def test_every_command_works_on_the_model(options, data_dir, tmp_path, capsys, failing_command):
    source = data_dir / "weights" / "stories260K" / "hf"
    moe, text = tmp_path / "moe", tmp_path / "train.txt"
    text.write_text((data_dir / "text" / "tinyshakespeare" / "input.txt").read_text()[:20_000])
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))

    def command(*words) -> str:
        capsys.readouterr()
        assert run(*words) == 0
        return capsys.readouterr().out

    given = ("--experts", 3, "--every", 1, "--universal", "coder", "--cv-coef", 0.01, *options)
    command("upcycle", source, moe, *given)
    planned = json.loads(command("plan", source, *given, "--json"))
    described = json.loads(command("inspect", moe, "--json"))
    assert planned == json.loads(command("plan", moe, "--json"))
    assert planned["total_params"] == described["parameters"] and planned["param_bytes"] == described["bytes"]
    assert (planned["universal_params"] == 0) == ("--extended" in options)
    assert {layer["universal"] for layer in described["experts"]} == {"coder"}
    assert "universal coder" in command("inspect", moe) and "universal FFN: coder" in command("plan", moe)

    short = ("--text", text, "--seq-len", 64, "--json")
    before = json.loads(command("eval", moe, *short))["nll"]
    assert before == pytest.approx(json.loads(command("eval", source, *short))["nll"], abs=1e-4)
    (entry,) = json.loads(command("generate", moe, "--ids", "1,403", "--max-new-tokens", 8, "--json"))
    assert len(entry["ids"]) == 8

    command("train", tmp_path / "recipe.toml")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 4 and all(record["cv_loss"] > 0 for record in records)
    assert records[-1]["loss"] < records[0]["loss"]
    trained, untrained = ModelDirectory(tmp_path / "run" / "model"), ModelDirectory(moe)
    assert trained.specs().keys() == untrained.specs().keys()
    noise = "layers/1/mlp/router/noise/kernel"
    assert np.abs(trained.read(noise)).max() > 0 and not untrained.read(noise).any()

    err = failing_command("export", moe, tmp_path / "hf")
    assert "Hugging Face format" in err and "mlp.universal is 'coder'" in err
