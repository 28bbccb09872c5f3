"""Granular upcycling: copies of the FFN are cut into experts, which add up to it (methods.md 2.6)."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moe_jax
from moe_jax.api.open_source import open_source
from moe_jax.checks.step0 import compare_logits
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.functional.routing.gates import GATES
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.upcycling import UpcycleSpec, moe_leaves, upcycled_config
from moe_jax.upcycling.dense_to_moe import why_different
from tests.support.dense_models import DTYPES, dense_config, random_leaves
from tests.support.numerics import logits_of
from tests.support.tiers import long, one_in
from tests.upcycling.test_start import lineage_of, run

PREFIX = "layers/0/mlp/"


def made(pieces: int, *, experts=2, top_k=2, gate="topk_softmax", seed=0, noise=0.0, drop=0.0, dtype=None, **dense):
    """An FFN's leaves, the MoE and its leaves."""
    config = dense_config(**dense)
    how = {"granularity": pieces, "noise": noise, "drop": drop, "seed": seed}
    spec = UpcycleSpec(experts=experts, top_k=top_k, every=1, gate=gate, **how)
    moe = upcycled_config(config, spec).moe(0)
    leaves = random_leaves(config, dtype=dtype)
    ffn = {path.removeprefix(PREFIX): leaf for path, leaf in leaves.items() if path.startswith(PREFIX)}
    return ffn, moe, dict(moe_leaves(ffn, moe, spec, layer=0))


def apply_ffn(x, leaves):
    """A plain reference: float64."""
    wide = {path: np.asarray(leaf, np.float64) for path, leaf in leaves.items()}
    up = x @ wide["up/kernel"] + wide.get("up/bias", 0)
    first = x @ wide["gate/kernel"] + wide.get("gate/bias", 0) if "gate/kernel" in wide else up
    hidden = first / (1 + np.exp(-first)) * (up if "gate/kernel" in wide else 1)
    return hidden @ wide["down/kernel"] + wide.get("down/bias", 0)


def apply_moe(x, leaves, moe):
    logits = x @ np.asarray(leaves["router/kernel"], np.float64)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : moe.top_k]
    y = np.zeros_like(x)
    for token, experts in enumerate(chosen):
        kept = np.exp(logits[token][experts])
        total = kept.sum() if moe.gate == "topk_softmax" else np.exp(logits[token]).sum()
        for expert, weight in zip(experts, kept / total, strict=True):
            own = {
                path.removeprefix("experts/"): leaf[expert]
                for path, leaf in leaves.items()
                if path.startswith("experts/")
            }
            y[token] += weight * apply_ffn(x[token : token + 1], own)[0]
    return y


