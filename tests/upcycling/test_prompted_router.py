"""Routers that begin from the hidden states of texts (methods.md 2.6)."""

import json

import numpy as np
import pytest

import moe_jax
from moe_jax.api.open_source import open_source
from moe_jax.api.transforms import read_prompts
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.upcycling import beginnings
from moe_jax.upcycling.beginnings import MOST_TOKENS, Prompt, router_kernels
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.tiers import long
from tests.upcycling.test_branches import tokenizer_file
from tests.upcycling.test_start import lineage_of, run

PROMPTS = [Prompt(np.array([1, 5, 7, 9]), 1), Prompt(np.array([1, 4, 4, 30, 31, 2]), 1), Prompt(np.array([6, 8]))]
TEXTS = ("Once upon a time there was a dog.", "The sun is hot.", "Lily and Tom like to play with a big red ball.")


def model(folder, **config):
    made = dense_config(**config)
    leaves = random_leaves(made)
    return made, leaves, ModelDirectory(write_model(folder / "dense", made, leaves))


@pytest.fixture
def stories(data_dir):
    return data_dir / "weights" / "stories260K" / "hf"


def test_the_first_layer_without_attention_by_hand(tmp_path):
    """Its FFN is given the normalised embeddings."""
    config = dense_config(num_layers=2)
    leaves = random_leaves(config)
    leaves["layers/0/attention/o/kernel"] *= 0
    source = ModelDirectory(write_model(tmp_path / "dense", config, leaves))
    found = router_kernels(source, PROMPTS, [0])
    assert found.keys() == {0} and found[0].dtype == np.float32
    for column, prompt in zip(found[0].T, PROMPTS, strict=True):
        x = leaves["embed/embedding"][prompt.ids].astype(np.float64)
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.norm_eps) * leaves["layers/0/mlp_norm/scale"]
        mean = x[prompt.first :].mean(axis=0)
        np.testing.assert_allclose(column, mean / np.linalg.norm(mean), rtol=1e-5, atol=1e-6)


@long
def test_hidden_states_are_those_of_transformers(stories):
    import torch
    import transformers

    source = open_source(stories)
    prompts = read_prompts(source, TEXTS)
    found = router_kernels(source, prompts, range(5))
    reference = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    given = {}
    for index, layer in enumerate(reference.model.layers):
        layer.mlp.register_forward_pre_hook(lambda _, args, index=index: given.__setitem__(index, args[0][0]))
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            reference(torch.tensor(prompt.ids[None].astype(np.int64)))
        for index, states in given.items():
            mean = states.numpy()[prompt.first :].astype(np.float64).mean(axis=0)
            np.testing.assert_allclose(found[index][:, number], mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-5)


def test_a_text_does_not_depend_on_the_others(tmp_path):
    _, _, source = model(tmp_path)
    together = router_kernels(source, PROMPTS, [1, 3])
    assert together.keys() == {1, 3}
    for number, prompt in enumerate(PROMPTS):
        alone = router_kernels(source, [prompt], [1, 3])
        for layer in (1, 3):
            np.testing.assert_allclose(alone[layer][:, 0], together[layer][:, number], rtol=1e-5, atol=1e-6)
            assert np.linalg.norm(alone[layer]) == pytest.approx(1, abs=1e-6)


def test_layers_after_the_last_one_needed_are_not_read(tmp_path):
    config, leaves, source = model(tmp_path)
    read = []

    class Watched(ModelDirectory):
        def read(self, path):
            read.append(path)
            return super().read(path)

    router_kernels(Watched(source.path), PROMPTS, [1])
    assert {path.split("/")[1] for path in read if path.startswith("layers/")} == {"0", "1"}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([PROMPTS[0], Prompt(np.array([1]), 1)], "text 2 for the router"),
        ([PROMPTS[0], PROMPTS[1], PROMPTS[0]], "texts 1 and 3 for .* first 48 tokens"),
        ([Prompt(np.arange(60) % 40), Prompt(np.arange(50) % 40)], "texts 1 and 2"),
    ],
)
def test_texts_that_say_nothing_are_refused(prompts, message, tmp_path):
    _, _, source = model(tmp_path)
    assert source.config.max_positions == 48 < MOST_TOKENS
    with pytest.raises(InputError, match=message):
        router_kernels(source, prompts, [0])


