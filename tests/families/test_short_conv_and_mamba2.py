"""LFM2 and Granite 4 beyond what every family is tested for: caches, padding, documents, verbs, what is refused."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

import moe_jax
from moe_jax.conversion import read_hf_config, write_hf_config
from moe_jax.conversion.families import FAMILIES
from moe_jax.conversion.gguf.gguf_metadata import described
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.model_io.loading import load_model
from moe_jax.models import ShortConvConfig, config_from_json, config_to_json
from tests.families.cases import CASES, SMALL
from tests.families.reference import random_model, saved
from tests.support.generated import generate
from tests.support.hf_checkpoints import CONFIGS, assert_same_bits, read_tensors
from tests.support.recurrent_models import logits_in_other_ways
from tests.support.tiers import long, one_in

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 20))
NAMES = ("lfm2_moe", "granitemoehybrid")


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    """A random small model of Transformers, and the checkpoint of it."""
    reference = random_model(CASES[request.param], request.param)
    return reference, saved(reference, tmp_path_factory.mktemp("hybrid"))


def logits_of(reference, tokens=TOKENS, **options):
    with torch.no_grad():
        return reference(torch.tensor(tokens), use_cache=False, **options).logits.numpy()


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


@one_in(2)
def test_caches_padding_and_documents_change_nothing(pair):
    reference, source = pair
    for got in logits_in_other_ways(load_model(source), TOKENS):
        assert close(got, logits_of(reference))


@long
def test_rows_of_different_lengths_are_generated_alike(pair):
    """Transformers pads the shorter prompt on the left."""
    reference, source = pair
    model = load_model(source)
    prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]
    padded = torch.tensor([prompts[0], [0] * 5 + prompts[1]])
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    with torch.no_grad():
        options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs = reference.generate(padded, attention_mask=mask, **options)[:, 9:].tolist()
    assert generate(model, prompts, max_new_tokens=12) == theirs


def test_the_config_is_written_as_a_kind_of_its_own():
    config = read_hf_config(CONFIGS["lfm2"])
    assert config.recurrent_layers == (0,)
    written = config_to_json(config)
    assert "short_conv" in written["segments"][0]["pattern"][0]
    assert config_from_json(json.loads(json.dumps(written))) == config
    assert "short convolution of 32 channels over 3" in config.layers[0].attention.describe()


def test_layer_types_and_widths_of_older_configs():
    base = {key: value for key, value in CONFIGS["lfm2"].items() if key != "layer_types"}
    assert read_hf_config(base).recurrent_layers == ()
    assert read_hf_config({**base, "full_attn_idxs": [1]}).recurrent_layers == (0,)
    older = {**base, "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "tie_embedding": False, "theta": 1e6}
    config = read_hf_config(older)
    assert config.ffn(0).dim == 8192 and not config.tie_embeddings
    for change, match in (
        ({"full_attn_idxs": [2]}, "full_attn_idxs has 2"),
        ({"full_attn_idxs": []}, "none has attention"),
        ({"layer_types": ["conv", "linear_attention"]}, "layer_types has"),
        ({"block_auto_adjust_ff_dim": True, "block_multiple_of": 0}, "block_multiple_of=0"),
        ({"theta": 5.0}, "'theta' is 5.0"),
    ):
        with pytest.raises(InputError, match=match):
            read_hf_config({**base, **change})


def with_mixer(config, **changes):
    layers = [
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **changes))
        if layer.is_recurrent
        else layer
        for layer in config.layers
    ]
    return dataclasses.replace(config, layers=tuple(layers))


def test_what_the_format_cannot_say_is_refused():
    config = read_hf_config(CONFIGS["lfm2"])
    with pytest.raises(InputError, match="channels is 48"):
        write_hf_config(with_mixer(config, channels=48))
    with pytest.raises(InputError, match="short convolution of 32"):
        write_hf_config(dataclasses.replace(config, family="qwen3"))
    for wrong in ({"channels": 0}, {"channels": 8, "conv_width": 0}):
        with pytest.raises(InputError, match="must be"):
            ShortConvConfig(**wrong)
    with pytest.raises(InputError, match="carries a state"):
        config.check_whole_sequences(2)
    with pytest.raises(InputError, match="lfm2"):
        described(config)


@long
@pytest.mark.parametrize("layers", [[1], [0]])  # dense layers come first in the format; others become equal experts
def test_an_upcycled_lfm2_is_one_of_transformers(layers, tmp_path):
    reference = random_model(CASES["lfm2"], "lfm2")
    dense = saved(reference, tmp_path / "dense").path
    moe_jax.upcycle(dense, tmp_path / "moe", experts=4, gate="topk_sigmoid", layers=layers)
    moe_jax.export(tmp_path / "moe", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert type(theirs).__name__ == "Lfm2MoeForCausalLM"
    assert close(logits_of(theirs.float()), logits_of(reference))
    with pytest.raises(InputError, match="lfm2"):
        moe_jax.export(moe_jax.upcycle(dense, tmp_path / "softmax"), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@long
def test_granite_4_upcycled_has_no_ffn_beside_its_experts(tmp_path):
    name = "granitemoehybrid-dense-groups-biases-rotated-tied"
    reference = random_model(CASES[name], name)
    moe = moe_jax.upcycle(saved(reference, tmp_path / "dense").path, tmp_path / "moe", experts=4, every=1)
    assert close(moe_jax.load(moe.path).decoder(jnp.asarray(TOKENS, jnp.int32)).logits, logits_of(reference))
    with pytest.raises(InputError, match="beside the experts"):
        moe_jax.export(tmp_path / "moe", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@long
def test_every_verb(pair, tmp_path):
    reference, source = pair
    moe_jax.adapt(source.path, tmp_path / "lora", method="lora", adapter="lora:2", targets="v,o")
    moe_jax.export(tmp_path / "lora", tmp_path / "peft", format="peft")
    names = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_modules"]
    outputs = ["conv.out_proj", "self_attn.out_proj"] if source.config.family == "lfm2_moe" else ["o_proj", "out_proj"]
    assert sorted(names) == sorted([*outputs, "in_proj", "v_proj"])
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(source.path)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert sum("lora_" in name for name, _ in adapted.named_parameters()) == len(stored) == 2 * 4
    moe_jax.adapt(source.path, tmp_path / "perft", method="perft-s", adapter="parallel:2")
    tokens = jnp.asarray(TOKENS, jnp.int32)
    for name in ("lora", "perft"):
        assert close(moe_jax.load(tmp_path / name).decoder(tokens).logits, logits_of(reference))
    moe_jax.compress(source.path, tmp_path / "small", method="quantize", bits=8)
    moe_jax.export(tmp_path / "small", tmp_path / "back")
    before, after = read_tensors(source.path), read_tensors(tmp_path / "back")
    kept = [name for name in before if ".conv." in name or ".mamba." in name or ".self_attn." in name]
    assert_same_bits({name: after[name] for name in kept}, {name: before[name] for name in kept})


@long
def test_a_mesh_gives_the_same_logits(pair):
    reference, source = pair
    mesh = make_mesh({"fsdp": 2, "tensor": 2, "expert": 2})
    graphdef, state = nnx.split(load_model(source))
    state = jax.device_put(state, state_shardings(state, mesh))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x).logits)(state, jnp.asarray(TOKENS, jnp.int32))
    assert close(got, logits_of(reference))


def test_a_granite_4_of_attention_alone_is_read_and_written():
    keys = {**CONFIGS["granitemoehybrid"], "layer_types": ["attention", "attention"]}
    config = read_hf_config(keys)
    assert not config.recurrent_layers and FAMILIES["granitemoehybrid"].table_of(config)
    written = write_hf_config(config)
    assert read_hf_config(written) == config and transformers.GraniteMoeHybridConfig(**written).mamba_n_heads == 1


def test_keys_of_mamba2_that_cannot_be():
    keys = CONFIGS["granitemoehybrid"]
    config = read_hf_config(keys)
    assert config.layers[0].attention.carried.state == (4, 8, 16) and config.rope.fraction == 0
    assert "Mamba-2 of 4 heads of 8 x 16" in config.layers[0].attention.describe()
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    assert read_hf_config({**keys, "time_step_limit": [0.0, math.inf]}) == config  # as Transformers 4 writes it
    for change, match in (
        ({"mamba_d_head": 5}, "mamba_d_head=5"),
        ({"mamba_d_head": "wide"}, "'mamba_d_head' is"),
        ({"mamba_n_groups": 3}, "num_groups=3"),
        ({"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ({"layer_types": ["mamba", "mamba"]}, "layer_types has"),
        ({"position_embedding_type": "alibi"}, "unknown position_embedding_type"),
    ):
        with pytest.raises(InputError, match=match):
            read_hf_config({**keys, **change})
    with pytest.raises(InputError, match="granitemoehybrid"):
        write_hf_config(dataclasses.replace(read_hf_config(CONFIGS["lfm2"]), family="granitemoehybrid"))
    with pytest.raises(InputError, match="lfm2_moe"):
        write_hf_config(dataclasses.replace(config, family="lfm2_moe"))