@given(
    pieces=st.sampled_from([2, 3, 4, 6]),
    experts=st.integers(1, 4),
    chosen=st.data(),
    seed=st.integers(0, 3),
    gated=st.booleans(),
    bias=st.booleans(),
)
def test_pieces_add_up_to_the_ffn(pieces, experts, chosen, seed, gated, bias):
    top_k = chosen.draw(st.integers(1, experts))
    gate = chosen.draw(st.sampled_from(["topk_softmax"] + ["softmax_topk"] * (top_k == experts)))
    dense = {"gated": gated, "bias": bias, "dim": 12, "num_layers": 1}
    ffn, moe, leaves = made(pieces, experts=experts, top_k=top_k, gate=gate, seed=seed, **dense)
    assert (moe.num_experts, moe.top_k, moe.expert.dim) == (experts * pieces, top_k * pieces, 12 // pieces)
    x = np.random.default_rng(seed).standard_normal((9, 16))
    np.testing.assert_allclose(apply_moe(x, leaves, moe), apply_ffn(x, ffn), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("experts", "top_k", "pieces"), [(4, 1, 2), (4, 2, 3), (8, 2, 4)])
def test_the_papers_factor_is_exact_where_the_router_finds_all_experts_alike(experts, top_k, pieces):
    """E G^2 / T. Equal logits choose the experts of the lowest indices, which are whole copies."""
    ffn, moe, leaves = made(pieces, experts=experts, top_k=top_k, gate="softmax_topk", bias=True, gated=False)
    leaves["router/kernel"] = np.zeros_like(leaves["router/kernel"])
    x = np.random.default_rng(0).standard_normal((9, 16))
    np.testing.assert_allclose(apply_moe(x, leaves, moe), apply_ffn(x, ffn), rtol=1e-5, atol=1e-5)
    factor = experts * pieces**2 / (top_k * pieces)
    down = np.concatenate(leaves["experts/down/kernel"][:pieces])
    np.testing.assert_allclose(down, ffn["down/kernel"] * np.float32(factor), rtol=1e-6)


def test_pieces_of_a_copy_have_equal_columns_in_the_router():
    _, moe, leaves = made(3, experts=4)
    router = leaves["router/kernel"].reshape(16, 4, 3)
    assert (router == router[:, :, :1]).all() and len({router[:, copy, 0].tobytes() for copy in range(4)}) == 4
    _, _, whole = made(1, experts=4)
    np.testing.assert_array_equal(router[:, :, 0], whole["router/kernel"])


def test_noise_and_dropped_neurons_go_with_it():
    _, _, plain = made(4)
    _, _, dropped = made(4, drop=0.5)
    _, _, noisy = made(4, noise=0.1)
    for expert in range(8):
        same = (dropped["experts/up/kernel"][expert] == plain["experts/up/kernel"][expert]).all(axis=0)
        assert same.sum() == 3
        assert not (noisy["experts/down/kernel"][expert] == plain["experts/down/kernel"][expert]).any()


def test_leaves_are_those_of_the_model():
    config = dense_config(num_layers=1, bias=True)
    for pieces in (2, 3):
        options = UpcycleSpec(every=1, granularity=pieces)
        specs = leaf_specs(upcycled_config(config, options))
        _, _, leaves = made(pieces, experts=8, bias=True, num_layers=1)
        expected = {path.removeprefix(PREFIX): spec.shape for path, spec in specs.items() if path.startswith(PREFIX)}
        assert {path: leaf.shape for path, leaf in leaves.items()} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": 5}, "granularity=5 does .* the 24 neurons of the FFN"),
        ({"universal": "coder"}, "with a universal FFN"),
        ({"gate": "top1", "top_k": 1}, "goes with gate 'topk_softmax' or 'softmax_topk', not 'top1'"),
        ({"delta": "low-rank:2"}, "pieces of the FFN"),
        ({"method": "pesc"}, "--granularity does not go"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        upcycled_config(dense_config(), UpcycleSpec(**{"granularity": 2, **options}))


def test_what_is_promised():
    float32, bfloat16 = DTYPES["float32"], DTYPES["bfloat16"]
    for pieces, dtype, equal in ((2, bfloat16, True), (3, float32, True), (3, bfloat16, False), (1, bfloat16, True)):
        assert (why_different(UpcycleSpec(granularity=pieces), [dtype]) is None) == equal
    why = why_different(UpcycleSpec(gate="softmax_topk", granularity=2), [float32])
    assert why is not None and "scaled by 8" in why
    all_chosen = UpcycleSpec(gate="softmax_topk", experts=2, granularity=2)
    assert why_different(all_chosen, [float32]) is None
    assert {name for name in GATES if GATES[name].weights_sum_to_one} == {"topk_softmax", "topk_sigmoid"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--granularity 0", "granularity=0 must be a positive integer"),
        ("--granularity 7", "granularity=7 does not divide the 24 neurons"),
        ("--granularity 2 --delta low-rank:2", "--granularity needs --delta full"),
        ("--granularity 2 --method pesc --adapter 2 --rest full", "--granularity does not go with adapter experts"),
    ],
)
def test_bad_options_of_the_command(options, message, dense_model, tmp_path, failing):
    assert message in failing(dense_model, tmp_path / "moe", *options.split())


@one_in(6)  # the first and the last
@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ("--granularity 4 --experts 2 --top-k 1", None),
        ("--granularity 2 --experts 3 --gate softmax_topk --top-k 3", None),
        ("--granularity 3 --experts 2", "down kernels times 3 are rounded"),
        ("--granularity 2 --experts 4 --gate softmax_topk", "outputs scaled by 4, as if the router found all"),
    ],
)
def test_the_command_says_whether_step_0_is_equal(options, differs, dense_model, tmp_path, capsys):
    """In bfloat16, with biases."""
    assert run(dense_model, tmp_path / "moe", *options.split()) == 0
    measured = lineage_of(tmp_path / "moe")["measured"]
    if differs is None:
        assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]
        assert "step0_differs" not in measured
    else:
        assert measured["step0_max_abs_difference"] > measured["step0_allowed"]
        assert differs in measured["step0_differs"] and differs in capsys.readouterr().out


def test_plan_counts_what_is_written(dense_model, tmp_path):
    options = ("--granularity", 4, "--experts", 3, "--layers", 0, 3, "--no-step0-check")
    assert run(dense_model, tmp_path / "moe", *options) == 0
    measured = lineage_of(tmp_path / "moe")["measured"]
    planned = moe_jax.plan(dense_model, upcycle={"granularity": 4, "experts": 3, "layers": [0, 3]})
    assert planned.total_params == measured["total_params"] and planned.param_bytes == measured["param_bytes"]
    assert planned.dense_params == measured["dense_params"]


@long
def test_stories260k_in_pieces_starts_as_the_dense_model_and_leaves_as_a_checkpoint(data_dir, tmp_path):
    source = data_dir / "weights" / "stories260K" / "hf"
    assert run(source, tmp_path / "moe", "--granularity", 4, "--experts", 3, "--top-k", 2, "--every", 1) == 0
    measured = lineage_of(tmp_path / "moe")["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"] and "step0_differs" not in measured
    assert cli.main(["export", str(tmp_path / "moe"), str(tmp_path / "hf")]) == 0
    moe, again = ModelDirectory(tmp_path / "moe"), open_source(tmp_path / "hf")
    assert again.config.family == "mixtral"
    config, theirs = moe.config.moe(0), again.config.moe(0)
    assert dataclasses.replace(theirs, balance_coef=config.balance_coef) == config
    assert (theirs.num_experts, theirs.top_k, theirs.expert.dim) == (12, 8, open_source(source).config.ffn(0).dim // 4)

    tokens = np.random.default_rng(0).integers(3, 512, (2, 24)).astype(np.int32)
    expected = np.asarray(logits_of(moe_jax.load(source).decoder, tokens))
    for model in (tmp_path / "moe", tmp_path / "hf"):
        found = np.asarray(logits_of(moe_jax.load(model).decoder, tokens))
        assert compare_logits(expected, found, moe.config.num_layers).equal  # 1e-5, relative to the largest logit
    for path in moe.specs():
        np.testing.assert_array_equal(again.read(path), moe.read(path))

    import torch
    import transformers

    # PyTorch's grouped product, which it would take, needs rows of 16 bytes times a whole number; these have 43 floats.
    how = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", **how)
    with torch.no_grad():
        found = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    assert compare_logits(expected, found, moe.config.num_layers).equal
