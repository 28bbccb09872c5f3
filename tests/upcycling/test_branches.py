"""Experts from different models, and the mean of these for all else (Branch-Train-MiX; methods.md 2.6)."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.upcycling import UpcycleSpec, upcycled_config
from moe_jax.upcycling.beginnings import Branches, LazyLeaves
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.tiers import one_in
from tests.upcycling.test_start import lineage_of, run

CONFIG = dense_config(num_layers=3, bias=True)


def tokenizer_file(folder, words=("a", "b"), **settings):
    folder.mkdir()
    vocabulary = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0]))
    content = json.loads(made.to_str()) | settings
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return (folder / "tokenizer.json",)


def branch(folder, name, number, *, config=CONFIG, dtype=None, words=("a", "b"), **settings):
    """A model whose leaves differ from those of other numbers."""
    leaves = random_leaves(config)
    random = np.random.default_rng(number)
    leaves = {path: leaf + 0.1 * random.standard_normal(leaf.shape) for path, leaf in leaves.items()}
    leaves = {path: leaf.astype(dtype or np.float32) for path, leaf in leaves.items()}
    return write_model(folder / name, config, leaves, tokenizer_file(folder / f"{name}-files", words, **settings))


@pytest.fixture
def models(tmp_path):
    return [branch(tmp_path, name, number) for number, name in enumerate(("base", "one", "two", "three"))]


@one_in(10)
@pytest.mark.parametrize("rest_from", ["mean", "base"])
@pytest.mark.parametrize("options", ["--every 2", "--layers 0 1 2 --universal coder", "--layers 2 --granularity 2"])
def test_every_expert_is_the_ffn_of_its_model_and_the_rest_is_the_mean(options, rest_from, models, tmp_path, capsys):
    base, *named = models
    how = ("--experts-from", *named, "--rest-from", rest_from, "--top-k", 2)
    assert run(base, tmp_path / "moe", *options.split(), *how) == 0
    moe, sources = ModelDirectory(tmp_path / "moe"), [ModelDirectory(path) for path in named]
    dense = ModelDirectory(base)

    def rest(path):
        return dense.read(path) if rest_from == "base" else np.mean([one.read(path) for one in sources], axis=0)

    pieces = 2 if "granularity" in options else 1
    for path in moe.specs():
        leaf = moe.read(path)
        if "/experts/" in path:
            expected = np.stack([one.read(path.replace("/experts", "")) for one in sources])
            if pieces == 2:
                axis = 1 if path.endswith("down/kernel") else leaf.ndim - 1
                halves = [expected] * 2 if path.endswith("down/bias") else np.split(expected, 2, axis=axis)
                expected = np.stack(halves, axis=1).reshape(leaf.shape) * (2 if path.endswith("down/kernel") else 1)
            np.testing.assert_array_equal(leaf, expected)
        elif "/universal/" in path:
            np.testing.assert_allclose(leaf, rest(path.replace("/universal", "")), rtol=1e-6, atol=1e-7)
        elif "/router/" not in path:
            np.testing.assert_allclose(leaf, rest(path), rtol=1e-6, atol=1e-7)
    entry = lineage_of(tmp_path / "moe")
    assert entry["options"]["experts_from"] == list(map(str, named)) and entry["options"]["experts"] == 3
    assert [source["path"] for source in entry["sources"]] == list(map(str, models))
    assert entry["measured"]["step0_differs"].startswith("experts from 3 models")
    assert entry["measured"]["step0_max_abs_difference"] > entry["measured"]["step0_allowed"]
    assert "as is meant: experts from 3 models" in capsys.readouterr().out


def test_the_base_named_alone_gives_its_own_logits(models, tmp_path):
    """The one case that is equal; it shows that nothing else is changed."""
    assert run(models[0], tmp_path / "moe", "--experts-from", *[models[0]] * 3, "--granularity", 2) == 0
    measured = lineage_of(tmp_path / "moe")["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]


def test_dtypes_are_those_of_the_base(tmp_path):
    base, one = branch(tmp_path, "base", 0, dtype="bfloat16"), branch(tmp_path, "one", 1)
    moe = moe_jax.upcycle(base, tmp_path / "moe", experts_from=[one, one], every=1, step0_check=False)
    assert {str(spec.dtype) for spec in moe.source.specs().values()} == {"bfloat16"}


def test_models_in_memory_give_what_those_on_disk_do(models, tmp_path):
    loaded, how = [moe_jax.load(path) for path in models], dict(noise=0.01, drop=0.1, every=1, step0_check=False)
    in_memory = moe_jax.upcycle(loaded[0], experts_from=loaded[1:], **how)
    on_disk = moe_jax.upcycle(models[0], tmp_path / "moe", experts_from=models[1:], **how)
    for path in on_disk.source.specs():
        np.testing.assert_array_equal(in_memory.source.read(path), on_disk.source.read(path))


def test_no_more_than_a_leaf_of_a_model_is_read_at_a_time(models):
    """What is read is not kept."""
    base, *named = map(ModelDirectory, models)
    (first, *_) = Branches(base, named, "mean").ffns("layers/0/mlp/", ["up/kernel"])
    assert isinstance(first, LazyLeaves) and list(first) == ["up/kernel"] and "down/kernel" not in first
    assert first["up/kernel"] is not first["up/kernel"]


OTHERS = {
    "vocab_size": (dict(vocab_size=41), "vocab_size is 41, not 40"),
    "layers": (dict(num_layers=4), "4 layers, not 3"),
    "width": (dict(dim=32), "layers[0].mlp.dim is 32, not 24"),
    "norm": (dict(norm="layer"), "norm is 'layer', not 'rms'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture_is_refused(name, tmp_path, failing):
    changed, message = OTHERS[name]
    base = branch(tmp_path, "base", 0)
    other = branch(tmp_path, "other", 1, config=dense_config(**{"num_layers": 3, "bias": True, **changed}))
    err = failing(base, tmp_path / "moe", "--experts-from", base, other)
    assert f"--experts-from {other} has another architecture than {base}: " in err and message in err


def test_another_family_name_dtype_and_special_tokens_are_no_other_architecture(tmp_path):
    base = branch(tmp_path, "base", 0)
    config = dataclasses.replace(CONFIG, family="mistral", dtype="bfloat16", eos_ids=(3,))
    other = branch(tmp_path, "other", 1, config=config)
    assert run(base, tmp_path / "moe", "--experts-from", base, other, "--no-step0-check") == 0


def test_tokens_must_mean_the_same(tmp_path, failing):
    base, other = branch(tmp_path, "base", 0), branch(tmp_path, "other", 1, words=("b", "a"))
    err = failing(base, tmp_path / "moe", "--experts-from", base, other)
    assert "another tokenizer" in err and "the token 'a' is id 1, not id 0; ids must mean the same" in err
    more = branch(tmp_path, "more", 1, words=("a", "b", "c"))
    assert "the token 'c' is id 2, not unknown" in failing(base, tmp_path / "moe", "--experts-from", base, more)
    damaged = branch(tmp_path, "damaged", 1)
    (damaged / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not a tokenizer" in failing(base, tmp_path / "moe", "--experts-from", base, damaged)


def test_settings_of_a_tokenizer_may_differ(tmp_path):
    padding = {"strategy": {"Fixed": 4}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    padding |= {"pad_to_multiple_of": None}
    base, other = branch(tmp_path, "base", 0), branch(tmp_path, "other", 1, padding=padding)
    assert run(base, tmp_path / "moe", "--experts-from", base, other, "--no-step0-check") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--experts-from {0} {1} --experts 3", "names 2 models, each for one expert, and --experts is 3"),
        ("--experts-from {0} {1} --delta low-rank:2", "--experts-from needs --delta full"),
        ("--experts-from {0} {1} --method pesc --adapter 2", "--experts-from does not go with adapter experts"),
        ("--experts-from {0}", "top_k=2 is above num_experts=1"),
        ("--experts-from {0} nowhere", "no model at nowhere"),
        ("--rest-from base", "--rest-from goes with --experts-from only"),
    ],
)
def test_bad_options_of_the_command(options, message, models, tmp_path, failing):
    assert message in failing(models[0], tmp_path / "moe", *options.format(*models).split())


def test_as_many_models_as_experts():
    with pytest.raises(InputError, match="--experts-from names 3 models"):
        UpcycleSpec(experts=8, experts_from=("a", "b", "c"))
    assert upcycled_config(dense_config(), UpcycleSpec(experts_from=("a", "b", "c"))).moe(1).num_experts == 3


def test_plan_counts_without_reading_the_models(models):
    planned = moe_jax.plan(models[0], upcycle={"experts_from": ["a", "b", "c"], "every": 1})
    assert planned.total_params == moe_jax.plan(models[0], upcycle={"experts": 3, "every": 1}).total_params


def test_stories260k_mixed_with_itself_starts_as_it_was(data_dir, tmp_path):
    source = data_dir / "weights" / "stories260K" / "hf"
    assert run(source, tmp_path / "moe", "--experts-from", source, source, "--every", 1) == 0
    measured = lineage_of(tmp_path / "moe")["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]
