"""config.json in both styles, for all families: what it means, what is given back, what is refused."""

import dataclasses
import json
import pathlib
import re

import pytest

from moe_jax.conversion import families, read_hf_config, write_hf_config
from moe_jax.conversion.config_keys import HFConfig, is_harmless
from moe_jax.conversion.families import FAMILIES, usual
from moe_jax.conversion.hf_config import class_names
from moe_jax.core.errors import InputError
from moe_jax.models import BankConfig, ModelConfig
from moe_jax.models.config import MAX_LAYERS
from tests.support.hf_checkpoints import BASE, CONFIGS, complaint

LLAMA = CONFIGS["llama"]


@pytest.mark.parametrize("name", CONFIGS)
def test_writing_gives_back_every_key(name: str):
    config = {**CONFIGS[name], "initializer_range": 0.02, "custom": {"a": [1]}}
    written = write_hf_config(read_hf_config(config, ignored=["custom"]))
    for key, value in config.items():
        if key not in ("max_window_layers", "model_type"):
            assert written[key] == value, key
    assert read_hf_config(written, ignored=["custom"]) == read_hf_config(CONFIGS[name])
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_that_are_not_known_are_refused(name: str):
    config = {**CONFIGS[name], "initializer_range": 0.02, "_of_a_tool": 1, "sink_tokens": 4}
    assert complaint(config) == (
        "config.json: 'sink_tokens' may change what the model computes, in a way that is not supported; if not, say so "
        "with moe-jax convert --ignore-keys sink_tokens"
    )
    assert "and 1 more keys" in complaint({**config, "depth_scale": 2.0})
    assert read_hf_config(config, ignored=["sink_tokens"]) == read_hf_config(CONFIGS[name])


def test_an_encoder_s_keys_are_harmless_only_where_they_say_nothing():
    assert read_hf_config({**LLAMA, "is_encoder_decoder": False}) == read_hf_config(LLAMA)
    assert "'is_encoder_decoder' may change" in complaint({**LLAMA, "is_encoder_decoder": True})


@pytest.mark.parametrize(
    ("key", "nothing", "something"),
    [
        ("add_cross_attention", False, True),
        ("cross_attention_hidden_size", None, 8),
        ("is_decoder", False, True),
        ("is_encoder_decoder", False, True),
        ("pruned_heads", {}, {"0": [1]}),
        ("rope_interleaved", False, True),
        ("tf_legacy_loss", False, True),
        ("tie_encoder_decoder", False, True),
        ("_name_of_a_tool", 1, None),  # whatever it is
        ("unsloth_version", "2", None),
        ("torch_dtype", "float32", None),
        ("dropout", None, 0.1),
    ],
)
def test_keys_that_say_nothing(key: str, nothing: object, something: object):
    assert is_harmless(key, nothing) == (key != "dropout")
    if something is not None:
        assert not is_harmless(key, something)


def test_all_families_are_found_in_order():
    sources = "".join(file.read_text() for file in pathlib.Path(families.__file__).parent.rglob("[!_]*.py"))
    defined = re.findall(r"^[A-Z0-9_]+ = Family\(\n +name=\"(\w+)\"", sources, re.M)
    made_of_others = re.findall(r"^([A-Z0-9_]+) = (?:_made_of|_with_experts|replace)\(", sources, re.M)
    defined += [name.lower() for name in made_of_others]
    assert {"llama", "mixtral", "qwen3_moe", "llava_phi"} <= set(defined) and list(FAMILIES) == sorted(defined)


