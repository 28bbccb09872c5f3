"""Pairs of inputs and targets for models with an encoder: from JSON lines to batches, runs, and scores."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.packing import stack_pairs
from moe_jax.data.pipeline import open_data
from moe_jax.data.rows import Example
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.distributed.sharding import make_mesh
from moe_jax.evaluation.held_out import Evaluator, read_held_out, score_rows, target_losses
from moe_jax.models import MoEConfig
from moe_jax.nn import Decoder
from moe_jax.training.flops import step_flops, train_flops_per_token
from moe_jax.training.in_memory_training import read_batch
from moe_jax.training.metrics import read_metrics
from moe_jax.training.program import abstract_batch, draw_model, make_program
from tests.support.byte_tokenizer import EOS
from tests.support.losses import token_losses
from tests.support.numerics import initialised
from tests.support.tiers import long
from tests.support.training_models import FFN, config_of, encoder_decoder, recipe_of, write_config

SWITCH = MoEConfig(expert=FFN, num_experts=4, top_k=1, gate="top1", balance_coef=0.01, z_coef=0.01)
CONFIG = encoder_decoder(SWITCH, SWITCH)
PAIRS = [("one", "eins"), ("forty-two", "42"), ("seven", "sieben und nichts"), ("x", ""), ("twenty", "zwanzig")]


def write_pairs(path: Path, pairs, keys=("input", "target")) -> Path:
    path.write_text("".join(json.dumps(dict(zip(keys, pair, strict=True))) + "\n\n" for pair in pairs))
    return path


def batches(path, tokenizer_path, *, config=CONFIG, rows=None, batch_size=2, note=None, **options):
    section = DataSection(
        sources=(SourceSection(path=str(path)),), **{"seq_len": 6, "input_len": 8, "prefetch": 0, **options}
    )
    rows = range(batch_size) if rows is None else rows
    noted = {} if note is None else {"note": note}
    return open_data(section, config, tokenizer_path, seed=0, batch_size=batch_size, rows=rows, **noted)


@pytest.mark.parametrize("keys", [("input", "target"), ("prompt", "response")])
def test_a_pair_has_a_row_and_what_is_too_long_is_cut_and_counted(tmp_path, tokenizer_path, keys):
    path, noted = write_pairs(tmp_path / "a.jsonl", PAIRS, keys), []
    iterator = batches(path, tokenizer_path, shuffle=False, epochs=1, note=noted.append)
    assert len(noted) == 1 and "5 pairs, 1 inputs" in noted[0] and "2 targets than data.seq_len = 6" in noted[0]
    first, second, third, after = (next(iterator) for _ in range(4))
    assert first["inputs"].tolist() == [[*b"one", EOS, 0, 0, 0, 0], [*b"forty-t", EOS]]
    assert first["inputs_valid"].tolist() == [[True] * 4 + [False] * 4, [True] * 8]
    assert first["targets"].tolist() == [[*b"eins", EOS, 0], [*b"42", EOS, 0, 0, 0]]
    assert first["tokens"].tolist() == [[0, *b"eins", 0], [0, *b"42", 0, 0, 0]]
    assert first["weights"].tolist() == [[1] * 5 + [0], [1] * 3 + [0] * 3]
    assert first["segment_ids"].tolist() == first["weights"].tolist()
    assert first["cut"].tolist() == [[0, 0], [1, 0]]
    assert second["targets"].tolist() == [[*b"sieben"], [EOS, 0, 0, 0, 0, 0]]
    assert third["cut"].tolist() == [[0, 1], [0, 0]] and not third["inputs_valid"][1].any()
    assert not after["segment_ids"].any() and not after["weights"].any()


def test_processes_prepare_their_own_rows_and_a_position_is_resumed(tmp_path, tokenizer_path):
    path = write_pairs(tmp_path / "a.jsonl", [(f"number {i}", str(i)) for i in range(30)])
    iterator = batches(path, tokenizer_path, prefetch=2, batch_size=4)
    some = [next(iterator) for _ in range(11)]
    seen = ["".join(map(chr, row[1:5])) for batch in some for row in batch["tokens"]]
    assert seen != sorted(seen)
    mine = batches(path, tokenizer_path, batch_size=4, rows=[1, 3])
    for batch in some:
        own = next(mine)
        assert all(np.array_equal(own[name], batch[name][[1, 3]]) for name in batch)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = batches(path, tokenizer_path, batch_size=4)
    resumed.set_state(state)
    for _ in range(3):
        want, got = next(iterator), next(resumed)
        assert all(np.array_equal(want[name], got[name]) for name in want)


def test_without_an_encoder_a_pair_is_a_prompt_and_a_response(tmp_path, tokenizer_path):
    config, made = config_of(FFN), []
    for keys in (("input", "target"), ("prompt", "response")):
        path = write_pairs(tmp_path / f"{keys[0]}.jsonl", PAIRS * 3, keys)
        made.append(next(batches(path, tokenizer_path, config=config, input_len=None)))
    assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])
    tokenizer, example = Tokenizer(tokenizer_path, config), Example("one=two", 4, is_response=True)
    whole, cut = tokenizer.pair(example), tokenizer.pair(example, seq_len=5)
    assert whole.tokens.tolist() == [*b"one=two"] and whole.inputs is None and not whole.target_was_cut
    assert whole.targets[whole.weights > 0].tolist() == [*b"two", EOS]
    assert cut.tokens.tolist() == [*b"e=two"] and cut.targets.tolist() == [*b"=two", EOS] and cut.target_was_cut


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
path = "train.jsonl"
[optimizer]
learning_rate = 1e-2
[schedule]
steps = 12
[train]
steps = 12
batch_size = 8
[mesh]
data = 2
fsdp = 2
expert = 2
[checkpoint]
every = 4
keep = 5
[eval]
text = "held_out.jsonl"
every = 6
[log]
tensorboard = false
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tokenizer_path):
    """A folder with all that a run needs."""
    folder = tmp_path_factory.mktemp("pairs")
    write_config(folder / "config.json", CONFIG)
    pairs = [(f"after {chr(97 + i % 25)}", chr(98 + i % 25)) for i in range(200)]
    write_pairs(folder / "train.jsonl", pairs)
    write_pairs(folder / "held_out.jsonl", [*pairs[:7], ("far too long an input", "b")])
    (folder / "recipe.toml").write_text(RECIPE.format(tokenizer=tokenizer_path))
    return folder


@pytest.fixture(scope="module")
def finished(prepared):
    """It with a run of 12 steps that knows what follows a letter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(prepared)
        assert cli.main(["train", "recipe.toml"]) == 0
    return prepared


