"""GGUF files of DeepSeek-V2 and V3: both forms of the latent's map, true shapes, and what llama.cpp would not read."""

import math

import gguf
import numpy as np
import pytest
import transformers

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.conversion import GGUFModel, HuggingFaceDirectory, checkpoint_source
from moe_jax.conversion.gguf.gguf_metadata import check_read_back, described, tensor_shapes
from moe_jax.conversion.gguf.gguf_types import Facts, planned_tensor
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.conversion.model_table import mapped
from moe_jax.conversion.table import FUSED
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import leaf_specs
from tests.support.gguf_files import write_gguf
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint

V2 = CONFIGS["deepseek_v2"]
V3 = CONFIGS["deepseek_v3"] | {"attention_bias": False}
YARN = V2["rope_scaling"]
DENSE = {key: value for key, value in V2.items() if key != "num_experts_per_tok"} | {"n_routed_experts": None}
GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}


def checkpoint(folder, config):
    tensors = random_tensors(config, config["torch_dtype"])
    return write_checkpoint(folder / "hf", config, tensors), tensors


def written(folder, config, **options):
    """A checkpoint, and the GGUF file that it was exported as."""
    source, _ = checkpoint(folder, config)
    return HuggingFaceDirectory(source), GGUFModel(moe_jax.export(source, folder / "m.gguf", format="gguf", **options))


def assert_same_numbers(a, b):
    assert a.specs().keys() == b.specs().keys()
    for path in a.specs():
        assert np.array_equal(a.read(path).astype(np.float32), b.read(path).astype(np.float32)), path


def keys_of(model):
    """The metadata of the architecture."""
    fields = gguf.GGUFReader(model.path).fields.items()
    return {key.removeprefix("deepseek2."): field.contents() for key, field in fields}


@pytest.mark.parametrize("config", [V2, V2 | {"q_lora_rank": 20}, V3], ids=["v2", "v2-latent-queries", "v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_older_files_have_the_map_from_the_latent_whole(tmp_path, monkeypatch, config, dtype):
    monkeypatch.setattr(checkpoint_source, "CHUNK_BYTES", 500)
    config = config | {"torch_dtype": dtype}
    source, tensors = checkpoint(tmp_path, config)
    whole = GGUFModel(write_gguf(tmp_path / "whole.gguf", config, tensors, whole=True))
    split = GGUFModel(write_gguf(tmp_path / "split.gguf", config, tensors))
    theirs = HuggingFaceDirectory(source)
    for ours in (whole, split):
        assert_same_numbers(theirs, ours)
        assert ours.config.layers == theirs.config.layers and ours.config.rope == theirs.config.rope
        assert {str(spec.dtype) for spec in ours.specs().values()} == {dtype}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (V2, {"attention.q_lora_rank": 0, "expert_gating_func": 1, "expert_group_count": 4}),
        (V2 | {"q_lora_rank": 20} | GREEDY, {"attention.q_lora_rank": 20, "expert_group_count": 1}),
        (V2 | {"num_hidden_layers": 27}, {"attention.q_lora_rank": None, "leading_dense_block_count": 1}),
        (DENSE, {"leading_dense_block_count": 3, "expert_count": None}),
        (V2 | {"first_k_dense_replace": 0}, {"leading_dense_block_count": 0, "expert_feed_forward_length": 24}),
        (V3, {"expert_gating_func": 2, "expert_weights_norm": True, "rope.scaling.yarn_log_multiplier": None}),
        (V3 | {"norm_topk_prob": False}, {"expert_weights_norm": None, "expert_weights_scale": 2.5}),
        (V3 | {"rope_scaling": YARN}, {"rope.scaling.yarn_log_multiplier": pytest.approx(0.0707)}),
        (V3 | {"n_group": 1, "topk_group": 1}, {"expert_group_count": 1, "expert_group_used_count": 1}),
    ],
)
def test_what_the_metadata_say(tmp_path, config, expected):
    theirs, ours = written(tmp_path, config)
    found = keys_of(ours)
    assert {key: found.get(key) for key in expected} == expected
    assert (found["attention.head_count_kv"], found["attention.key_length"], found["attention.value_length"]) == (
        1,
        20,
        16,
    )
    assert (found["attention.key_length_mla"], found["attention.value_length_mla"]) == (12, 12)
    assert_same_numbers(theirs, ours)
    assert ours.config.layers == theirs.config.layers and ours.config.rope == theirs.config.rope