def test_a_family_in_a_file_of_its_own_is_found(tmp_path, monkeypatch):
    (tmp_path / "of_tomorrow.py").write_text(
        "import dataclasses\nfrom moe_jax.conversion.families.dense.llama import LLAMA\n"
        "OF_TOMORROW = dataclasses.replace(LLAMA, name='of_tomorrow')\n"
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = families._discover()
    assert found.keys() - FAMILIES.keys() == {"of_tomorrow"} and FAMILIES.items() <= found.items()


def test_what_a_left_out_key_means_is_the_family_s_default():
    small = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    llama = read_hf_config({**small, "model_type": "llama", "intermediate_size": 48})
    assert (llama.norm_eps, llama.max_positions, llama.rope.theta, llama.bos_id, llama.eos_ids) == (
        1e-6, 2048, 10000.0, 1, (2,)
    )  # fmt: skip
    assert llama.layers[0].attention.num_kv_heads == 4
    mistral = read_hf_config({**small, "model_type": "mistral", "intermediate_size": 48, "num_key_value_heads": None})
    assert mistral.layers[0].attention.num_kv_heads == 4  # null is not the default of 8
    assert mistral.layers[0].attention.sliding_window == 4096
    mixtral = read_hf_config({**small, "model_type": "mixtral", "intermediate_size": 48, "num_key_value_heads": 2})
    assert (mixtral.rope.theta, mixtral.layers[0].mlp.num_experts, mixtral.layers[0].mlp.top_k) == (1e6, 8, 2)


def test_the_architecture_stands_in_for_a_missing_model_type():
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert read_hf_config({**config, "architectures": ["MistralForCausalLM"]}).family == "mistral"
    latent = {key: value for key, value in CONFIGS["kimi_k2"].items() if key != "model_type"}
    assert read_hf_config({**latent, "architectures": ["DeepseekV3ForCausalLM"]}).family == "deepseek_v3"


def test_gates():
    assert read_hf_config(CONFIGS["mixtral"]).layers[0].mlp.gate == "topk_softmax"
    assert read_hf_config(CONFIGS["olmoe"]).layers[0].mlp.gate == "softmax_topk"
    assert read_hf_config({**CONFIGS["olmoe"], "norm_topk_prob": True}).layers[0].mlp.gate == "topk_softmax"


def test_kimi_k2_is_a_deepseek_v3_of_another_name():
    kimi = read_hf_config(CONFIGS["kimi_k2"])
    assert dataclasses.replace(kimi, family="deepseek_v3") == read_hf_config(
        {**CONFIGS["kimi_k2"], "model_type": "deepseek_v3"}
    )
    written = write_hf_config(kimi)
    assert (written["model_type"], written["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])


def test_what_the_keys_of_stablelm_mean():
    plain, other = read_hf_config(CONFIGS["stablelm"]), read_hf_config(CONFIGS["stablelm-parallel-head-norms"])
    assert (plain.norm, plain.norm_eps, plain.rope.fraction) == ("layer", 1e-5, 0.25)
    one, another = plain.layers[0], other.layers[0]
    assert (one.attention.biases, one.attention.qk_norm, one.parallel) == (("q", "k", "v"), "none", False)
    assert (another.attention.biases, another.attention.qk_norm) == ((), "head_layer")
    assert another.parallel and another.shared_norm


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_the_share_that_stablelm_rotates_is_always_written(fraction: float):
    config = read_hf_config({**CONFIGS["stablelm"], "partial_rotary_factor": fraction})
    assert config.rope.fraction == fraction
    assert write_hf_config(config)["partial_rotary_factor"] == fraction
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": fraction}
    newer = {key: value for key, value in CONFIGS["stablelm"].items() if key != "partial_rotary_factor"}
    assert read_hf_config({**newer, "rope_parameters": parameters}) == config


ATTENTION_BIASES = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "stablelm", "qwen"), ("q", "k", "v")),
    **dict.fromkeys(("llama-biases", "qwen3-window", "qwen3_moe-dense-layers", "gemma"), ("q", "k", "v", "o")),
    **dict.fromkeys(("phi", "phi-tied-wide-heads", "qwen-biases-everywhere"), ("q", "k", "v", "o")),
    "deepseek_v3": ("q_down", "kv_down", "o"),
    **dict.fromkeys(("glm4_moe", "solar_open", "glm4"), ("q", "k", "v")),
    **dict.fromkeys(
        ("dots1", "gpt_oss", "granite", "olmo2", "smollm3", "hunyuan_v1_moe", "phimoe"), ("q", "k", "v", "o")
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_which_projections_have_biases(name: str):
    config = read_hf_config(CONFIGS[name])
    assert {layer.attention.biases for layer in config.layers} == {ATTENTION_BIASES.get(name, ())}


def windows(family: str = "qwen2", **keys: object) -> list[int | None]:
    config = read_hf_config({**BASE, "model_type": family, **keys})
    return [layer.attention.sliding_window for layer in config.layers]


def test_windows_of_qwen2():
    assert windows() == [None] * 3
    assert windows(use_sliding_window=False, sliding_window=8, max_window_layers=0) == [None] * 3
    assert windows(use_sliding_window=True, sliding_window=8, max_window_layers=2) == [None, None, 8]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, sliding_window=8, layer_types=types) == [8, None, 8]
    written = write_hf_config(
        read_hf_config({**BASE, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
                        "layer_types": types})
    )  # fmt: skip
    assert written["layer_types"] == types
    # Keys that say nothing because windows are off come back as they were.
    off = {**BASE, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 77, "max_window_layers": 5}
    assert write_hf_config(read_hf_config(off)).items() >= off.items()


def test_windows_of_qwen2_moe():
    """In every second layer below a limit, as Transformers has it."""
    six = {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 8}
    assert windows("qwen2_moe", **six) == [8, None] * 3
    assert windows("qwen2_moe", **six, max_window_layers=3) == [8, None, 8, None, None, None]
    assert windows("qwen2_moe", **six, layer_types=["full_attention"] * 6) == [None] * 6
    # Transformers writes a window of 0 where there is none.
    assert windows("qwen2_moe", use_sliding_window=False, sliding_window=0) == [None] * 3


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3"])
def test_types_of_layers_without_windows(family: str):
    full, sliding = ["full_attention"] * 3, ["full_attention", "full_attention", "sliding_attention"]
    assert windows(family, layer_types=full) == [None] * 3
    config = {**BASE, "model_type": family, "use_sliding_window": False, "layer_types": full}
    assert write_hf_config(read_hf_config(config)).items() >= config.items()
    assert "layer_types has 'sliding_attention', but use_sliding_window is not true" in complaint(
        {**config, "layer_types": sliding}
    )
    assert "layer_types has 3 entries ['chunked_attention'" in complaint(
        {**config, "layer_types": ["chunked_attention", *full[1:]]}
    )


def test_the_attention_of_qwen3():
    config = {**BASE, "model_type": "qwen3"}
    attention = read_hf_config(config).layers[0].attention
    # The width of a head does not follow from the model's, also where it is left out.
    assert (attention.qk_norm, attention.head_dim, attention.biases) == ("head", 128, ())
    biased = read_hf_config({**config, "attention_bias": True})
    assert biased.layers[0].attention.biases == ("q", "k", "v", "o")
    assert "it has no 'head_dim', which cannot be guessed" in complaint({**config, "head_dim": None})


def test_the_shared_expert_of_qwen2_moe():
    config = read_hf_config(CONFIGS["qwen2_moe"])
    moe = config.moe(0)
    assert (moe.universal, moe.universal_dim, moe.expert.dim, moe.gate) == ("sigmoid", 40, 24, "softmax_topk")
    assert config.layers[0].attention.biases == ("q", "k", "v")
    assert read_hf_config({**CONFIGS["qwen2_moe"], "qkv_bias": False}).layers[0].attention.biases == ()


def moe_layers(**keys: object) -> tuple[int, ...]:
    return read_hf_config({**CONFIGS["qwen3_moe"], "num_hidden_layers": 6, **keys}).moe_layers


def test_the_window_of_qwen3_moe_is_given_back():
    for window in ({"use_sliding_window": True, "sliding_window": 16}, {"use_sliding_window": False}):
        config = read_hf_config({**CONFIGS["qwen3_moe"], **window})
        assert {layer.attention.sliding_window for layer in config.layers} == {window.get("sliding_window")}
        written = write_hf_config(config)
        assert {key: written[key] for key in window} == window and read_hf_config(written) == config
        assert ("sliding_window" in written) == ("sliding_window" in window)


def test_a_model_has_no_more_layers_than_can_be():
    """Which is known before any is made."""
    for count in (0, -1, MAX_LAYERS + 1, 10**9):
        with pytest.raises(InputError, match="layers"):
            usual.num_layers(HFConfig({"num_hidden_layers": count}, {}))
    assert usual.num_layers(HFConfig({"num_hidden_layers": MAX_LAYERS}, {})) == MAX_LAYERS


def test_an_activation_of_nothing_is_one_that_is_missing():
    for config in ({**LLAMA, "hidden_act": None}, {**CONFIGS["switch_transformers"], "dense_act_fn": None}):
        (key,) = {"hidden_act", "dense_act_fn"} & config.keys()
        assert f"no {key!r}" in complaint(config)


def test_layers_of_qwen3_moe():
    assert moe_layers() == (0, 1, 2, 3, 4, 5)
    assert moe_layers(decoder_sparse_step=2) == (1, 3, 5)
    assert moe_layers(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == (1, 5)
    assert moe_layers(mlp_only_layers=[0, 5]) == (1, 2, 3, 4)
    assert moe_layers(mlp_only_layers=None) == (0, 1, 2, 3, 4, 5)
    assert "'mlp_only_layers' is 3, expected a list" in complaint({**CONFIGS["qwen3_moe"], "mlp_only_layers": 3})
    assert moe_layers(decoder_sparse_step=7) == ()
    without = write_hf_config(read_hf_config({**CONFIGS["qwen3_moe"], "decoder_sparse_step": 7}))
    assert without["mlp_only_layers"] == list(range(without["num_hidden_layers"]))
    assert "decoder_sparse_step=0 must be at least 1" in complaint({**CONFIGS["qwen3_moe"], "decoder_sparse_step": 0})


@pytest.mark.parametrize("dense", [(), (0,), (0, 2, 4), (0, 1, 2, 3, 4), (1, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_any_layers_of_qwen3_moe_may_be_dense(dense: tuple[int, ...]):
    config = read_hf_config({**CONFIGS["qwen3_moe"], "num_hidden_layers": 6, "mlp_only_layers": list(dense)})
    assert read_hf_config(write_hf_config(config)) == config
    assert set(config.moe_layers) == {0, 1, 2, 3, 4, 5} - set(dense)


def test_both_names_of_the_number_of_experts():
    config = CONFIGS["qwen3_moe"]
    new = {key: value for key, value in config.items() if key != "num_experts"} | {"num_local_experts": 4}
    assert read_hf_config(new) == read_hf_config(config) == read_hf_config({**config, "num_local_experts": 4})
    assert "num_local_experts is 5, but num_experts is 4; keep one" in complaint({**config, "num_local_experts": 5})


def test_phi_rotates_half_of_each_head_unless_it_says_otherwise():
    phi = CONFIGS["phi"]
    assert read_hf_config(phi).rope.fraction == 0.5
    for config in ({**phi, "partial_rotary_factor": 1.0}, {**phi, "rope_parameters": {"partial_rotary_factor": 1.0}}):
        assert read_hf_config(config).rope.fraction == 1.0
        assert write_hf_config(read_hf_config(config))["partial_rotary_factor"] == 1.0


def test_all_names_of_phi_s_activation_mean_the_same():
    for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        config = read_hf_config({**CONFIGS["phi"], "hidden_act": name})
        assert config == read_hf_config(CONFIGS["phi"])
        assert write_hf_config(config)["hidden_act"] == "gelu_new"


def test_one_head_is_enough_and_none_is_not():
    one = read_hf_config({**LLAMA, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": None})
    assert (one.layers[0].attention.num_heads, one.layers[0].attention.head_dim) == (1, one.d_model)
    assert "num_attention_heads" in complaint({**LLAMA, "num_attention_heads": 0})


@pytest.mark.parametrize(("family", "count"), [("mixtral", "num_local_experts"), ("olmoe", "num_experts")])
def test_what_a_config_of_an_moe_lacks_is_listed_together(family: str, count: str):
    said = complaint({**CONFIGS[family], count: None, "num_experts_per_tok": None})
    assert count in said and "num_experts_per_tok" in said


def test_moes_in_every_second_layer():
    config = {**CONFIGS["deepseek"], "num_hidden_layers": 5, "first_k_dense_replace": 1, "moe_layer_freq": 2}
    assert read_hf_config(config).moe_layers == (2, 4)
    written = write_hf_config(read_hf_config(config))
    assert written["moe_layer_freq"] == 2 and read_hf_config(written) == read_hf_config(config)


@pytest.mark.parametrize("style", ["torch_dtype", "dtype"])
def test_dtype_in_both_styles(style: str):
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert read_hf_config({**config, style: "bfloat16"}).dtype == "bfloat16"
    assert read_hf_config({**config, style: "torch.float16"}).dtype == "float16"
    assert read_hf_config(config).dtype == "float32"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "rwkv9"}, f"unknown model_type 'rwkv9'; the documentation has the {len(FAMILIES)}"),
        ({"model_type": "lama"}, "unknown model_type 'lama' (did you mean 'llama'?)"),
        ({"model_type": None}, "has no model_type and architectures [], of which none is known; add"),
        ({"model_type": ["llama"]}, "unknown model_type ['llama']; the"),
        ({"model_type": None, "architectures": 5}, "has no model_type and architectures 5, of which none"),
        ({"model_type": None, "architectures": ["LamaForCausalLM"]}, "(did you mean 'LlamaForCausalLM'?); add"),
        ({"model_type": None, "architectures": [["LlamaForCausalLM"]]}, "architectures [['LlamaForCausalLM']], of"),
        ({"num_hidden_layers": 10**10}, "a model of 10000000000 layers is not one that can be: 10,000 are the most"),
        ({"num_hidden_layers": 10**400}, "'num_hidden_layers' is an integer of 1329 bits, expected an integer"),
        ({"rope_theta": 10**400}, "'rope_theta' is an integer of 1329 bits, expected a number"),
        ({"rope_theta": float("inf")}, "'rope_theta' is inf"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"rms_norm_eps": -1.0}, "norm_eps=-1.0 must be at least 0"),
        ({"eos_token_id": [1, 64]}, "eos_ids: token 64 is outside"),
        ({"partial_rotary_factor": "half"}, "'partial_rotary_factor' is 'half', expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "integer of 1329 bits"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "unknown rope type ['linear']"),
        ({"rope_parameters": {"partial_rotary_factor": [1]}}, "rope partial_rotary_factor is [1], expected a number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}},
            "rope original_max_position_embeddings is 0.5",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": -1},
            "rope original_max_position_embeddings is -1",
        ),
        ({"hidden_act": "x" * 100_000}, "unknown hidden_act 'xxxxxxxx"),
        ({"hidden_size": None}, "has no 'hidden_size', which cannot"),
        ({"hidden_size": "32"}, "'hidden_size' is '32', expected an integer"),
        ({"hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4, and there is no head_dim"),
        ({"num_attention_heads": 0}, "multiple of num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"vocab_size": -1}, "vocab_size=-1 must be a"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"intermediate_size": 0}, "dim=0 must be a"),
        ({"hidden_act": "silo"}, "unknown hidden_act 'silo' (did you mean 'silu'?); known: silu"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' is 'small', expected a number"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', expected true"),
        ({"eos_token_id": [1, "2"]}, "list of integers"),
        ({"torch_dtype": "int8"}, "unknown dtype 'int8'"),
        ({"quantization_config": {"bits": 4}}, "unknown 'quant_method'"),
        (
            {"rope_scaling": {"type": "lineer", "factor": 2.0}},
            "'lineer' (did you mean 'linear'?)",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "two types, linear"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear', expected an object"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope type 'llama3' needs 'low_freq_factor'"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 2.0}},
            "high_freq_factor=2.0 is below low_freq_factor=4.0",
        ),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 4}}, "rope type 'longrope' needs 'short_factor'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
            "rope short_factor has 3 entries, expected 4, one per rotated pair",
        ),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta is 1.0, but"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 3.0}},
            "rope_scaling says factor=2.0, rope_parameters say 3.0",
        ),
    ],
)
def test_bad_configs(change: dict, expected: str):
    message = complaint({**LLAMA, **change})
    assert expected in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_missing_keys_are_listed_together(family: str):
    keys = ("hidden_size", "num_attention_heads")
    message = complaint({key: value for key, value in CONFIGS[family].items() if key not in keys})
    assert all(repr(key) in message for key in keys)


def test_bad_configs_of_single_families():
    assert "num_experts=10000000 must be at most" in complaint({**CONFIGS["mixtral"], "num_local_experts": 10**7})
    assert "a model of 10001 layers" in complaint({**LLAMA, "num_hidden_layers": 10_001})
    many = complaint({**CONFIGS["mixtral"], "num_hidden_layers": 1000, "num_local_experts": 2000})
    assert "2,000,000 experts in all layers are not what can be: 100,000 are the most" in many
    assert "top_k=9 is above num_experts=4" in complaint({**CONFIGS["mixtral"], "num_experts_per_tok": 9})
    normed = complaint({**CONFIGS["phi"], "qk_layernorm": True})
    assert normed == "config.json: 'qk_layernorm' is True, only False is supported"
    types = {"use_sliding_window": True, "layer_types": ["full_attention"]}
    assert "layer_types has 1 entries" in complaint({**BASE, "model_type": "qwen2", **types})
    assert "head_dim is hidden_size / num_attention_heads = 32 / 4, not 16" in complaint(
        {**CONFIGS["stablelm"], "head_dim": 16}
    )
    scaled = {"type": "linear", "factor": 2.0, "mscale_all_dim": 0.5}
    assert "mscale_all_dim goes with type 'yarn'" in complaint({**CONFIGS["deepseek_v2"], "rope_scaling": scaled})
    assert "'qk_layernorm' is 1, expected true or false" in complaint({**CONFIGS["stablelm"], "qk_layernorm": 1})


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("deepseek", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must"),
        ("deepseek", {"moe_layer_freq": 0}, "moe_layer_freq=0"),
        ("deepseek", {"n_shared_experts": -1}, "n_shared_experts=-1 must"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=4"),
        ("deepseek_v3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("deepseek_v2", {"topk_method": "greddy"}, "'greddy' (did you mean 'greedy'?)"),
        ("deepseek_v2", {"topk_method": None}, "unknown topk_method None; known"),
        ("deepseek", {"moe_layer_freq": 0}, "moe_layer_freq=0 must"),
        ("glm4_moe", {"num_mtp_layers": 101}, "num_mtp_layers=101 must lie"),
        ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts=-1 must"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval=0 must"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index=-2 at least"),
        ("ernie4_5_moe", {"use_bias": True}, "'use_bias' is True, only False"),
        ("ernie4_5_moe", {"moe_norm_min": 1.0}, "'moe_norm_min' is 1.0, only"),
        (
            "phi3-plain",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
            "partial_rotary_factor is 0.5, but",
        ),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'longrope' alone, not 'yarn'"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers has 3 entries"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must"),
        ("exaone_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
        ("exaone_moe", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern=0 must"),
        ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "'first_k_dense_replace' is 2, only"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "moe_topk differs between layers"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 8}, "moe_intermediate_size=8 must"),
        ("hunyuan_v1_moe", {"num_shared_expert": [2, 2]}, "num_shared_expert is 1"),
        ("hunyuan_v1_moe", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "rope alpha is -1.0"),
        ("phimoe", {"router_jitter_noise": 0.1}, "'router_jitter_noise' is 0.1, only"),
        (
            "phimoe",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.0}},
            "short_mscale=1.0 and long_mscale=None",
        ),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "with short_mscale"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "average"}, "is 'average', only 'sum'"),
        ("cohere2_moe", {"expert_selection_fn": "max"}, "expert_selection_fn is 'max'"),
        ("cohere2_moe", {"num_shared_experts": -1}, "num_shared_experts=-1 must"),
        ("afmoe", {"score_func": "softmax"}, "'score_func' is 'softmax', only"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0 must"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters has ['rope_theta']"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("minimax_m2", {"rotary_dim": 13}, "rotary_dim=13 must lie"),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, "agree with partial_rotary_factor=0.25"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "'attn_type_list' is [1, 0], only"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "'swiglu_limit' is 6.0, only 7.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "'swiglu_alpha' is 1.0, only 1.702"),
        ("gpt_oss", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu', only 'silu'"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("gemma", {"hidden_size": 0}, "'hidden_size' is 0, expected 1"),
        ("t5", {"num_layers": 0}, "num_layers=0 must"),
        ("t5", {"num_decoder_layers": -1}, "num_decoder_layers=-1 must"),
        ("t5", {"num_layers": 6000, "num_decoder_layers": 4001}, "10001 layers"),
        ("t5", {"feed_forward_proj": "gated-silo"}, "unknown feed_forward_proj 'gated-silo'; known: "),
        ("t5", {"feed_forward_proj": "fused-gelu"}, "unknown feed_forward_proj 'fused-gelu'"),
        ("t5", {"feed_forward_proj": None}, "unknown feed_forward_proj ''"),
        ("switch_transformers", {"num_sparse_decoder_layers": -1}, "num_sparse_decoder_layers=-1 must"),
        ("switch_transformers", {"num_sparse_encoder_layers": -1}, "num_sparse_encoder_layers=-1 must"),
    ],
)
def test_what_a_family_cannot_be_is_refused(name: str, change: dict, expected: str):
    message = complaint({**CONFIGS[name], **change})
    assert expected in message and "\n" not in message


def test_what_some_keys_mean_that_are_seldom_there():
    greedy = read_hf_config({**CONFIGS["deepseek_v2"], "topk_method": "greedy"})
    grouped = read_hf_config(CONFIGS["deepseek_v2"])
    keys = CONFIGS["deepseek_v2"]
    selections = [config.moe(config.moe_layers[0]).selection for config in (greedy, grouped)]
    assert [(one.groups, one.top_groups) for one in selections] == [(1, 1), (keys["n_group"], keys["topk_group"])]
    # Without experts all layers are dense, and without a frequency every one from the first on is an MoE.
    deepseek = {key: value for key, value in CONFIGS["deepseek"].items() if key != "moe_layer_freq"}
    assert read_hf_config(deepseek).moe_layers == (1, 2)
    assert read_hf_config({**deepseek, "first_k_dense_replace": 0, "moe_layer_freq": 2}).moe_layers == (0, 2)
    of_experts = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    assert read_hf_config({key: deepseek[key] for key in deepseek if key not in of_experts}).moe_layers == ()
    assert read_hf_config({**deepseek, "n_shared_experts": 0}).moe(1).universal == "none"
    # A decoder begins with padding if nothing else is said; and there are as many layers as in the encoder.
    t5 = {key: value for key, value in CONFIGS["t5"].items() if key != "decoder_start_token_id"}
    config = read_hf_config({**t5, "pad_token_id": 7, "num_layers": 3})
    assert (config.decoder_start_id, config.num_encoder_layers, config.num_layers) == (7, 3, 6)
    assert write_hf_config(config)["pad_token_id"] == 7
    # A head that is the embedding may have inputs that are not scaled, and the other way round.
    for tied, scaled in ((True, False), (False, True), (True, True)):
        keys = {"tie_word_embeddings": tied, "scale_decoder_outputs": scaled}
        config = read_hf_config({**t5, **keys})
        assert (config.tie_embeddings, config.logit_scale) == (tied, 32**-0.5 if scaled else 1.0)
        assert read_hf_config(write_hf_config(config)) == dataclasses.replace(config, foreign=config.foreign)


def test_names_of_classes_are_those_of_all_or_none():
    config = dataclasses.replace(read_hf_config(LLAMA), num_classes=2)
    named = {"0": "bad", "1": "good"}
    for names, expected in (
        (named, ("bad", "good")),
        ({**named, "2": "more"}, None),
        ({"0": "bad"}, None),
        ({"0": "bad", "2": "good"}, None),
        ([*named], None),
        (None, None),
    ):
        foreign = {} if names is None else {"id2label": names}
        assert class_names(dataclasses.replace(config, foreign=foreign)) == expected
    assert class_names(dataclasses.replace(config, num_classes=None, foreign={"id2label": named})) is None
    written = write_hf_config(config)
    assert written["architectures"] == ["LlamaForSequenceClassification"] and "tie_word_embeddings" not in written
    assert (written["id2label"], written["label2id"]) == (
        {"0": "LABEL_0", "1": "LABEL_1"},
        {"LABEL_0": 0, "LABEL_1": 1},
    )


def changed(config: ModelConfig, **attention: object) -> ModelConfig:
    """The config with something else in the attention of its last layer."""
    last = dataclasses.replace(
        config.layers[-1], attention=dataclasses.replace(config.layers[-1].attention, **attention)
    )
    return dataclasses.replace(config, layers=(*config.layers[:-1], last))


def with_moe(name: str, **moe: object) -> ModelConfig:
    """The config with something else in its MoEs."""
    config = read_hf_config(CONFIGS[name])
    layers = [
        dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, **moe)) if i in config.moe_layers else layer
        for i, layer in enumerate(config.layers)
    ]
    return dataclasses.replace(config, layers=tuple(layers))


