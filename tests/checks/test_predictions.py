"""What quantising changes in the predictions of a text, alone and as `adapt` and `upcycle` say it."""

import dataclasses
import json
import types

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_jax
from moe_jax.api import transforms
from moe_jax.checks.step0 import MOST_TOKENS, WINDOW, ProbeText, compare_predictions, text_rows
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from tests.support.dense_models import dense_config
from tests.support.tiers import long

NF4 = "--method lora --adapter lora:2 --targets q --base nf4".split()
STORY = "Once upon a time, there was a little dog named Max. He liked to run in the big park.\n"


@pytest.fixture(scope="module")
def model(data_dir):
    return data_dir / "weights" / "stories260K" / "hf"


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 3 * WINDOW), st.integers(2, 2 * WINDOW))
def test_windows_are_those_of_eval(count, max_positions):
    """Every token of the text is in one place, and all are scored but the first of each window."""
    ids = np.arange(1, count + 1)
    tokens, scored = text_rows(ProbeText("text", ids), max_positions)
    length = min(WINDOW, max_positions)
    assert tokens.shape == scored.shape == (-(-count // length), length)
    assert tokens[tokens > 0].tolist() == ids[:MOST_TOKENS].tolist()
    assert tokens[scored].tolist() == [token for i, token in enumerate(ids) if i % length]


@pytest.mark.parametrize("seed", range(3))
def test_the_figures_are_those_of_scipy(seed):
    random = np.random.default_rng(seed)
    before, after = random.normal(0, 20, (2, 3, 5, 11)).astype(np.float32)
    tokens, scored = text_rows(ProbeText("text", random.integers(0, 11, 13)), 5)
    found = compare_predictions("text", before, after, tokens, scored)
    first, second = (scipy.special.log_softmax(logits.astype(np.float64), -1) for logits in (before, after))
    places = [(row, at) for row in range(3) for at in range(1, 5) if row * 5 + at < 13]
    kl = [scipy.special.rel_entr(np.exp(first[r, t - 1]), np.exp(second[r, t - 1])).sum() for r, t in places]
    assert found.tokens == len(places) == 10
    np.testing.assert_allclose(found.kl, np.mean(kl), rtol=1e-9)
    for loss, predicted in ((found.loss_before, first), (found.loss_after, second)):
        np.testing.assert_allclose(loss, -np.mean([predicted[r, t - 1, tokens[r, t]] for r, t in places]), rtol=1e-9)


@long
def test_adapt_says_what_eval_says_of_both_models(model, tmp_path, capsys):
    text, out = tmp_path / "story.txt", tmp_path / "tuned"
    text.write_text(STORY * 9)
    assert cli.main(["adapt", str(model), str(out), *NF4, "--text", str(text)]) == 0
    printed = capsys.readouterr().out
    measured = json.loads((out / "lineage.json").read_text())[-1]["measured"]
    assert measured["nf4_text"] == str(text)
    for source, name in ((model, "before"), (out, "after")):
        scored = moe_jax.evaluate(source, text, seq_len=WINDOW)
        assert scored.tokens == measured["nf4_tokens"] and scored.windows > 1
        np.testing.assert_allclose(measured[f"nf4_loss_{name}"], scored.nll, atol=1e-5)
    shown = f"loss {measured['nf4_loss_before']:.4f} -> {measured['nf4_loss_after']:.4f}"
    assert f"NF4 on {text}: {shown}, KL divergence {measured['nf4_kl']:.3g} nats per token" in printed


@long
def test_without_a_text_there_is_a_built_in_one(model, tmp_path, capsys):
    assert cli.main(["upcycle", str(model), str(tmp_path / "pesc"), "--method", "pesc", "--adapter", "4"]) == 0
    measured = json.loads((tmp_path / "pesc" / "lineage.json").read_text())[-1]["measured"]
    assert measured["nf4_text"] == "a built-in text" and 0 < measured["nf4_kl"] < 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "NF4 on a built-in text" in printed and f"{measured['nf4_loss_after']:.4f}" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*NF4, "--text", "absent.txt"], "no text at absent.txt"),
        ([*NF4[:-2], "--text", "story.txt"], "model has none"),
        ([*NF4, "--text", "story.txt", "--no-step0-check"], "was not asked"),
        ([*NF4, "--text", "short.txt"], "short.txt is empty"),
    ],
)
def test_a_text_that_cannot_be_used_is_said_at_once(options, message, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(STORY)
    (tmp_path / "short.txt").write_text("")
    assert cli.main(["adapt", str(model), "tuned", *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "tuned").exists()


def test_models_are_compared_on_a_text_where_kernels_are_rounded(monkeypatch, tmp_path):
    """The built-in one without a file, if there is a tokenizer to read it with."""
    (tmp_path / "text.txt").write_text("own")
    plain, scored = dense_config(), dataclasses.replace(dense_config(), num_classes=2)
    source = types.SimpleNamespace(config=plain, path="a model")
    monkeypatch.setattr(transforms, "has_nf4_kernels", lambda config: config is not plain)
    nf4 = dense_config(num_layers=2)

    def text(source=source, config=nf4, file=None, check=True):
        return transforms._probe_text(source, config, file, check=check)

    monkeypatch.setattr(transforms, "tokenizer_of_source", lambda source: tokenizer)
    tokenizer = types.SimpleNamespace(encode=lambda text: list(text.encode()))
    monkeypatch.setattr(transforms, "read_text", lambda place, tokenizer: tokenizer.encode(place.read_text()))
    labels = types.SimpleNamespace(config=scored, path="a model")
    assert text().ids == tokenizer.encode(transforms._TEXT)
    assert text(file=tmp_path / "text.txt").ids.tolist() == [*b"own"]
    assert text(config=plain) is text(check=False) is text(source=labels) is None
    for changes in ({"config": plain}, {"check": False}, {"source": labels}):
        with pytest.raises(InputError):
            text(file=tmp_path / "text.txt", **changes)
    tokenizer = types.SimpleNamespace(encode=lambda text: [1])
    assert text() is None
    monkeypatch.setattr(transforms, "tokenizer_of_source", fail)
    assert text() is None


def fail(source):
    raise InputError("no tokenizer")


def test_one_token_has_nothing_to_compare():
    tokens, scored = text_rows(ProbeText("short", np.array([3])), 128)
    logits = np.zeros((*tokens.shape, 5), np.float32)
    with pytest.raises(InputError, match="short: one token"):
        compare_predictions("short", logits, logits, tokens, scored)
