"""Damaged safetensors files: one clear line each, and never wrong data."""

import json
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moe_jax.conversion.safetensors_file import DiskShards, Layout, PlannedTensor, read_header
from moe_jax.conversion.tensors import DTYPES, TensorFiles
from moe_jax.core.errors import InputError
from tests.support.tiers import examples

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6).astype(ml_dtypes.bfloat16),
    "c.bias": np.arange(5, dtype=np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(3.0, np.float32),
}


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, stop: int, dtype: str = "F32", shape: tuple[int, ...] | None = None) -> dict:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def test_finds_every_tensor_that_the_library_wrote(tmp_path: pathlib.Path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    files = TensorFiles()
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, place in found.items():
        out = np.empty(place.shape, DTYPES[place.dtype])
        files.read_into(place, 0, out)
        assert out.tobytes() == TENSORS[name].tobytes() and out.dtype == TENSORS[name].dtype


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "its header should take 8 bytes, the file has 0"),
        (b"abc", "its header should take 8 bytes, the file has 3"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "its header should take 1099511627776 bytes, the file has 10"),
        ((100).to_bytes(8, "little") + b"{}", "header should take 100 bytes"),
        (raw(b'{"a": '), "not valid JSON"),
        (raw(b"\xff\xfe"), "not valid JSON"),
        (raw(b"[" * 5000 + b"]" * 5000), "nested more than 100 levels"),
        (raw(b"[" * 30_000_000), "more than 1,000,000 values"),
        (raw(b'{"a":[' + b"{}," * 6_000_000 + b"{}]}"), "more than 1,000,000 values"),
        (raw([1]), "JSON list, expected an"),
        (raw(b'{"a": 1, "a": 2}'), "key 'a' is given more"),
        (raw(b"\xef\xbb\xbf{}"), "first byte"),
        (raw({"__metadata__": {"format": 1}}), "its __metadata__ are not strings"),
        (raw({"__metadata__": None}), "its __metadata__ are not strings"),
        (raw({"a": 3}), "the entry of 'a' in its header is not a dtype, a shape and data_offsets"),
        (raw({"a": entry(0, 4, "F33", [1])}, b"0" * 4), "'a' has the unknown dtype 'F33' (did you mean 'F32'?)"),
        (raw({"a": entry(0, 4, ["F32"], [1])}, b"0" * 4), "'a' has the unknown dtype ['F32']"),
        (raw({"a": entry(0, 4, "F32", [1] * 65)}, b"0" * 4), "expected counts"),
        (raw({"a": entry(0, 4, "F32", [1] * 900_000)}, b"0" * 4), "expected counts"),
        (raw({"a": entry(0, 4, "F32", [10**30])}, b"0" * 4), "fit into 64 bits"),
        (
            raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 4500 + b'],"data_offsets":[0,4]}}'),
            "fit into 64 bits",
        ),
        (raw({"a": entry(0, 4, "F32", [2**62] * 64)}, b"0" * 4), "integer of 3971 bits bytes"),
        (raw({"a": entry(0, 4, "F4", [7])}, b"0" * 4), "takes 28 bits, but its data_offsets [0, 4] span 4"),
        (raw({"a": entry(0, 4, "F32", [-1])}, b"0" * 4), "expected counts"),
        (raw({"a": entry(0, 4, "F32", [1.0])}, b"0" * 4), "expected counts"),
        (raw({"a": entry(0, 4, "F32", [2])}, b"0" * 4), "takes 8 bytes, but its data_offsets [0, 4] span 4"),
        (raw({"a": entry(4, 0, "F32", [1])}, b"0" * 4), "span -4"),
        (raw({"a": entry(0, 8)}, b"0" * 4), "'a' ends 4 bytes after"),
        (raw({"a": entry(0, 8), "b": entry(4, 12)}, b"0" * 12), "'b' overlaps 'a'"),
        (raw({"a": entry(0, 4), "b": entry(8, 12)}, b"0" * 12), "'b' leaves a gap after 'a'"),
        (raw({"a": entry(4, 8)}, b"0" * 8), "'a' leaves a gap after 'the header'"),
        (raw({"a": entry(0, 4)}, b"0" * 8), "4 bytes at its"),
    ],
)
def test_a_damaged_file_is_named_with_its_damage(tmp_path: pathlib.Path, content: bytes, complaint: str):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_header(file)
    message = str(error.value)
    assert message.startswith(f"{file} is not a valid safetensors file: ") and complaint in message
    assert "\n" not in message and message.endswith("fetch it again")


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: pathlib.Path):
    file = tmp_path / "x.safetensors"
    with open(file, "wb") as handle:
        handle.write((200_000_000).to_bytes(8, "little"))
        handle.truncate(300_000_000)  # sparse: takes no room
    with pytest.raises(InputError, match="its header claims 200,000,000 bytes, at most 33,554,432"):
        read_header(file)


