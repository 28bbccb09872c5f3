"""`moe-jax compress`, as a user runs it, and what can be done with its result."""

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from moe_jax.api import compress as compress_api
from moe_jax.api.open_source import open_source
from moe_jax.compression.linear_maps import with_codes
from moe_jax.compression.methods.interface import check_base
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import parse_layers
from moe_jax.compression.stream import choose_layers
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import count_bytes, show_bytes
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig, FFNConfig, LinearCodes
from tests.support.dense_models import dense_config
from tests.support.moe_models import RECIPE, moe_config, run, same_weights
from tests.support.tiers import long

SPARSIFY, QUANTIZE = ("--method", "ders-sparsify", "--drop", 0.5), ("--method", "ders-quantize", "--bits", 4)


def test_the_report_and_the_lineage(models, tmp_path, out_of):
    printed = out_of("compress", models["moe"], tmp_path / "out", *QUANTIZE, "--base", models["dense"])
    rows = {row[0]: row for row in map(str.split, printed.splitlines())}
    assert rows["base:"] == ["base:", "dense", "model"] and rows["2"][-1].endswith("%")
    assert "on the disk (" in printed and f"wrote {tmp_path / 'out'}" in printed

    entry = json.loads((tmp_path / "out" / "lineage.json").read_text())[-1]
    assert entry["command"] == "compress"
    given = {"method": "ders-quantize", "bits": 4, "base": str(models["dense"]), "extended": False, "layers": None}
    assert given.items() <= entry["options"].items()
    assert [source["path"] for source in entry["sources"]] == [str(models["moe"]), str(models["dense"])]
    assert [layer["layer"] for layer in entry["measured"]["layers"]] == [0, 2]
    inspected = out_of("inspect", tmp_path / "out")
    assert "layers [2]" in inspected
    folders = [folder for folder, *_ in os.walk(tmp_path / "out")]
    files = [file for folder in folders for file in Path(folder).iterdir() if file.is_file()]
    taken = show_bytes(sum(os.stat(path).st_size for path in (*folders, *files)))
    assert f"wrote {tmp_path / 'out'}: {taken}" in printed and f"on the disk: {taken}" in inspected


def test_another_dtype_and_what_the_bytes_are(models, tmp_path, out_of):
    """A centre and positions stay beside the kept entries; the bytes before are those of the model as it is stored."""
    options = ["--method", "resmoe", "--keep", "0.25", "--dtype", "bf16"]
    printed = out_of("compress", models["moe"], tmp_path / "out", *options)
    source, small = ModelDirectory(models["moe"]), ModelDirectory(tmp_path / "out")
    assert small.config.dtype == "bfloat16"
    assert {str(spec.dtype) for spec in small.specs().values()} <= {"bfloat16", "int32", "uint8", "uint32", "int16"}
    [entry] = small.lineage[-1:]
    assert entry["options"]["dtype"] == "bfloat16"
    assert entry["measured"]["bytes_before"] == sum(map(source.stored_bytes, source.specs()))
    shares = [float(share) for share in re.findall(r"(?:values|positions|centre) ([\d.]+)%", printed)]
    assert len(shares) == 3 and "(bfloat16 where there are no codes)" in printed
    # Half the bytes of a quarter of the entries; a bit for each of them; half the bytes of one expert of E.
    experts = source.config.moe(source.config.moe_layers[0]).num_experts
    assert shares == pytest.approx([12.5, 100 / 32, 50 / experts], rel=0.15)


def test_json_is_the_lineages_figures(models, tmp_path, out_of):
    """A line for every layer, and one for the model."""
    printed = out_of("compress", models["moe"], tmp_path / "out", *SPARSIFY, "--layers", "2,0", "--json")
    *layers, model = map(json.loads, printed.splitlines())
    measured = json.loads((tmp_path / "out" / "lineage.json").read_text())[-1]["measured"]
    whole = {"model": str(models["moe"]), "out": str(tmp_path / "out"), **measured}
    assert model.pop("disk_bytes") > model["bytes_after"]
    assert model == {key: value for key, value in whole.items() if key != "layers"}
    assert [layer["layer"] for layer in layers] == [0, 2]
    specs = ModelDirectory(tmp_path / "out").specs()
    for line, layer in zip(layers, measured["layers"], strict=True):
        figures = {key: value for key, value in layer.items() if key not in ("base", "bytes_before", "bytes_after")}
        prefix = f"layers/{layer['layer']}/mlp/experts/"
        nbytes = count_bytes(spec for path, spec in specs.items() if path.startswith(prefix))
        assert line == {**figures, "bytes": nbytes} and nbytes <= layer["bytes_after"]
    assert set(layers[0]) >= {"error_per_neuron", "relative_error", "objective", "rounds", "converged", "seconds"}
    assert layers[0]["relative_error"] > 0 and layers[0]["objective"] is None


