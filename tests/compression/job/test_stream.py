"""Whole models: every bank kind as a source, bases, layers, universal FFNs, and jobs that are killed."""

import dataclasses
import json
import os
import shutil
import signal
import weakref

import ml_dtypes
import numpy as np
import pytest

from moe_jax.commands import cli
from moe_jax.compression import compress, make_method, stream
from moe_jax.compression.coding.coder import LeastError
from moe_jax.compression.coding.write_experts import stored_base
from moe_jax.compression.linear_maps import with_codes
from moe_jax.compression.methods.interface import Base
from moe_jax.compression.source_layer import SourceLayer, mean_kernel
from moe_jax.core.errors import InputError
from moe_jax.model_io.in_memory import InMemory
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, LinearCodes, ModelConfig, MoEConfig
from tests.support.dense_models import DTYPES, dense_config, random_leaves, write_model
from tests.support.disks import run_python
from tests.support.moe_models import EXPERTS, MemorySource, memory_moe, same_weights
from tests.support.tiers import one_in

BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=2),
    "sparse": BankConfig(kind="sparse", rate=0.8),
}
SPARSIFY, QUANTIZE = make_method("ders-sparsify", {"drop": 0.5}), make_method("ders-quantize", {"bits": 8})
EXACT = make_method("ders-sparsify", {"drop": 0.0})


def kernels(source, index, name="up", **kwargs) -> np.ndarray:
    """All experts of a layer, materialised."""
    return np.stack([np.asarray(k, np.float32) for k in SourceLayer(source, index, **kwargs).kernels(name)])


@pytest.mark.parametrize("kind", BANKS)
def test_every_bank_keeps_its_experts_when_nothing_is_dropped(kind, tmp_path):
    source = memory_moe(BANKS[kind], None)
    report = compress(source, tmp_path / "out", EXACT, described={})
    out = ModelDirectory(tmp_path / "out")
    assert out.config.layers[0].mlp.bank.kind == "sparse"
    for name in ("gate", "up", "down"):
        np.testing.assert_allclose(kernels(out, 0, name), kernels(source, 0, name), atol=1e-6)
    assert report.layers[0].relative_error < 1e-6
    assert report.layers[0].base == ("mean of the experts" if kind == "full" else "base of the bank")
    assert {path: spec.shape for path, spec in out.specs().items()} == {
        path: spec.shape for path, spec in leaf_specs(out.config).items()
    }
    for path in source.specs():
        if "/experts/" not in path:
            assert out.read(path).tobytes() == source.read(path).tobytes(), path


@pytest.mark.parametrize("kind", BANKS)
def test_figures_are_those_of_what_was_written(kind, tmp_path):
    source = memory_moe(BANKS[kind], dtype="bfloat16")
    for method, name in ((SPARSIFY, "sparse"), (make_method("ders-quantize", {"bits": 2, "group_size": 8}), "quant")):
        layer = compress(source, tmp_path / name, method, described={}).layers[0]
        out = ModelDirectory(tmp_path / name)
        error = weight = delta = 0.0
        dots, norms = np.zeros(EXPERTS), np.zeros(EXPERTS)
        base_norm = 0.0
        for matrix in ("gate", "up", "down"):
            before, after = kernels(source, 0, matrix), kernels(out, 0, matrix)
            base = np.asarray(out.read(f"layers/0/mlp/experts/base/{matrix}/kernel"), np.float32)
            error, weight = error + ((after - before) ** 2).sum(), weight + (before**2).sum()
            delta += ((before - base) ** 2).sum()
            dots += (before * base).sum(axis=(1, 2))
            norms, base_norm = norms + (before**2).sum(axis=(1, 2)), base_norm + (base**2).sum()
        cosines = dots / np.sqrt(norms * base_norm)
        np.testing.assert_allclose(layer.relative_error, np.sqrt(error / weight), rtol=1e-3)
        np.testing.assert_allclose(layer.delta_error, np.sqrt(error / delta), rtol=1e-3)
        np.testing.assert_allclose((layer.cosine_mean, layer.cosine_min), (cosines.mean(), cosines.min()), rtol=1e-5)


