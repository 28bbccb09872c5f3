"""Nemotron-H beyond what every family is tested for: layers of one branch, caches, steps, verbs, what is refused."""

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
from moe_jax.conversion import read_hf_config, write_hf_config
from moe_jax.conversion.gguf.architectures.gguf_architectures import only_moe
from moe_jax.conversion.gguf.gguf_metadata import described
from moe_jax.conversion.hf_format import exported_config
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.model_io.loading import load_model
from moe_jax.models import NoAttentionConfig, NoFFNConfig, config_from_json, config_to_json
from moe_jax.upcycling.dense_to_moe import upcycled_config
from moe_jax.upcycling.spec import UpcycleSpec
from tests.families.cases import CASES, SMALL
from tests.families.reference import random_model, saved
from tests.support.generated import generate
from tests.support.hf_checkpoints import CONFIGS, assert_same_bits, random_tensors, read_tensors, write_checkpoint
from tests.support.recurrent_models import logits_in_other_ways
from tests.support.tiers import long

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 20))
KEYS = CONFIGS["nemotron_h"]


def made(name, folder, **changes):
    """A random small model of Transformers, and the checkpoint of it."""
    reference = random_model(CASES[name], name)
    for mixer in (layer.mixer for layer in reference.model.layers if hasattr(layer.mixer, "time_step_limit")):
        mixer.time_step_limit = (changes.get("time_step_min", 0.001), float("inf"))
    reference.config.update(changes)
    return reference, saved(reference, folder)


def logits_of(reference, tokens=TOKENS):
    with torch.no_grad():
        return reference(torch.tensor(tokens), use_cache=False).logits.numpy()


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


def test_caches_padding_and_documents_change_nothing(tmp_path):
    """Steps below the smallest are raised to it: about a third of them."""
    reference, source = made("nemotron_h", tmp_path, time_step_min=0.6)
    for got in logits_in_other_ways(load_model(source), TOKENS):
        assert close(got, logits_of(reference))


@long
def test_rows_of_different_lengths_are_generated_alike(tmp_path):
    """Transformers pads the shorter prompt on the left."""
    reference, source = made("nemotron_h", tmp_path)
    prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]
    padded = torch.tensor([prompts[0], [0] * 5 + prompts[1]])
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    with torch.no_grad():
        options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs = reference.generate(padded, attention_mask=mask, **options)[:, 9:].tolist()
    assert generate(load_model(source), prompts, max_new_tokens=12) == theirs


@long
def test_a_mesh_gives_the_same_logits(tmp_path):
    reference, source = made("nemotron_h", tmp_path)
    mesh = make_mesh({"fsdp": 2, "tensor": 2, "expert": 2})
    graphdef, state = nnx.split(load_model(source))
    state = jax.device_put(state, state_shardings(state, mesh))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x).logits)(state, jnp.asarray(TOKENS, jnp.int32))
    assert close(got, logits_of(reference))


# --- configs --------------------------------------------------------------------------------------


def test_layers_of_one_branch_are_written_and_read():
    config = read_hf_config(KEYS)
    assert [layer.branches for layer in config.layers] == [("attention",), ("mlp",), ("attention",), ("mlp",)]
    assert config.moe_layers == (1,) and config.softmax_layers == (2,)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    words = [(layer.attention.describe(), layer.mlp.describe()) for layer in config.layers]
    assert words[0] == ("Mamba-2 of 4 heads of 8 x 12, 2 groups", "no FFN") and words[3][0] == "no attention"


def test_the_kinds_of_layers_by_pattern_and_by_list():
    config = read_hf_config(KEYS)
    others = {key: value for key, value in KEYS.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    assert (
        read_hf_config({**others, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}) == config
    )
    assert read_hf_config({**others, "layers_block_type": ["mamba", "moe", "attention", "mlp"]}) == config
    assert write_hf_config(config)["hybrid_override_pattern"] == "ME*-"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hybrid_override_pattern": None}, "neither"),
        ({"hybrid_override_pattern": "ME*"}, "num_hidden_layers=4"),
        ({"hybrid_override_pattern": "ME*x"}, "unknown kind"),
        ({"hybrid_override_pattern": ""}, "at least one layer"),
        ({"hybrid_override_pattern": "MMMM"}, "without attention"),
        ({"layers_block_type": ["moe", "mlp", "mamba", "attention"]}, "keep one"),
        ({"moe_latent_size": 8}, "moe_latent_size"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_head_dim": 16}, "attention_head_dim"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"n_groups": 3}, "not a multiple"),
        ({"time_step_min": -1.0}, "least_step"),
        ({"mlp_hidden_act": "relu3"}, "unknown mlp_hidden_act"),
    ],
    ids=str,
)
def test_configs_that_make_no_sense(change, says):
    with pytest.raises(InputError, match=says):
        read_hf_config({**KEYS, **change})