def test_figures_that_no_layer_has_are_not_in_the_table(models, tmp_path, out_of):
    above, title, first, *_ = out_of("compress", models["moe"], tmp_path / "out", *QUANTIZE).splitlines()
    assert title.split() == "layer to base least error delta neuron bytes kept".split(), above
    assert above.split() == "cosine of the per".split() and len(first.split()) == 9
    resmoe = ("--method", "resmoe", "--keep", 0.25)
    printed = out_of("compress", models["moe"], tmp_path / "resmoe", *resmoe)
    assert "objective  rounds" in printed and "seconds" in printed
    assert "choice: sparse, keep 0.25, " in printed  # the same in all layers


def test_the_choice_under_a_budget_is_said_of_every_layer(models, tmp_path, out_of):
    options = ("--method", "resmoe", "--residual", "quantized", "--target-bytes", "34kB", "--json")
    *layers, model = map(json.loads, out_of("compress", models["moe"], tmp_path / "out", *options).splitlines())
    assert [layer["layer"] for layer in layers] == [0, 2]
    for layer in layers:
        bits = ModelDirectory(tmp_path / "out").config.layers[layer["layer"]].mlp.bank.form.bits
        assert layer["choice"] == f"quantized, {bits} bits" and layer["converged"] and layer["rounds"] >= 1
    assert model["expert_bytes_after"] <= 34_000


def test_merging_by_the_use_of_experts_on_a_text(models, tmp_path, out_of, text):
    options = ("--method", "msmoe", "--keep", 0.34)
    out_of("compress", models["one"], tmp_path / "out", *options, "--calibrate", text, "--seq-len", 48)
    entry = json.loads((tmp_path / "out" / "lineage.json").read_text())[-1]
    assert entry["options"]["calibrate"] == str(text) and str(text) in [source["path"] for source in entry["sources"]]
    assert not entry["measured"]["layers"][0]["uniform_usage"] and not entry["measured"]["warnings"]
    assert ModelDirectory(tmp_path / "out").config.layers[0].mlp.merged_experts == 1


@pytest.mark.parametrize(
    ("text", "layers"), [("all", [0, 2]), ("top:1", [2]), ("top:2", [0, 2]), ("1-2", [2]), ("0-0,2", [0, 2])]
)
def test_layers_by_number_and_by_place(text, layers):
    config = moe_config(dense_config(num_layers=4), BankConfig(), None, BankConfig(), None)
    assert list(choose_layers(config, parse_layers(text, config))) == layers


def test_a_range_may_end_anywhere_and_costs_nothing():
    config = moe_config(dense_config(num_layers=4), BankConfig(), None, BankConfig(), None)
    assert parse_layers("0-999999999", config) == config.moe_layers
    for text in ("0-" + "9" * 5000, "9" * 5000, "top:" + "9" * 5000, "1-2-3", "²"):
        with pytest.raises(InputError) as error:
            parse_layers(text, config)
        assert len(str(error.value)) < 200


