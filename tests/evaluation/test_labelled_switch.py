"""A Switch from new weights to labels, end to end: trained on pairs, asked for labels, compressed, and asked again."""

import json

import pytest

import moe_jax
from moe_jax.commands import cli
from tests.support.tiers import long
from tests.support.training_models import encoder_decoder, write_config
from tests.training.test_pairs import SWITCH

KINDS = {"dog": "animal", "cat": "animal", "bird": "animal", "ball": "toy", "doll": "toy", "kite": "toy"}
COMPRESSED = {
    "resmoe": ("--method", "resmoe", "--keep", "0.5", "--layers", "encoder:1,decoder:1"),
    "ders-quantize": ("--method", "ders-quantize", "--bits", "8", "--layers", "decoder:0,1"),
}
LAYERS = {"resmoe": [1, 3], "ders-quantize": [2, 3]}
RECIPE = """
run_dir = "run"
[model]
config = "config.json"
init = "random"
[data]
tokenizer = "{tokenizer}"
seq_len = 8
input_len = 16
[[data.sources]]
path = "pairs.jsonl"
[optimizer]
learning_rate = 1e-2
weight_decay = 0.0
[schedule]
warmup_steps = 10
[train]
steps = 120
batch_size = 16
[log]
tensorboard = false
every = 40
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_path):
    folder = tmp_path_factory.mktemp("switch")
    config = encoder_decoder(SWITCH, SWITCH, tie_embeddings=False)
    write_config(folder / "config.json", config)
    texts = [(f"{name}: a {thing}", kind) for name in ("Tom", "Sue", "Ben") for thing, kind in KINDS.items()]
    seen, unseen = [pair for pair in texts if "Ben" not in pair[0]], [pair for pair in texts if "Ben" in pair[0]]
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"input": a, "target": b}) + "\n" for a, b in seen * 4))
    (folder / "labelled.jsonl").write_text("".join(json.dumps({"text": a, "label": b}) + "\n" for a, b in unseen))
    (folder / "recipe.toml").write_text(RECIPE.format(tokenizer=tokenizer_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "recipe.toml"]) == 0
    return folder


def labelled(folder, name: str, capsys) -> dict:
    capsys.readouterr()
    assert cli.main(["eval", name, "--classify", "labelled.jsonl", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@long
def test_a_switch_labels_what_it_has_not_seen_also_when_compressed(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = labelled(folder, "run/model", capsys)
    assert before["accuracy"] == 1.0 and before["confusion"] == [[3, 0], [0, 3]] and before["interval"][0] > 0.6
    for name, options in COMPRESSED.items():
        assert cli.main(["compress", "run/model", name, *options]) == 0
        after = labelled(folder, name, capsys)
        assert after["accuracy"] >= 5 / 6 and after["count"] == 6
        changed = moe_jax.load(name).lineage[-1]["measured"]["layers"]
        assert [layer["layer"] for layer in changed] == LAYERS[name]
