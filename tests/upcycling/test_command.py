"""`moe-jax upcycle`, as a user runs it."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.checks import step0
from moe_jax.commands import cli
from moe_jax.model_io.loading import leaf_specs, load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.upcycling import dense_to_moe
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.numerics import logits_of
from tests.support.tiers import one_in

DELTAS = ("full", "low-rank:4", "sparse:0.9")


def run(*arguments) -> int:
    return cli.main(["upcycle", *map(str, arguments)])


@one_in(3, first=1)  # the small model below has every one
@pytest.mark.parametrize("delta", DELTAS)
def test_stories260k_starts_as_the_dense_model(delta, data_dir, tmp_path, capsys):
    source = data_dir / "weights" / "stories260K" / "hf"
    assert run(source, tmp_path / "moe", "--delta", delta, "--every", 2 if delta == "full" else 1) == 0
    out = capsys.readouterr().out
    assert "260,032" in out and "step-0 difference" in out
    assert "┃" not in out  # rows are named, columns are not

    dense, moe = open_source(source), open_source(tmp_path / "moe")
    assert moe.config.moe_layers == ((1, 3) if delta == "full" else (0, 1, 2, 3, 4))
    text = (data_dir / "text" / "tinystories" / "tinystories_sample_2MiB.txt").read_text()[:2000].encode()
    tokens = jnp.asarray(np.frombuffer(text, np.uint8)[:192].reshape(2, 96).astype(np.int32))
    difference = jnp.abs(logits_of(load_model(moe), tokens) - logits_of(load_model(dense), tokens))
    assert float(difference.max()) <= 1e-5

    entry = json.loads((tmp_path / "moe" / "lineage.json").read_text())[-1]
    assert entry["command"] == "upcycle" and entry["options"]["delta"] == delta
    assert entry["measured"]["step0_max_abs_difference"] <= 1e-5
    assert entry["measured"]["dense_params"] == 260_032
    assert entry["sources"] == [{"path": str(source), "fingerprint": dense.fingerprint()}]
    assert (tmp_path / "moe" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@one_in(4)
@pytest.mark.parametrize("delta", DELTAS)
def test_a_model_directory_in_bfloat16_with_biases(delta, dense_model, tmp_path):
    dst = tmp_path / "moe"
    assert run(dense_model, dst, "--experts", 3, "--delta", delta, "--seed", 5, "--layers", 0, 2) == 0
    dense, moe = ModelDirectory(dense_model), ModelDirectory(dst)
    assert moe.config.moe_layers == (0, 2)
    assert {path: spec.shape for path, spec in moe.specs().items()} == {
        path: spec.shape for path, spec in leaf_specs(moe.config).items()
    }
    for path, spec in moe.specs().items():
        places = {"columns": np.uint16, "row_ends": np.int32}
        assert spec.dtype == places.get(path.rsplit("/", 1)[-1], jnp.bfloat16), path
    for path in dense.specs().keys() & moe.specs().keys():
        assert moe.read(path).tobytes() == dense.read(path).tobytes(), path
    experts = "layers/2/mlp/experts"
    base = f"{experts}/up/kernel" if delta == "full" else f"{experts}/base/up/kernel"
    dense_up = dense.read("layers/2/mlp/up/kernel")
    assert moe.read(base).tobytes() == (dense_up.tobytes() * 3 if delta == "full" else dense_up.tobytes())
    assert moe.read(f"{experts}/down/bias").tobytes() == dense.read("layers/2/mlp/down/bias").tobytes() * 3

    lineage = json.loads((dst / "lineage.json").read_text())
    assert [entry["command"] for entry in lineage] == ["test", "upcycle"]
    measured = lineage[-1]["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]
    assert measured["param_bytes"] == sum(spec.size * spec.dtype.itemsize for spec in moe.specs().values())
    assert (dst / "tokenizer.json").read_text() == "{}"


def test_all_commands_count_alike(dense_model, tmp_path, capsys):
    assert run(dense_model, tmp_path / "moe", "--delta", "sparse:0.5", "--no-step0-check") == 0
    measured = json.loads((tmp_path / "moe" / "lineage.json").read_text())[-1]["measured"]
    capsys.readouterr()
    described = {}
    for command in ("inspect", "plan"):
        assert cli.main([command, str(tmp_path / "moe"), "--json"]) == 0
        described[command] = json.loads(capsys.readouterr().out)
    assert described["inspect"]["parameters"] == described["plan"]["total_params"] == measured["total_params"]
    assert described["inspect"]["bytes"] == described["plan"]["param_bytes"] == measured["param_bytes"]
    assert described["plan"]["dense_params"] == measured["dense_params"]
    assert sum(layer["parameters"] for layer in described["inspect"]["experts"]) == described["plan"]["expert_params"]


def test_the_same_seed_writes_the_same_weights(dense_model, tmp_path):
    arguments = (dense_model, "--delta", "sparse:0.5", "--no-step0-check")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(arguments[0], tmp_path / name, *arguments[1:], "--seed", seed) == 0
    a, b, c = (ModelDirectory(tmp_path / name) for name in "abc")
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()


def test_gates_that_cannot_be_equal_need_an_explicit_word(dense_model, tmp_path, failing, capsys):
    for options in (("--gate", "softmax_topk"), ("--gate", "top1", "--top-k", 1)):
        assert "weights that do not sum to 1" in failing(dense_model, tmp_path / "moe", *options)
    assert run(dense_model, tmp_path / "moe", "--gate", "softmax_topk", "--no-step0-check") == 0
    assert "not checked" in capsys.readouterr().out
    entry = json.loads((tmp_path / "moe" / "lineage.json").read_text())[-1]
    assert entry["measured"]["step0_max_abs_difference"] is None and entry["options"]["step0_check"] is False


def test_a_gate_over_all_experts_is_equal(dense_model, tmp_path):
    assert run(dense_model, tmp_path / "moe", "--gate", "softmax_topk", "--experts", 2) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--experts", 1), "top_k=2 is above num_experts=1"),
        (("--every", 0), "every=0 must be at least"),
        (("--every", 5), "every=5 must lie between 1 and the number of layers, 4"),
        (("--layers", 4), "layers 4 do not exist"),
        (("--delta", "low-rank:99"), "rank 99 is above min(d, f) = 16"),
        (("--delta", "low-rank:0"), "rank=0 must be a"),
        (("--delta", "sparse:1"), "rate=1.0 must lie in [0, 1)"),
        (("--delta", "sparce:0.5"), "did you mean 'sparse:0.5'"),
        (("--freeze-base",), "--freeze-base needs a shared"),
        (("--gate", "top2"), "top2"),
        (("--seed", -1), "seed=-1 must not be"),
        (("--expert", 4), "did you mean '--experts'"),
    ],
)
def test_bad_options_are_refused(options, message, dense_model, tmp_path, failing):
    err = failing(dense_model, tmp_path / "moe", *options)
    assert message in err and err.count("\n") == 1


def test_an_existing_target_is_refused(dense_model, tmp_path, failing):
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "precious").write_text("kept")
    err = failing(dense_model, tmp_path / "moe")
    assert "already exists; choose" in err and err.count("\n") == 1


def test_an_absent_source_is_refused(tmp_path, failing):
    assert "no model at" in failing(tmp_path / "nothing", tmp_path / "moe")


def test_options_of_dense_models_are_refused_of_an_moe(dense_model, tmp_path, failing):
    assert run(dense_model, tmp_path / "moe", "--no-step0-check") == 0
    err = failing(tmp_path / "moe", tmp_path / "again", "--delta", "low-rank:2")
    assert "--delta is for a dense model" in err and err.count("\n") == 1


def test_weights_that_are_not_finite_are_refused(tmp_path, failing):
    config = dense_config()
    leaves = random_leaves(config)
    leaves["layers/2/mlp/down/kernel"][3, 4] = np.nan
    source = write_model(tmp_path / "dense", config, leaves)
    err = failing(source, tmp_path / "moe")
    assert "layers/2/mlp/down/kernel: 1 of " in err and "first nan at [3, 4]" in err and err.count("\n") == 1


@one_in(2, first=1)
@pytest.mark.parametrize("delta", DELTAS)
def test_a_wrong_leaf_fails_the_check(delta, dense_model, tmp_path, failing, monkeypatch):
    """The check sees what was written: experts that differ a little, or a delta that is not zero."""
    changed = {"full": "experts/up/kernel", "low-rank:4": "experts/delta/up/b", "sparse:0.9": "experts/delta/up/values"}

    def wrong(*args, **kwargs):
        for path, leaf in moe_leaves(*args, **kwargs):
            yield path, (leaf + np.full_like(leaf, 0.01) if path == changed[delta] else leaf)

    moe_leaves = dense_to_moe.moe_leaves
    monkeypatch.setattr(dense_to_moe, "moe_leaves", wrong)
    assert "logits differ" in failing(dense_model, tmp_path / "moe", "--delta", delta)


def test_a_check_beyond_memory_is_refused_before_anything_is_written(dense_model, tmp_path, failing, monkeypatch):
    monkeypatch.setattr(step0, "available_memory", lambda: 1000)
    monkeypatch.setattr(step0.StreamedModel, "logits", None)
    err = failing(dense_model, tmp_path / "moe")
    assert "the step-0 check needs" in err and "--no-step0-check" in err and err.count("\n") == 1


def test_dtypes_of_a_mixed_checkpoint_are_kept(tmp_path):
    config = dense_config(num_layers=2)
    leaves = random_leaves(config)
    for path in ("layers/1/mlp/up/kernel", "layers/1/mlp_norm/scale"):
        leaves[path] = leaves[path].astype(jnp.bfloat16)
    write_model(tmp_path / "dense", config, leaves)
    assert run(tmp_path / "dense", tmp_path / "moe", "--delta", "low-rank:2", "--no-step0-check") == 0
    specs = ModelDirectory(tmp_path / "moe").specs()
    halved = {path for path, spec in specs.items() if spec.dtype == jnp.bfloat16}
    up = {f"layers/1/mlp/experts/{leaf}" for leaf in ("base/up/kernel", "delta/up/a", "delta/up/b")}
    assert halved == up | {"layers/1/mlp/router/kernel", "layers/1/mlp_norm/scale"}


def test_the_config_survives(dense_model, tmp_path):
    assert run(dense_model, tmp_path / "moe", "--balance-coef", "0.02", "--z-coef", "0.001", "--no-step0-check") == 0
    dense, moe = ModelDirectory(dense_model).config, ModelDirectory(tmp_path / "moe").config
    layers = tuple(
        dataclasses.replace(layer, mlp=layer.mlp.expert) if i in (1, 3) else layer for i, layer in enumerate(moe.layers)
    )
    assert dataclasses.replace(moe, layers=layers) == dense
    assert (moe.layers[1].mlp.balance_coef, moe.layers[1].mlp.z_coef) == (0.02, 0.001)
