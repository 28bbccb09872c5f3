"""Models with the gated delta rule beyond what every family is tested for: caches, padding, documents, whole models."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import moe_jax
from moe_jax.commands import cli
from moe_jax.conversion import HuggingFaceDirectory, read_hf_config, write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.generation.continued_rows import ask
from moe_jax.generation.engine import Engine
from moe_jax.generation.sizes import Size, shapes_of
from moe_jax.model_io.loading import load_model
from moe_jax.models import config_from_json, config_to_json
from moe_jax.nn import Decoder, init_cache
from tests.families.cases import CASES, SMALL
from tests.families.reference import random_model, saved
from tests.support.generated import generate
from tests.support.hf_checkpoints import CONFIGS, assert_same_bits, random_tensors, read_tensors, write_checkpoint
from tests.support.tiers import first, long

LENGTH = 80  # more than a chunk
TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, LENGTH))
APPLY = nnx.jit(lambda model, tokens, **options: model(tokens, **options))
BEGIN = nnx.jit(lambda model, tokens, **options: model(tokens, begins=True, **options))
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random small model of Transformers, and ours."""
    reference = random_model(CASES["qwen3_next"], "qwen3_next")
    return reference, load_model(saved(reference, tmp_path_factory.mktemp("delta-rule")))


@pytest.fixture(scope="module")
def expected(pair):
    return logits_of(pair[0])


def logits_of(reference, tokens=TOKENS):
    with torch.no_grad():
        return reference(torch.tensor(tokens), use_cache=False).logits.numpy()


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


def apply(model, tokens, **options):
    return APPLY(model, jnp.asarray(tokens, jnp.int32), **options)


@pytest.mark.parametrize(
    "pieces", first(1, (70, 1, 9), (LENGTH,), (1,) * LENGTH), ids=lambda pieces: f"{len(pieces)} pieces"
)
def test_a_cache_gives_the_same_logits(pair, expected, pieces):
    """A piece as long as a chunk and more, a token, and a piece shorter than one."""
    _, model = pair
    caches, start = init_cache(model.config, 2, LENGTH, jnp.dtype("float32")), 0
    for length in pieces:
        positions = jnp.broadcast_to(jnp.arange(start, start + length, dtype=jnp.int32)[None], (2, length))
        out = apply(model, TOKENS[:, start : start + length], positions=positions, caches=caches)
        assert close(out.logits, expected[:, start : start + length])
        caches, start = out.caches, start + length


def test_rows_that_begin_forget_what_was_in_their_caches_and_padding_changes_nothing(pair, expected):
    """Rows of different lengths, padded on the right, and a token more of each."""
    _, model = pair
    used = jax.tree.map(lambda one: jnp.full_like(one, 7), init_cache(model.config, 2, LENGTH, jnp.dtype("float32")))
    lengths = np.array([70, 3])
    valid = jnp.asarray(np.arange(70)[None] < lengths[:, None])
    out = BEGIN(model, jnp.asarray(TOKENS[:, :70], jnp.int32), valid=valid, caches=used)
    more = np.stack([row[[length]] for row, length in zip(TOKENS, lengths, strict=True)])
    got = apply(model, more, positions=jnp.asarray(lengths[:, None], jnp.int32), caches=out.caches).logits
    for row, length in enumerate(lengths):
        assert close(out.logits[row, :length], expected[row, :length]) and close(got[row, 0], expected[row, length])


def test_packed_documents_and_padding_before_a_text(pair, expected):
    _, model = pair
    segments = jnp.asarray([[1] * 33 + [2] * 40 + [0] * 7, [0] * 7 + [1] * 73], jnp.int32)
    positions = jnp.asarray([[*range(33), *range(40), *[0] * 7], [*[0] * 7, *range(73)]], jnp.int32)
    tokens = np.stack([TOKENS[0], np.roll(TOKENS[1], 7)])
    tokens[0, 33:73] = TOKENS[1, :40]
    got = apply(model, tokens, positions=positions, segment_ids=segments).logits
    assert close(got[0, :33], expected[0, :33]) and close(got[0, 33:73], expected[1, :40])
    assert close(got[1, 7:], expected[1, :73])


@long
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_those_of_transformers(family, tmp_path):
    """Prompts of different lengths in one batch; one by one in Transformers."""
    reference = random_model(CASES[family], family)
    model = load_model(saved(reference, tmp_path))
    prompts = [TOKENS[0, :70].tolist(), TOKENS[1, :5].tolist(), TOKENS[1, 7:8].tolist()]
    options = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    theirs = []
    for prompt in prompts:
        with torch.no_grad():
            given = {"attention_mask": torch.ones(1, len(prompt), dtype=torch.long), **options}
            theirs.append(reference.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist())
    assert generate(model, prompts, max_new_tokens=30) == theirs


