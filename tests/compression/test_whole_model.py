"""Attention, dense FFNs, embedding and head in codes beside the experts: what is stored, and what it means."""

import dataclasses
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.compression import Report
from moe_jax.compression.calibration.coded_pass import CodedPass
from moe_jax.compression.linear_maps import linear_maps
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.without_codes import without_codes
from moe_jax.models import LinearCodes
from moe_jax.training.program import initial_states, make_program
from moe_jax.training.recipe import ModelSection
from tests.support.calibrated_codes import by_text, check_nearer, killed_and_continued, logits, mean_nll
from tests.support.dense_models import random_leaves, write_model
from tests.support.tiers import long, one_in
from tests.support.training_models import recipe_of

CODES = ("--method", "quantize", "--bits", "4", "--group-size", "8", "--of", "model")
LOSSES = r"the calibration text: (\d\.\d{4}) nats per token before, (\d\.\d{4}) now"


def compressed(model, out, *more) -> int:
    return main(["compress", str(model), str(out), *CODES, *map(str, more)])


def test_a_model_in_codes_is_its_decoded_self_and_its_scales_learn(coded, windows, tmp_path):
    ours = logits(coded, windows)
    source = moe_jax.load(coded).source
    assert source.config.codes and all(layer.codes for layer in source.config.layers)
    whole = without_codes(source)
    assert not whole.config.codes and linear_maps(whole.config) and not linear_maps(source.config)
    moe_jax.export(coded, tmp_path / "hf")
    decoded = logits(tmp_path / "hf", windows)  # products of codes may be summed in another order
    np.testing.assert_allclose(ours, decoded, rtol=0, atol=1e-5 * np.abs(decoded).max())
    tokens = jnp.asarray(windows)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss, grads = nnx.jit(nnx.value_and_grad(lambda decoder: decoder.loss(batch)))(moe_jax.load(coded).decoder)
    assert float(loss) == pytest.approx(float(moe_jax.Model.of_source(whole).decoder.loss(batch)), rel=1e-6)
    names = {jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(grads) if jnp.any(leaf)}
    for module in ("'q'", "embed", "lm_head"):
        assert any(module in name and "scales" in name for name in names)
    assert not any("codes" in name or "zeros" in name for name in names)


def test_inspect_counts_weights_in_codes(models, coded, out_of):
    count = sum(spec.size for path, spec in moe_jax.load(models["moe"]).source.specs().items())
    total = re.search(r"total: ([\d,]+) parameters and ([\d,]+) weights in codes", out_of("inspect", coded))
    assert total is not None
    kept = [path for path in moe_jax.load(coded).source.specs() if path.endswith(("norm/scale", "router/kernel"))]
    whole = sum(moe_jax.load(coded).source.specs()[path].size for path in kept)
    assert int(total[2].replace(",", "")) == count - whole


def test_a_tied_table_is_coded_once(models, text, windows, tmp_path):
    dense = moe_jax.load(models["dense"]).source
    tied = dataclasses.replace(dense.config, tie_embeddings=True)
    model = write_model(tmp_path / "tied", tied, random_leaves(tied), dense.tokenizer_files)
    options = {"method": "quantize", "bits": 4, "group_size": 8, "of": "model"}
    rounded = moe_jax.compress(model, None, **options)
    calibrated = moe_jax.compress(model, None, calibrate=text, samples=len(windows), seq_len=32, **options)
    assert [part.part for part in calibrated.report.parts] == ["embedding", "attention", "dense"]
    whole = logits(model, windows)
    check_nearer(whole, *(np.asarray(one.decoder(windows).logits) for one in (calibrated, rounded)))


@one_in(2)
@pytest.mark.parametrize("model", ["moe", "dense"])
def test_a_text_makes_outputs_change_less_and_the_losses_are_said(models, text, windows, tmp_path, capfd, model):
    assert compressed(models[model], tmp_path / "rounded") == 0
    assert compressed(models[model], tmp_path / "by_text", *by_text(text, len(windows))) == 0
    said = capfd.readouterr().out
    whole, rounded, ours = (logits(one, windows) for one in (models[model], tmp_path / "rounded", tmp_path / "by_text"))
    check_nearer(whole, ours, rounded)
    found = re.search(LOSSES, said)
    assert found is not None, said
    stated = [float(one) for one in found.groups()]
    assert stated == pytest.approx([mean_nll(whole, windows), mean_nll(ours, windows)], abs=2e-4)


