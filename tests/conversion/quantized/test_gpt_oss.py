"""gpt-oss with its experts in MXFP4, as it is published: decoded, and kept in codes, against Transformers' decoder."""

import json
import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.kept_experts import assert_kept_as_decoded
from tests.support.quantized_checkpoints import plain_checkpoint

WIDE = {"hidden_size": 64, "intermediate_size": 96}
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """A small model with experts in codes, and the one that Transformers decodes it to."""
    root = tmp_path_factory.mktemp("gpt-oss")
    plain = plain_checkpoint(root / "plain", "gpt_oss", **WIDE)
    generator, coded, decoded = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            coded[name] = decoded[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        coded[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        coded[f"{name}_scales"] = torch.randint(121, 127, shape, generator=generator).to(torch.uint8)
        codes = (coded[f"{name}_{part}"] for part in ("blocks", "scales"))
        decoded[name] = convert_moe_packed_tensors(*codes, dtype=torch.float32).contiguous()
        assert decoded[name].shape == tensor.shape
    config = json.loads((plain / "config.json").read_text())
    for where, tensors, more in (("coded", coded, {"quantization_config": CONFIG}), ("decoded", decoded, {})):
        (root / where).mkdir()
        save_file(tensors, root / where / "model.safetensors", metadata={"format": "pt"})
        (root / where / "config.json").write_text(json.dumps(config | more))
    return root / "coded", root / "decoded"


def test_codes_are_decoded_to_what_transformers_decodes_them_to(folders, tmp_path):
    models = []
    for index, folder in enumerate(folders):
        moe_jax.convert(folder, tmp_path / str(index))
        models.append(ModelDirectory(tmp_path / str(index)))
    assert [*models[0].specs()] == [*models[1].specs()]
    for path in models[0].specs():
        np.testing.assert_array_equal(models[0].read(path), models[1].read(path), err_msg=path)


def test_experts_stay_in_codes(folders, tmp_path, capfd):
    """Rows of gate and up lie in turns in the stored codes, and apart in those that are kept."""
    assert_kept_as_decoded(folders[0], tmp_path, "4", capfd)
    model = ModelDirectory(tmp_path / "kept")
    form = model.config.moe(0).bank.form
    assert (form.bits, form.group_size, form.table) == (4, 32, True)
    assert model.read("layers/0/mlp/experts/delta/gate/codes").nbytes == 4 * 64 * 96 // 2


def test_kept_experts_compute_what_decoded_ones_do_and_leave_whole(folders, tmp_path):
    kept = moe_jax.convert(folders[0], tmp_path / "kept", codes="keep")
    ids = np.random.default_rng(0).integers(0, 64, 60).tolist()
    of_kept = moe_jax.evaluate(kept, ids, seq_len=20).nll
    assert of_kept == pytest.approx(moe_jax.evaluate(folders[1], ids, seq_len=20).nll, abs=1e-5)
    moe_jax.export(kept, tmp_path / "whole")
    found, expected = (load_file(where / "model.safetensors") for where in (tmp_path / "whole", folders[1]))
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def test_fused_experts_are_not_written_in_codes(folders, tmp_path):
    with pytest.raises(InputError, match="in codes"):
        moe_jax.export(folders[1], tmp_path / "out", format="compressed-tensors", bits=4)
    assert not (tmp_path / "out").exists()


def test_a_scale_that_is_not_finite_is_found_in_kept_codes_too(folders, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    tensors[name][2, 5, 0] = 255
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    (damaged / "config.json").write_text((folders[0] / "config.json").read_text())
    for how in ("keep", "decode"):
        with pytest.raises(InputError, match="are not finite"):
            moe_jax.convert(damaged, tmp_path / how, codes=how)
