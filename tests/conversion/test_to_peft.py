"""LoRA in the format of the PEFT library: what it loads computes what the tuned model does."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.conversion.families import family_named
from moe_jax.conversion.safetensors_file import read_header
from moe_jax.conversion.to_peft import base_name, export_peft
from moe_jax.core.errors import InputError
from moe_jax.experts.shapes import AdapterConfig, LoRAConfig
from moe_jax.model_io.adapter_dir import AdapterDirectory, AdapterDirectoryWriter
from moe_jax.model_io.loading import leaf_specs, load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.models.moe_config import PerftConfig
from moe_jax.peft.adapt import adapted_config, targets_of
from moe_jax.peft.spec import AdaptSpec
from tests.support.dense_models import write_model
from tests.support.hf_checkpoints import BASE, CONFIGS, random_tensors, write_checkpoint
from tests.support.tiers import long, one_in

TOKENS = np.array([[1, 5, 9, 33, 2, 60, 17, 4]])
TWO_LAYERS = {**BASE, "num_hidden_layers": 2}
LLAMA = {**TWO_LAYERS, "model_type": "llama", "attention_bias": True}
MIXTRAL = {**TWO_LAYERS, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OLMOE = {**TWO_LAYERS, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}


def lora(rank: int, *targets: str, scale: float = 2.0) -> LoRAConfig:
    return LoRAConfig(rank=rank, targets=targets, scale=scale)


def with_attention(config, *loras):
    layers = [
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, lora=one))
        for layer, one in zip(config.layers, loras, strict=True)
    ]
    return dataclasses.replace(config, layers=tuple(layers), frozen_base=True)


def with_mlp(config, **changes):
    """Changes the FFN or MoE of the first layer."""
    first = dataclasses.replace(config.layers[0], mlp=dataclasses.replace(config.layers[0].mlp, **changes))
    return dataclasses.replace(config, layers=(first, *config.layers[1:]))


def base_of(folder, keys) -> HuggingFaceDirectory:
    return HuggingFaceDirectory(write_checkpoint(folder / "base", keys, random_tensors(keys)))


def write_adapter(folder, base, config, trained=()) -> AdapterDirectory:
    rng = np.random.default_rng(1)
    with AdapterDirectoryWriter(folder, config, base=base, tokenizer_files=(), lineage=[], trained=trained) as writer:
        for path, spec in leaf_specs(config).items():
            if path in own_leaves(config) | frozenset(trained):
                writer.write({path: rng.normal(0, 0.3, spec.shape).astype(np.float32)})
    return open_source(folder)


def logits(source) -> np.ndarray:
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens).logits)(load_model(source), jnp.asarray(TOKENS)))


def logits_of_peft(base: HuggingFaceDirectory, adapter) -> tuple[np.ndarray, np.ndarray]:
    """Logits of Transformers without the adapter, and with it as PEFT loads it."""
    import peft
    import torch
    import transformers

    # By its name, for not all classes are known to the auto classes.
    theirs = getattr(transformers, family_named(base.config.family).architecture).from_pretrained(base.path)
    with torch.no_grad():
        plain = theirs(torch.tensor(TOKENS)).logits.numpy()
        # It warns of keys that are missing or unexpected; the first sort would be left at random, the second out.
        tuned = peft.PeftModel.from_pretrained(theirs, adapter)
        names = set(peft.get_peft_model_state_dict(tuned))
        assert names == set(read_header(adapter / "adapter_model.safetensors"))
        return plain, tuned.eval()(torch.tensor(TOKENS)).logits.numpy()


def assert_peft_computes_the_same(base, source, out) -> None:
    plain, found = logits_of_peft(base, out)
    expected = logits(source)
    # LoRA that is left out changes logits by far more than rounding does, which its large numbers amplify.
    tolerance = 1e-4 * np.abs(expected).max()
    assert np.abs(plain - expected).max() > 10 * tolerance
    np.testing.assert_allclose(found, expected, atol=tolerance)


@pytest.mark.parametrize("keys", [LLAMA, OLMOE], ids=["llama", "olmoe"])
def test_peft_gives_the_logits_of_the_tuned_model(tmp_path, capsys, keys):
    base = base_of(tmp_path, keys)
    if keys is LLAMA:  # different in every layer, and beside the FFN too
        config = with_attention(base.config, lora(2, "q", "v"), lora(3, "q", "k", "o", scale=0.7))
        config = with_mlp(config, lora=lora(4, "gate", "down", scale=1.5))
    else:
        config = with_attention(base.config, *[lora(4, "q", "k", "v", "o", scale=0.25)] * 2)
    source = write_adapter(tmp_path / "adapter", base, config)
    assert cli.main(["export", str(source.path), str(tmp_path / "out"), "--format", "peft"]) == 0
    assert "LoRA beside" in capsys.readouterr().err

    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(base.path) and said["target_parameters"] is None
    if keys is OLMOE:
        assert (said["target_modules"], said["r"], said["lora_alpha"]) == (
            ["q_proj", "k_proj", "v_proj", "o_proj"],
            4,
            1,
        )
        assert not said["rank_pattern"] and not said["alpha_pattern"]
    assert_peft_computes_the_same(base, source, tmp_path / "out")


@one_in(2, first=1)
@pytest.mark.parametrize(
    ("keys", "in_every_layer"), [(OLMOE, False), (MIXTRAL, True)], ids=["olmoe, some", "mixtral, all"]
)
def test_experts_and_routers_are_parameters(tmp_path, capsys, keys, in_every_layer):
    """PEFT orders a rank by experts in one factor and experts by ranks in the other; its own forward decides."""
    base = base_of(tmp_path, keys)
    config = with_attention(base.config, lora(2, "q"), lora(2, "q", scale=0.5))
    expert = base.config.layers[0].mlp.expert
    tuned = {"expert": dataclasses.replace(expert, lora=lora(3, "up", "down", "gate", scale=1.5))}
    config = with_mlp(config, router_lora=lora(1, "router", scale=0.7), **tuned)
    if in_every_layer:
        config = dataclasses.replace(config, layers=(config.layers[0],) * 2)
    else:
        first, second = config.layers
        other = dataclasses.replace(second.mlp, expert=dataclasses.replace(expert, lora=lora(2, "up")))
        config = dataclasses.replace(config, layers=(first, dataclasses.replace(second, mlp=other)))
    source = write_adapter(tmp_path / "adapter", base, config)
    assert cli.main(["export", str(source.path), str(tmp_path / "out"), "--format", "peft"]) == 0
    assert f"LoRA beside 2 linear modules and {6 if in_every_layer else 4} parameters" in capsys.readouterr().err
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    short = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    names = ["model.layers.0.mlp.gate.weight", "mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    assert sorted(said["target_parameters"]) == sorted(short if in_every_layer else names)
    # Gate and up have columns of their own in the factors of the tensor that holds both.
    assert said["r"] == 6 and said["lora_dropout"] == 0
    assert_peft_computes_the_same(base, source, tmp_path / "out")


# Transformers has them itself, as causal models; and a tensor of a matrix for each. Of Arcee Trinity PEFT takes the
# gate of attention for one of an FFN, which it would join with another map.
OTHERS = ("qwen", "deepseek", "t5", "switch_transformers", "gpt_oss", "llama4_text", "kimi_k2", "afmoe")
FAMILIES = [name for name, keys in CONFIGS.items() if keys["model_type"] not in OTHERS]
# A choice of keys that layers share goes no further than these are.
OWN_KEYS = {"glm_moe_dsa": {"index_topk": TOKENS.size}}


def assert_exported_whole(folder, base, targets) -> None:
    spec = AdaptSpec(method="lora", adapter="lora:2", targets=targets)
    source = write_adapter(folder / "-".join(targets), base, adapted_config(base.config, spec))
    out = folder / f"{'-'.join(targets)} in PEFT"
    export_peft(source, out)
    assert_peft_computes_the_same(base, source, out)


def exported_targets(base) -> tuple[str, ...]:
    """The targets of a model, but for one beside which PEFT puts no LoRA."""
    refused = ("o",) if base.config.family == "nemotron_h" else ()
    return tuple(name for name in targets_of(base.config) if name not in refused)


@long
@one_in(8, first=5)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_every_target(tmp_path, family):
    """Attention, dense layers, experts, shared experts and routers."""
    base = base_of(tmp_path, CONFIGS[family] | OWN_KEYS.get(family, {}))
    assert_exported_whole(tmp_path, base, exported_targets(base))


@long
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_each_target_alone(tmp_path, family):
    base = base_of(tmp_path, CONFIGS[family] | OWN_KEYS.get(family, {}))
    for name in exported_targets(base):
        assert_exported_whole(tmp_path, base, (name,))


@one_in(2)
@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_of_experts_as_kernels_peft_adapts_attention_only(tmp_path, family):
    base = base_of(tmp_path, CONFIGS[family])
    assert_exported_whole(tmp_path, base, ("q", "v"))
    for name in ("gate", "down"):
        with pytest.raises(InputError, match="has another shape"):
            assert_exported_whole(tmp_path, base, (name,))


def test_what_peft_refuses_is_refused_first(tmp_path):
    base = base_of(tmp_path, CONFIGS["nemotron_h"])
    with pytest.raises(InputError, match="mixer.out_proj"):
        assert_exported_whole(tmp_path, base, ("o",))


def test_what_peft_cannot_say_is_refused(tmp_path, capsys):
    base = base_of(tmp_path, OLMOE)
    plain = with_attention(base.config, *[lora(2, "q")] * 2)
    perft = PerftConfig(variant="single", adapter=AdapterConfig(rank=2))
    refused = {
        "PERFT experts": with_mlp(plain, perft=perft),
    }
    for index, (phrase, config) in enumerate(refused.items()):
        source = write_adapter(tmp_path / f"adapter{index}", base, config)
        assert cli.main(["export", str(source.path), str(tmp_path / "out"), "--format", "peft"]) == 2
        said = capsys.readouterr().err
        assert f"{phrase} have no place in it" in said and said.count("\n") == 1

    retrained = write_adapter(tmp_path / "retrained", base, plain, trained=("final_norm/scale",))
    for source, options, phrase in (
        (base.path, ["--format", "peft"], "is not an adapter directory"),
        (retrained.path, ["--format", "peft"], "1 leaves of the base were trained too, the first is final_norm/scale"),
        (retrained.path, ["--format", "peft", "--dtype", "bfloat16"], "--dtype: does not go with --format peft"),
        (retrained.path, [], "holds: fold them with moe-jax merge\n"),
        (tmp_path / "adapter0", [], "has PERFT experts, which no format holds but its own"),
    ):
        assert cli.main(["export", str(source), str(tmp_path / "out"), *options]) == 2
        assert phrase in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


@pytest.mark.parametrize("kind", ["PERFT", "PESC"])
def test_what_is_said_of_lora_beside_experts_can_be_done(tmp_path, kind, capsys):
    if kind == "PERFT":
        base = base_of(tmp_path, OLMOE)
        config = with_mlp(base.config, perft=PerftConfig(variant="routed", num_experts=2, top_k=1,
                                                         adapter=AdapterConfig(rank=2)))  # fmt: skip
        path = write_adapter(tmp_path / "adapter", base, with_attention(config, *[lora(2, "q")] * 2)).path
    else:
        path, base = tmp_path / "adapter", base_of(tmp_path, LLAMA)
        how = ["--method", "pesc", "--experts", "4", "--top-k", "2", "--adapter", "2", "--rest", "lora:2"]
        assert cli.main(["upcycle", str(base.path), str(path), *how]) == 0
    for options in ([], ["--format", "peft"]):
        assert cli.main(["export", str(path), str(tmp_path / "out"), *options]) == 2
    plain, _ = capsys.readouterr().err.splitlines()[-2:]
    assert "keep the model directory" in plain and "moe-jax merge --partly folds the LoRA" in plain
    assert cli.main(["merge", str(path), str(tmp_path / "folded"), "--partly"]) == 0
    assert "LoRA folded into" in capsys.readouterr().out
    assert cli.main(["export", str(tmp_path / "folded"), str(tmp_path / "out")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "keep the model directory" in said and "--partly" not in said


def test_says_what_the_adapter_stands_on(tmp_path, capsys):
    """A base that is no Hugging Face checkpoint yet, and was quantised for training."""
    leaves = base_of(tmp_path, LLAMA)
    base = ModelDirectory(write_model(tmp_path / "model", leaves.config, {p: leaves.read(p) for p in leaves.specs()}))
    config = with_attention(base.config, *[lora(2, "q")] * 2)
    attention = dataclasses.replace(config.layers[0].attention, nf4=True)
    config = dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], attention=attention),) * 2)
    source = write_adapter(tmp_path / "adapter", base, config)
    assert cli.main(["export", str(source.path), str(tmp_path / "out"), "--format", "peft"]) == 0
    said = capsys.readouterr().err
    assert f"moe-jax export {base.path} DST" in said and "trained over NF4 kernels" in said
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_a_base_that_was_converted_is_named_by_its_origin(tmp_path):
    checkpoint = base_of(tmp_path, LLAMA)
    for name, options in (("model", []), ("narrow", ["--dtype", "bf16"])):
        assert cli.main(["convert", str(checkpoint.path), str(tmp_path / name), *options]) == 0
    assert base_name(open_source(tmp_path / "model")) == str(checkpoint.path)
    assert base_name(open_source(tmp_path / "narrow")) is None


def test_adapt_says_what_cannot_be_exported(tmp_path, capsys):
    deepseek = {**TWO_LAYERS, **CONFIGS["deepseek"]}
    base = base_of(tmp_path, deepseek)
    for targets, is_told in (("q,v", False), ("up", True)):
        out = str(tmp_path / targets)
        options = ["--method", "lora", "--adapter", "lora:2", "--targets", targets, "--no-step0-check"]
        assert cli.main(["adapt", str(base.path), out, *options]) == 0
        assert ("note: export --format peft will not take it" in capsys.readouterr().out) == is_told