@long
def test_rows_move_to_other_slots_with_their_states(pair):
    _, model = pair
    engine = Engine(model, draws=False)
    prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]

    def read(prompt):
        rows, block, _ = engine.read([prompt], ask(1, 9, key=jax.random.key(0)[None]), least=32)
        return rows, block.tokens[:, 0].tolist()

    (rows, one), (row, other) = map(read, prompts)
    engine.compile(shapes_of(rows), Size(2, 64), 32)
    rows = engine.mover.put(engine.mover.move(rows, [-1, 0], Size(2, 64)), row, 0)
    _, block = engine.advance(rows, 8, stay=np.array([True, True]))
    found = [[*one, *block.tokens[:, 1].tolist()], [*other, *block.tokens[:, 0].tolist()]]
    assert found == generate(model, prompts, max_new_tokens=9)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_whole_one(family, tmp_path, capsys):
    """Published checkpoints have the tower, and layers for further tokens, beside it; the head is said outside."""
    text = CONFIGS[f"{family}_text"]
    tensors = random_tensors({**text, "tie_word_embeddings": True})
    inside = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    more = {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "attn_output_gate": True}
    whole = {"model_type": family, "tie_word_embeddings": True, "text_config": inside | more, "vision_config": {}}
    named = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    beside = {"model.visual.blocks.0.norm1.weight": np.ones(3, np.float32), "mtp.norm.weight": np.ones(3, np.float32)}
    folder = write_checkpoint(tmp_path / "whole", whole, named | beside)
    source = HuggingFaceDirectory(folder)
    assert source.config.tie_embeddings and len(source.weights.ignored) == 2
    assert cli.main(["convert", str(folder), str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert "sees with" in said.out + said.err and "tokens after the next" in said.out + said.err
    moe_jax.export(tmp_path / "model", tmp_path / "out")
    assert_same_bits(read_tensors(tmp_path / "out"), tensors)
    keys = json.loads((tmp_path / "out" / "config.json").read_text())
    assert keys["model_type"] == f"{family}_text" and keys["rope_parameters"]["mrope_section"] == [1, 1, 0]


def test_layers_without_a_list_of_them():
    keys = {key: value for key, value in CONFIGS["qwen3_next"].items() if key != "layer_types"}
    config = read_hf_config({**keys, "num_hidden_layers": 8})
    assert config.softmax_layers == (3, 7) and config.recurrent_layers == (0, 1, 2, 4, 5, 6)
    assert read_hf_config({**keys, "full_attention_interval": 2}).softmax_layers == (1,)
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "none has attention"),
        ({"layer_types": ["linear_attention"]}, "has 1 entries"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": None, "full_attention_interval": -1}, "at least 1"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"linear_num_value_heads": 3}, "not a multiple"),
        ({"linear_conv_kernel_dim": 0}, "conv_width"),
        ({"linear_key_head_dim": "8"}, "an integer"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_configs_that_make_no_sense(family, keys, says):
    with pytest.raises(InputError, match=says):
        read_hf_config({**CONFIGS[family], **keys})


def model_of(config) -> moe_jax.Model:
    return moe_jax.Model(Decoder(config, rngs=nnx.Rngs(0)))


def test_dense_layers_beside_mixtures_leave_as_equal_experts(tmp_path):
    torch.manual_seed(0)
    dense = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIGS["qwen3_5_text"]))
    dense.save_pretrained(tmp_path / "dense")
    moe_jax.upcycle(tmp_path / "dense", tmp_path / "moe", experts=4, top_k=2, every=2, step0_check=False)
    moe_jax.export(tmp_path / "moe", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back).__name__ == "Qwen3_5MoeForCausalLM"
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected, got = (model(tokens).logits.numpy() for model in (dense.eval(), back.eval()))
    assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()


def test_what_formats_cannot_hold_is_refused(tmp_path):
    config = read_hf_config(CONFIGS["qwen3_next"])
    attention = config.layers[1]
    everywhere = dataclasses.replace(config, layers=(attention,) * 2)
    for wrong, says in (
        (dataclasses.replace(config, family="llama"), "in the place of attention"),
        (everywhere, "at least one layer"),
        (dataclasses.replace(config, layers=config.layers[:1]), "at least one layer"),
    ):
        with pytest.raises(InputError, match=says):
            write_hf_config(wrong)
    with pytest.raises(InputError, match="qwen3_next"):
        moe_jax.export(model_of(config), tmp_path / "model.gguf", format="gguf")
    assert not list(tmp_path.iterdir())


def test_sequences_are_not_split():
    config = read_hf_config(CONFIGS["qwen3_next"])
    with pytest.raises(InputError, match="mesh.sequence"):
        config.check_whole_sequences(2)
    config.check_whole_sequences(1)


def test_a_state_as_it_is_published_in_float32_keeps_its_bits(tmp_path):
    """Qwen3.5 has rates and norms of the rule in float32 beside weights in bfloat16."""
    keys = CONFIGS["qwen3_5_text"]
    tensors = random_tensors(keys, "bfloat16")
    tensors |= {name: one.astype(np.float32) for name, one in tensors.items() if "A_log" in name or "attn.norm" in name}
    moe_jax.convert(write_checkpoint(tmp_path / "theirs", keys, tensors), tmp_path / "model")
    moe_jax.export(tmp_path / "model", tmp_path / "out")
    assert_same_bits(read_tensors(tmp_path / "out"), tensors)
