"""Models whose experts share a centre in codes, as a user makes and uses them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.compression import compress, make_method
from moe_jax.compression.options.in_common import centre_options
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.conversion import export, read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.experts import BaseCodes
from moe_jax.figures.similarity import measure_similarity
from moe_jax.model_io.loading import model_leaves
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.training.in_memory_training import train_on_batches
from moe_jax.training.recipe import MeshSection, ModelSection, OptimizerSection
from tests.compression.test_export import logits
from tests.support.dense_models import random_leaves
from tests.support.generated import generate
from tests.support.hf_checkpoints import CONFIGS
from tests.support.moe_models import RECIPE, MemorySource, run
from tests.support.tiers import EVERY, long, one_in
from tests.support.training_models import recipe_of

PERFT = ("--method", "perft-r", "--experts", "4", "--top-k", "2", "--adapter", "lora:2")
RESMOE = ("--method", "resmoe", "--residual", "quantized:2", "--centre-bits")


def test_codes_of_a_centre_are_those_that_its_options_say():
    def codes(*options, **more):
        return BaseCodes(**centre_options(*options, **more) or {})

    assert centre_options(None, None) is None
    assert codes(4, 32) == BaseCodes(code="4", group_size=32)
    assert codes("3", None, table=True, scale_bits=8) == BaseCodes(code="3", table=True, scale_bits=8)
    assert codes("8", 16, table=True) == BaseCodes(code="8", group_size=16)  # which have no table
    assert codes("nf4", None, table=True, scale_bits=8) == BaseCodes(code="nf4")  # nor scales of their own
    for bits, size, said in ((None, 32, "goes with centre_bits"), (4, 5, "multiple of 8"), (5, None, "'5'")):
        with pytest.raises(InputError, match=said):
            centre_options(bits, size)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ders-quantize", {"bits": 2, "group_size": 8}),
        ("ders-sparsify", {"drop": 0.5}),
        ("ders-sparsify", {"drop": 0.5, "keep": "magnitude"}),
        ("resmoe", {"residual": "svd", "keep": 0.5}),
    ],
)
def test_every_method_around_a_centre_codes_it_as_it_is_asked_to(models, method, options):
    layer = SourceLayer(ModelDirectory(models["one"]), 0)
    shares = {0: {"shares": np.full(len(layer.shapes), 1 / len(layer.shapes))}}
    for centre, expected in (
        ({}, None),
        ({"centre_bits": "3", "centre_group_size": 8}, BaseCodes(code="3", group_size=8)),
    ):
        bank = make_method(method, {**options, **centre}).plan([layer], shares)[0].bank
        assert (bank.base, bank.base_codes) == ("shared", expected)


@pytest.fixture(scope="module", params=["4", "nf4"])
def small(request, models, tmp_path_factory):
    """`one` of the models, compressed by the command."""
    out = tmp_path_factory.mktemp("small") / "out"
    assert run(models["one"], out, *RESMOE, request.param) == 0
    return request.param, out


def test_the_report_and_inspect_say_it(small, models, tmp_path, out_of):
    code, out = small
    printed = out_of("compress", models["one"], tmp_path / "again", *RESMOE, code)
    assert f"{'NF4' if code == 'nf4' else '4-bit'} centre, quantized, 2 bits" in printed
    inspected = out_of("inspect", out)
    assert f"base {'NF4' if code == 'nf4' else '4-bit'} codes" in inspected
    counted = json.loads(out_of("inspect", out, "--json"))
    model = ModelDirectory(out)
    scales = sum(spec.size for path, spec in model.specs().items() if path.endswith("/coded/scales"))
    (experts,) = counted["experts"]
    of_deltas = sum(spec.size for path, spec in model.specs().items() if "/delta/" in path and spec.dtype != np.uint8)
    assert experts["parameters"] == scales + of_deltas  # codes are none, nor anything of NF4
    assert experts["bytes"] == sum(
        spec.size * spec.dtype.itemsize for path, spec in model.specs().items() if "/experts/" in path
    )


def test_it_is_compressed_again_from_its_own_centre(small, tmp_path):
    _, out = small
    source = ModelDirectory(out)
    layer, name = SourceLayer(source, 0), "up"
    assert layer.dtype(name) == np.float32 and layer.base(name).dtype == np.float32
    report = compress(source, tmp_path / "out", make_method("ders-quantize", {"bits": 8}), described={})
    assert report.layers[0].base == "base of the bank" and report.layers[0].relative_error < 0.01
    np.testing.assert_array_equal(ModelDirectory(tmp_path / "out").read("layers/0/mlp/experts/base/up/kernel"),
                                  layer.base(name))  # fmt: skip
    similar = measure_similarity(source, 0)
    base = layer.base(name).reshape(-1)
    first = next(layer.kernels(name)).reshape(-1)
    cosine = base @ first / np.linalg.norm(base) / np.linalg.norm(first)
    assert similar.to_base[name][0] == pytest.approx(cosine, abs=1e-5)


@long
def test_training_moves_scales_and_keeps_codes(small, models, tmp_path, capsys):
    code, out = small
    if code == "nf4":
        pytest.skip("has no trained leaf")
    (tmp_path / "text.txt").write_text("All the world is a stage, and all the men and women merely players. " * 10)
    recipe = RECIPE.format(folder=tmp_path).replace(f"{tmp_path}/out", str(out))
    (tmp_path / "recipe.toml").write_text(f"{recipe}[mesh]\ndata = 8\n")
    assert cli.main(["train", str(tmp_path / "recipe.toml")]) == 0, capsys.readouterr().err
    before, after = ModelDirectory(out), ModelDirectory(tmp_path / "run" / "model")
    assert after.config.layers == before.config.layers
    for leaf, moves in (("scales", True), ("codes", False)):
        path = f"layers/0/mlp/experts/base/up/coded/{leaf}"
        assert np.array_equal(before.read(path), after.read(path)) != moves


@pytest.fixture(scope="module")
def factored(models, tmp_path_factory):
    """`one` of the models, with low-rank factors around a centre in codes."""
    out = tmp_path_factory.mktemp("factored") / "out"
    options = ("--residual", "svd", "--design", "separate", "--keep", "0.3", "--centre-bits", "4")
    assert run(models["one"], out, "--method", "resmoe", *options) == 0
    return out


@long
@pytest.mark.parametrize("form", ["small", "factored"])
def test_with_perft_experts_beside_it_eight_devices_learn_and_say_what_one_does(form, request, small, tmp_path):
    code, out = small
    if form == "factored":
        if code == "nf4":
            pytest.skip("its centre is in four bits")
        out = request.getfixturevalue(form)
    assert cli.main(["adapt", str(out), str(tmp_path / "perft"), *PERFT]) == 0
    source = ModelDirectory(tmp_path / "perft")
    recipe = recipe_of(steps=3, optimizer=OptimizerSection(learning_rate=1e-2))
    batches = [np.random.default_rng(0).integers(0, 256, (8, 17))] * 3
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8], [9], [10], [11, 12], [13]]
    found = []
    for mesh, count in ((MeshSection(), 1), (MeshSection(data=4, tensor=2), 8)):
        losses: list[float] = []
        model, _ = train_on_batches(
            dataclasses.replace(recipe, mesh=mesh), source, batches, devices=jax.devices()[:count],
            on_step=lambda record, losses=losses: losses.append(record["loss"]),
        )  # fmt: skip
        found.append((losses, generate(model, prompts, max_new_tokens=5)))
    (one, said), (eight, said_by_eight) = found
    assert one[-1] < one[0]
    np.testing.assert_allclose(eight, one, rtol=2e-3)
    assert said_by_eight == said


@long
@pytest.mark.parametrize(
    ("added", "moving", "of_base"),
    [
        (("--levels", "fitted"), {"table": True}, {"table": True}),
        (("--zero-points", "--row-scales"), {"zeros": False, "row_scales": True}, {}),
    ],
)
def test_formats_of_codes_are_counted_trained_and_exported(added, moving, of_base, models, tmp_path, out_of):
    more = ("--scale-bits", "8", *added)
    assert run(models["one"], tmp_path / "out", *RESMOE, "3", *more) == 0
    out = ModelDirectory(tmp_path / "out")
    specs = {path: spec for path, spec in out.specs().items() if "/experts/" in path}
    options = ("--residual", "quantized:2", "--centre-bits", "3", *more, "--json")
    (form,) = json.loads(out_of("plan", models["one"], "--compress", "resmoe", *options))["compression"]["forms"]
    assert form["expert_bytes"] == sum(s.size * s.dtype.itemsize for s in specs.values())
    export(out, tmp_path / "hf", console=Console(quiet=True))
    np.testing.assert_allclose(logits(open_source(tmp_path / "hf")), logits(out), atol=1e-3)

    of_out = ModelSection(path=str(out.path))
    recipe = recipe_of(steps=2, model=of_out, optimizer=OptimizerSection(learning_rate=0.1))
    batches = [np.random.default_rng(0).integers(0, 256, (8, 17))] * 2
    model, _ = train_on_batches(recipe, out, batches, devices=jax.devices()[:1])
    after = dict(model_leaves(model))
    for folder, own in (("base/up/coded", of_base), ("delta/up", moving)):
        for leaf, moves in ({"scale_steps": True, "scale_codes": False, "codes": False} | own).items():
            path = f"layers/0/mlp/experts/{folder}/{leaf}"
            assert np.array_equal(out.read(path), after[path]) != moves, path


@pytest.mark.parametrize(
    ("method", "options"),
    [("hqq", ("--bits", "3")), ("nf4", ()), ("quantize", ("--bits", "1", "--row-scales"))],
)
def test_a_plan_knows_the_formats_of_methods(method, options, models, tmp_path, out_of):
    assert run(models["one"], tmp_path / "out", "--method", method, *options) == 0
    specs = {path: spec for path, spec in ModelDirectory(tmp_path / "out").specs().items() if "/experts/" in path}
    planned = json.loads(out_of("plan", models["one"], "--compress", method, *options, "--json"))["compression"]
    (form,) = (form for form in planned["forms"] if form["form"].startswith("quantized"))
    assert form["expert_bytes"] == sum(s.size * s.dtype.itemsize for s in specs.values())


def test_a_plan_knows_what_codes_of_allocate_may_have(models, out_of):
    """Of every number of bits, as of other codes around a centre in codes, by default of 4 bits; each takes more."""

    def planned(method: str, *options: str) -> list[dict]:
        out = out_of("plan", models["one"], "--compress", method, "--residual", "quantized", *options, "--json")
        return json.loads(out)["compression"]["forms"]

    options = ("--scale-bits", "8", "--zero-points", "--row-scales")
    forms = planned("allocate", *options)
    assert forms == planned("ders-quantize", *options, "--centre-bits", "4") and len(forms) == 5
    larger = planned("allocate", *options, "--centre-bits", "8")
    assert larger == planned("ders-quantize", *options, "--centre-bits", "8") != forms
    fewer = planned("allocate", *options[:3])
    assert all(form["expert_bytes"] > other["expert_bytes"] for form, other in zip(forms, fewer, strict=True))


@one_in(4)
@pytest.mark.parametrize("base", ["stored", "nf4"])
@long
def test_lora_beside_the_centre_is_merged_into_a_plain_one(base, small, tmp_path, out_of):
    _, out = small
    lora = ("--method", "lora", "--adapter", "lora:2", "--targets", "up,down", "--base", base, "--no-step0-check")
    out_of("adapt", out, tmp_path / "lora", *lora)
    out_of("merge", tmp_path / "lora", tmp_path / "merged")
    merged, tuned = ModelDirectory(tmp_path / "merged"), open_source(tmp_path / "lora")
    assert any("/coded" in path for path in tuned.specs()) and not any("/coded" in path for path in merged.specs())
    np.testing.assert_allclose(logits(merged), logits(tuned), atol=1e-4)


@one_in(2)
@pytest.mark.parametrize("code", ["3", "nf4"])
def test_what_is_exported_is_what_the_codes_stand_for(code, tmp_path):
    config = read_hf_config(CONFIGS["mixtral"])
    source = MemorySource(config, random_leaves(config))
    method = make_method("ders-quantize", {"bits": 2, "group_size": 16, "centre_bits": code})
    compress(source, tmp_path / "out", method, described={})
    out = ModelDirectory(tmp_path / "out")
    export(out, tmp_path / "hf", console=Console(quiet=True))
    exported = open_source(tmp_path / "hf")
    for name in ("gate", "up", "down"):
        expected = np.stack(list(SourceLayer(out, 1).kernels(name)))
        found = exported.read(f"layers/1/mlp/experts/{name}/kernel")
        np.testing.assert_array_equal(found, expected.astype(found.dtype))
    if EVERY:  # of the same kernels, in the formats of codes above
        np.testing.assert_allclose(logits(exported), logits(out), atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--centre-bits", "5"), "unknown centre_bits '5'"),
        (("--centre-bits", "4", "--centre-group-size", "12"), "group_size=12 must be a multiple of 8"),
        (("--centre-group-size", "64"), "centre_group_size=64 goes with centre_bits"),
        (("--centre-bits", "nf4", "--centre-group-size", "64"), "does not go with an NF4 base"),
    ],
)
def test_options_that_will_not_do(options, message, models, tmp_path, failing):
    assert message in failing(models["moe"], tmp_path / "out", *RESMOE[:-1], *options)


def test_a_plan_counts_what_is_written(small, models, out_of):
    code, out = small
    options = ("--residual", "quantized:2", "--centre-bits", code, "--json")
    (form,) = json.loads(out_of("plan", models["one"], "--compress", "resmoe", *options))["compression"]["forms"]
    specs = {path: spec for path, spec in ModelDirectory(out).specs().items() if "/experts/" in path}
    centre = sum(spec.size * spec.dtype.itemsize for path, spec in specs.items() if "/base/" in path)
    assert form["layer"]["centre"] == centre
    assert form["expert_bytes"] == sum(spec.size * spec.dtype.itemsize for spec in specs.values())


def test_other_methods_have_no_centre_to_code(models, tmp_path, failing):
    message = failing(models["moe"], tmp_path / "out", "--method", "quantize", "--bits", "4", "--centre-bits", "4")
    assert "--centre-bits does not go with quantize: it belongs to" in message


@long
def test_a_budget_has_room_for_what_codes_of_the_centres_save(models, tmp_path, out_of, failing):
    """Below the bytes of plain centres, and enough for those in codes."""
    budget = ("--method", "resmoe", "--budget-bits", "10.5")
    assert "of the centres of 2 layers alone" in failing(models["moe"], tmp_path / "out", *budget)
    codes = ("--centre-bits", "2", "--centre-group-size", "8")
    printed = out_of("compress", models["moe"], tmp_path / "out", *budget, *codes)
    assert "2-bit centre" in printed