def test_a_quantised_bank_is_compressed_again_from_its_own_base(tmp_path):
    source = memory_moe(BankConfig())
    compress(source, tmp_path / "eight", QUANTIZE, described={})
    eight = ModelDirectory(tmp_path / "eight")
    report = compress(eight, tmp_path / "two", make_method("ders-quantize", {"bits": 4}), described={})
    assert report.layers[0].base == "base of the bank"
    base = "layers/0/mlp/experts/base/up/kernel"
    assert ModelDirectory(tmp_path / "two").read(base).tobytes() == eight.read(base).tobytes()
    np.testing.assert_allclose(kernels(eight, 0), kernels(source, 0), atol=0.003)
    assert report.layers[0].delta_error < 0.15
    assert ModelDirectory(tmp_path / "two").config.layers[0].mlp.bank.form.bits == 4


def test_the_mean_is_that_of_the_experts_in_float32():
    source = memory_moe(BankConfig(), dtype="bfloat16")
    stacked = kernels(source, 0)
    np.testing.assert_allclose(mean_kernel(SourceLayer(source, 0).kernels("up")), stacked.mean(axis=0), rtol=1e-6)
    layer = SourceLayer(source, 0)
    base = Base(layer, None)
    assert base.origin == "mean of the experts"
    np.testing.assert_array_equal(base.kernel("up"), mean_kernel(layer.kernels("up")))
    stored = stored_base(layer, BankConfig(kind="quantized", bits=2), "up", base.kernel("up"), LeastError())
    assert stored.kernel.tobytes() == stored.leaves["kernel"].tobytes()
    assert stored.kernel.tobytes() == stacked.mean(axis=0).astype(ml_dtypes.bfloat16).tobytes()


def test_a_dense_base_is_taken_before_a_banks_own(models, tmp_path):
    dense, moe = ModelDirectory(models["dense"]), ModelDirectory(models["moe"])
    report = compress(moe, tmp_path / "out", SPARSIFY, base=dense, described={})
    out = ModelDirectory(tmp_path / "out")
    assert {layer.base for layer in report.layers} == {"dense model"}
    for i in (0, 2):
        for name in ("gate", "up", "down"):
            stored = out.read(f"layers/{i}/mlp/experts/base/{name}/kernel")
            assert stored.tobytes() == dense.read(f"layers/{i}/mlp/{name}/kernel").tobytes()
    again = compress(out, tmp_path / "again", QUANTIZE, base=dense, described={})
    assert {layer.base for layer in again.layers} == {"dense model"}


def test_a_base_of_another_dtype_is_stored_as_the_experts_are(tmp_path):
    config = dense_config(num_layers=1)
    dense = MemorySource(config, random_leaves(config))
    source = memory_moe(BankConfig(), dtype="bfloat16")
    compress(source, tmp_path / "out", SPARSIFY, base=dense, described={})
    specs = ModelDirectory(tmp_path / "out").specs()
    dtypes = {str(spec.dtype) for path, spec in specs.items() if "/base/" in path or path.endswith("/values")}
    assert dtypes == {"bfloat16"}


def test_chosen_layers_only_and_kinds_mixed_by_several_runs(models, tmp_path):
    moe = ModelDirectory(models["moe"])
    compress(moe, tmp_path / "one", SPARSIFY, layers=(2,), described={})
    one = ModelDirectory(tmp_path / "one")
    assert [one.config.layers[i].mlp.bank.kind for i in (0, 2)] == ["full", "sparse"]
    report = compress(one, tmp_path / "two", QUANTIZE, layers=(0,), described={})
    two = ModelDirectory(tmp_path / "two")
    assert [layer.layer for layer in report.layers] == [0]
    assert [two.config.layers[i].mlp.bank.kind for i in (0, 2)] == ["quantized", "sparse"]
    assert two.config.layers[1] == moe.config.layers[1]
    for path, spec in moe.specs().items():
        if not path.startswith(("layers/0/mlp/experts", "layers/2/mlp/experts")):
            assert two.specs()[path] == spec and two.read(path).tobytes() == moe.read(path).tobytes(), path


