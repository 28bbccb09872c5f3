"""The keys of config.json for rotary embeddings: in both styles, for all families."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import re

import pytest

from moe_jax.conversion import read_hf_config, write_hf_config
from moe_jax.conversion.families import FAMILIES
from moe_jax.core.errors import InputError
from moe_jax.models import RopeConfig
from tests.support.hf_checkpoints import CONFIGS, complaint

LLAMA = CONFIGS["llama"]


ROPES = [
    ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}, RopeConfig(theta=5e5)),
    (
        {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 1e5, "rope_type": "linear", "factor": 4.0},
        RopeConfig(theta=1e5, scaling="linear", factor=4.0),
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2}},
        {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0},
        RopeConfig(scaling="dynamic", factor=2.0),
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}},
        {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
         "truncate": False},
        RopeConfig(scaling="yarn", factor=4.0, original_max_positions=32, truncate=False),
    ),
    (
        # DeepSeek's keys; the factor of the lengths, 128 / 32, where none is given
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32, "mscale": 0.7,
                          "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2}},
        {"rope_theta": 1e4, "rope_type": "yarn", "original_max_position_embeddings": 32, "mscale": 0.7,
         "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
        RopeConfig(scaling="yarn", factor=4.0, original_max_positions=32, mscale=0.7, mscale_all_dim=0.7,
                   beta_fast=16.0, beta_slow=2.0),
    ),
    (
        {"original_max_position_embeddings": 64,
         "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
        {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "original_max_position_embeddings": 64},
        RopeConfig(scaling="longrope", factor=2.0, original_max_positions=64, short_factor=(1.0,) * 4,
                   long_factor=(2.0,) * 4),
    ),
    (
        {"rope_theta": 5e5, "rope_scaling": CONFIGS["llama-llama3"]["rope_scaling"]},
        {"rope_theta": 5e5, **CONFIGS["llama-llama3"]["rope_scaling"]},
        RopeConfig(theta=5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_positions=32),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), ROPES, ids=lambda rope: getattr(rope, "scaling", ""))
def test_rope_in_both_styles(old: dict, new: dict, expected: RopeConfig):
    assert read_hf_config({**LLAMA, **old}).rope == expected
    assert read_hf_config({**LLAMA, "rope_parameters": new}).rope == expected
    assert read_hf_config(write_hf_config(read_hf_config({**LLAMA, **old}))).rope == expected


def test_a_rope_parameter_that_is_null_is_not_given():
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0, "partial_rotary_factor": None}
    assert read_hf_config({**LLAMA, "rope_parameters": parameters}).rope == RopeConfig(
        theta=7.0, scaling="linear", factor=2.0
    )


def test_part_of_a_head_is_rotated_in_the_families_alone_whose_code_in_transformers_does():
    folder = pathlib.Path(importlib.util.find_spec("transformers").origin).parent / "models"
    for name, config in CONFIGS.items():
        family = FAMILIES[config["model_type"]]
        code = [*(folder / family.name.removesuffix("_text")).glob("modeling_*.py")]
        if name != family.name or family.own_code or not code:
            continue
        # The names of what their code cuts off a head before it rotates it.
        rotates_parts = any(re.search("rotary_ndims|rotary_dim = cos", file.read_text()) for file in code)
        assert family.rotates_parts == rotates_parts, name
        if not rotates_parts and name != "nemotron_h":  # which rotates nothing
            assert "partial_rotary_factor" in complaint({**config, "partial_rotary_factor": 0.5}), name


def test_windows_of_olmo3_may_have_a_base_of_their_own():
    types = ("full_attention", "sliding_attention")
    given = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(types, (1e6, 1e4), strict=True)}
    olmo3 = {key: value for key, value in CONFIGS["olmo3"].items() if key not in ("rope_theta", "rope_scaling")}
    config = read_hf_config({**olmo3, "rope_parameters": given})
    assert {config.rope_of(layer).theta for layer in config.layers} == {1e6, 1e4}
    written = write_hf_config(config)
    assert written["rope_parameters"] == given and read_hf_config(written) == config


@pytest.mark.parametrize("fraction", [0.5, 0.0])
def test_a_family_that_rotates_whole_heads_is_not_said_to_rotate_parts(fraction: float):
    """But where the type of rotation itself leaves a part out; Transformers reads all types with the same code."""
    given = {"rope_theta": 1e4, "partial_rotary_factor": fraction}
    assert "partial_rotary_factor" in complaint({**LLAMA, "rope_parameters": {"rope_type": "default", **given}})
    plain = read_hf_config(LLAMA)
    assert read_hf_config({**LLAMA, "partial_rotary_factor": 1.0}) == plain
    rope = dataclasses.replace(plain.rope, fraction=fraction)
    with pytest.raises(InputError, match="'llama'"):
        write_hf_config(dataclasses.replace(plain, rope=rope))
    config = read_hf_config({**LLAMA, "rope_parameters": {"rope_type": "proportional", "factor": 1.0, **given}})
    assert config.rope.fraction == fraction
    assert read_hf_config(write_hf_config(config)).rope == config.rope


def test_the_original_length_of_longrope_is_written_where_each_release_looks_for_it():
    longrope = next(old for old, _, rope in ROPES if rope.scaling == "longrope")
    written = write_hf_config(read_hf_config({**LLAMA, **longrope}))
    assert written["original_max_position_embeddings"] == 64
    assert written["rope_scaling"]["original_max_position_embeddings"] == 64


def test_rope_parameters_may_be_given_per_layer_type_if_they_agree():
    one = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    nested = {"full_attention": one, "sliding_attention": dict(one)}
    assert read_hf_config({**LLAMA, "rope_parameters": nested}).rope == RopeConfig(
        theta=7.0, scaling="linear", factor=2.0
    )
    other = {"full_attention": one, "sliding_attention": {**one, "factor": 3.0}}
    assert "differ between layer types" in complaint({**LLAMA, "rope_parameters": other})
    alone = {"full_attention": one, "sliding_attention": None}
    assert read_hf_config({**LLAMA, "rope_parameters": alone}).rope.theta == 7.0


def test_keys_inside_the_rope_that_mean_nothing_here_are_given_back():
    config = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}
    assert write_hf_config(read_hf_config(config))["rope_scaling"] == config["rope_scaling"]


def test_keys_inside_rope_parameters_are_refused_too():
    scaling = {"type": "linear", "factor": 2.0, "mrope_section": [2, 2, 2], "finetuned": True}
    assert "'rope_scaling.mrope_section' may change" in complaint({**LLAMA, "rope_scaling": scaling})
    config = read_hf_config({**LLAMA, "rope_scaling": scaling}, ignored=["rope_scaling.mrope_section"])
    assert write_hf_config(config)["rope_scaling"] == scaling


def test_the_scale_of_scores_grows_with_the_length_that_yarn_makes():
    """In queries and in keys, so that it is there twice; a head is 8 + 4 wide."""
    config = CONFIGS["deepseek_v2"]
    for factor, all_dim, magnitude in (
        (4.0, 0.707, 0.1 * 0.707 * math.log(4) + 1),
        (1.0, 0.707, None),
        (4.0, 0.0, None),
    ):
        scaling = {**config["rope_scaling"], "factor": factor, "mscale_all_dim": all_dim}
        if not all_dim:
            del scaling["mscale_all_dim"], scaling["mscale"]
        scales = [layer.attention.scale for layer in read_hf_config({**config, "rope_scaling": scaling}).layers]
        expected = None if magnitude is None else pytest.approx(12**-0.5 * magnitude**2)
        assert scales == [expected] * 3


@pytest.mark.parametrize("rope", [rope for rope, _, _ in ROPES], ids=lambda rope: str(rope.get("rope_scaling")))
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_transformers_reads_what_we_write(name: str, rope: dict, tmp_path: pathlib.Path):
    import transformers

    ours = {**CONFIGS[name], **rope}
    (tmp_path / "config.json").write_text(json.dumps(write_hf_config(read_hf_config(ours))))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__.lower() == f"{name}config"
    again = read_hf_config(theirs.to_dict())  # in the style of the release that is installed
    assert again == read_hf_config(ours) and str(theirs.dtype) in ("torch.float32", "float32")
