"""PyTorch checkpoints without PyTorch: the same tensors, and nothing is ever run."""

import contextlib
import io
import pathlib
import pickle
import struct
import time
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_jax.conversion import tensors
from moe_jax.conversion.tensors import DTYPES, TensorFiles
from moe_jax.conversion.torch_file import _run, read_torch_file
from moe_jax.core.errors import InputError


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


@pytest.fixture(scope="module")
def state(torch) -> dict:
    """Contiguous, transposed and sliced tensors, views of one storage, scalars and empty ones, all dtypes."""
    big = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = torch.nn.Linear(3, 2).state_dict()  # an OrderedDict with metadata
    state.update(
        whole=big,
        transposed=big.T,
        sliced=big[1:3, ::2],
        parameter=torch.nn.Parameter(big.bfloat16()),
        half=big.half(),
        empty=torch.zeros(0, 3),
        scalar=torch.tensor(3.0),
        row=big[2:3].T,
        integers=torch.arange(4),
    )
    return state


def test_reads_what_torch_saved(torch, state: dict, tmp_path: pathlib.Path):
    torch.save(state, tmp_path / "x.bin")
    found, files = read_torch_file(tmp_path / "x.bin"), TensorFiles()
    assert found.keys() == state.keys()
    assert found["integers"].dtype == "I64"
    assert found["transposed"].strides == (1, 6) and found["whole"].strides is None and found["row"].strides is None
    for name, entry in found.items():
        expected = state[name].detach()
        assert entry.shape == tuple(expected.shape)
        if entry.dtype not in DTYPES:
            continue
        array = files.read_strided(entry)
        assert np.array_equal(array.astype(np.float32), expected.float().numpy()), name
        if entry.strides is None:
            out = np.empty(entry.shape, DTYPES[entry.dtype])
            files.read_into(entry, 0, out)
            assert out.tobytes() == np.ascontiguousarray(array).tobytes()


def test_reads_a_state_dict_that_a_trainer_wrapped(torch, state: dict, tmp_path: pathlib.Path):
    torch.save({"state_dict": state}, tmp_path / "x.bin")
    assert read_torch_file(tmp_path / "x.bin").keys() == state.keys()


class Malicious:
    """Unpickles by writing a file."""

    def __init__(self, target: str):
        self.target = target

    def __reduce__(self):
        return open, (self.target, "w")


def test_runs_nothing(torch, tmp_path: pathlib.Path):
    target = tmp_path / "written"
    torch.save({"weight": Malicious(str(target))}, tmp_path / "x.bin")
    with pytest.raises(InputError, match="wants to run _?io.open"):
        read_torch_file(tmp_path / "x.bin")
    assert not target.exists()


@pytest.mark.parametrize(
    ("pickled", "complaint"),
    [
        (b"cbuiltins\neval\nX\1\0\0\0a\x85R.", "run builtins.eval; only plain tensors"),
        (b"\x8c\2os\x8c\6system\x93.", "wants to run os.system"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(K\1K\0))tR.", "without a storage"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n.", "dict of tensors"),
        (b"}X\1\0\0\0aK\1s.", "int under 'a', expected tensors"),
        (b"}K\1K\1s.", "int under 1, expected tensors"),
        (b"(K\1K\2tQ.", "data.pkl is damaged (ValueError)"),
        (b"K\1Q.", "data.pkl is damaged (TypeError)"),
        (b"\x80\x02}q", "data.pkl is damaged"),
        (b"", "data.pkl is damaged (ValueError)"),
        (b".", "data.pkl is damaged (IndexError)"),
        (b"h\1.", "data.pkl is damaged (KeyError)"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}b.", "attributes of what"),
        (b"ccollections\nOrderedDict\nccollections\nOrderedDict\nR.", "call of what"),
        (b"(dI1\nI1\ns.", "the operation DICT"),  # of protocol 0, which PyTorch does not write
        (b"}K\1\x85K\1s.", "tuple as a"),
        (b"}X\1\0\0\0aK\1sX\1\0\0\0aK\1s.", "the key 'a' twice"),
        (b"}K\1a.", "items of what is no list"),
        (b"K\1(K\2e.", "items of what is no list"),
        (b"]K\1K\2s.", "keys of what is no dictionary"),
        (b"}(K\1u.", "keys of what is no dictionary"),
        (b"K\1K\2\x93.", "a name that is no string"),
        (b"(X\1\0\0\0xctorch\nFloatStorage\nX\1\0\0\0kK\1K\2tQ.", "something else than a storage"),
        (b"(X\7\0\0\0storageK\1X\1\0\0\0kK\1K\2tQ.", "something else than a storage"),
    ],
)
def test_a_pickle_that_is_no_state_dict(tmp_path: pathlib.Path, pickled: bytes, complaint: str):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(InputError) as error:
        read_torch_file(tmp_path / "x.bin")
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("pickled", "value"),
    [
        (b"]K\1aK\2a.", [1, 2]),
        (b"](K\1K\2e.", [1, 2]),
        (b"\x8c\1a\x94]\x94K\5ah\0\x86.", ([5], "a")),
        (b"K\4K\5q\7K\6h\7\x87\x86.", (4, (5, 6, 5))),
        (b"K\5\x85.", (5,)),
        (b"(N\x88\x89t.", (None, True, False)),
        (b"((}])tt.", (({}, [], ()),)),
        (b"}(X\1\0\0\0aK\1K\3M\0\1u.", {"a": 1, 3: 256}),
        (b"ccollections\nOrderedDict\n)R}X\1\0\0\0aK\1sb.", {}),
    ],
)
def test_a_pickle_builds_what_python_would_build(pickled: bytes, value):
    assert _run(pickled) == value == pickle.loads(pickled)


