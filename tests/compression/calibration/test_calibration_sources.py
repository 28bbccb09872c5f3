"""What a calibration draws of its sources, what is kept and said of it, and what is refused."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.api import read_calibration
from moe_jax.api.model import open_model
from moe_jax.api.read_calibration import read_rows
from moe_jax.commands.cli import main
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.recording import LayerRows
from moe_jax.core.errors import InputError
from moe_jax.data.calibration_texts.built_in_rows import FOLDER, KINDS, built_in_examples, questions
from moe_jax.generation import own_samples
from moe_jax.generation.own_samples import AT_ONCE, sample_texts
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import stream
from tests.support.byte_tokenizer import BOS, EOS
from tests.support.tiers import long

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
QUANTIZE = {"method": "quantize", "bits": 3, "group_size": 16}


@pytest.fixture(scope="module")
def source(models):
    return open_model(models["one"])


@pytest.fixture
def chats(tmp_path):
    rows = [[("user", f"question {i}"), ("assistant", f"answer {i}")] for i in range(6)]
    file = tmp_path / "chats.jsonl"
    lines = ({"messages": [{"role": role, "content": content} for role, content in row]} for row in rows)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def chatting(source, tmp_path):
    """The same model with a chat template beside its tokenizer."""
    moe_jax.save(moe_jax.load(source.path), tmp_path / "chatting")
    (tmp_path / "chatting" / "chat_template.jinja").write_text(TEMPLATE)
    return open_model(tmp_path / "chatting")


def read(source, given, *, seq_len=24, samples=None, seed=0, **more):
    return read_rows(source, given, seq_len=seq_len, samples=samples, seed=seed, **more)


def test_each_source_gives_its_share(source, text):
    rows = read(source, {text: 3, "built-in": 1}, samples=12)
    assert rows.sources == ((str(text), 9), ("built-in", 3)) and len(rows) == 12
    alone, built_in = read(source, text, samples=9), read(source, "built-in", samples=3)
    np.testing.assert_array_equal(rows.tokens[:9, : alone.length], alone.tokens)
    np.testing.assert_array_equal(rows.tokens[9:, : built_in.length], built_in.tokens)
    assert rows.tokens_by_source == {str(text): 9 * 24, "built-in": built_in.count}
    assert read(source, {text: 1, "built-in": 3}, samples=12).digest() != rows.digest()
    assert read(source, {text: 3, "built-in": 1}, samples=12, seed=1).digest() != rows.digest()


def test_without_a_number_a_source_gives_what_it_has(source, text):
    rows = read(source, [text, "built-in"])
    windows = len(text.read_bytes()) // 24
    assert dict(rows.sources) == {str(text): windows, "built-in": 64}


def test_one_source_is_drawn_as_ever(source, text):
    """So that a recording of a text is found again."""
    ids = np.frombuffer(text.read_bytes(), np.uint8)
    windows = ids[: len(ids) // 24 * 24].reshape(-1, 24).astype(np.int32)
    chosen = np.sort(np.random.Generator(np.random.Philox(5)).permutation(len(windows))[:7])
    drawn = read(source, text, samples=7, seed=5)
    assert drawn.digest() == CalibrationRows.of_windows(windows[chosen]).digest()


def test_joined_rows_end_with_padding():
    windows = CalibrationRows.of_windows(np.arange(6, dtype=np.int32).reshape(2, 3))
    longer = CalibrationRows.of_windows(np.arange(10, 15, dtype=np.int32)[None])
    joined = CalibrationRows.joined({"a": windows, "b": longer})
    np.testing.assert_array_equal(joined.tokens, [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0], [10, 11, 12, 13, 14]])
    np.testing.assert_array_equal(joined.valid.sum(axis=1), [3, 3, 5])
    np.testing.assert_array_equal(joined.weights.sum(axis=1), [2, 2, 4])
    assert joined.tokens_by_source == {"a": 6, "b": 5} and joined.first(2).digest() == joined.first(2).digest()


def test_conversations_are_written_by_the_template_and_answers_scored(chatting, chats):
    rows = read(chatting, chats, seq_len=200, samples=6)
    assert (rows.weights.sum(axis=1) > 0).all() and (rows.weights.sum(axis=1) < rows.valid.sum(axis=1)).all()
    for tokens, targets, weights in zip(rows.tokens, rows.targets, rows.weights, strict=True):
        scored = bytes(int(token) for token in targets[weights > 0] if token < 256).decode()
        assert scored.startswith("answer ") and "question" in bytes(int(t) for t in tokens if t < 256).decode()


def test_the_built_in_texts_are_of_all_kinds_and_come_once_each():
    rows = {kind: (FOLDER / f"{kind}.jsonl").read_text("utf-8").splitlines() for kind in KINDS}
    every = [example.text for example in built_in_examples(None, seed=3)]
    assert len(every) == len(set(every)) == sum(map(len, rows.values())) > 100
    assert every != [example.text for example in built_in_examples(None, seed=4)]
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 200_000
    assert len(set(questions())) == len(questions()) >= 60
    assert "public domain" in (FOLDER / "PROVENANCE.md").read_text("utf-8")
    chat = json.loads(rows["chats"][0])["messages"]
    assert any(f"User: {chat[0]['content']}\n\nAssistant: {chat[1]['content']}" in text for text in every)
    for kind, found in rows.items():  # one of each in turn
        own = {json.loads(row).get("text") for row in found}
        assert kind == "chats" or any(text in own for text in every[:4])


def test_built_in_conversations_are_written_by_the_template(chatting):
    rows = read(chatting, "built-in", seq_len=400, samples=8)
    partly = [
        weights for weights, valid in zip(rows.weights, rows.valid, strict=True) if 0 < weights.sum() < valid.sum() - 1
    ]
    assert len(partly) == 2


@pytest.fixture
def sampled(monkeypatch):
    """Samples without a model: every row counts up from the last token of its prompt; row 1 ends early."""
    calls = []

    def counting(model, prompts, wanted, *, key, eos_ids):
        assert wanted.temperature == 1 and len(key) == len(prompts)
        calls.append([list(prompt) for prompt in prompts])
        for step in range(wanted.max_new_tokens):
            yield np.array(
                [-1 if row == 1 and step > 1 else prompt[-1] + 1 + step for row, prompt in enumerate(prompts)]
            )

    monkeypatch.setattr(own_samples, "stream", counting)
    return calls


def test_samples_are_kept_and_an_interrupted_job_goes_on(sampled, tmp_path):
    prompts = [[10 * i] for i in range(AT_ONCE + 3)]
    loaded = []

    def load():
        loaded.append(1)
        return None

    def stopping(what, done, total):
        if done == AT_ONCE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample_texts(load, prompts, length=6, keep=tmp_path / "kept", progress=stopping)
    assert len(sampled) == 1
    told = []
    again = sample_texts(load, prompts, length=6, keep=tmp_path / "kept", progress=lambda *step: told.append(step))
    assert len(sampled) == 2 and len(loaded) == 2 and told[-1] == ("sampling", len(prompts), len(prompts))
    assert sampled[1][:3] == prompts[AT_ONCE:] and len(sampled[1]) == AT_ONCE
    assert [text.tolist() for text in again[:3]] == [[0, 1, 2, 3, 4, 5], [10, 11, 12], [20, 21, 22, 23, 24, 25]]
    whole = sample_texts(load, prompts, length=6, keep=tmp_path / "kept")
    assert len(sampled) == 2 and len(loaded) == 2
    assert all(np.array_equal(one, other) for one, other in zip(again, whole, strict=True))
    (tmp_path / "kept" / "0.npz").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="damaged .* remove it"):
        sample_texts(load, prompts, length=6, keep=tmp_path / "kept")


def test_the_models_own_texts_begin_with_bos_or_answer_questions(source, chatting, sampled, tmp_path):
    rows = read(source, "self", samples=3, seq_len=6, place=tmp_path.joinpath)
    np.testing.assert_array_equal(rows.tokens[:, 0], BOS)
    assert rows.weights[0].sum() == 5 and rows.weights[1].sum() == 2
    assert [file.name.startswith("self-") for file in tmp_path.iterdir() if file.name.startswith("self")] == [True]
    asked = read(chatting, "self", samples=3, seq_len=200)
    for tokens, weights in zip(asked.tokens, asked.weights, strict=True):
        prompt = bytes(int(token) for token in tokens[: int(np.argmax(weights > 0)) + 1] if token < 256).decode()
        assert any(question in prompt for question in questions()) and prompt.rstrip().endswith("assistant:")
    with pytest.raises(InputError, match="leaves no room"):
        read(chatting, "self", samples=3, seq_len=5)


def test_the_seed_is_part_of_what_is_kept(source, sampled, tmp_path):
    for seed in (0, 1, 0):
        read(source, "self", samples=2, seq_len=6, seed=seed, place=tmp_path.joinpath)
    assert len(sampled) == 2 and len(list(tmp_path.glob("self-*"))) == 2


@long
def test_a_model_samples_what_it_would_alone(tmp_path):
    model = moe_jax.tiny_model(experts=4)
    prompts = [[1], [2, 3], [4]] * 4
    texts = sample_texts(lambda: model.decoder, prompts, length=9, seed=7, end_ids=(0, 9))
    keys = jax.random.split(jax.random.key(7), len(prompts))
    wanted = GenerateSpec(max_new_tokens=8, temperature=1.0)
    for i in (0, 1, 4, 11):
        alone = [
            int(step[0]) for step in stream(model.decoder, [prompts[i]], wanted, key=keys[i : i + 1], eos_ids=(0, 9))
        ]
        assert texts[i].tolist() == [*prompts[i], *alone][:9]
    assert len({tuple(text) for text in texts}) > 6
    again = sample_texts(lambda: model.decoder, prompts, length=9, seed=7, end_ids=(0, 9))
    assert all(np.array_equal(one, other) for one, other in zip(texts, again, strict=True))


@long
def test_a_job_says_its_sources_and_what_each_gave_the_experts(models, text, tmp_path, capsys):
    words = ["compress", models["one"], tmp_path / "out", "--method", "quantize", "--bits", 3, "--group-size", 16]
    words += ["--calibrate", f"{text}:2,built-in,self", "--samples", 16, "--seq-len", 24]
    words += ["--calibration-dir", tmp_path / "kept", "--calibration-seed", 3]
    assert main(list(map(str, words))) == 0
    printed = capsys.readouterr().out
    entry = moe_jax.load(tmp_path / "out").lineage[-1]
    assert [one["path"] for one in entry["options"]["calibrate"]] == [str(text), "built-in", "self"]
    assert entry["options"]["recording"] in {folder.name for folder in (tmp_path / "kept").iterdir()}
    assert str(text) in [one["path"] for one in entry["sources"]]
    tokens, (layer,) = entry["measured"]["calibration_tokens"], entry["measured"]["layers"]
    assert tokens[str(text)] == 8 * 24 and f"{8 * 24} tokens of {text}" in " ".join(printed.split())
    by_source = layer["expert_tokens_by_source"]
    assert list(by_source) == list(tokens)
    np.testing.assert_array_equal(np.sum(list(by_source.values()), axis=0), layer["expert_tokens"])
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "kept").rglob("*.npz")}
    words[2] = tmp_path / "again"
    assert main(list(map(str, words))) == 0
    assert kept == {file: file.stat().st_mtime_ns for file in (tmp_path / "kept").rglob("*.npz")}


@long
def test_a_recording_of_other_weights_is_another(models, text, tmp_path):
    made = [
        moe_jax.compress(models["one"], calibrate=given, **QUANTIZE, samples=8, seq_len=24).lineage[-1]["options"]
        for given in ({text: 1, "built-in": 1}, {text: 3, "built-in": 1})
    ]
    assert made[0]["recording"] != made[1]["recording"]


@long
@pytest.mark.parametrize("of", ["rest", "model"])
def test_a_model_in_codes_takes_the_same_sources(models, text, tmp_path, of):
    """Without experts, too, whose inputs nobody then records."""
    given = {"calibrate": {text: 2, "self": 1, "built-in": 1}, "calibration_dir": tmp_path / "kept"}
    small = moe_jax.compress(
        models["dense" if of == "rest" else "one"], **QUANTIZE, of=of, **given, samples=8, seq_len=24
    )
    entry = small.lineage[-1]
    assert list(entry["measured"]["calibration_tokens"]) == [str(text), "self", "built-in"]
    assert len(entry["options"]["recording"]) == 16 and len(entry["options"]["calibrate"]) == 3
    assert len(list((tmp_path / "kept").glob("self-*"))) == 1
    with pytest.raises(InputError, match="--save-imatrix keeps"):
        moe_jax.compress(models["dense"], **QUANTIZE, of="rest", **given, save_imatrix=tmp_path / "kept.gguf")


@long
def test_export_takes_the_same_sources(models, text, tmp_path):
    out = moe_jax.export(
        models["one"],
        tmp_path / "codes",
        format="compressed-tensors",
        bits=4,
        group_size=8,
        calibrate={text: 1, "self": 1, "built-in": 2},
        samples=8,
        seq_len=24,
    )
    lineage = json.loads((out / "lineage.json").read_text())
    assert [one["path"] for one in lineage[-1]["options"]["calibrate"]] == ["text.txt", "self", "built-in"]


def test_tokens_of_experts_by_source():
    from moe_jax.compression.calibration.expert_statistics import routed_by_source, routed_tokens

    experts = np.array([[0, 1], [1, 2], [-1, 2], [2, 1]])
    rows = LayerRows(np.zeros((4, 1), np.float32), experts, np.zeros((4, 2), np.float32))
    layer = SimpleNamespace(rows=rows, moe=SimpleNamespace(bank_experts=4))
    found = routed_by_source(layer, {"a": 1, "b": 3})
    assert found == {"a": (1, 1, 0, 0), "b": (0, 2, 3, 0)} and routed_tokens(layer) == (1, 3, 3, 0)
    assert routed_by_source(layer, {"a": 4}) is None


@pytest.mark.parametrize(
    ("given", "samples", "said"),
    [
        ("{text}:3,{chats}", 64, "which are 28 windows"),
        ("{text},{chats}:9", 20, "holds 6 rows"),
        ("built-in", 9999, "holds .* rows of text"),
        ("{text}:100,built-in", 8, "has less than one"),
        ("{text}", 0, "at least 1"),
        ("{unanswered}", None, "answer"),
    ],
)
def test_what_is_refused_of_sources(chatting, text, chats, tmp_path, given, samples, said):
    unanswered = tmp_path / "unanswered.jsonl"
    unanswered.write_text('{"messages": [{"role": "user", "content": "is anybody there?"}]}\n')
    given = given.format(text=text, chats=chats, unanswered=unanswered)
    with pytest.raises(InputError, match=said):
        read(chatting, given, samples=samples)


def test_a_model_without_tokenizer_is_refused(text):
    source = moe_jax.tiny_model(experts=4).source
    for given in ("self", "built-in"):
        with pytest.raises(InputError, match=f"no tokenizer.json.*{given}"):
            read(source, given)


def test_a_model_that_names_no_beginning_is_refused(source):
    model = SimpleNamespace(config=SimpleNamespace(bos_id=None, eos_ids=()))
    with pytest.raises(InputError, match="neither a BOS"):
        read_calibration._beginning(model, SimpleNamespace(bos=None))
    model.config.eos_ids = (EOS,)
    assert read_calibration._beginning(model, SimpleNamespace(bos=None)) == EOS


@pytest.mark.parametrize("given", ["{text}:0", "{text},nowhere.txt", "{text},{text}"])
def test_mistakes_of_a_command_are_one_line_and_nothing_is_written(failing, models, text, tmp_path, given):
    words = ["compress", models["one"], tmp_path / "out", "--method", "quantize", "--bits", 4]
    said = failing(*words[1:], "--calibrate", given.format(text=text))
    assert "above 0" in said or "no text at nowhere.txt" in said or "twice" in said