def test_hidden_states_without_a_direction_are_refused(tmp_path):
    config = dense_config()
    leaves = random_leaves(config)
    leaves["layers/1/mlp_norm/scale"] *= 0
    source = ModelDirectory(write_model(tmp_path / "dense", config, leaves))
    with pytest.raises(InputError, match="layer 1: the hidden states"):
        router_kernels(source, PROMPTS, [1])


def test_a_layer_beyond_memory_is_refused(tmp_path, monkeypatch):
    _, _, source = model(tmp_path)
    monkeypatch.setattr(beginnings, "available_memory", lambda: 1000)
    with pytest.raises(InputError, match="router need"):
        router_kernels(source, PROMPTS, [1])


@pytest.mark.parametrize(
    "options", ["", "--delta low-rank:2", "--delta sparse:0.9 --universal med --no-step0-check", "--granularity 2"]
)
def test_the_command_writes_them(options, stories, tmp_path):
    """With every form of experts, equal at step 0 where they were, and with granularity in virtual groups."""
    (tmp_path / "text.txt").write_text(TEXTS[2])
    texts = (*TEXTS[:2], f"@{tmp_path / 'text.txt'}")
    assert run(stories, tmp_path / "moe", "--every", 2, *options.split(), "--router-from", *texts) == 0
    moe, source = ModelDirectory(tmp_path / "moe"), open_source(stories)
    expected = router_kernels(source, read_prompts(source, TEXTS), [1, 3])
    for layer in (1, 3):
        router = moe.read(f"layers/{layer}/mlp/router/kernel")
        columns = np.repeat(expected[layer], router.shape[1] // 3, axis=1)
        np.testing.assert_allclose(router, columns, rtol=1e-5, atol=1e-6)
    entry = lineage_of(tmp_path / "moe")
    assert entry["options"]["router_from"] == list(texts) and entry["options"]["experts"] == 3
    assert len(set(entry["options"]["router_tokens"])) == 3
    measured = entry["measured"]
    if "--no-step0-check" not in options:
        assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]


def test_the_verb_in_memory_does_what_the_command_does(stories, tmp_path):
    assert run(stories, tmp_path / "moe", "--router-from", *TEXTS) == 0
    made = moe_jax.upcycle(stories, router_from=TEXTS)
    path = "layers/1/mlp/router/kernel"
    np.testing.assert_array_equal(made.source.read(path), ModelDirectory(tmp_path / "moe").read(path))
    assert moe_jax.plan(stories, upcycle={"router_from": TEXTS}).total_params == sum(
        spec.size for spec in made.source.specs().values()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--router-from a b --experts 3", "--router-from has 2 texts for 3 experts; give one for each"),
        ("--router-from a b --universal coder", "--universal coder has a gate network"),
        ("--router-from a b --method pesc --adapter 2 --rest full", "--router-from does not go with adapter experts"),
        ("--router-from a b --granularity 2 --experts 4", "2 texts for 4 copies of the FFN that are cut into experts"),
        ("--router-from a @nowhere.txt", "no text at nowhere.txt"),
        ("--router-from a {}", "is a file; write @"),
        ("--router-from a a", "texts 1 and 2 for the router are equal"),
    ],
)
def test_bad_options_of_the_command(options, message, tmp_path, failing):
    config = dense_config()
    files = tokenizer_file(tmp_path / "files", ("a", "b"))
    source = write_model(tmp_path / "dense", config, random_leaves(config), files)
    (tmp_path / "text.txt").write_text("a b")
    assert message in failing(source, tmp_path / "moe", *options.format(tmp_path / "text.txt").split())


def test_a_model_without_a_tokenizer_is_refused(tmp_path, failing):
    _, _, source = model(tmp_path)
    assert "has no tokenizer.json" in failing(source.path, tmp_path / "moe", "--router-from", "a", "b")


def test_other_texts_in_a_file_are_another_job(stories, tmp_path):
    """The tokens are part of what identifies the work: half of it is not gone on with after the file has changed."""
    tokens = []
    for number, text in enumerate(TEXTS[:2]):
        (tmp_path / "text.txt").write_text(text)
        assert run(stories, tmp_path / str(number), "--router-from", "A cat.", f"@{tmp_path / 'text.txt'}") == 0
        entry = json.loads((tmp_path / str(number) / "lineage.json").read_text())[-1]
        tokens.append(entry["options"]["router_tokens"])
    assert tokens[0][0] == tokens[1][0] and tokens[0][1] != tokens[1][1]