@pytest.mark.parametrize("name", ["a\nb", "a\0", "x" * 5000])
def test_names_that_no_message_can_hold(tmp_path: pathlib.Path, name: str):
    (tmp_path / "x.safetensors").write_bytes(raw({name: entry(0, 4)}, b"0" * 4))
    with pytest.raises(InputError, match="model's tensors") as error:
        read_header(tmp_path / "x.safetensors")
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path: pathlib.Path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="regular file"):
        read_header(tmp_path / "x.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: pathlib.Path):
    file = tmp_path / "x.safetensors"
    save_file(TENSORS, file)
    place, files, array = read_header(file)["a.weight"], TensorFiles(), np.empty((3, 4), np.float32)
    files.read_into(place, 0, array)
    with open(file, "r+b") as handle:
        handle.truncate(place.start + 8)
    with pytest.raises(InputError, match="ended while"):
        files.read_into(place, 0, array)
    with pytest.raises(InputError, match="replaced while"):
        TensorFiles().read_into(place, 0, array)


def test_tensors_begin_aligned():
    header = Layout.of({"x": PlannedTensor("BF16", (3,))}).header
    assert len(header) % 8 == 0
    assert json.loads(header[8:])["x"] == {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}


def test_every_shard_is_on_the_disk_before_it_is_said_to_be(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    tensors = {name: PlannedTensor("F32", TENSORS["a.weight"].shape) for name in ("a", "b", "c")}
    values = {name: TENSORS["a.weight"] + place for place, name in enumerate(tensors)}
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    with DiskShards(tmp_path, tensors, max_bytes=100) as writer:
        shards = sorted(str(path) for path in tmp_path.glob("*.safetensors"))
        for name, value in values.items():
            writer.write(name, 8, value.reshape(-1)[8:])
            writer.write(name, 0, value.reshape(-1)[:8])
        assert writer.sync() and len(shards) == 2 and sorted(synced) == shards
        assert not writer.are_kept(values)  # the notes of the work say it
        synced.clear()
    assert {*shards} < {*synced}  # and the index
    found = load_file(shards[0]) | load_file(shards[1])
    assert found.keys() == values.keys() and all(np.array_equal(found[name], values[name]) for name in found)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_corruption_of_the_header_gives_wrong_data_or_a_traceback(tmp_path: pathlib.Path, data: st.DataObject):
    """Bytes of length and header are changed, removed or added: an InputError, or every tensor as it was.

    A changed name or dtype of the same size is not this layer's to notice: `match_weights` does.
    """
    file = tmp_path / "fuzz.safetensors"
    save_file(TENSORS, file)
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, end - 1))
        action = data.draw(st.sampled_from(["change", "remove", "insert"]))
        byte = data.draw(st.integers(0, 255))
        content[position : position + (action != "insert")] = b"" if action == "remove" else bytes([byte])
    file.write_bytes(content)
    try:
        found = read_header(file)
    except InputError:
        return
    by_shape = {(place.shape, place.dtype): place for place in found.values()}
    files = TensorFiles()
    for array in TENSORS.values():
        name = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
        place = by_shape.get((array.shape, name))
        if place is not None:  # else shape or dtype were changed, and whoever expects the tensor notices
            out = np.empty(array.shape, array.dtype)
            files.read_into(place, 0, out)
            assert out.tobytes() == array.tobytes()
