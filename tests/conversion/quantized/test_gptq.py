"""GPTQ checkpoints: codes of all kinds stand for the numbers that the format says, and faults are one line."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_jax
from moe_jax.conversion.formats import format_of
from moe_jax.conversion.tensors import TensorFiles
from moe_jax.core.errors import InputError
from tests.support.compressed_weights import assert_decoded, folded, read_whole
from tests.support.faulty_codes import assert_only_input_errors, cast, cut, read, with_first, without
from tests.support.packed_weights import gptq_settings, in_gptq
from tests.support.quantized_checkpoints import assert_reads_as, is_quantised, plain_checkpoint, write_quantised
from tests.support.tiers import long

MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"
CODES, ZEROS, SCALES, ORDER = (f"{MODULE}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize(("shape", "group_size"), [((75, 48), 16), ((40, 37), 12), ((24, 64), -1)])
def test_codes(bits, version, desc_act, shape, group_size, tmp_path):
    args = {"version": version, "desc_act": desc_act}
    stored, values = in_gptq(bits, group_size, **args)(WEIGHT, drawn(*shape))
    settings = gptq_settings(bits, group_size, checkpoint_format=version, desc_act=desc_act)
    assert_decoded(tmp_path, stored, settings, {WEIGHT: values})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_in_order_need_no_index(dtype, tmp_path):
    stored, values = in_gptq(order=False, dtype=dtype)(WEIGHT, drawn(40, 48))
    assert_decoded(tmp_path, stored, gptq_settings(), {WEIGHT: values})


@pytest.mark.parametrize(
    ("bits", "words", "codes"),
    [
        (4, [0x76543210], range(8)),
        (8, [0x03020100], range(4)),
        (2, [0xE4E4E4E4], [0, 1, 2, 3] * 4),
        (3, [0x43C67543, 0x7543C675, 0xC67543C6], [(5 * i + 3) % 8 for i in range(32)]),
    ],
)
def test_words_of_gptqmodel(bits, words, codes, tmp_path):
    """Packed by its own function; 0, the first zero point, has borrowed from the next one."""
    ones = (1 << 32) // ((1 << bits) - 1)
    one_less = [word - ones & 0xFFFFFFFF for word in words] if bits != 3 else words
    as_words = [torch.from_numpy(np.asarray(given, np.uint32).view(np.int32)) for given in (words, one_less)]
    stored = {
        CODES: as_words[0][:, None].repeat(1, len(codes)),
        ZEROS: as_words[1][None],
        SCALES: torch.ones(1, len(codes)),
        ORDER: torch.zeros(len(codes), dtype=torch.int32),
    }
    zeros = np.asarray(codes if bits != 3 else [(code + 1) % 8 for code in codes])
    assert_decoded(tmp_path, stored, gptq_settings(bits, -1), {WEIGHT: np.asarray(codes)[None] - zeros[:, None]})


# --- rules for some modules -----------------------------------------------------------------------


def test_rules_for_some_modules(tmp_path):
    """The first that matches holds."""
    rules = {
        r"-:.*\.gate_proj": {},
        r"+:.*\.layers\.0\..*k_proj": {"bits": 8, "sym": False},
        r"lm_head": {"bits": 8, "group_size": -1},
        r".*proj$": {"group_size": 12},
        r".*\.k_proj": {"bits": 2},
    }
    given = {
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.1.self_attn.k_proj.weight": (4, 12),
        "lm_head.weight": (8, -1),
        "model.layers.0.mlp.other.weight": (4, 16),
    }
    stored, expected = {"model.layers.0.mlp.gate_proj.weight": drawn(8, 8)}, {}
    expected |= stored
    for name, packing in given.items():
        tensors, expected[name] = in_gptq(*packing)(name, drawn(40, 48))
        stored |= tensors
    assert_decoded(tmp_path, stored, gptq_settings(dynamic=rules), expected)


def test_codes_that_a_rule_leaves_whole(tmp_path):
    stored, _ = in_gptq()(WEIGHT, drawn(40, 48))
    with pytest.raises(InputError, match="leaves it whole"):
        read(tmp_path, stored, gptq_settings(dynamic={r"-:.*up_proj": {}}))


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "group_size", "args"),
    [
        ("llama", 4, 16, {"desc_act": True}),
        ("mixtral", 4, 16, {"version": "gptq_v2"}),
        ("qwen3_moe", 8, -1, {}),
        ("deepseek_v3", 3, 12, {}),
        ("olmoe", 2, 8, {"dtype": torch.bfloat16}),
    ],
)
def test_models(name, bits, group_size, args, tmp_path):
    settings = gptq_settings(
        bits, group_size, desc_act="desc_act" in args, checkpoint_format=args.get("version", "gptq")
    )
    plain = plain_checkpoint(tmp_path / "plain", name)

    def chosen(name, weight):
        return is_quantised(name, weight) or (bits == 8 and name == "lm_head.weight")

    assert_reads_as(*write_quantised(plain, tmp_path, in_gptq(bits, group_size, **args), settings, chosen), tmp_path)


def test_biases_of_zeros_are_left_out(tmp_path):
    """AutoGPTQ gave one to every module."""
    plain = plain_checkpoint(tmp_path / "plain", "llama")
    both = write_quantised(plain, tmp_path, in_gptq(), gptq_settings())
    file = both[0] / "model.safetensors"
    tensors = load_file(file)
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    biases = {f"{module}.bias": torch.zeros(tensors[f"{module}.scales"].shape[1]) for module in modules}
    save_file(tensors | biases, file)
    assert_reads_as(*both, tmp_path)
    biases[f"{modules[0]}.bias"][3] = 1
    save_file(tensors | biases, file)
    with pytest.raises(InputError, match="bias is unexpected"):
        moe_jax.convert(both[0], tmp_path / "again")


# --- faults ---------------------------------------------------------------------------------------


def written(kind: str = "gptq") -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    stored, _ = in_gptq()(WEIGHT, drawn(40, 48))
    return stored, gptq_settings()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(SCALES), "scales is missing"),
        (without(ZEROS), "qzeros is missing"),
        (cut(SCALES), "scales has shape"),
        (cut(ZEROS, 1), "qzeros has shape"),
        (cut(CODES), "qweight has shape"),
        (cut(CODES, 1), "scales has shape"),
        (lambda stored: stored.update({ORDER: stored[ORDER][:40]}), "qweight has shape"),
        (cast(CODES, torch.int64), "qweight has dtype"),
        (cast(SCALES, torch.int32), "scales has dtype"),
        (cast(ORDER, torch.int64), "g_idx has dtype"),
        (with_first(SCALES, float("nan")), "not finite"),
        (with_first(SCALES, float("inf")), "not finite"),
        (with_first(ORDER, 3), "g_idx names groups"),
        (with_first(ORDER, -1), "g_idx names groups"),
        (lambda stored: stored.update({CODES: stored[CODES].reshape(-1)}), "qweight has shape"),
        (lambda stored: stored.update({ORDER: stored[ORDER][None]}), "g_idx has shape"),
        (lambda stored: stored.update({WEIGHT: torch.ones(40, 48)}), "one of the two"),
        (lambda stored: stored.update(in_gptq(8)(WEIGHT, drawn(40, 48))[0]), "'dynamic'"),
    ],
)
def test_faults_of_tensors(change, message, tmp_path):
    stored, config = written()
    read(tmp_path, stored, config)
    change(stored)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, stored, config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 5}, "bits"),
        ({"bits": True}, "bits"),
        ({"group_size": 0}, "group_size"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"checkpoint_format": "bitblas"}, "'bitblas'"),
        ({"format": "gptq_p"}, "'gptq_p'"),
        ({"format": "gptq_v2"}, "differ"),
        ({"is_marlin_format": True}, "Marlin"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
        ({"desc_act": "yes"}, "desc_act"),
        ({"adapter": {"name": "lora"}}, "adapter"),
        ({"dynamic": ["x"]}, "expected an object"),
        ({"dynamic": {"x": {"bits": 7}}}, "bits"),
        ({"dynamic": {"x": {"format": "marlin"}}}, "'format'"),
        ({"dynamic": {"x": 3}}, "expected an object"),
        ({"dynamic": {"+:(": {}}}, "regular expression"),
        ({"dynamic": {"x" * 2000: {}}}, "regular expression"),
    ],
)
def test_faults_of_configs(changed, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        format_of({"quantization_config": gptq_settings() | changed})
    assert "\n" not in str(caught.value)


def test_groups_in_an_order_that_is_missing(tmp_path):
    stored, _ = in_gptq(desc_act=True, order=False)(WEIGHT, drawn(40, 48))
    with pytest.raises(InputError, match="g_idx is missing"):
        read(tmp_path, stored, gptq_settings(desc_act=True))


def test_groups_out_of_order_do_not_stay_in_codes(tmp_path):
    stored, values = in_gptq(desc_act=True)(WEIGHT, drawn(40, 48))
    entry = folded(tmp_path, stored, gptq_settings())[WEIGHT]
    np.testing.assert_array_equal(read_whole(entry), values)
    with pytest.raises(InputError, match="out of order"):
        TensorFiles().codes(entry, 0, 40)


def test_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, ["gptq"], range(100))


@long
def test_many_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, ["gptq"], range(100, 2000))