def test_the_same_seed_gives_the_same_weights(models, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(models["moe"], tmp_path / name, *SPARSIFY, "--seed", seed) == 0
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


@pytest.fixture
def nll(out_of, text):
    """What `moe-jax eval` says of a model."""
    return lambda model: json.loads(out_of("eval", model, "--text", text, "--seq-len", 48, "--json"))["nll"]


@pytest.mark.parametrize("method", [SPARSIFY, QUANTIZE], ids=["sparsify", "quantize"])
def test_the_result_is_exported_merged(method, models, tmp_path, out_of):
    """Kinds are mixed: layer 0 keeps its full experts, and layer 1 is dense."""
    out_of("compress", models["moe"], tmp_path / "out", *method, "--layers", 2)
    out_of("export", tmp_path / "out", tmp_path / "hf")
    ours, exported = ModelDirectory(tmp_path / "out"), open_source(tmp_path / "hf")
    assert [layer.mlp.bank.kind for layer in exported.config.layers] == ["full"] * 3
    for layer in (0, 2):
        for name in ("gate", "up", "down"):
            merged = np.stack(list(SourceLayer(ours, layer).kernels(name)))
            np.testing.assert_array_equal(exported.read(f"layers/{layer}/mlp/experts/{name}/kernel"), merged)


@long
def test_the_result_is_a_model_like_any_other(models, tmp_path, out_of, nll, text):
    out = tmp_path / "out"
    out_of("compress", models["one"], out, *QUANTIZE)
    # Codes are multiplied as the kernels that they stand for, and these are not the ones that there were.
    out_of("export", out, tmp_path / "merged")
    assert nll(out) == pytest.approx(nll(tmp_path / "merged"), rel=1e-6)
    kernel = "layers/0/mlp/experts/up/kernel"
    assert not np.array_equal(open_source(tmp_path / "merged").read(kernel), ModelDirectory(models["one"]).read(kernel))
    words = ("--prompt", "All", "--max-new-tokens", 4, "--temperature", 0)
    assert out_of("generate", out, *words).startswith("All")

    plan, described = (json.loads(out_of(command, out, "--json")) for command in ("plan", "inspect"))
    assert plan["total_params"] == described["parameters"] and plan["param_bytes"] == described["bytes"]

    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
    out_of("train", tmp_path / "recipe.toml")
    trained = ModelDirectory(tmp_path / "run" / "model")
    assert trained.config.layers == ModelDirectory(out).config.layers
    base, codes = (f"layers/0/mlp/experts/{leaf}" for leaf in ("base/up/kernel", "delta/up/codes"))
    assert not np.array_equal(trained.read(base), ModelDirectory(out).read(base))
    assert np.array_equal(trained.read(codes), ModelDirectory(out).read(codes))


def test_a_hugging_face_moe_with_the_dense_model_it_came_from(models, tmp_path, out_of):
    """The dense model is a Llama, the exported MoE is in Mixtral's format, where every layer is an MoE."""
    out_of("export", models["moe"], tmp_path / "mixtral")
    out_of("export", models["dense"], tmp_path / "llama")
    options = (*QUANTIZE, "--base", tmp_path / "llama", "--json")
    out_of("compress", tmp_path / "mixtral", tmp_path / "out", *options)
    layers = json.loads((tmp_path / "out" / "lineage.json").read_text())[-1]["measured"]["layers"]
    assert {layer["base"] for layer in layers} == {"dense model"} and len(layers) == 3
    # Layer 1 was dense: its experts are copies of the base.
    assert layers[1]["delta_error"] is None and layers[1]["relative_error"] == 0
    source = open_source(tmp_path / "mixtral")
    experts = sum(source.stored_bytes(path) for path in source.specs() if path.startswith("layers/0/mlp/experts/"))
    assert layers[0]["bytes_before"] == experts == 3 * 3 * 16 * 24 * 4
    for ours, theirs in zip(SourceLayer(ModelDirectory(tmp_path / "out"), 0).kernels("down"),
                            SourceLayer(source, 0).kernels("down"), strict=True):  # fmt: skip
        np.testing.assert_allclose(ours, theirs, atol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--method is missing"),
        (("--method", "ders-sparsity", "--drop", 0.5), "'ders-sparsity' (did you mean 'ders-sparsify'?)"),
        (("--method", "ders-sparsify"), "ders-sparsify needs --drop"),
        (("--method", "ders-quantize"), "ders-quantize needs --bits"),
        (("--method", "ders-sparsify", "--drop", 1), "drop=1 must lie in [0, 1)"),
        (("--method", "ders-sparsify", "--drop=-0.5"), "drop=-0.5 must lie in [0, 1)"),
        (("--method", "ders-sparsify", "--drop", "much"), "--drop 'much': expected numbers"),
        (("--method", "ders-sparsify", "--drop", "0.5,0.9"), "--drop 0.5,0.9: several values need --sweep"),
        (("--method", "ders-sparsify", "--drop", 0.9995, "--keep", "exact"), "rate 0.9995 leaves no entry of the"),
        ((*SPARSIFY, "--keep", "largest"), "unknown keep 'largest'"),
        ((*SPARSIFY, "--seed", -1), "seed=-1 must not be negative"),
        ((*SPARSIFY, "--bits", 2), "--bits does not go with ders-sparsify: it belongs to ders-quantize"),
        (("--method", "ders-quantize", "--bits", 5), "bits=5 must be one of 8, 4, 3, 2, 1"),
        (("--method", "ders-quantize", "--bits", 2.5), "--bits '2.5': expected whole numbers"),
        ((*QUANTIZE, "--drop", 0.5), "--drop does not go with ders-quantize: it belongs to ders-sparsify"),
        ((*QUANTIZE, "--seed", 1), "--seed does not go with ders-quantize"),
        ((*QUANTIZE, "--group-size", 12), "group_size=12 must be a multiple of 8"),
        ((*QUANTIZE, "--scale", "absmin"), "unknown scale 'absmin' (did you mean 'absmax'?)"),
        ((*QUANTIZE, "--layers", 1), "--layers: 1 of the model's MoE layers, which are 0, 2"),
        ((*QUANTIZE, "--layers", "0,9"), "--layers: 9 of the model's MoE layers, which are 0, 2"),
        ((*QUANTIZE, "--layers", "0 2"), "--layers '0 2': expected all, top:N, or layers such as 0,3,8-11"),
        ((*QUANTIZE, "--layers", "top:3"), "--layers top:3: the model has 2 MoE layers"),
        ((*QUANTIZE, "--layers", "top:0"), "--layers top:0: the model has 2 MoE layers"),
        ((*QUANTIZE, "--layers", "1-1"), "--layers 1-1: none of them is an MoE layer"),
        ((*QUANTIZE, "--extended"), "--extended: there is no universal FFN in layers 0, 2"),
        ((*QUANTIZE, "--base", "nowhere"), "no model at nowhere"),
        ((*QUANTIZE, "--text", "t"), "--text: only with --sweep"),
        ((*QUANTIZE, "--seq-len", 8, "--batch-size", 2), "--seq-len, --batch-size: only with --sweep or --calibrate"),
        (("--sweep",), "--sweep needs --text FILE"),
        (("--sweep", "--text", "nowhere.txt"), "no text at nowhere.txt"),
        (("--sweep", "--text", "t", "--method", "ders-quantize,resmo"), "unknown method 'resmo'"),
        (("--method", "GPTQ", "--bits", 4), "unknown method 'GPTQ': here it is quantize with --calibrate"),
        (
            ("--sweep", "--text", "t", "--method", "ders-quantize", "--drop", "0.5,0.9"),
            "--drop does not go with ders-quantize",
        ),
        (("--sweep", "--text", "t", "--bits", "2,5"), "bits=5 must be one of"),
        (("--sweep", "--text", "t", "--batch-size", 0), "batch_size=0 must be a positive"),
        (("--bit", 4), "did you mean '--bits'"),
    ],
)
def test_bad_options_are_refused(options, message, models, tmp_path, failing):
    assert message in failing(models["moe"], tmp_path / "out", *options)


