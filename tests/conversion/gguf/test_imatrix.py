"""The importance of inputs from llama-imatrix: in both forms, what it does to K-quants, and faults in one line."""

import pathlib
import struct

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

import moe_jax  # noqa: E402
from moe_jax.conversion.gguf.gguf_model import GGUFModel  # noqa: E402
from moe_jax.conversion.gguf.imatrix import read_imatrix, write_imatrix  # noqa: E402
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory  # noqa: E402
from moe_jax.core.errors import InputError  # noqa: E402
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint  # noqa: E402

SHAPES = {"blk.0.ffn_up_exps.weight": (3, 4, 8), "blk.0.attn_q.weight": (8, 8), "output_norm.weight": (8,)}


def write_tensors(path: pathlib.Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> pathlib.Path:
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
    file = write_tensors(
        tmp_path / "imatrix.gguf",
        sums("blk.0.ffn_up_exps.weight", stacked, [[2], [0], [4]])
        | sums("blk.0.attn_q.weight", np.ones((1, 8)), [[5]]),
    )
    found = read_imatrix(file, SHAPES)
    moments = np.stack([stacked[0] / 2, (stacked[0] / 2 + stacked[2] / 4) / 2, stacked[2] / 4])
    np.testing.assert_allclose(found["blk.0.ffn_up_exps.weight"], moments, rtol=1e-6)
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], np.full((1, 8), 0.2), rtol=1e-6)
    assert len(found) == 2


WRITTEN = {"blk.0.ffn_up_exps.weight": np.arange(24.0, dtype=np.float32).reshape(3, 8),
           "blk.0.attn_q.weight": np.full((1, 8), 3, np.float32)}  # fmt: skip
COUNTS = {"blk.0.ffn_up_exps.weight": np.float32([2, 4, 8]), "blk.0.attn_q.weight": np.float32([5])}
SAID = {"datasets": ["wiki.txt", "code.txt"], "chunk_count": 3, "chunk_size": 512}


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "imatrix.gguf"
    write_imatrix(file, WRITTEN, COUNTS, **SAID)
    found = read_imatrix(file, SHAPES)
    assert found.keys() == WRITTEN.keys()
    for name, sums_of in WRITTEN.items():
        np.testing.assert_array_equal(found[name], sums_of / COUNTS[name][:, None])
    reader = gguf.GGUFReader(file)
    said = {key: field.contents() for key, field in reader.fields.items()}
    assert said["general.type"] == "imatrix" and said["imatrix.datasets"] == ["wiki.txt", "code.txt"]
    assert (said["imatrix.chunk_count"], said["imatrix.chunk_size"]) == (3, 512)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == sorted(tensors, key=lambda name: (name.rsplit(".", 1)[0], name.endswith("counts")))
    assert np.array_equal(tensors["blk.0.ffn_up_exps.weight.counts"].data, [[2], [4], [8]])
    assert np.array_equal(tensors["blk.0.ffn_up_exps.weight.in_sum2"].data, WRITTEN["blk.0.ffn_up_exps.weight"])
    assert [one.name for one in tmp_path.iterdir()] == ["imatrix.gguf"]
    with pytest.raises(InputError, match="already exists"):
        write_imatrix(file, WRITTEN, COUNTS, **SAID)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"squares": {}}, "no sums"),
        ({"counts": {"blk.0.attn_q.weight": np.float32([5])}}, "without counts"),
        ({"squares": WRITTEN | {"blk.0.attn_q.weight": np.ones(8, np.float32)}}, r"blk.0.attn_q.weight has sums .8."),
        ({"counts": COUNTS | {"blk.0.attn_q.weight": np.float32([5, 5])}}, r"counts .2., expected"),
        ({"squares": WRITTEN | {"blk.0.attn_q.weight": np.full((1, 8), -1.0)}}, "attn_q.weight.in_sum2 .* negative"),
        ({"squares": WRITTEN | {"blk.0.attn_q.weight": np.full((1, 8), 1e300)}}, "not finite"),
        ({"counts": COUNTS | {"blk.0.attn_q.weight": np.float32([np.nan])}}, "attn_q.weight.counts"),
        ({"datasets": []}, "name of a"),
        ({"chunk_count": 0}, "chunk_count=0 must"),
        ({"chunk_size": 2**32}, "chunk_size=4294967296 must"),
    ],
)
def test_what_is_no_imatrix_is_not_written(tmp_path, changes, message):
    given = {"squares": WRITTEN, "counts": COUNTS, **SAID} | changes
    with pytest.raises(InputError, match=message) as caught:
        write_imatrix(tmp_path / "imatrix.gguf", **given)
    assert len(str(caught.value).splitlines()) == 1 and not list(tmp_path.iterdir())