def test_parts_of_the_map_may_differ_in_their_types(tmp_path):
    """Rows of 24 fit no blocks and are halves, those of 256 do; what is read is float32."""
    config = V2 | {"kv_lora_rank": 256, "qk_nope_head_dim": 24, "num_hidden_layers": 2}
    theirs, ours = written(tmp_path, config, gguf_type="Q4_K_M")
    types = {one.name: one.tensor_type.name for one in gguf.GGUFReader(ours.path).tensors}
    assert (types["blk.1.attn_k_b.weight"], types["blk.1.attn_v_b.weight"]) == ("F16", "Q4_K")
    path = "layers/1/attention/kv_up/kernel"
    found, expected = (model.read(path).reshape(256, 4, 36) for model in (ours, theirs))
    assert found.dtype == np.float32
    assert np.array_equal(found[..., :24], expected[..., :24].astype(np.float16))
    assert 0 < np.abs(found[..., 24:] - expected[..., 24:]).max() < 0.3 * expected.std()
    tensors = random_tensors(config)
    tensors["model.layers.1.self_attn.kv_b_proj.weight"][3, 5] = 1e6
    source = write_checkpoint(tmp_path / "large", config, tensors)
    with pytest.raises(InputError, match="attn_k_b.weight: .* float16"):
        moe_jax.export(source, tmp_path / "large.gguf", format="gguf", gguf_type="Q4_K_M")


def test_true_shapes_of_deepseek_v3():
    """As llama.cpp's own script writes them: 61 layers, of which 3 are dense."""
    config = read_hf_config(
        transformers.DeepseekV3Config().to_dict() | {"rope_parameters": YARN | {"rope_theta": 10000.0}}
    )
    description = described(config)
    table = description.architecture.table_of(config)
    shapes = tensor_shapes(
        mapped(config, leaf_specs(config), FUSED, table=table).tensors, description.architecture, None
    )
    check_read_back(description, shapes)
    assert sum(map(math.prod, shapes.values())) == 671_026_419_200
    assert len(shapes) == 3 + 3 * 13 + 58 * 18 and description.notes == []
    expected = {
        "blk.60.attn_q_a": (1536, 7168), "blk.60.attn_q_b": (24576, 1536), "blk.60.attn_kv_a_mqa": (576, 7168),
        "blk.60.attn_k_b": (128, 512, 128), "blk.60.attn_v_b": (128, 128, 512), "blk.60.attn_output": (7168, 16384),
        "blk.60.ffn_down_exps": (256, 7168, 2048), "blk.60.ffn_down_shexp": (7168, 2048), "blk.2.ffn_up": (18432, 7168),
    }  # fmt: skip
    assert {name: shapes[f"{name}.weight"] for name in expected} == expected
    assert shapes["blk.3.exp_probs_b.bias"] == (256,) and "blk.2.exp_probs_b.bias" not in shapes
    facts = Facts(num_layers=61, num_experts=256, heads_per_kv_head=1, is_tied=False)
    kinds = {name: planned_tensor(name, shape, "BF16", "Q4_K_M", facts).kind for name, shape in shapes.items()}
    assert kinds["blk.60.attn_k_b.weight"] == "Q5_0" and kinds["blk.60.attn_v_b.weight"] == "Q4_K"
    assert kinds["blk.60.ffn_down_exps.weight"] == kinds["output.weight"] == "Q6_K"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": ("deepseek2.attention.kv_lora_rank",)}, "no deepseek2.attention.kv_lora_rank"),
        ({"without": ("deepseek2.attention.key_length_mla",)}, "no deepseek2.attention.key_length_mla"),
        ({"without": ("deepseek2.rope.dimension_count",)}, "no deepseek2.rope.dimension_count"),
        ({"without": ("deepseek2.expert_used_count",)}, "no deepseek2.expert_used_count"),
        ({"without": ("deepseek2.rope.scaling.yarn_log_multiplier",)}, "no deepseek2.rope.scaling.yarn_log_multiplier"),
        ({"metadata": {"deepseek2.attention.head_count_kv": 4}}, "head_count_kv is 4, only 1"),
        ({"metadata": {"deepseek2.attention.head_count_kv": 1}, "whole": True}, "head_count_kv is 1, only 4"),
        ({"metadata": {"deepseek2.attention.key_length": 12}}, "key_length is 12, only 20"),
        ({"metadata": {"deepseek2.attention.value_length": 12}}, "value_length is 12, only 16"),
        ({"metadata": {"deepseek2.attention.key_length_mla": 4}}, "dimension_count is 4, but"),
        ({"metadata": {"deepseek2.attention.head_count": 2**31}}, r"attn_k_b.weight has shape .4, 16, 8., expected"),
        ({"metadata": {"deepseek2.attention.kv_lora_rank": "x"}}, "kv_lora_rank is 'x', expected"),
        ({"metadata": {"deepseek2.attention.kv_lora_rank": 16.5}}, "only 20.5 is"),
        ({"metadata": {"deepseek2.attention.q_lora_rank": -3}}, "q_rank"),
        ({"metadata": {"deepseek2.attention.value_length_mla": 0}}, "value_dim"),
        ({"metadata": {"deepseek2.leading_dense_block_count": -1}}, "first_k_dense_replace"),
        ({"metadata": {"deepseek2.expert_gating_func": 3}}, "expert_gating_func is 3"),
        ({"metadata": {"deepseek2.expert_weights_norm": True}}, "norm_topk_prob"),
        ({"metadata": {"deepseek2.expert_group_count": 3}}, "groups"),
        ({"metadata": {"deepseek2.rope.scaling.yarn_attn_factor": 0.5}}, "yarn_attn_factor is 0.5"),
        ({"metadata": {"deepseek2.nextn_predict_layers": 1}}, "nextn_predict_layers is 1"),
        ({"metadata": {"deepseek2.attention.temperature_scale": 0.1}}, "temperature_scale"),
    ],
)
def test_faults_of_metadata_are_one_line(tmp_path, change, message):
    tensors = random_tensors(V2)
    path = write_gguf(tmp_path / "m.gguf", V2, tensors, **change)
    with pytest.raises(InputError, match=message) as caught:
        GGUFModel(path)
    assert len(str(caught.value).splitlines()) == 1 and str(path) in str(caught.value)