@long  # `test_calibrated_export.py` has one of the same pass
@pytest.mark.parametrize(("layer", "when"), [(1, "finish_as"), (0, "begin"), (2, "begin")])
def test_a_killed_job_goes_on(models, text, tmp_path, monkeypatch, layer, when):
    once, again = tmp_path / "once", tmp_path / "again"
    assert compressed(models["moe"], once, *by_text(text)) == 0

    def run(out):
        return compressed(models["moe"], out, *by_text(text))

    begun = killed_and_continued(run, again, layer, when, monkeypatch)
    assert begun == list(range(layer, 3))
    assert moe_jax.load(once).source.fingerprint() == moe_jax.load(again).source.fingerprint()


def test_a_pass_that_outlives_what_was_written_begins_anew(models, text, tmp_path, monkeypatch):
    out, kept, copy, losses_of = tmp_path / "out", tmp_path / ".out.analysis", tmp_path / "copy", CodedPass.losses_of
    how = {"method": "quantize", "bits": 4, "group_size": 8, "of": "rest", "calibrate": text, "samples": 2}

    def copied(self, written):
        shutil.copytree(kept, copy)
        return losses_of(self, written)

    with monkeypatch.context() as patched:
        patched.setattr(CodedPass, "losses_of", copied)
        once = moe_jax.compress(models["one"], out, **how, seq_len=32)
    expected = once.source.fingerprint(), once.report.losses
    shutil.rmtree(out)
    copy.rename(kept)  # as if the job was killed when `out` was there, and this not yet removed
    again = moe_jax.compress(models["one"], out, **how, seq_len=32)
    assert (again.source.fingerprint(), again.report.losses) == expected


def test_the_rest_alone_keeps_experts_of_any_kind(models, text, windows, tmp_path):
    small = moe_jax.compress(models["one"], tmp_path / "deltas", method="ders-quantize", bits=4, group_size=8)
    options = {"method": "quantize", "bits": 4, "group_size": 8, "of": "rest", "embedding_bits": 8}
    both = moe_jax.compress(small.path, tmp_path / "both", calibrate=text, samples=6, seq_len=32, **options)
    old, new = small.source, both.source
    kept = [path for path in old.specs() if "/experts/" in path or "norm/" in path]
    assert kept and all(np.array_equal(old.read(path), new.read(path)) for path in kept)
    assert {one.bits for one in new.config.codes} == {8}
    before, after = logits(small.path, windows), logits(both.path, windows)
    assert np.square(after - before).mean() < 0.2 * np.square(before).mean()
    assert not both.report.layers
    assert both.report.earlier == (f"ders-quantize --bits 4 --group-size 8, of {models['one']}",)
    assert Report.from_json(both.report.to_json()).earlier == both.report.earlier
    with pytest.raises(InputError, match="in codes already"):
        moe_jax.compress(both.path, None, **options)


@pytest.mark.parametrize("init", ["checkpoint", "random"])
def test_what_is_trained_begins_in_the_dtypes_that_a_checkpoint_is_read_with(coded, init):
    source = moe_jax.load(coded).source
    recipe = recipe_of(model=ModelSection(path=str(coded), init=init))
    program = make_program(recipe, source.config, jax.devices()[:1])
    params, _ = initial_states(program, recipe, source)
    dtypes = [jax.tree.map(lambda leaf: str(leaf.dtype), state) for state in (params, program.state.params)]
    assert dtypes[0] == dtypes[1] and "float32" in jax.tree.leaves(dtypes[0])


def size_of(model) -> int:
    source = moe_jax.load(model).source
    return sum(spec.size * spec.dtype.itemsize for spec in source.specs().values())