def curve(folder: Path, run: str = "run") -> list[dict]:
    timing = ("seconds", "tokens_per_second", "flops_per_second")
    return [
        {key: value for key, value in record.items() if key not in timing}
        for record in read_metrics(folder / run / "metrics.jsonl")
    ]


@long
def test_a_run_learns_and_reports_the_routers_of_both_stacks(finished):
    records = curve(finished)
    assert [record["step"] for record in records] == [*range(1, 13)]
    assert records[-1]["loss"] < 0.85 * records[0]["loss"]
    assert set(records[0]["expert_load"]) == set("0123")
    assert records[0]["aux_loss"] > 0
    assert records[0]["tokens"] == records[0]["scored_tokens"] == 16
    assert records[0]["input_tokens"] == 8 * len("after a") + 8
    assert records[0]["cut_inputs"] == records[0]["cut_targets"] == 0
    model = moe_jax.load(finished / "run" / "model")
    scored = moe_jax.evaluate(model, finished / "held_out.jsonl", input_len=16, seq_len=8)
    assert scored.nll == pytest.approx(records[-1]["eval_loss"], rel=1e-5)
    assert (scored.windows, scored.tokens, scored.cut) == (8, 16, 1)


@long
def test_a_resumed_run_gives_the_same_curve_to_the_last_bit(finished, monkeypatch):
    monkeypatch.chdir(finished)
    other = ["--set", "run_dir=resumed"]
    assert cli.main(["train", "recipe.toml", *other, "train.steps=8"]) == 0
    assert cli.main(["train", "recipe.toml", *other, "--resume"]) == 0
    first, again = curve(finished), curve(finished, "resumed")
    for record in (*first, *again):
        record.pop("eval_loss", None)  # also made where the first part ended
    assert again == first
    a, b = (moe_jax.load(finished / run / "model").source for run in ("run", "resumed"))
    assert a.fingerprint() == b.fingerprint()


@long
def test_batches_in_memory_on_one_device_train_as_those_of_files_on_eight(finished, tokenizer_path):
    section = DataSection(sources=(SourceSection(path=str(finished / "train.jsonl")),), seq_len=8, input_len=16)
    data = open_data(section, CONFIG, tokenizer_path, seed=0, batch_size=8, rows=range(8))
    made, records = [next(data) for _ in range(6)], []
    given = [{name: batch[name] for name in ("inputs", "inputs_valid", "targets", "segment_ids")} for batch in made]
    for batch, one in zip(made, given, strict=True):
        again = read_batch(one, CONFIG)
        assert np.array_equal(again["weights"], batch["weights"])
        assert np.array_equal(again["tokens"] * batch["segment_ids"], batch["tokens"])
    recipe = {"optimizer": {"learning_rate": 1e-2}, "schedule": {"steps": 12}, "train": {"steps": 6}}
    moe_jax.train(recipe, moe_jax.Model(draw_model(CONFIG, 0)), given, on_step=records.append)
    for one, many in zip(records, curve(finished), strict=False):
        assert many["loss"] == pytest.approx(one["loss"], rel=2e-4)
        assert many["aux_loss"] == pytest.approx(one["aux_loss"], rel=2e-4)
        assert many["input_tokens"] == one["input_tokens"] and "cut_inputs" in one
    assert len(records) == 6