def dat(entries, tail=b""):
    """A file of the older form: names, calls and values."""
    found = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        values = np.asarray(values, "<f4")
        name = name.encode()
        found += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, values.size) + values.tobytes()
    return found + tail


EXPERTS = ("blk.0.ffn_up_exps.weight", 4, np.arange(24))
Q = ("blk.0.attn_q.weight", 0, np.ones(8))
OTHER = ("blk.7.attn_q.weight", 1, np.ones(5))


@pytest.mark.parametrize("tail", [b"", struct.pack("<i", 3), struct.pack("<ii", 3, 4) + b"wiki"])
def test_older_files(tmp_path, tail):
    file = tmp_path / "imatrix.dat"
    file.write_bytes(dat([OTHER, EXPERTS, Q], tail))
    found = read_imatrix(file, SHAPES)
    np.testing.assert_array_equal(found["blk.0.ffn_up_exps.weight"], np.arange(24).reshape(3, 8) / np.float32(4))
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"], np.ones((1, 8)))
    assert len(found) == 2 and found["blk.0.attn_q.weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends after 0"),
        (b"\x01\x00\x00\x00", "ends after 4"),
        (struct.pack("<i", 0), "number of matrices is 0"),
        (struct.pack("<i", 2**31 - 1), "number of matrices is 2,147,483,647"),
        (struct.pack("<ii", 1, -1), "length of a name is -1"),
        (struct.pack("<ii", 1, 3) + b"\xff\xfe\xfd", "no UTF-8"),
        (struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, 2**30), "number of values of 'a' is 1,073,741,824"),
        (dat([(Q[0], -1, Q[2])]), "number of calls of 'blk.0.attn_q.weight' is -1"),
        (dat([Q, Q]), "'blk.0.attn_q.weight' is in it twice"),
        (dat([Q])[:-1], "number of values"),
        (dat([Q], b"\0\0"), "ends after"),
        (dat([Q], struct.pack("<ii", 3, 9) + b"wiki"), "length of the name of the text is 9"),
        (dat([Q], struct.pack("<ii", 3, 2) + b"wiki"), "2 bytes at its end"),
        (dat([(Q[0], 1, np.ones(9))]), "9 values, expected 1 x 8"),
        (dat([(Q[0], 1, np.full(8, np.inf))]), "no sums of"),
        (dat([(Q[0], 1, np.full(8, -1))]), "no sums of"),
        (dat([OTHER]), "nothing about"),
    ],
)
def test_faults_of_older_files(tmp_path, content, message):
    file = tmp_path / "imatrix.dat"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_imatrix(file, SHAPES)
    assert len(str(caught.value).splitlines()) == 1 and str(file) in str(caught.value)


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
    file = write_tensors(tmp_path / "imatrix.gguf", tensors, kind)
    with pytest.raises(InputError, match=message):
        read_imatrix(file, SHAPES)


def test_a_file_that_is_not_there(tmp_path):
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
    file = write_tensors(tmp_path / "imatrix.gguf", sums(name, importance, np.ones((experts, 1))))
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
