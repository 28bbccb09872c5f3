"""Bytes of compressed experts from a config alone: methods.md 8, the banks, and `moe-jax plan --compress`."""

import dataclasses
import inspect
import json
import math
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.commands import cli
from moe_jax.compression.coding.storage import FULL, layer_in, stored_bytes
from moe_jax.compression.spec import METHODS
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import count_bytes
from moe_jax.experts.forms import Matrix, Sparse
from moe_jax.experts.forms.coding import Storable
from moe_jax.experts.forms.protocol import registered
from moe_jax.experts.forms.sparse import ENCODINGS, POSITION_LEAVES, encoding_bytes, smallest_encoding
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import BankConfig, ModelConfig, config_to_json
from moe_jax.planning.planned_compression import planned_compression
from tests.support.dense_models import dense_config
from tests.support.moe_models import moe_config

MIB = 2**20
EVERY = {layout.name: layout for method in METHODS.values() for layout in method.layouts} | {FULL.name: FULL}
WRITTEN = {name: layout for name, layout in EVERY.items() if getattr(layout, "position_bytes", None) is None}


KEEP = {"sp": 0.6, "msmoe": 0.6, "svd": 0.6}
OF_EXPERTS = tuple(f"layers/0/mlp/{leaf}" for leaf in ("experts/", "universal/", "groups"))
NOTHING: dict[str, Any] = {
    name: False if option.annotation is bool else None
    for name, option in inspect.signature(planned_compression).parameters.items()
    if option.kind is option.KEYWORD_ONLY
}
"""Options of `planned_compression`, none of which is given."""


def small(**kwargs) -> ModelConfig:
    """Layers 1 and 2 of 3 are MoEs; shapes that are no multiples of 8."""
    dense = dense_config(num_layers=3, d_model=20, dim=36, **kwargs)
    return moe_config(dense, None, BankConfig(), BankConfig())


def planned(capsys, *words) -> dict:
    assert cli.main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["compression"]


@pytest.fixture
def mixtral(data_dir):
    return data_dir / "configs" / "as_found" / "mistralai__Mixtral-8x7B-v0.1.json"