def test_what_was_cut_is_counted_by_inputs_and_targets_over_all_rows():
    config = encoder_decoder(FFN, FFN)
    recipe = recipe_of(batch_size=4)
    program = make_program(recipe, config, jax.devices()[:1])
    batch = abstract_batch(recipe, config, program.mesh)
    assert batch["cut"].shape == (4, 2)
    with jax.set_mesh(program.mesh):
        _, metrics = jax.eval_shape(program.step, program.state, program.frozen, batch)
    assert metrics.cut.shape == (2,)


def test_flops_of_inputs_are_those_of_the_encoder():
    config = encoder_decoder(FFN, FFN)
    flops = step_flops(config, 8, 16)
    both = train_flops_per_token(config, 8) - 12 * 16 * 8 * 2  # without the scores of the encoder
    assert flops(1, 1) == pytest.approx(both + 12 * 16 * 16 * 4, rel=1e-12)
    per_input = flops(0, 1)
    attention, ffn, kv = 4 * 16 * 16, 3 * 16 * 32, 2 * 16 * 16
    assert per_input == 6 * 2 * (attention + ffn) + 6 * 2 * kv + 2 * 12 * 16 * 16


def test_the_encoder_changes_where_only_its_inputs_do():
    """Padding of inputs is not attended to, and what is attended to matters."""
    graphdef, state = nnx.split(initialised(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)), 1))
    state = jax.tree.map(lambda leaf: leaf * 6, state)
    tokens = jnp.asarray([[0, 5, 6]], jnp.int32)

    @jax.jit
    def run(state, inputs):
        valid = jnp.asarray([[True, True, False]])
        return nnx.merge(graphdef, state)(tokens, inputs=inputs, inputs_valid=valid).logits

    first = run(state, jnp.asarray([[7, 8, 9]], jnp.int32))
    np.testing.assert_array_equal(first, run(state, jnp.asarray([[7, 8, 30]], jnp.int32)))
    assert np.abs(first - run(state, jnp.asarray([[7, 9, 9]], jnp.int32))).max() > 1e-2


def by_definition(model, pairs) -> np.ndarray:
    run = nnx.jit(lambda model, tokens, given: model(tokens, **given).logits)
    found = []
    for pair in pairs:
        given = {} if pair.inputs is None else {"inputs": jnp.asarray(pair.inputs)[None]}
        logits = run(model, jnp.asarray(pair.tokens)[None], given)
        found.append(float((token_losses(logits, jnp.asarray(pair.targets)[None])[0] * pair.weights).sum()))
    return np.array(found)


@long
@pytest.mark.parametrize("config", [CONFIG, config_of(FFN, SWITCH)], ids=["encoder", "decoder"])
def test_targets_are_scored_whatever_the_batch_and_the_mesh(tmp_path, tokenizer_path, config):
    longer = ("a longer input than that", "and its target " * 2)
    path = write_pairs(tmp_path / "a.jsonl", [("two", "zwei"), ("ten", "zehn"), longer])
    pairs = read_held_out(SourceSection(path=str(path)), DataSection(input_len=32, seq_len=64), config, tokenizer_path)
    graphdef, state = nnx.split(draw_model(config, 3))
    state = jax.tree.map(lambda leaf: leaf * 4, state)
    expected = by_definition(nnx.merge(graphdef, state), pairs)
    found = Evaluator(graphdef, pairs, batch_size=2)
    given = {"graphdef": graphdef, "states": (state,), "batch_size": 2}
    np.testing.assert_allclose(score_rows(target_losses, pairs, **given), expected, rtol=1e-5)
    assert found(state).tokens == sum(pair.weights.sum() for pair in pairs)
    assert found(state).nll == pytest.approx(expected.sum() / found(state).tokens, rel=1e-5)
    spread = score_rows(target_losses, pairs, **given, mesh=make_mesh({"data": 2, "fsdp": 4}))
    np.testing.assert_allclose(spread, expected, rtol=1e-5)


