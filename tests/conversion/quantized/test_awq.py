"""AWQ checkpoints: their codes stand for the numbers that the format says, and faults are one line."""

import re

import numpy as np
import pytest
import torch

from moe_jax.conversion.formats import format_of
from moe_jax.core.errors import InputError
from tests.support.compressed_weights import assert_decoded
from tests.support.faulty_codes import assert_only_input_errors, cast, cut, read, with_first, without
from tests.support.packed_weights import awq_settings, in_awq
from tests.support.quantized_checkpoints import assert_reads_as, is_quantised, plain_checkpoint, write_quantised
from tests.support.tiers import long

MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"
CODES, ZEROS, SCALES = (f"{MODULE}.{part}" for part in ("qweight", "qzeros", "scales"))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("shape", "group_size"), [((72, 48), 16), ((40, 37), -1), ((8, 128), 32), ((136, 33), 11)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes(shape, group_size, dtype, tmp_path):
    stored, values = in_awq(group_size, dtype=dtype)(WEIGHT, drawn(*shape))
    assert_decoded(tmp_path, stored, awq_settings(group_size), {WEIGHT: values})


@pytest.mark.parametrize(
    ("shape", "group_size"), [((75, 48), 16), ((40, 128), -1), ((9, 320), 64), ((9, 1152), 128), ((9, 576), 32)]
)
def test_codes_for_vectors(shape, group_size, tmp_path):
    """In the version `gemv`, whose zero points and scales have places that are not used."""
    stored, values = in_awq(group_size, version="gemv")(WEIGHT, drawn(*shape))
    assert_decoded(tmp_path, stored, awq_settings(group_size, version="GEMV"), {WEIGHT: values})


def test_the_order_in_a_word(tmp_path):
    """As AutoAWQ packs the codes 0, 1, ... of eight outputs."""
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    stored = {CODES: word, ZEROS: torch.zeros_like(word), SCALES: torch.ones(1, 8)}
    assert_decoded(tmp_path, stored, awq_settings(-1), {WEIGHT: np.arange(8)[:, None]})


@pytest.mark.parametrize(
    "settings", [awq_settings(zero_point=False), awq_settings(version=None, checkpoint_format="gemm")]
)
def test_settings_that_change_nothing(settings, tmp_path):
    stored, values = in_awq()(WEIGHT, drawn(40, 48))
    assert_decoded(tmp_path, stored, settings, {WEIGHT: values})


@pytest.mark.parametrize(
    ("name", "group_size", "version"),
    [("llama", 16, "gemm"), ("mixtral", 16, "gemm"), ("qwen3_moe", 8, "gemm"), ("deepseek_v3", -1, "gemm"),
     ("olmoe", 16, "gemv")],
)  # fmt: skip
def test_models(name, group_size, version, tmp_path):
    plain = plain_checkpoint(tmp_path / "plain", name)
    both = write_quantised(
        plain,
        tmp_path,
        in_awq(group_size, version=version),
        awq_settings(group_size, version=version),
        lambda name, weight: is_quantised(name, weight) and weight.shape[0] % 8 == 0,
    )
    assert_reads_as(*both, tmp_path)


# --- faults ---------------------------------------------------------------------------------------


def written(kind: str = "gemm") -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    stored, _ = in_awq(version=kind)(WEIGHT, drawn(40, 48))
    return stored, awq_settings(version=kind)


@pytest.mark.parametrize("kind", ["gemm", "gemv"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(SCALES), "scales is missing"),
        (without(ZEROS), "qzeros is missing"),
        (cut(SCALES), "scales has shape"),
        (cut(SCALES, 1), "scales has shape"),
        (cut(ZEROS), "qzeros has shape"),
        (cut(CODES), "has 47 inputs|qzeros has shape"),
        (cast(CODES, torch.int64), "qweight has dtype"),
        (cast(ZEROS, torch.int8), "qzeros has dtype"),
        (with_first(SCALES, float("nan")), "not finite"),
        (lambda stored: stored.update({CODES: stored[CODES][None]}), "qweight has shape"),
        (lambda stored: stored.update({WEIGHT: torch.ones(40, 48)}), "one of the two"),
    ],
)
def test_faults_of_tensors(kind, change, message, tmp_path):
    stored, config = written(kind)
    read(tmp_path, stored, config)
    change(stored)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, stored, config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 8}, "'bits'"),
        ({"group_size": "16"}, "'group_size'"),
        ({"zero_point": 3}, "'zero_point'"),
        ({"version": "gemv_fast"}, "'gemv_fast'"),
        ({"version": "marlin"}, "'marlin'"),
        ({"version": "exllama"}, "'exllama'"),
        ({"version": "ipex"}, "'ipex'"),
        ({"version": 3}, "'version'"),
        ({"backend": "llm-awq"}, "'llm-awq'"),
    ],
)
def test_faults_of_configs(changed, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        format_of({"quantization_config": awq_settings() | changed})
    assert "\n" not in str(caught.value)


def test_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, ["gemm", "gemv"], range(100))


@long
def test_many_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, ["gemm", "gemv"], range(100, 2000))