@long
@pytest.mark.parametrize("model", ["moe", "dense"])
def test_a_budget_for_the_whole_model_is_kept_and_used_where_it_counts(models, text, windows, tmp_path, model):
    how = {"calibrate": text, "samples": 4, "seq_len": 32, "group_size": 8, "of": "model"}
    errors, whole = [], logits(models[model], windows)
    for share in (0.55, 0.8):  # little models have much beside their weights
        out = tmp_path / str(share)
        target = int(size_of(models[model]) * share)
        made = moe_jax.compress(models[model], out, method="allocate", target_bytes=target, **how)
        assert size_of(out) <= target
        errors.append(np.square(logits(out, windows) - whole).mean())
        assert made.report.parts or share > 0.6
    assert errors[1] < errors[0]


def test_the_best_measured_plan_is_taken(models, text, tmp_path, out_of):
    how = ("--method", "allocate", "--of", "model", "--group-size", "8", "--tries", "2")
    how += ("--target-bytes", str(int(size_of(models["one"]) * 0.6)), *by_text(text, 4))
    said = out_of("compress", models["one"], tmp_path / "out", *how)
    report = moe_jax.load(tmp_path / "out").lineage[-1]["measured"]
    assert len(report["tried"]) >= 2
    measured = [float(one) for one in re.findall(r"plan \d: divergence (\d\.\d+)", said)]
    assert measured == [pytest.approx(one["measured"], abs=1e-4) for one in report["tried"]]
    # All rows of so short a text were tried, with what the taken plan is made of.
    assert report["losses"]["divergence"] == pytest.approx(min(one["measured"] for one in report["tried"]), rel=1e-3)


@long
def test_plans_for_experts_alone_are_tried_too(models, text, tmp_path, out_of):
    how = ("--method", "allocate", "--group-size", "8", "--tries", "2", "--budget-bits", "10", *by_text(text, 4))
    said = out_of("compress", models["one"], tmp_path / "out", *how)
    made = moe_jax.load(tmp_path / "out")
    tried = made.lineage[-1]["measured"]["tried"]
    measured = [float(one) for one in re.findall(r"plan \d: divergence (\d\.\d+)", said)]
    assert 1 <= len(tried) == len(measured)
    assert not made.source.config.codes and made.source.config.moe(0).bank.form.has_codes


def test_bad_input(models, text, failing, tmp_path):
    out = tmp_path / "none"
    model = models["moe"]
    assert "of=model" in failing(model, out, "--method", "quantize", "--bits", "4", "--rest-bits", "4")
    assert "--layers" in failing(model, out, *CODES, "--layers", "0")
    assert "rest_bits=5" in failing(model, out, *CODES, "--rest-bits", "5")
    for part in ("rest", "embedding"):
        said = failing(model, out, *CODES, "--levels", "even", f"--{part}-bits", "1")
        assert f"{part}_bits=1" in said and "no zero" in said
    rest, sweep = (*CODES[:-1], "rest"), ("--sweep", "--text", text, "--method", "up,quantize", "--keep", "0.5")
    assert "--gradients" in failing(model, out, *rest, "--calibrate", text, "--gradients")
    for part in ("rest", "model"):
        assert "--of" in failing(model, out, *sweep, "--bits", "4", "--of", part)
    assert "--no-feedback" in failing(model, out, *rest, "--no-feedback")
    allocate = ("--method", "allocate", "--of", "model", "--calibrate", text, "--samples", "2", "--seq-len", "32")
    assert "too small for the model" in failing(model, out, *allocate, "--target-bytes", "1kB")
    assert "--of" in failing(models["dense"], out, "--method", "quantize", "--bits", "4")
    with pytest.raises(InputError, match="attention/w"):
        config = moe_jax.load(model).source.config
        layer = dataclasses.replace(config.layers[0], codes=(LinearCodes(paths=("attention/w",), bits=4),))
        leaf_specs(dataclasses.replace(config, layers=(layer, *config.layers[1:])))
    with pytest.raises(InputError, match="two kinds"):
        dataclasses.replace(config.layers[0], codes=(LinearCodes(paths=("attention/q",), bits=4),) * 2)