def two_windows(config: ModelConfig) -> ModelConfig:
    one = dataclasses.replace(config.layers[0].attention, sliding_window=6)
    layers = (dataclasses.replace(config.layers[0], attention=one), *config.layers[1:])
    return changed(dataclasses.replace(config, layers=layers), sliding_window=4)


def with_moes_first(config: ModelConfig) -> ModelConfig:
    """MoEs in the first two layers of the encoder: no step leads there."""
    moe, ffn = config.layers[1].mlp, config.layers[0].mlp
    layers = [dataclasses.replace(config.layers[i], mlp=mlp) for i, mlp in enumerate((moe, moe, ffn))]
    return dataclasses.replace(config, layers=(*layers, *config.layers[3:]))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (changed(read_hf_config(LLAMA), sliding_window=4), "layer 2: attention.sliding_window is 4"),
        (changed(read_hf_config(LLAMA), biases=("o",)), "layer 0 has False and layer 2 has True"),
        (changed(read_hf_config(LLAMA), head_dim=16), "layer 0 has (4, 2, 8) and layer 2 has (4, 2, 16)"),
        (changed(read_hf_config(CONFIGS["mistral"]), sliding_window=4), "layer 0 has 8 and layer 2 has 4"),
        (changed(read_hf_config(CONFIGS["mixtral"]), qk_norm="head"), "attention.qk_norm is 'head'"),
        (changed(read_hf_config(CONFIGS["stablelm"]), qk_norm="head"), "layer 0 has none and layer 2 has head"),
        (dataclasses.replace(read_hf_config(LLAMA), norm="layer"), "norm is 'layer', the format can only say 'rms'"),
        (dataclasses.replace(read_hf_config(LLAMA), head_bias=True), "head_bias is True"),
        (dataclasses.replace(read_hf_config(CONFIGS["stablelm"]), norm="rms"), "norm is 'rms', the format"),
        (dataclasses.replace(read_hf_config(CONFIGS["mixtral"]), family="llama"), "layer 0 is an MoE"),
        (dataclasses.replace(read_hf_config(LLAMA), family="mixtral"), "layer 0 is dense"),
        (changed(read_hf_config(CONFIGS["phi"]), biases=("q",)), "layer 2: attention.biases is ('q',)"),
        (dataclasses.replace(read_hf_config(CONFIGS["phi"]), head_bias=False), "head_bias is False"),
        (dataclasses.replace(read_hf_config(LLAMA), family="phi"), "3 layers (first: 0): parallel is False"),
        (dataclasses.replace(read_hf_config(LLAMA), family="rwkv9"), "unknown model family 'rwkv9'"),
        (dataclasses.replace(read_hf_config(CONFIGS["olmoe"]), family="mixtral"), "mlp.gate is 'softmax_topk'"),
        (dataclasses.replace(read_hf_config(CONFIGS["deepseek"]), family="deepseek_v2"), "latent attention only"),
        (with_moe("deepseek", universal_dim=50), "whole number of experts wide, but they are 50 wide and an expert 24"),
        (dataclasses.replace(read_hf_config(LLAMA), family="t5"), "with an encoder and a decoder, and no"),
        (changed(read_hf_config(CONFIGS["t5"]), relative_bias=None), "and relative biases for all layers"),
        (two_windows(read_hf_config(CONFIGS["qwen2"])), "one sliding window, the layers have [4, 6, 8]"),
        (dataclasses.replace(read_hf_config(CONFIGS["switch_transformers"]), tie_embeddings=False), "has its own"),
        (
            with_moes_first(read_hf_config(CONFIGS["switch_transformers"])),
            "in the encoder, layers [0, 1] of 3 are MoEs",
        ),
    ],
)
def test_what_a_format_cannot_say_is_refused(config: ModelConfig, expected: str):
    with pytest.raises(InputError) as error:
        write_hf_config(config)
    assert expected in str(error.value)


