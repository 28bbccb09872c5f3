"""Against Transformers itself: we read what it saves, and it computes the same from what we write."""

import copy
import json
import math
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from moe_jax.conversion import HuggingFaceDirectory, convert, export, read_hf_config, write_hf_config
from moe_jax.conversion.families import FAMILIES
from moe_jax.conversion.spec import ExportSpec
from moe_jax.conversion.table import FUSED, LAYOUTS, PER_EXPERT
from moe_jax.functional.position_embeddings import rope_tables
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.hf_checkpoints import BASE, CONFIGS, assert_same_bits, read_tensors
from tests.support.tiers import one_in

QUIET = Console(quiet=True)
# Models with an encoder: tests/families/test_encoder_decoder.py.
CAUSAL = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
KNOWN = [name for name in CONFIGS if CONFIGS[name]["model_type"] in CAUSAL]
TOKENS = torch.tensor([[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """name, layout -> a folder in which Transformers saved a small random model."""
    root = tmp_path_factory.mktemp("saved")

    def save(name: str, layout: str = PER_EXPERT) -> pathlib.Path:
        folder = root / f"{name}-{layout}"
        if not folder.exists():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS[name]))  # it changes what it is given
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
            model.save_pretrained(folder, save_original_format=layout == PER_EXPERT, max_shard_size="30kB")
        return folder

    return save


def load(folder: pathlib.Path):
    """Loads a model and checks that no weight was missing, unexpected or made up."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def assert_same_model(a: pathlib.Path, b: pathlib.Path) -> None:
    """Transformers loads the same parameters, bit for bit, and computes the same logits."""
    first, second = load(a), load(b)
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        # Not exactly: PyTorch's products depend on how the parameters are aligned in memory.
        assert np.allclose(first(TOKENS).logits, second(TOKENS).logits, atol=1e-5)


@one_in(4)
@pytest.mark.parametrize("name", KNOWN)
def test_saved_converted_exported_loaded(saved, tmp_path: pathlib.Path, name: str):
    foreign = saved(name)
    convert(foreign, tmp_path / "ours", console=QUIET)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=QUIET)
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(foreign))
    assert_same_model(tmp_path / "back", foreign)


NAMES = [
    "mixtral",
    "olmoe",
    "qwen2_moe-dense-layers",
    "qwen3_moe-dense-layers",
    "deepseek_v3",
    "ernie4_5_moe",
    "minimax_m2",
    "granitemoe",
]


@one_in(6)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_both_layouts_of_experts(saved, tmp_path: pathlib.Path, name: str, before: str, after: str):
    foreign = saved(name, before)
    source = HuggingFaceDirectory(foreign)
    assert source.weights.layout == before
    assert any("gate_up_proj" in tensor for tensor in source.checkpoint.tensors) == (before == FUSED)
    export(source, tmp_path / "back", ExportSpec(expert_layout=after), console=QUIET)
    assert HuggingFaceDirectory(tmp_path / "back").weights.layout == after
    assert_same_model(tmp_path / "back", saved(name))


def test_pytorch_files_of_transformers_4(saved, tmp_path: pathlib.Path):
    foreign = saved("mixtral")
    state = {name: torch.tensor(array) for name, array in read_tensors(foreign).items()}
    (tmp_path / "old").mkdir()
    config = {**CONFIGS["mixtral"], "architectures": ["MixtralForCausalLM"]}
    saved_config = json.loads((foreign / "config.json").read_text())
    config["rope_theta"] = saved_config["rope_parameters"]["rope_theta"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    export(HuggingFaceDirectory(tmp_path / "old"), tmp_path / "back", console=QUIET)
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(foreign))
    assert_same_model(tmp_path / "back", foreign)


def test_code_that_is_left_behind_is_not_asked_for(saved, tmp_path: pathlib.Path):
    source = shutil.copytree(saved("phi3"), tmp_path / "foreign")
    beside = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    elsewhere = {"AutoModel": "someone/code--modeling_phi3.Phi3Model"}
    keys = json.loads((source / "config.json").read_text()) | {"auto_map": {**beside, **elsewhere}}
    (source / "config.json").write_text(json.dumps(keys))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_phi3.Phi3Tokenizer", None]}, "model_max_length": 64}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    convert(source, tmp_path / "ours", console=QUIET)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=QUIET)
    keys = json.loads((tmp_path / "back" / "config.json").read_text())
    assert keys["auto_map"] == elsewhere
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text()) == {"model_max_length": 64}
    given = (source / "tokenizer_config.json").read_bytes()
    assert (tmp_path / "ours" / "tokenizer_config.json").read_bytes() == given
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", trust_remote_code=True)


@pytest.mark.parametrize("scales", [(0, 0), (0.0, 1.0), (0.5, 0.0), (0.5, 1.0)])
def test_a_magnitude_of_zero_in_yarn_is_none_as_in_transformers(scales: tuple[float, float]):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    given = {**scaling, "mscale": scales[0], "mscale_all_dim": scales[1]}
    theirs = transformers.LlamaConfig(**BASE, rope_parameters={**given, "rope_theta": 100.0})
    frequencies, expected = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    config = read_hf_config({**CONFIGS["llama"], "rope_theta": 100.0, "rope_scaling": given})
    tables = rope_tables(config.rope, 2 * len(frequencies), 64, jnp.zeros((1, 1), jnp.int32))
    assert np.max(tables[0]) == pytest.approx(expected)  # the cosine of 0, times the magnitude
    written = write_hf_config(config)["rope_scaling"]
    assert (written["mscale"], written["mscale_all_dim"]) == scales
    latent = read_hf_config({**CONFIGS["deepseek_v3"], "rope_scaling": given})
    magnitude = 0.1 * scales[1] * math.log(4.0) + 1.0
    assert latent.layers[0].attention.score_scale == pytest.approx(12**-0.5 * magnitude**2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loads_as_it_was(saved, tmp_path: pathlib.Path, dtype: str):
    export(HuggingFaceDirectory(saved("olmoe")), tmp_path / "back", ExportSpec(dtype=dtype), console=QUIET)
    model = load(tmp_path / "back")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in transformers.CONFIG_MAPPING])
def test_what_a_config_leaves_out_is_what_transformers_takes_it_for(name):
    # The window of Qwen2 and Qwen3 is forgotten where none is used.
    asked = {"use_sliding_window": True} if "use_sliding_window" in FAMILIES[name].defaults else {}
    theirs = transformers.AutoConfig.for_model(name, **asked)
    rope = getattr(theirs, "rope_parameters", None) or {}
    if "sliding_attention" in rope:
        rope = {
            "rope_theta": rope["full_attention"]["rope_theta"],
            "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
            "sliding_window_pattern": getattr(theirs, "_sliding_window_pattern", None),
        }
    ours = FAMILIES[name].defaults | asked
    # Files of T5 and DeepSeek have them, the classes have not: relative biases know no length, and there is no loss.
    for key in ("n_positions", "seq_aux"):
        ours.pop(key, None)
    # MiniMax's class has none, and its code takes whole heads then.
    known = {"partial_rotary_factor": getattr(theirs, "partial_rotary_factor", 1.0), **rope}
    if by_layer := theirs.to_dict().get("per_layer_config"):  # Gemma 4: the class has no attribute for all layers
        known |= {"head_dim": theirs.to_dict()["head_dim"]}
        known |= {"global_head_dim": next(iter(by_layer.values()))["head_dim"]}
    # By attribute and not from its dict, where a key may have another name.
    found = {key: known[key] if key in known else getattr(theirs, key) for key in ours}
    # A pair of sides is a list in a file, and a tuple in the class.
    assert ours == {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