def test_a_file_without_any_map_from_the_latent(tmp_path):
    tensors = {name: values for name, values in random_tensors(V2).items() if "kv_b_proj" not in name}
    with pytest.raises(InputError, match="attn_k_b.weight is missing"):
        GGUFModel(write_gguf(tmp_path / "m.gguf", V2, tensors))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"blk.1.attn_k_b.weight": (4, 8, 16)}, "blk.1.attn_k_b.weight has shape"),
        ({"blk.0.attn_v_b.weight": (48, 16)}, "blk.0.attn_v_b.weight has shape"),
        ({"blk.0.attn_k_b.bias": (4,)}, "attn_k_b.bias is unexpected"),
        ({"blk.2.attn_kv_b.weight": (80, 16)}, "attn_kv_b.weight is unexpected"),
        ({"blk.1.exp_probs_b.bias": (8,)}, "exp_probs_b.bias is unexpected"),
    ],
)
def test_faults_of_tensors_are_one_line(tmp_path, raw, message):
    added = {name: np.zeros(shape, np.float32) for name, shape in raw.items()}
    model = GGUFModel(write_gguf(tmp_path / "m.gguf", V2, random_tensors(V2), raw=added))
    with pytest.raises(InputError, match=message) as caught:
        model.specs()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIGS["deepseek_v3"], "attn_q_a.bias"),
        (V3 | {"rope_interleave": False}, "interleaved is False"),
        (V3 | {"num_hidden_layers": 26}, "26 layers"),
        (V3 | {"n_shared_experts": None}, "shared experts only"),
        (V3 | {"topk_group": 4}, "4 of 4 groups"),
        (V2 | {"n_group": 8}, "2 of 8 groups"),
        (V2 | {"rope_scaling": YARN | {"mscale": 1.0}}, "equal mscale"),
        (V2 | {"rope_scaling": {key: YARN[key] for key in YARN if "mscale" not in key}}, "equal mscale"),
        (V2 | {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor"),
        (V2 | {"rope_scaling": YARN | {"truncate": False}}, "truncate is False"),
        (V2 | {"rope_scaling": CONFIGS["llama-llama3"]["rope_scaling"]}, "'llama3'"),
    ],
)
def test_what_llama_cpp_would_not_read_is_not_written(tmp_path, config, message):
    source, _ = checkpoint(tmp_path, config)
    with pytest.raises(InputError, match=message) as caught:
        moe_jax.export(source, tmp_path / "m.gguf", format="gguf")
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("config", "epsilon", "ranks"),
    [(V2, True, True), (V2 | GREEDY | {"rms_norm_eps": 1e-6}, False, False), (V3, True, False)],
)
def test_what_llama_cpp_computes_otherwise_is_said(tmp_path, capsys, config, epsilon, ranks):
    source, _ = checkpoint(tmp_path, config)
    assert main(["export", str(source), str(tmp_path / "m.gguf"), "--format", "gguf", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("norms latents with epsilon 1e-05, this model with 1e-06" in said) == epsilon
    assert ("ranks groups of experts by their best two" in said) == ranks