def test_a_legacy_file_says_what_to_do(torch, state: dict, tmp_path: pathlib.Path):
    torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="older than PyTorch 1.6"):
        read_torch_file(tmp_path / "x.bin")


def rewritten(source: pathlib.Path, target: pathlib.Path, change) -> pathlib.Path:
    """Copies a zip, with `change(name, content)` returning a new content, or None to leave a member out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda name, content: None if name.endswith("/data/0") else content, "is missing"),
        (lambda name, content: content[:-4] if name.endswith("/data/0") else content, "storage, which has"),
        (lambda name, content: b"big" if name.endswith("byteorder") else content, "big-endian"),
        (lambda name, content: None if name.endswith("data.pkl") else content, "it has 0 data.pkl"),
    ],
)
def test_a_damaged_archive(torch, tmp_path: pathlib.Path, change, complaint: str):
    torch.save({"w": torch.zeros(3, 4)}, tmp_path / "x.bin")
    file = rewritten(tmp_path / "x.bin", tmp_path / "y.bin", change)
    with pytest.raises(InputError, match=complaint):
        read_torch_file(file)


def test_a_compressed_archive(torch, tmp_path: pathlib.Path):
    torch.save({"w": torch.zeros(3, 4)}, tmp_path / "x.bin")
    for compressed in ("data.pkl", "/data/0"):
        with zipfile.ZipFile(tmp_path / "x.bin") as old, zipfile.ZipFile(tmp_path / "y.bin", "w") as new:
            for name in old.namelist():
                method = zipfile.ZIP_DEFLATED if name.endswith(compressed) else zipfile.ZIP_STORED
                new.writestr(name, old.read(name), method)
        with pytest.raises(InputError, match="is compressed"):
            read_torch_file(tmp_path / "y.bin")


def test_a_truncated_archive(torch, state: dict, tmp_path: pathlib.Path):
    torch.save(state, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="is damaged"):
        read_torch_file(tmp_path / "x.bin")


def same_tensors(state: dict, found: dict, files: TensorFiles) -> bool:
    """Whether all tensors of the dtypes that we read are there, bit for bit."""
    return found.keys() == state.keys() and all(
        np.array_equal(
            np.ascontiguousarray(files.read_strided(entry)).view(np.uint8),
            np.ascontiguousarray(state[name].detach().view(dtype=_bits(state[name])).numpy()).view(np.uint8),
        )
        for name, entry in found.items()
        if entry.dtype in DTYPES and 0 not in entry.shape
    )


def _bits(tensor):
    """The integers of a tensor's width: NumPy knows no bfloat16."""
    import torch

    return {2: torch.int16, 4: torch.int32}[tensor.element_size()]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_corruption_gives_a_traceback_or_other_weights(
    torch, state: dict, tmp_path: pathlib.Path, data: st.DataObject
):
    file = tmp_path / "fuzz.bin"
    if not (tmp_path / "good.bin").exists():
        torch.save(state, tmp_path / "good.bin")
    content = bytearray((tmp_path / "good.bin").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(InputError):
        assert same_tensors(state, read_torch_file(file), TensorFiles())


def test_every_bit_of_a_storage_counts(torch, tmp_path: pathlib.Path):
    torch.save({"w": torch.arange(4.0)}, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    start = content.index(torch.arange(4.0).numpy().tobytes())
    for bit in range(8 * 16):
        damaged = bytearray(content)
        damaged[start + bit // 8] ^= 1 << bit % 8
        (tmp_path / "y.bin").write_bytes(damaged)
        entry = read_torch_file(tmp_path / "y.bin")["w"]  # the header is whole
        with pytest.raises(InputError, match="fetch it again"):
            TensorFiles().read_into(entry, 3, np.empty(1, np.float32))
        with pytest.raises(InputError, match="checksum of its"):
            TensorFiles().read_strided(entry)


def test_a_checksum_is_made_once(torch, tmp_path: pathlib.Path, monkeypatch):
    torch.save({"w": torch.arange(64.0)}, tmp_path / "x.bin")
    entry, files, made = read_torch_file(tmp_path / "x.bin")["w"], TensorFiles(), []
    monkeypatch.setattr(tensors, "check_crc", lambda *arguments: made.append(arguments))
    for start in range(0, 64, 8):
        files.read_into(entry, start, np.empty(8, np.float32))
    assert len(made) == 1


def test_what_the_headers_of_a_member_say_is_compared(torch, tmp_path: pathlib.Path):
    torch.save({"w": torch.zeros(3, 4)}, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    header = content.rindex(b"PK\3\4", 0, content.index(b"x/data/0"))
    for position in (6, 8, 14, 18, 22, 30):  # flags, method, CRC-32, both sizes, name
        damaged = bytearray(content)
        damaged[header + position] ^= 1
        (tmp_path / "y.bin").write_bytes(damaged)
        with pytest.raises(InputError, match="of the member 'x/data/0' differ"):
            read_torch_file(tmp_path / "y.bin")


def test_members_of_one_name(torch, tmp_path: pathlib.Path):
    torch.save({"w": torch.zeros(3, 4)}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin", "a") as archive, pytest.warns(UserWarning):
        archive.writestr("x/data/0", bytes(48))
    with pytest.raises(InputError, match="two members 'x/data/0'"):
        read_torch_file(tmp_path / "x.bin")


def test_one_name_twice_among_many(tmp_path: pathlib.Path):
    one = struct.Struct("<4s6H3I5H2I8s").pack
    names = [b"%08d" % i for i in range(100_000)] + [b"%08d" % 99_999]
    table = b"".join(one(b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, name) for name in names)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(names) & 0xFFFF, len(names) & 0xFFFF, len(table), 0, 0)
    (tmp_path / "x.bin").write_bytes(table + end)
    start = time.process_time()
    with pytest.raises(InputError, match="two members '00099999'"):
        read_torch_file(tmp_path / "x.bin")
    assert time.process_time() - start < 5


def test_a_tensor_larger_than_its_storage(torch, tmp_path: pathlib.Path):
    torch.save({"w": torch.zeros(1).expand(10**9)}, tmp_path / "x.bin")
    with pytest.raises(InputError, match="'w' takes 4000000000 bytes .* has 4"):
        read_torch_file(tmp_path / "x.bin")


def deflated(size: int) -> bytes:
    """A zip with `byteorder` as a short member that is `size` zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/byteorder", bytes(size))
        archive.writestr("x/data.pkl", b"}.")
    return file.getvalue()


def with_pickle(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
    return file.getvalue()


TWICE = b"q\0h\0\x86"  # a pair of the last value and itself


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: with_pickle(b"Nr" + (2**27).to_bytes(4, "little") + b"."), "holds a NoneType", id="memo"),
        pytest.param(lambda: with_pickle(b"}" + b")" + TWICE * 99 + b"K\1s."), "tuple as a", id="hash"),
        pytest.param(lambda: with_pickle(b"}X\1\0\0\0a" + b")" + TWICE * 99 + b"s."), "holds a tuple", id="repr"),
        pytest.param(lambda: with_pickle(b")" + b"2\x86" * 99 + b"."), "the operation DUP", id="dup"),
        pytest.param(lambda: with_pickle(b"]" * (30 << 20) + b"."), "more than 1,000,000 operations", id="lists"),
        pytest.param(lambda: with_pickle(b"(" * (33 << 20)), "member 'data.pkl' has 34,603,008 bytes", id="long"),
        pytest.param(lambda: deflated(60 << 20), "'byteorder' is compressed", id="deflated"),
        pytest.param(
            lambda: b"PK\1\2" + bytes(9 << 20) + b"PK\5\6" + bytes(8) + (9 << 20).to_bytes(4, "little") + bytes(6),
            "members is impossibly",
            id="members",
        ),
    ],
)
def test_what_would_exhaust_is_refused(tmp_path: pathlib.Path, make, complaint: str):
    """Time and memory are measured in `tests/attack`."""
    (tmp_path / "x.bin").write_bytes(make())
    with pytest.raises(InputError, match=complaint) as error:
        read_torch_file(tmp_path / "x.bin")
    assert len(str(error.value)) < 500


def test_pickles_that_poison_our_classes_have_no_effect(torch, tmp_path: pathlib.Path):
    """A pickle can set attributes of what it builds; nothing it can reach outlives the reading."""

    poison = b"ccollections\nOrderedDict\n(N}S'items'\nI1\nstb."
    with zipfile.ZipFile(tmp_path / "bad.bin", "w") as archive:
        archive.writestr("archive/data.pkl", poison)
    with pytest.raises(InputError):
        read_torch_file(tmp_path / "bad.bin")
    torch.save({"w": torch.ones(2)}, tmp_path / "good.bin")
    assert read_torch_file(tmp_path / "good.bin").keys() == {"w"}