@long
def test_the_commands_take_pairs_and_answer_inputs(finished, capsys, monkeypatch):
    monkeypatch.chdir(finished)
    held_out = ["--text", "held_out.jsonl", "--input-len", "16", "--seq-len", "8"]
    assert cli.main(["eval", "run/model", *held_out, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["nll"] == pytest.approx(curve(finished)[-1]["eval_loss"], rel=1e-5)
    assert (found["windows"], found["cut"]) == (8, 1) and "1 of 8 pairs" in printed.err
    Path("plain.txt").write_text("no pair")
    assert cli.main(["eval", "run/model", "--text", "plain.txt"]) == 2
    assert "scored on pairs" in capsys.readouterr().err
    prompts = ["after c", "after ddd"]
    options = [option for prompt in prompts for option in ("--prompt", prompt)]
    assert cli.main(["generate", "run/model", *options, "--max-new-tokens", "6", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    model = moe_jax.load("run/model")
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["prompt"] == prompt and answer["prompt_ids"] == [*prompt.encode(), EOS]
        assert answer["ids"] == moe_jax.generate(model, prompt, max_new_tokens=6).ids
    assert cli.main(["generate", "run/model", "--prompt", "after c", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == answers[0]["text"] + "\n"
    scored = moe_jax.evaluate(model, [("after c", "d"), ("after d", "e")], input_len=16, seq_len=8)
    assert scored.tokens == 4 and scored.windows == 2 and scored.cut == 0
    with pytest.raises(InputError, match="list of pairs"):
        moe_jax.evaluate(model, [1, 2, 3])


def test_an_encoder_is_scored_on_pairs_alone(tmp_path, tokenizer_path):
    for name, content in (("a.txt", "plain"), ("b.jsonl", '{"text": "a"}\n')):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=r"is scored on pairs|line 1: expected \{\"prompt\""):
            read_held_out(SourceSection(path=str(tmp_path / name)), DataSection(), CONFIG, tokenizer_path)


@pytest.mark.parametrize(
    ("name", "content", "overrides", "message"),
    [
        ("a.txt", "text", [], "trained on pairs"),
        ("a.jsonl", '{"input": "a", "target": "b"}\n{"text": "c"}', [], "line 2: expected {"),
        ("a.jsonl", '{"input": "a", "target": 3}', [], "'target' holding a int"),
        ("a.jsonl", "\n \n", [], "holds no pairs"),
        ("a.jsonl", '{"input": "a", "target": ""}', ["data.eos=never"], "pair whose target"),
        ("a.jsonl", '{"input": "a", "target": "b"}', ["data.input_len=1"], "input_len = 1 must be at least 2"),
        ("a.jsonl", '{"input": "a", "target": "b"}', ["eval.text=a.txt"], "no text at a.txt"),
    ],
)
def test_bad_data_is_one_line(prepared, monkeypatch, capsys, name, content, overrides, message):
    monkeypatch.chdir(prepared)
    (prepared / name).write_text(content)
    sources = json.dumps(name)
    overrides = ["run_dir=none", f"data.sources=[{{path={sources}}}]", *overrides]
    assert cli.main(["train", "recipe.toml", "--set", *overrides]) == 2
    (prepared / name).unlink()
    err = capsys.readouterr().err
    assert message in err and err.count("moe-jax: error:") == 1 and not (prepared / "none").exists()


def test_lengths_of_inputs_are_for_encoders(prepared, monkeypatch, capsys):
    monkeypatch.chdir(prepared)
    write_config(prepared / "decoder.json", config_of(FFN))
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=none", "model.config=decoder.json"]) == 2
    assert "data.input_len = 16 is for" in capsys.readouterr().err


def test_a_batch_in_memory_has_the_arrays_of_one_of_files():
    batch = read_batch({"inputs": np.ones((2, 5), int), "targets": np.ones((2, 4), int)}, CONFIG)
    of_files = stack_pairs([], 2, input_len=5, seq_len=4)
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == {
        name: (a.shape, a.dtype) for name, a in of_files.items()
    }


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.ones((2, 5), int), "encoder expected inputs"),
        ({"inputs": np.ones((2, 5), int)}, "batch of inputs"),
        ({"inputs": np.ones((3, 5), int), "targets": np.ones((2, 4), int)}, r"batch has shape \(3, 5\)"),
        ({"inputs": np.full((2, 5), 999), "targets": np.ones((2, 4), int)}, "go from 999 to 999"),
        ({"inputs": np.ones((2, 5)), "targets": np.ones((2, 4), int)}, "batch has dtype float64"),
        ({"inputs": np.ones((2, 5), int), "targets": np.ones(4, int)}, r"batch has shape \(4,\)"),
    ],
)
def test_bad_batches_are_named(batch, message):
    with pytest.raises(InputError, match=message):
        read_batch(batch, CONFIG)
