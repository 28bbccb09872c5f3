"""`ModelConfig`: what it refuses, and its JSON."""

import dataclasses
import json

import pytest

from moe_jax.core.errors import InputError
from moe_jax.models import (
    AttentionConfig,
    BankConfig,
    FFNConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    SelectionConfig,
    config_from_json,
    config_to_json,
)

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, sliding_window=7, qk_norm="head")
FFN = FFNConfig(dim=24)
MOE = MoEConfig(expert=FFN, num_experts=4, top_k=2, bank=BankConfig(kind="sparse", rate=0.9, train_base=False))
SHARED = dataclasses.replace(
    MOE,
    gate="topk_sigmoid",
    gate_scale=2.5,
    universal="sigmoid",
    selection=SelectionConfig(bias=True, groups=2, group_score="best_two"),
)
CONFIG = ModelConfig(
    family="llama",
    vocab_size=32,
    d_model=16,
    max_positions=64,
    layers=(LayerConfig(attention=ATTENTION, mlp=FFN), LayerConfig(attention=ATTENTION, mlp=MOE)) * 3,
    rope=RopeConfig(scaling="longrope", factor=2.0, short_factor=(1.0, 1.5) * 4, long_factor=(2.0, 3.0) * 4),
    eos_ids=(2, 3),
    foreign={"initializer_range": 0.02, "nested": {"kept": [1, None]}},
)


def test_json_round_trip():
    text = json.dumps(config_to_json(CONFIG))
    again = config_from_json(json.loads(text))
    assert again == CONFIG
    assert hash(again) == hash(CONFIG)
    assert again.foreign == CONFIG.foreign
    assert len(json.loads(text)["segments"]) == 1  # written as a run, to be read by people


def test_what_older_files_lack_is_written_only_where_it_says_something():
    own = dataclasses.replace(ATTENTION, rope_interleaved=True, output_gate=True, biases=("gate",))
    layers = (LayerConfig(attention=own, mlp=FFN, residual_scale=0.5), LayerConfig(attention=ATTENTION, mlp=FFN))
    config = dataclasses.replace(CONFIG, layers=layers, norm="layer_unbiased")
    written = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(written) == config
    first, second = written["segments"][0]["pattern"][0], written["segments"][1]["pattern"][0]
    assert (first["residual_scale"], first["attention"]["output_gate"]) == (0.5, True)
    assert "residual_scale" not in second and not {"output_gate", "rope_interleaved"} & second["attention"].keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: LayerConfig(attention=ATTENTION, mlp=FFN, residual_scale=0.5, parallel=True), "residual_scale=0.5"),
        (lambda: LayerConfig(attention=ATTENTION, mlp=FFN, residual_scale=0.5, norm_position="both"), "norm_position"),
        (lambda: LayerConfig(attention=ATTENTION, mlp=FFN, residual_scale=-1.0), "residual_scale"),
        (lambda: LayerConfig(attention=ATTENTION, mlp=FFN, cross=dataclasses.replace(
            ATTENTION, mask="bidirectional", sliding_window=None, output_gate=True)), "neither output_gate"),
        (lambda: AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, output_gate=True,
            latent=LatentConfig(kv_rank=4, rope_dim=4, value_dim=4)), "for plain attention"),
    ],
)  # fmt: skip
def test_where_newer_fields_have_no_place(change, message):
    with pytest.raises(InputError, match=message):
        change()


def test_json_of_layers_that_are_not_llamas():
    own = dataclasses.replace(ATTENTION, biases=("q", "o"), scale=0.5, rope=RopeConfig(fraction=0.25))
    cross = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, mask="bidirectional", source_dim=6)
    layers = (
        LayerConfig(attention=own, mlp=FFN, parallel=True, shared_norm=True),
        LayerConfig(attention=ATTENTION, mlp=SHARED, cross=cross, norm_position="both"),
    )
    config = dataclasses.replace(
        CONFIG, layers=layers, norm="none", final_norm=False, learned_positions=True, num_classes=3, logit_soft_cap=9.0
    )
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_older_files_say_in_two_flags_which_projections_have_biases():
    data = json.loads(json.dumps(config_to_json(CONFIG)))
    for layer, flags in zip(data["segments"][0]["pattern"], ((True, False), (False, True)), strict=True):
        del layer["attention"]["biases"]
        layer["attention"] |= {"qkv_bias": flags[0], "out_bias": flags[1]}
    biases = [layer.attention.biases for layer in config_from_json(data).layers]
    assert biases == [("q", "k", "v"), ("o",)] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("format"), "has no format 'moe_jax.model'"),
        (lambda d: d.update(version=99), "version 99, this .* version 2"),
        (lambda d: d.update(vocab_sise=3), r"config.json: unknown key 'vocab_sise' \(did you mean 'vocab_size'\?\)"),
        (lambda d: d.pop("d_model"), "key 'd_model' is missing"),
        (lambda d: d.pop("segments"), "key 'segments' is missing"),
        (lambda d: d["segments"][0]["pattern"][0].pop("ffn"), r"pattern\[0\]: a layer has one of"),
        (lambda d: d["segments"][0]["pattern"][1]["moe"].update(gate="topk"), r"\[1\].moe: unknown gate 'topk' .did"),
        (lambda d: d["rope"].update(scaling="ntk"), "rope.scaling: expected one of .*'llama3', .*ntk"),
        (lambda d: d.update(d_model="16"), "d_model: expected .* string .16."),
        (lambda d: d.update(bos_id=True), "bos_id: expected an integer"),
        (lambda d: d.update(eos_ids=[2, None]), r"eos_ids\[1\]: expected an integer"),
        (lambda d: d["segments"][0].update(repeats=1.5), "repeats: expected .* number 1.5"),
        (lambda d: d["rope"].update(short_factor=3), "rope.short_factor: expected a list, .*, got the integer 3"),
    ],
)
def test_bad_json(change, message):
    data = json.loads(json.dumps(config_to_json(CONFIG)))
    change(data)
    with pytest.raises(InputError, match=message):
        config_from_json(data)