def test_models_and_targets_that_will_not_do(models, tmp_path, failing, text):
    assert "the model is dense: it has no experts" in failing(models["dense"], tmp_path / "out", *QUANTIZE)
    assert "--base is an MoE itself" in failing(models["moe"], tmp_path / "out", *QUANTIZE, "--base", models["moe"])
    assert "no model at" in failing(tmp_path / "nothing", tmp_path / "out", *QUANTIZE)
    (tmp_path / "there").mkdir()
    assert "already exists; choose another name" in failing(models["moe"], tmp_path / "there", *QUANTIZE)
    assert "already exists" in failing(models["moe"], tmp_path / "there", "--sweep", "--text", text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "qwen2"}, "--base is a 'qwen2' model and the experts are of a 'llama' one"),
        ({"d_model": 32}, "--base has 4 layers of width 32, the model 4 of width 16"),
        ({"num_layers": 3}, "--base has 3 layers of width 16, the model 4 of width 16"),
        ({"dim": 32}, "--base has another FFN than the experts in layer 2"),
        ({"gated": False}, "--base has another FFN than the experts in layer 2"),
    ],
)
def test_a_base_of_another_shape_or_family_is_refused(changes, message):
    model = moe_config(dense_config(), None, None, BankConfig(), None)
    family = changes.pop("family", "llama")
    with pytest.raises(InputError) as caught:
        check_base(dataclasses.replace(dense_config(**changes), family=family), model, (2,))
    assert message in str(caught.value)