@pytest.mark.parametrize("bank", [BankConfig(), BankConfig(kind="low-rank", rank=2)], ids=["full", "low-rank"])
def test_extended_makes_the_universal_ffn_one_more_delta(bank, tmp_path):
    source = memory_moe(bank, bank, universal="coder", top_k=1, shape={"bias": True})
    compress(source, tmp_path / "beside", QUANTIZE, described={})
    report = compress(source, tmp_path / "out", QUANTIZE, extended=True, layers=(1,), described={})
    beside, out = ModelDirectory(tmp_path / "beside"), ModelDirectory(tmp_path / "out")
    assert not beside.config.layers[1].mlp.extended and out.config.layers[1].mlp.extended
    assert not out.config.layers[0].mlp.extended
    assert (SourceLayer(beside, 1).num_experts, SourceLayer(out, 1).num_experts) == (EXPERTS, EXPERTS + 1)
    for path in source.specs():
        if "/mlp/universal/" in path:
            assert beside.read(path).tobytes() == source.read(path).tobytes()
            assert (path in out.specs()) == path.startswith("layers/0/")
    for name in ("gate", "up", "down"):
        before, after = kernels(source, 1, name, with_universal=True), kernels(out, 1, name)
        assert before.shape == after.shape == (EXPERTS + 1, *before.shape[1:])
        np.testing.assert_allclose(after, before, atol=0.01)
        universal = source.read(f"layers/1/mlp/universal/{name}/kernel")
        np.testing.assert_array_equal(before[-1], universal)
        biases = out.read(f"layers/1/mlp/experts/{name}/bias")
        assert biases[-1].tobytes() == source.read(f"layers/1/mlp/universal/{name}/bias").tobytes()
    universal_bytes = sum(source.stored_bytes(p) for p in source.specs() if p.startswith("layers/1/mlp/universal/"))
    assert report.layers[0].bytes_before > universal_bytes
    whole = make_method("quantize", {"bits": 4, "of": "model"})
    with pytest.raises(InputError, match="universal FFN"):
        compress(source, tmp_path / "whole", whole, extended=True, described={})
    # What is extended already stays so.
    compress(out, tmp_path / "again", SPARSIFY, extended=True, described={})
    assert SourceLayer(ModelDirectory(tmp_path / "again"), 1).num_experts == EXPERTS + 1


def test_a_universal_ffn_of_a_width_of_its_own_is_no_delta(tmp_path):
    """One whose width is named, as foreign formats do, may be as wide as the experts."""
    width = memory_moe(BankConfig(), BankConfig()).config.layers[1].mlp.expert.dim
    same, wider = (
        memory_moe(BankConfig(), BankConfig(), universal="one", universal_dim=dim) for dim in (width, width + 1)
    )
    compress(same, tmp_path / "out", QUANTIZE, extended=True, described={})
    moe = ModelDirectory(tmp_path / "out").config.layers[1].mlp
    assert (moe.universal, moe.extended, moe.universal_dim) == ("one", True, None)
    with pytest.raises(InputError, match=f"layer 0 is {width + 1} wide .* {width}"):
        compress(wider, tmp_path / "no", QUANTIZE, extended=True, described={})


def test_a_universal_ffn_in_codes_is_no_delta(tmp_path):
    source, path = memory_moe(BankConfig(), universal="one"), "layers/0/mlp/universal/down"
    coded = MemorySource(with_codes(source.config, {path: LinearCodes(paths=(path,), bits=4)}), source.leaves)
    with pytest.raises(InputError, match="layer 0 is in codes"):
        compress(coded, tmp_path / "out", QUANTIZE, extended=True, described={})


def test_bytes_are_those_on_the_disk(models, tmp_path):
    moe = ModelDirectory(models["moe"])
    report = compress(moe, tmp_path / "out", make_method("ders-quantize", {"bits": 2}), described={})

    def on_disk(model, part=""):
        files = (model / "params").rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file() and part in str(file))

    for layer in report.layers:
        part = f"/layers.{layer.layer}.mlp.experts."
        assert layer.bytes_before == on_disk(models["moe"], part)
        assert layer.bytes_after == on_disk(tmp_path / "out", part)
    # The rest is Orbax's own description of the tree.
    assert 0 < on_disk(tmp_path / "out") - report.bytes_after < 20_000 + on_disk(models["moe"]) - report.bytes_before
    assert report.expert_bytes_after < report.expert_bytes_before