@pytest.mark.parametrize("bank", [BankConfig(kind="quantized", bits=4), BankConfig(kind="sparse", rate=0.5, bits=2)])
def test_quantised_experts_of_the_first_version_are_refused(bank):
    """Their codes would be taken for others; anything else of that version is read."""

    def of_first_version(config):
        return {**json.loads(json.dumps(config_to_json(config))), "version": 1}

    assert config_from_json(of_first_version(CONFIG)) == CONFIG
    layers = (CONFIG.layers[0], dataclasses.replace(CONFIG.layers[1], mlp=dataclasses.replace(MOE, bank=bank)))
    quantised = dataclasses.replace(CONFIG, layers=layers)
    assert config_from_json(json.loads(json.dumps(config_to_json(quantised)))) == quantised
    with pytest.raises(InputError, match="version 1.*compress the .* again"):
        config_from_json(of_first_version(quantised))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionConfig(num_heads=4, num_kv_heads=3, head_dim=8), "multiple of num_kv_heads=3"),
        (lambda: AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=7), "must be even"),
        (lambda: AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=0), "positive integer"),
        (lambda: dataclasses.replace(ATTENTION, biases=("k", "q")), "in .* o"),
        (lambda: dataclasses.replace(ATTENTION, biases=("w",)), "unknown bias 'w'"),
        (lambda: dataclasses.replace(ATTENTION, mask="prefix"), "go with mask 'prefix'"),
        (lambda: dataclasses.replace(ATTENTION, mask="acausal"), "unknown mask 'acausal' .did you mean 'causal'"),
        (lambda: LayerConfig(attention=ATTENTION, mlp=FFN, parallel=True, norm_position="post"), "go with .* 'pre'"),
        (lambda: LayerConfig(attention=ATTENTION, mlp=FFN, shared_norm=True), "in parallel"),
        (lambda: LayerConfig(attention=ATTENTION, mlp=FFN, cross=ATTENTION), "mask must be 'bidirectional'"),
        (lambda: LayerConfig(attention=dataclasses.replace(ATTENTION, source_dim=4), mlp=FFN), "cross-attention only"),
        (lambda: dataclasses.replace(CONFIG, num_classes=3, tie_embeddings=True), "cannot be tied"),
        (lambda: FFNConfig(dim=0), "dim=0 must be a"),
        (lambda: FFNConfig(dim=8, activation="swish"), "unknown activation 'swish'"),
        (lambda: MoEConfig(expert=FFN, num_experts=2, top_k=3), "top_k=3 is above num_experts=2"),
        (lambda: MoEConfig(expert=FFN, num_experts=4, top_k=2, gate="top1"), "routes to one"),
        (lambda: MoEConfig(expert=FFN, num_experts=4, top_k=2, capacity_factor=0.0), "above 0"),
        (lambda: SelectionConfig(groups=2, top_groups=3), "top_groups=3 is above groups=2"),
        (lambda: dataclasses.replace(MOE, selection=SelectionConfig(groups=3)), "must divide the number"),
        (lambda: dataclasses.replace(MOE, selection=SelectionConfig(groups=4)), "top_k=2 experts cannot"),
        (
            lambda: dataclasses.replace(MOE, selection=SelectionConfig(groups=4, top_groups=2, group_score="best_two")),
            "'best_two' needs two",
        ),
        (lambda: dataclasses.replace(MOE, universal="coder", selection=SelectionConfig(bias=True)), "leave selection"),
        (lambda: dataclasses.replace(MOE, universal="med", gate="top1", top_k=1), "go with universal 'med'"),
        (lambda: BankConfig(kind="low-rank"), "bank kind 'low-rank' lacks its rank"),
        (lambda: BankConfig(kind="low-rank", rank=0), "rank=0 must be a"),
        (lambda: BankConfig(kind="sparse", rate=1.0), r"must lie in \[0, 1\)"),
        (lambda: BankConfig(kind="full", rank=3), "rank=3 .* 'full': low-rank and joint-low-rank and .* have one"),
        (lambda: dataclasses.replace(CONFIG, layers=()), "least one layer"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_delta_that_does_not_fit_names_its_layer():
    bank = BankConfig(kind="low-rank", rank=17)
    layer = LayerConfig(attention=ATTENTION, mlp=dataclasses.replace(MOE, bank=bank))
    with pytest.raises(InputError, match=r"layer 1: rank 17 is above min\(d, f\) = 16"):
        dataclasses.replace(CONFIG, layers=(CONFIG.layers[0], layer))
