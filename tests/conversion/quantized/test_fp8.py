"""FP8 checkpoints: the numbers and logits of Transformers, and faults in one line."""

import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from tests.support.numerics import logits_of
from tests.support.quantized_checkpoints import assert_reads_as, plain_checkpoint, write_quantised

TOKENS = [[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]]


class _Quantizer:
    def __init__(self, settings):
        self.quantization_config = transformers.FineGrainedFP8Config(**settings)


def in_fp8(settings):
    """The functions of Transformers for a weight: quantise it, and decode it."""
    writer, reader = Fp8Quantize(_Quantizer(settings)), Fp8Dequantize(_Quantizer(settings))

    def quantise(name, weight):
        stored = writer._quantize_one(name, weight)
        if len(stored) == 1:  # it leaves those whose blocks would be cut off as they are
            return stored, weight
        codes, scales = stored[name], stored[f"{name}_scale_inv"]
        return stored, reader._dequantize_one(codes, scales, torch.float32)

    return quantise


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("block", [(8, 16), (16, 8)])
def test_blocks_are_decoded_as_transformers_decodes_them(name, block, tmp_path):
    settings = {"weight_block_size": block}
    both = write_quantised(
        plain_checkpoint(tmp_path / "plain", name),
        tmp_path,
        in_fp8(settings),
        transformers.FineGrainedFP8Config(**settings).to_dict(),
    )
    model = assert_reads_as(*both, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(both[0], dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = np.asarray(logits_of(moe_jax.load(model).decoder, np.asarray(TOKENS, np.int32)))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())