def test_experts_without_a_common_origin_are_warned_of(tmp_path):
    source = memory_moe(BankConfig(), BankConfig(), num_experts=4)
    assert compress(source, tmp_path / "upcycled", QUANTIZE, described={}).warnings == ()
    for name in ("gate", "up", "down"):
        path = f"layers/1/mlp/experts/{name}/kernel"
        source.leaves[path] = np.random.default_rng(3).standard_normal(source.leaves[path].shape).astype(np.float32)
    report = compress(source, tmp_path / "independent", QUANTIZE, described={})
    assert report.layers[1].cosine_mean == pytest.approx(1 / np.sqrt(4), abs=0.05)
    (warning,) = report.warnings
    assert "cosine to the base 0.5" in warning and "in layers 1, where" in warning and "resmoe" in warning
    lineage = json.loads((tmp_path / "independent" / "lineage.json").read_text())
    assert lineage[-1]["measured"]["warnings"] == [warning]


def test_deltas_that_are_not_light_are_warned_of(tmp_path):
    (warning,) = compress(memory_moe(BankConfig()), tmp_path / "out", EXACT, described={}).warnings
    assert "of the room they took" in warning


def test_weights_that_are_not_finite_leave_nothing_behind(tmp_path):
    source = memory_moe(BankConfig(), BankConfig())
    source.leaves["layers/1/mlp/experts/down/kernel"][2, 3, 4] = np.nan
    for method in (SPARSIFY, QUANTIZE):
        with pytest.raises(InputError, match="2 in layer 1: 1"):
            compress(source, tmp_path / "out", method, described={})
        assert not os.listdir(tmp_path)
    dense = dense_config(num_layers=2)
    with pytest.raises(InputError, match="expert 2 in layer 1"):
        base = MemorySource(dense, random_leaves(dense))
        compress(source, tmp_path / "out", QUANTIZE, base=base, described={})


KILLED = """
import os, signal, sys
from pathlib import Path
from moe_jax.compression import compress, make_method
from moe_jax.model_io.model_dir import ModelDirectory

method = make_method(sys.argv[3], {"drop": 0.5} if sys.argv[3] == "ders-sparsify" else {"keep": 0.5})
compressed = []
compress_layer = type(method).compress

def kill_in_the_second(self, layer, base, target, write, analysis):
    compressed.append(layer.index)
    leaves = iter(range(100))
    def write_or_die(path, leaf):
        if len(compressed) == 2 and next(leaves) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, leaf)
    return compress_layer(self, layer, base, target, write_or_die, analysis)

type(method).compress = kill_in_the_second
compress(ModelDirectory(Path(sys.argv[1])), Path(sys.argv[2]), method, described={"seed": 0})
"""


@one_in(2, first=1)
@pytest.mark.parametrize(("name", "options"), [("resmoe", {"keep": 0.5}), ("ders-sparsify", {"drop": 0.5})])
def test_a_killed_job_goes_on_and_gives_the_same_bits(name, options, models, tmp_path, monkeypatch):
    ran = run_python(KILLED, models["moe"], tmp_path / "killed", name)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert sorted(os.listdir(tmp_path)) == [".killed.analysis", ".killed.partial"]
    for left in ("partial", "analysis"):
        shutil.copytree(tmp_path / f".killed.{left}", tmp_path / f".other.{left}")
    method, moe = make_method(name, options), ModelDirectory(models["moe"])
    plain = compress(moe, tmp_path / "plain", method, described={"seed": 0})

    compressed, analysed = [], []

    def note(step, seen):
        do = getattr(type(method), step)
        monkeypatch.setattr(
            type(method), step, lambda self, layer, *args: (seen.append(layer.index), do(self, layer, *args))[1]
        )

    note("compress", compressed)
    note("analyse", analysed)
    resumed = compress(moe, tmp_path / "killed", method, described={"seed": 0})
    assert same_weights(tmp_path / "plain", tmp_path / "killed")
    for again, once in zip(resumed.layers, plain.layers, strict=True):
        # The killed process was compiled for other devices: its sums may differ in the last bits.
        assert again.bytes_after == once.bytes_after and again.base == once.base
        assert again.relative_error == pytest.approx(once.relative_error, rel=1e-5)
        assert again.cosine_min == pytest.approx(once.cosine_min, rel=1e-5)
    assert compressed == [2]  # it did go on, and did not begin again
    assert not analysed or name == "ders-sparsify"  # which has nothing to keep
    assert not [left for left in os.listdir(tmp_path) if left.startswith(".killed")]
    assert sorted(os.listdir(tmp_path / "killed")) == sorted(os.listdir(tmp_path / "plain"))

    compressed.clear()
    analysed.clear()
    compress(moe, tmp_path / "other", method, described={"seed": 1})
    assert compressed == analysed == [0, 2]  # another job does not go on with it