def test_a_mixtral_layer_in_float32(mixtral, capsys):
    """methods.md 8."""
    plan = planned(capsys, mixtral, "--compress", "resmoe", "--keep", 0.25, "--dtype", "float32")
    forms = {form["form"]: form for form in plan["forms"]}
    layer = {name: form["layer"] for name, form in forms.items()}
    expert = 3 * 4096 * 14336 * 4
    assert layer["full"]["total"] == 5376 * MIB == 8 * expert
    assert layer["csr16"]["values"] + layer["csr16"]["places"] == 2016 * MIB
    assert layer["csr16"]["centre"] == 672 * MIB and layer["csr16"]["row_pointers"] == 8 * 4 * (4096 + 4096 + 14336)
    assert layer["csr16"]["total"] - layer["csr16"]["row_pointers"] == 2688 * MIB
    assert round(layer["svd"]["total"] / MIB) == 2016
    assert layer["svd"]["values"] == 8 * 4 * 1654 * (14336 + 3 * 4096)
    assert layer["coo64"]["values"] + layer["coo64"]["places"] == 8 * 840 * MIB
    assert layer["quantized:4"]["values"] == 8 * (expert // 8 + expert // 4 // 128 * 2)
    assert forms["csr16"]["bits_per_weight"] == pytest.approx(16, abs=0.01)
    assert [name for name, form in forms.items() if form["fewest"]] == ["bitmap"]
    assert [name for name, form in forms.items() if not form["written"]] == ["csr32", "coo64"]

    bits = planned(capsys, mixtral, "--compress", "resmoe", "--keep", 0.25, "--dtype", "float32", "--bits", 4)
    assert [form["form"] for form in bits["forms"]] == ["csr16", "csr32", "bitmap", "coo", "coo64", "quantized:4"]
    assert bits["forms"][0]["layer"]["values"] == pytest.approx(8 * expert // 4 * (4 / 32 + 16 / 32 / 128), rel=1e-6)
    assert bits["forms"][-1] == forms["quantized:4"]

    named = planned(capsys, mixtral, "--compress", "resmoe", "--keep", 0.25, "--dtype", "float32", "--storage", "csr16")
    assert named["forms"] == [{**forms["csr16"], "fewest": False}]


def test_a_model_of_which_only_the_last_layers_are_compressed(mixtral, capsys):
    whole = json.loads(mixtral.read_text())["num_hidden_layers"]
    words = (mixtral, "--compress", "resmoe", "--keep", 0.25, "--storage", "svd", "--compress-layers")
    top, all_of_them = planned(capsys, *words, "top:24"), planned(capsys, *words, "all")
    assert top["layers"] == list(range(whole - 24, whole)) and len(all_of_them["layers"]) == whole
    (few,), (many,) = top["forms"], all_of_them["forms"]
    assert few["expert_bytes"] * whole == many["expert_bytes"] * 24
    saved = {name: 46_702_792_704 * 2 - form["model_bytes"] for name, form in (("few", few), ("many", many))}
    assert saved["few"] * whole == saved["many"] * 24


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_the_bytes_are_those_of_the_model_that_is_described(gated):
    """A layer for every form that can be written: one model describes them all."""
    forms = list(WRITTEN.values())
    dense = dense_config(num_layers=len(forms), d_model=20, dim=36, gated=gated, bias=not gated, dtype="bfloat16")
    # Of three experts the least share keeps one.
    config = moe_config(dense, *[BankConfig()] * len(forms), top_k=1)
    layers = tuple(
        dataclasses.replace(layer, mlp=layer_in(form, layer.mlp, config.d_model, {"keep": 0.3}))
        for form, layer in zip(forms, config.layers, strict=True)
    )
    specs = leaf_specs(dataclasses.replace(config, layers=layers))
    before = leaf_specs(config)
    weights = 3 * (20 * 36 * (3 if gated else 2) + (0 if gated else 36 + 20))
    for i, counted in enumerate(stored_bytes(config, (0,), forms, {"keep": 0.3})):  # all layers are alike
        with_one = [spec for path, spec in specs.items() if path.startswith(f"layers/{i}/")]
        without = [spec for path, spec in before.items() if not path.startswith(f"layers/{i}/")]
        assert counted.model_bytes == count_bytes([*with_one, *without]), counted.form
        prefixes = (f"layers/{i}/mlp/experts/", f"layers/{i}/mlp/groups")
        experts = count_bytes(spec for path, spec in specs.items() if path.startswith(prefixes))
        assert counted.expert_bytes == counted.layer.total == experts, counted.form
        assert counted.bits_per_weight == pytest.approx(8 * experts / weights), counted.form


@pytest.mark.parametrize(("method", "gated"), [("quantize", True), ("sp", False), ("msmoe", True), ("svd", False)])
def test_a_universal_ffn_that_leaves_the_bank_is_still_counted(method, gated):
    """With the last expert in the bank before: after it where the form shares nothing, beside it."""
    dense = dense_config(num_layers=1, d_model=20, dim=36, gated=gated, bias=not gated)
    deltas = BankConfig(kind="low-rank", rank=2)
    config = moe_config(dense, deltas, universal="med", extended=True)
    counted = {
        one.form: one for one in planned_compression(config, method, **NOTHING | {"keep": KEEP.get(method)}).stored
    }
    for layout in (*METHODS[method].layouts, FULL):
        layer = layer_in(layout, config.moe(0), config.d_model, {"keep": 0.6}, base="none")
        assert layer.bank_experts + layer.universal_beside == {"merged": 2}.get(layout.name, 3) + 1
        specs = leaf_specs(dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], mlp=layer),)))
        experts = count_bytes(spec for path, spec in specs.items() if path.startswith(OF_EXPERTS))
        assert counted[layout.name].expert_bytes == counted[layout.name].layer.total == experts, layout.name
        assert counted[layout.name].model_bytes == count_bytes(specs.values())
    full = counted["full"]
    assert full.bits_per_weight == 32 and full.layer.biases == (0 if gated else 4 * 4 * (36 + 20))


def test_experts_that_are_merged_already_are_merged_further():
    config = moe_config(dense_config(num_layers=1, d_model=20, dim=36), BankConfig(), num_experts=8, merged_experts=4)
    merged, full = planned_compression(config, "msmoe", **NOTHING | {"keep": 0.5}).stored
    assert merged.layer.values == 2 * 3 * 20 * 36 * 4 and merged.layer.places == 8 * 4
    assert full.share == 1 and full.model_bytes == count_bytes(leaf_specs(config).values())
    with pytest.raises(InputError, match="experts are merged"):
        planned_compression(config, "reap", **NOTHING | {"keep": 0.5})


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("quantize", {"keep": 0.5, "bits": 4}, "--keep does not go"),
        ("allocate", {"keep": 0.5}, "--keep does not go"),
        ("resmoe", {"keep": 0.5, "residual": "quantized"}, "--keep does not go"),
        ("reap", {"keep": 0.3}, "top_k=2"),
        ("quantize", {"bits": 8, "levels": "fitted"}, "no table"),
        ("resmoe", {"residual": "quantized:8", "levels": "fitted"}, "no table"),
        ("quantize", {"bits": 1, "levels": "even"}, "one bit"),
    ],
)
def test_what_no_compression_would_do_is_not_planned(method, options, message):
    with pytest.raises(InputError, match=message):
        planned_compression(small(), method, **NOTHING | options)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("shape", "entries"), [((20, 36), 100), ((36, 20), 1), ((7, 9), 63)])