def test_banks_must_be_merged_before_they_are_written():
    config = read_hf_config(CONFIGS["mixtral"])
    moe = dataclasses.replace(config.layers[0].mlp, bank=BankConfig(kind="low-rank", rank=2))
    layers = tuple(dataclasses.replace(layer, mlp=moe) for layer in config.layers)
    with pytest.raises(InputError, match="mlp.bank.form is 'low-rank', the .* say 'full'"):
        write_hf_config(dataclasses.replace(config, layers=layers))


def test_differing_numbers_of_experts():
    config = read_hf_config(CONFIGS["mixtral"])
    other = dataclasses.replace(config.layers[1].mlp, num_experts=8)
    layers = (config.layers[0], dataclasses.replace(config.layers[1], mlp=other), config.layers[2])
    with pytest.raises(InputError, match="one .* layer 0 has 4 and layer 1 has 8"):
        write_hf_config(dataclasses.replace(config, layers=layers))


def test_configs_in_the_wild(data_dir: pathlib.Path):
    """Every true-size config of our families is read, and loses nothing when written."""
    seen = set()
    for file in sorted((data_dir / "configs").glob("*/*.json")):
        config = json.loads(file.read_text())
        if config.get("model_type") not in FAMILIES or "tensors" in config:
            continue
        seen.add(file.stem)
        written = write_hf_config(read_hf_config(config))
        assert {key: value for key, value in written.items() if key in config} == config, file
    assert {"01-ai__Yi-34B", "mistralai__Mixtral-8x7B-v0.1", "deepseek-ai__deepseek-coder-1.3b-base",
            "microsoft__phi-2"} <= seen  # fmt: skip


def test_special_tokens_are_in_the_vocabulary():
    """The default of a family, which Transformers writes for a small vocabulary too, is no statement about it."""
    olmoe = CONFIGS["olmoe"]
    for changes in ({"eos_token_id": 50279}, {}):
        config = read_hf_config({key: v for key, v in olmoe.items() if key != "eos_token_id"} | changes)
        assert config.vocab_size < 50279 and config.eos_ids == ()
    for eos in (50280, [1, 50279], -1):
        with pytest.raises(InputError, match="eos_ids: token"):
            read_hf_config(olmoe | {"eos_token_id": eos})
    with pytest.raises(InputError, match="bos_id: token 1000000 is outside"):
        read_hf_config(olmoe | {"bos_token_id": 10**6})