def test_a_base_whose_ffns_are_in_codes_is_refused():
    model, dense = moe_config(dense_config(), None, None, BankConfig(), None), dense_config()
    path = "layers/2/mlp/down"
    with pytest.raises(InputError, match="layer 2 is in codes"):
        check_base(with_codes(dense, {path: LinearCodes(paths=(path,), bits=4)}), model, (2,))
    path = "layers/2/attention/q"
    check_base(with_codes(dense, {path: LinearCodes(paths=(path,), bits=4)}), model, (2,))


def test_a_base_may_differ_where_no_experts_are():
    model = moe_config(dense_config(), None, None, BankConfig(), None)
    dense = dense_config()
    other = dataclasses.replace(dense.layers[0], mlp=FFNConfig(dim=99))
    check_base(dataclasses.replace(dense, layers=(other, *dense.layers[1:])), model, (2,))
    check_base(dense, dataclasses.replace(model, family="mixtral"), (2,))


@long
def test_a_sweep(models, tmp_path, out_of, nll, text):
    options = ("--sweep", "--text", text, "--seq-len", 48, "--drop", "0.9", "--bits", "1")
    printed = out_of("compress", models["one"], tmp_path / "out", *options, "--json")
    assert sorted(os.listdir(tmp_path / "out")) == ["sweep.json", "sweep.png"]
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert json.loads(printed) == found
    points = {(point["method"], point["value"]): point for point in found["measured"]["points"]}
    swept = ("ders-sparsify", 0.9), ("ders-quantize", 1), ("quantize", 1), ("hqq", 1)  # by those that sweep these
    assert tuple(points) == swept

    one = ("compress", models["one"], tmp_path / "one", "--method", "ders-quantize", "--bits", 1)
    report = json.loads(out_of(*one, "--json").splitlines()[-1])
    point = points["ders-quantize", 1]
    assert point["nll"] == pytest.approx(nll(tmp_path / "one"), rel=1e-6)
    assert point["expert_bytes"] == report["expert_bytes_after"]
    assert point["kept"] == pytest.approx(report["expert_bytes_after"] / report["expert_bytes_before"])
    assert point["perplexity"] == pytest.approx(np.exp(point["nll"]))


def test_a_sweep_tries_all_values_and_draws_them(models, tmp_path, out_of, monkeypatch, text):
    # Worse from model to model, at last beyond what a float holds: the axis becomes logarithmic.
    scores = iter([*np.linspace(2, 4, 4), 1000.0, 2.0])
    monkeypatch.setattr(compress_api, "_scorer", lambda source, spec: lambda model: float(next(scores)))
    words = ("--method", "ders-quantize")
    printed = out_of("compress", models["moe"], tmp_path / "out", "--sweep", "--text", text, *words)
    assert all(f"ders-quantize   bits {bits}" in printed for bits in (8, 4, 3, 2, 1))
    assert sorted(os.listdir(tmp_path / "out")) == ["sweep.json", "sweep.png"]
    assert "not compressed" in printed and "7.3891" in printed


def test_a_sweep_that_fails_leaves_nothing_behind(models, tmp_path, monkeypatch, text):
    def fail(model):
        raise InputError("no score")

    monkeypatch.setattr(compress_api, "_scorer", lambda source, spec: fail)
    assert run(models["moe"], tmp_path / "out", "--sweep", "--text", text) == 2
    assert os.listdir(tmp_path) == ["text.txt"]
