"""The importance of inputs from llama-imatrix: who has it, what it does to K-quants, and faults in one line."""

import pathlib

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

import moe_jax  # noqa: E402
from moe_jax.conversion.gguf.gguf_model import GGUFModel  # noqa: E402
from moe_jax.conversion.gguf.imatrix import read_imatrix  # noqa: E402
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory  # noqa: E402
from moe_jax.core.errors import InputError  # noqa: E402
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint  # noqa: E402

SHAPES = {"blk.0.ffn_up_exps.weight": (3, 4, 8), "blk.0.attn_q.weight": (8, 8), "output_norm.weight": (8,)}


def write_imatrix(path: pathlib.Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> pathlib.Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return path


def sums(name: str, values, counts) -> dict[str, np.ndarray]:
    return {f"{name}.in_sum2": np.asarray(values), f"{name}.counts": np.asarray(counts)}


def test_moments_are_sums_over_counts(tmp_path):
    stacked = np.arange(24.0).reshape(3, 8)
    stacked[1] = 0
    file = write_imatrix(
        tmp_path / "imatrix.gguf",
        sums("blk.0.ffn_up_exps.weight", stacked, [[2], [0], [4]])
        | sums("blk.0.attn_q.weight", np.ones((1, 8)), [[5]]),
    )
    found = read_imatrix(file, SHAPES)
    moments = np.stack([stacked[0] / 2, (stacked[0] / 2 + stacked[2] / 4) / 2, stacked[2] / 4])
    np.testing.assert_allclose(found["blk.0.ffn_up_exps.weight"], moments, rtol=1e-6)
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], np.full((1, 8), 0.2), rtol=1e-6)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        (sums("blk.0.attn_q.weight", np.ones((1, 9)), [[1]]), "imatrix", "made with another"),
        (sums("blk.0.attn_q.weight", np.full((1, 8), np.nan), [[1]]), "imatrix", "no sums of"),
        (sums("blk.0.attn_q.weight", np.full((1, 8), -1.0), [[1]]), "imatrix", "no sums of"),
        ({"blk.0.attn_q.weight.in_sum2": np.ones((1, 8))}, "imatrix", "counts is missing"),
        (sums("blk.7.attn_q.weight", np.ones((1, 8)), [[1]]), "imatrix", "nothing about"),
        (sums("blk.0.attn_q.weight", np.ones((1, 8)), [[1]]), "model", "not an imatrix"),
    ],
)
def test_faults(tmp_path, tensors, kind, message):
    file = write_imatrix(tmp_path / "imatrix.gguf", tensors, kind)
    with pytest.raises(InputError, match=message):
        read_imatrix(file, SHAPES)


def test_other_files(tmp_path):
    (tmp_path / "imatrix.dat").write_bytes(b"\x01\x00\x00\x00")
    with pytest.raises(InputError, match="no imatrix in"):
        read_imatrix(tmp_path / "imatrix.dat", SHAPES)
    with pytest.raises(FileNotFoundError, match="no imatrix file"):
        read_imatrix(tmp_path / "nothing.gguf", SHAPES)


def test_errors_of_important_inputs_are_smaller(tmp_path):
    """Of experts, each with inputs of its own that count."""
    config = {**CONFIGS["mixtral"], "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    checkpoint = write_checkpoint(tmp_path / "hf", config, random_tensors(config))
    experts = config["num_local_experts"]
    importance = np.full((experts, 256), 1e-3)
    for expert in range(experts):
        importance[expert, expert::8] = 1
    name = "blk.0.ffn_up_exps.weight"
    file = write_imatrix(tmp_path / "imatrix.gguf", sums(name, importance, np.ones((experts, 1))))
    with pytest.raises(InputError, match="only with --format gguf"):
        moe_jax.export(checkpoint, tmp_path / "out", imatrix=file)
    errors = {}
    whole = HuggingFaceDirectory(checkpoint).read("layers/0/mlp/experts/up/kernel")
    for given in (None, file):
        out = tmp_path / f"model-{given is None}.gguf"
        moe_jax.export(checkpoint, out, format="gguf", gguf_type="Q2_K", imatrix=given)
        difference = GGUFModel(out).read("layers/0/mlp/experts/up/kernel") - whole
        errors[given is None] = (difference**2 * importance[:, :, None]).sum((1, 2))
    assert (errors[False] < 0.8 * errors[True]).all()