def test_bytes_of_positions_are_those_of_a_bank(encoding, shape, entries):
    form, matrix = Sparse(rate=0.5, entries=entries, encoding=encoding), Matrix("up", shape)
    leaves = nnx.eval_shape(lambda: form.fresh(nnx.Rngs(0), matrix, (2,), jnp.dtype("float32")))
    positions = [leaves[name] for name in POSITION_LEAVES[encoding]]
    assert 2 * encoding_bytes(encoding, shape, entries) == count_bytes(positions)


def test_the_encoding_of_fewest_bytes():
    mixtral = [(4096, 14336), (4096, 14336), (14336, 4096)]

    def fewest(keep):
        return smallest_encoding(mixtral, [round(keep * math.prod(shape)) for shape in mixtral])

    # A bit for every entry is less than 16 for one in 16; ends of rows are more than a row index for each of few.
    assert [fewest(keep) for keep in (0.25, 0.07, 0.05, 0.001, 1e-5)] == ["bitmap", "bitmap", "csr", "csr", "coo"]
    assert smallest_encoding([(16, 24)], [3]) == "coo"


def test_every_method_has_forms():
    assert all(method.layouts for method in METHODS.values())
    storable = [form for form in registered() if issubclass(form, Storable)]
    assert {layout.name for form in storable for layout in form.layouts()} <= EVERY.keys()
    assert EVERY.keys() - WRITTEN.keys() == {"csr32", "coo64"}


def test_a_table_is_printed(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(small(gated=False, bias=True))))
    assert cli.main(["plan", str(tmp_path), "--compress", "resmoe", "--keep", "0.25"]) == 0
    rows = {row[0]: row for row in map(str.split, capsys.readouterr().out.splitlines()) if row}
    assert {name for name in EVERY if name in rows} == {*(layout.name for layout in METHODS["resmoe"].layouts), "full"}
    assert " ".join(rows["full"]).endswith("not compressed")
    assert sum("fewest" in row for row in rows.values()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", 0.25), "--keep: only with --compress"),
        (("--storage", "svd", "--dtype", "float32"), "--storage, --dtype: only with --compress"),
        (("--compress", "resmo", "--keep", 1), "unknown method 'resmo' (did you mean 'resmoe'?)"),
        (("--compress", "resmoe"), "--compress resmoe needs --keep"),
        (("--compress", "resmoe", "--keep", 0), "keep=0 must lie in (0, 1]"),
        (("--compress", "resmoe", "--keep", 1.5), "keep=1.5 must lie in (0, 1]"),
        (("--compress", "resmoe", "--keep", "nan"), "--keep: expected a finite"),
        (("--compress", "up", "--keep", 1, "--storage", "svd"), "unknown storage 'svd'; known: csr16"),
        (("--compress", "up", "--keep", 1, "--residual", "svd"), "--residual svd does"),
        (("--compress", "resmoe", "--keep", 1, "--residual", "quantized:5"), "--residual quantized:5 does not go"),
        (("--compress", "svd", "--keep", 1, "--bits", 4), "--bits 4: no form"),
        (("--compress", "up", "--keep", 1, "--bits", 5), "bits=5 of kept entries"),
        (("--compress", "up", "--keep", 1, "--compress-layers", "0"), "0 of the model's MoE layers, which are 1, 2"),
        (("--compress", "up", "--keep", 1, "--compress-layers", "top:3"), "the model has 2 MoE layers"),
    ],
)
def test_bad_options_are_refused(options, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(small())))
    assert cli.main(["plan", str(tmp_path), *map(str, options)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("moe-jax: error: ") and err.count("\n") == 1


def test_a_dense_model_has_nothing_to_compress(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(dense_config())))
    assert cli.main(["plan", str(tmp_path), "--compress", "resmoe", "--keep", "0.25"]) == 2
    assert "model is dense: it has" in capsys.readouterr().err