class CountingSource(MemorySource):
    """Gives copies of its leaves, and knows how many bytes of them are still held."""

    held = most_held = 0

    def read(self, path):
        leaf = self.leaves[path].copy()
        self.held += leaf.nbytes
        self.most_held = max(self.held, self.most_held)
        weakref.finalize(leaf, self._let_go, leaf.nbytes)
        return leaf

    def _let_go(self, nbytes):
        self.held -= nbytes


@one_in(2)
@pytest.mark.parametrize("method", [SPARSIFY, QUANTIZE], ids=["sparsify", "quantize"])
def test_no_layer_is_held_whole(method, tmp_path, monkeypatch):
    memory = memory_moe(*[BankConfig()] * 3, num_experts=6)
    source = CountingSource(memory.config, memory.leaves)
    compress(source, tmp_path / "out", method, described={})
    largest = max(leaf.nbytes for leaf in source.leaves.values())
    # A computation that still runs may keep the matrix before; a layer has three.
    assert largest <= source.most_held < 2.5 * largest


def test_progress_is_told_within_layers(models, tmp_path):
    seen = []
    source = ModelDirectory(models["moe"])
    compress(source, tmp_path / "out", QUANTIZE, described={}, progress=lambda *call: seen.append(call))
    assert {(what, total) for what, _, total in seen} == {("compressing", 2)}
    done = [share for _, share, _ in seen]
    # Codes, scales and biases of three matrices, of which the last makes the layer whole.
    assert done == sorted(done) and {0, 1, 2} <= set(done) and len({share for share in done if 0 < share < 1}) == 8


def test_in_memory_a_process_asks_no_other(tmp_path, monkeypatch):
    """Each of them makes all of it, and analyses all layers."""
    source, method = memory_moe(BANKS["full"], BANKS["full"]), make_method("resmoe", {"keep": 0.5})
    compress(source, tmp_path / "out", method, described={})
    monkeypatch.setattr(stream, "first_decides", None)
    made = InMemory()
    compress(source, made, method, described={})
    out = ModelDirectory(tmp_path / "out")
    assert made.source is not None and made.source.config == out.config
    assert all(made.source.read(path).tobytes() == out.read(path).tobytes() for path in out.specs())


def test_train_base_of_the_bank_is_kept(tmp_path):
    frozen = dataclasses.replace(BANKS["low-rank"], train_base=False)
    compress(memory_moe(frozen), tmp_path / "out", QUANTIZE, described={})
    assert not ModelDirectory(tmp_path / "out").config.layers[0].mlp.bank.train_base


def test_deltas_without_a_base_in_a_layer_with_one_norm_are_compressed(tmp_path):
    """As of StableLM and Phi: attention and the MoE stand in parallel behind one norm, which says the dtype."""
    bank = BankConfig(kind="low-rank", rank=2, base="none")
    moe = MoEConfig(expert=FFNConfig(dim=16), num_experts=4, top_k=2, bank=bank)
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4)
    layer = LayerConfig(attention=attention, mlp=moe, parallel=True, shared_norm=True)
    config = ModelConfig(family="none", vocab_size=16, d_model=8, max_positions=8, layers=(layer,), dtype="bfloat16")
    model = write_model(tmp_path / "model", config, random_leaves(config))
    assert SourceLayer(ModelDirectory(model), 0).dtype("up") == DTYPES["bfloat16"]
    assert cli.main(["compress", str(model), str(tmp_path / "out"), "--method", "quantize", "--bits", "8"]) == 0