def test_a_layer_has_a_branch():
    config = read_hf_config(KEYS)
    nothing = {"attention": NoAttentionConfig(), "mlp": NoFFNConfig()}
    for changes in (nothing, {"parallel": True}):
        with pytest.raises(InputError, match="a layer needs"):
            dataclasses.replace(config.layers[0], **changes)
    with pytest.raises(InputError, match="dim=0"):
        dataclasses.replace(config.moe(1), expert=NoFFNConfig())


def test_what_formats_cannot_hold_is_refused():
    config = read_hf_config(KEYS)
    mamba, moe, attention, ffn = config.layers

    def of(*layers):
        return dataclasses.replace(config, layers=layers)

    for wrong, says in (
        (dataclasses.replace(config, family="llama"), "attention alone"),
        (dataclasses.replace(of(ffn, mamba), family="qwen3_next"), "an FFN"),
        (of(mamba, moe), "at least one layer"),
        (of(attention, moe), "at least one layer"),
        (of(mamba, dataclasses.replace(attention, mlp=ffn.mlp)), "both attention"),
        (
            of(
                mamba,
                attention,
                dataclasses.replace(moe, mlp=dataclasses.replace(moe.mlp, universal="none", universal_dim=None)),
            ),
            "beside",
        ),
    ):
        with pytest.raises(InputError, match=says):
            write_hf_config(wrong)


def test_gguf_files_are_refused_for_the_family_and_not_for_its_dense_layers():
    with pytest.raises(InputError, match="are not written"):
        described(exported_config(read_hf_config(KEYS), replicate_dense=True, all_moe=only_moe))


# --- verbs ----------------------------------------------------------------------------------------


def test_layers_without_an_ffn_are_not_upcycled():
    config = read_hf_config({**KEYS, "hybrid_override_pattern": "-M-*"})
    assert upcycled_config(config, UpcycleSpec(experts=4)).moe_layers == (2,)
    assert upcycled_config(config, UpcycleSpec(experts=4, every=1)).moe_layers == (0, 2)
    with pytest.raises(InputError, match="layers 1 have no FFN"):
        upcycled_config(config, UpcycleSpec(experts=4, layers=(1, 2)))


@long
def test_every_verb(tmp_path, capsys):
    reference, source = made("nemotron_h", tmp_path / "theirs")
    logits, tokens = logits_of(reference), jnp.asarray(TOKENS, jnp.int32)
    moe_jax.adapt(source.path, tmp_path / "lora", method="lora", adapter="lora:2", targets="v,up")
    moe_jax.adapt(source.path, tmp_path / "qlora", method="lora", adapter="lora:2", targets="v,up", base="nf4")
    moe_jax.adapt(source.path, tmp_path / "perft", method="perft-s", adapter="parallel:2")
    for name in ("lora", "perft"):
        assert close(moe_jax.load(tmp_path / name).decoder(tokens).logits, logits)
    moe_jax.compress(source.path, tmp_path / "small", method="quantize", bits=8)
    moe_jax.export(tmp_path / "small", tmp_path / "back")
    before, after = read_tensors(source.path), read_tensors(tmp_path / "back")
    kept = [name for name in before if ".experts." not in name]
    assert_same_bits({name: after[name] for name in kept}, {name: before[name] for name in kept})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert type(theirs).__name__ == "NemotronHForCausalLM"
    with pytest.raises(InputError, match="are not written"):
        moe_jax.export(source.path, tmp_path / "model.gguf", format="gguf")
    for words in (["inspect", str(source.path)], ["plan", str(source.path)]):
        assert cli.main(words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "Mamba-2 of 4 heads" in said and "no attention" not in said


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    tensors = random_tensors(KEYS)
    beside = {"mtp.layers.0.norm.weight": np.ones(3, np.float32)}
    moe_jax.convert(write_checkpoint(tmp_path / "theirs", KEYS, tensors | beside), tmp_path / "model")
    moe_jax.export(tmp_path / "model", tmp_path / "out")
    assert_same_bits(read_tensors(tmp_path / "out"), tensors)
