"""Labels of texts: by a head for classes, or by the likelihood of what is said; and the command."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.evaluation.classification import (
    Labelled,
    count_labels,
    label_pairs,
    names_of_labels,
    read_labelled,
    scores_by_likelihood,
    wilson_interval,
)
from moe_jax.model_io.loading import model_leaves
from moe_jax.training.program import draw_model
from tests.support.dense_models import write_model
from tests.support.numerics import logits_of
from tests.support.tiers import long
from tests.support.training_models import FFN, config_of, encoder_decoder

LINES = [
    {"sentence": "a fine film", "label": 1, "idx": 0},
    {"sentence": "dull", "label": 0, "idx": 1},
    {"sentence": "it is fine", "label": 1, "idx": 2},
]


def lines(path, content):
    path.write_text("\n\n".join(one if isinstance(one, str) else json.dumps(one) for one in content))
    return path


def model_at(path, config, tokenizer_path, size=4.0):
    """A model of large random parameters, with a tokenizer of bytes."""
    graphdef, state = nnx.split(draw_model(config, 5))
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf * size, state))
    return write_model(path, config, dict(model_leaves(model)), (tokenizer_path,))


@pytest.mark.parametrize(
    ("line", "template", "text"),
    [
        ({"text": "a", "label": "x"}, None, "a"),
        ({"sentence1": "a", "sentence2": "b", "label": "x"}, None, "a b"),
        ({"premise": "a", "hypothesis": "b", "label": "x"}, None, "a b"),
        ({"premise": "a", "hypothesis": "{b}", "label": "x"}, "{hypothesis}, so {premise}: {}", "{b}, so a: {}"),
        ({"odd": "a", "label": "x"}, "odd {odd}", "odd a"),
    ],
)
def test_texts_are_found_by_the_names_that_data_sets_have(tmp_path, line, template, text):
    file = lines(tmp_path / "a.jsonl", [line])
    assert read_labelled(file, template) == [Labelled(text, "x", f"{file}, line 1")]


@pytest.mark.parametrize(
    ("line", "template", "message"),
    [
        ("{no json", None, "not valid JSON"),
        ("[1]", None, "label, got a JSON list"),
        ({"text": "a"}, None, "'label' is None, expected a string or a number from 0 on"),
        ({"text": "a", "label": -1}, None, "'label' is -1"),
        ({"text": "a", "label": True}, None, "'label' is True"),
        ({"words": "a", "label": 1}, None, "keys 'words', 'label', and none"),
        ({"text": 3, "label": 1}, None, "'text' is 3, expected a text"),
        ({"text": "a", "label": 1}, "{sentence}", "'sentence' is None"),
    ],
)
def test_a_bad_line_is_one_message_with_its_number(tmp_path, line, template, message):
    with pytest.raises(InputError) as error:
        read_labelled(lines(tmp_path / "a.jsonl", [{"text": "a", "sentence": "b", "label": 0}, line]), template)
    assert str(error.value).startswith(f"{tmp_path / 'a.jsonl'}, line 3: ") and message in str(error.value)


def test_a_template_without_a_key_is_refused(tmp_path):
    with pytest.raises(InputError, match="names no key"):
        read_labelled(lines(tmp_path / "a.jsonl", [{"text": "a", "label": 0}]), "sentence:")


def test_names_of_labels():
    texts, numbers = [Labelled("", "b"), Labelled("", "a")], [Labelled("", 1)]
    assert names_of_labels(texts, None, None, None) == ("a", "b")
    assert names_of_labels(texts, ["b", "a"], None, None) == ("b", "a")
    assert names_of_labels(numbers, None, ("no", "yes"), 2) == ("no", "yes")
    assert names_of_labels(numbers, None, None, 3) == ("0", "1", "2")
    for given, message in [
        ((numbers, None, None, None), "the labels are numbers: say with --labels"),
        ((numbers, ["a"], None, None), "expected two or more that differ"),
        ((numbers, ["a", "a"], None, None), "expected two or more that differ"),
        ((numbers, ["a", "b"], None, 3), "2 names of labels for a head that scores 3 classes"),
    ]:
        with pytest.raises(InputError, match=message):
            names_of_labels(*given)


def test_accuracy_confusion_and_interval():
    scores = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 0.5], [5.0, 5.0]])
    found = count_labels([Labelled("", one) for one in (1, "no", 0, "yes")], scores, ["no", "yes"], "head", 0)
    assert (found.correct, found.count, found.accuracy) == (2, 4, 0.5)
    assert found.confusion == ((1, 1), (1, 1)) and found.predictions == (1, 0, 1, 0)
    # 95% intervals of 2 of 4, 0 of 10 and 81 of 263, from the formula worked by hand and a published table.
    np.testing.assert_allclose(found.interval, (0.15003, 0.84997), atol=2e-5)
    np.testing.assert_allclose(wilson_interval(0, 10), (0, 0.27753), atol=2e-5)
    np.testing.assert_allclose(wilson_interval(81, 263), (0.2553, 0.3662), atol=1e-4)
    with pytest.raises(InputError, match="scores of line 3 are not finite"):
        texts = [Labelled("", 0, f"line {number}") for number in (1, 3)]
        count_labels(texts, np.array([[0.0, 1.0], [math.nan, 0.0]]), ["a", "b"], "head", 0)


@pytest.mark.parametrize(("input_len", "context"), [(99, "abcdefghi "), (19, "abcdefghi "), (12, "efghi "), (8, "i ")])
def test_all_labels_come_after_the_same_part_of_a_text(tokenizer_path, input_len, context):
    config, labels = config_of(FFN), ["x", "yyyyyyy"]
    tokenizer = Tokenizer(tokenizer_path, config, eos="never")
    pairs = label_pairs(config, tokenizer, "abcdefghi", labels, input_len=input_len)
    for pair, label in zip(pairs, labels, strict=True):
        assert bytes([*pair.tokens.tolist(), int(pair.targets[-1])]).decode() == context + label
        assert pair.weights.tolist() == [0] * (len(context) - 1) + [1] * len(label)
    nothing = np.zeros(2, np.float32)
    assert scores_by_likelihood(lambda score, rows: nothing, [pairs])[1] == (input_len < 16)


def test_a_label_that_leaves_nothing_of_the_text_is_an_error(tokenizer_path):
    config = config_of(FFN)
    tokenizer = Tokenizer(tokenizer_path, config, eos="never")
    with pytest.raises(InputError, match="input_len = 4"):
        label_pairs(config, tokenizer, "abc", ["x", "yyyyyyy"], input_len=4)


@long
@pytest.mark.parametrize("config", [encoder_decoder(FFN, FFN), config_of(FFN)], ids=["encoder", "decoder"])
def test_the_likeliest_label_is_taken(tmp_path, tokenizer_path, config, capsys):
    """Against the scores of pairs, label by label."""
    folder = model_at(tmp_path / "model", config, tokenizer_path)
    model, names = moe_jax.load(folder), ["negative", "so so", "positive"]
    file = lines(tmp_path / "a.jsonl", LINES)
    expected = []
    for line in LINES:
        if config.has_encoder:
            pairs = [[(f"sst2: {line['sentence']}", name)] for name in names]
            losses = [moe_jax.evaluate(model, pair).total_nll for pair in pairs]
        else:
            # Without the EOS that the evaluation of pairs scores: the difference of two texts.
            before = list(f"sst2: {line['sentence']} ".encode())
            whole = [moe_jax.evaluate(model, [*before, *name.encode()]).total_nll for name in names]
            losses = [total - moe_jax.evaluate(model, before).total_nll for total in whole]
        expected.append(int(np.argmin(losses)))
    options = ["--labels", ", ".join(names), "--template", "sst2: {sentence}"]
    assert cli.main(["eval", str(folder), "--classify", str(file), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"] == expected and found["by"] == "likelihood" and found["labels"] == names
    right = sum(given == LINES[i]["label"] for i, given in enumerate(expected))
    assert found["correct"] == right and found["accuracy"] == right / 3 and found["cut"] == 0
    texts = [(f"sst2: {line['sentence']}", names[line["label"]]) for line in LINES]
    assert list(moe_jax.classify(model, texts, labels=names).predictions) == expected


def test_a_head_scores_classes_and_nothing_else(tmp_path, tokenizer_path, capsys):
    config = dataclasses.replace(config_of(FFN), num_classes=2, foreign={"id2label": {"0": "bad", "1": "good"}})
    folder = model_at(tmp_path / "model", config, tokenizer_path)
    file = lines(tmp_path / "a.jsonl", [*LINES, {"sentence": "good " * 20, "label": "good"}])
    assert cli.main(["eval", str(folder), "--classify", str(file), "--input-len", "40"]) == 0
    printed = capsys.readouterr()
    assert "by the head" in printed.out and "1 of 4 texts" in printed.err
    heading, *counts = printed.out.splitlines()[-3:]
    assert heading.split() == ["label", "given", "bad", "good"] and [line.split()[0] for line in counts] == [
        "bad",
        "good",
    ]
    assert len({len(line) for line in (heading, *counts)}) == 1  # figures stand below their labels
    model = moe_jax.load(folder)
    decoder, predictions = model.decoder, []
    for text in [line["sentence"] for line in LINES] + [("good " * 20)[:40]]:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        # What comes after the last token cannot matter to it.
        logits = logits_of(decoder, np.pad(tokens, (0, 40 - len(tokens)))[None])
        predictions.append(int(np.argmax(logits[0, len(tokens) - 1])))
    found = moe_jax.classify(folder, file, input_len=40, batch_size=3)
    assert list(found.predictions) == predictions and found.labels == ("bad", "good") and found.by == "head"
    bad = [{"sentence": "", "label": 1}, {"sentence": "a", "label": 2}, {"sentence": "a", "label": "fine"}, "[]"]
    mixed = lines(tmp_path / "b.jsonl", [bad[0], *map(json.loads, file.read_text().split("\n\n")), *bad[1:]])
    also = moe_jax.classify(folder, mixed, input_len=40, batch_size=3, bad_documents="skip")
    assert also == found._replace(skipped=4, problems=also.problems)
    assert [one.split(": ")[0] for one in also.problems] == [f"{mixed}, line {number}" for number in (15, 1, 11, 13)]
    with pytest.raises(InputError, match="b.jsonl, line 15: "):
        moe_jax.classify(folder, mixed)
    for arguments, message in [
        (["generate", str(folder), "--prompt", "a"], "scores 2 classes and not tokens, which generation needs"),
        (["eval", str(folder), "--text", str(file)], "which a perplexity needs"),
        (["eval", str(folder), "--classify", str(file), "--labels", "a,b,c"], "3 names of labels for a head"),
        (["eval", str(folder)], "give one of --text FILE, --classify FILE and --tasks NAME,..."),
        (["eval", str(folder), "--text", str(file), "--labels", "a,b"], "--labels and --template go with --classify"),
        (["eval", str(folder), "--classify", str(file), "--seq-len", "9"], "--seq-len goes with --text"),
        (["eval", str(folder), "--classify", str(tmp_path / "none")], "no file of labelled texts at"),
    ]:
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
