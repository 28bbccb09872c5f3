"""PyTorch checkpoints without PyTorch: the same tensors, and nothing is ever run."""

import pathlib
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_jax.convert.tensors import DTYPES, TensorFiles
from moe_jax.convert.torch_file import read_torch_file
from moe_jax.errors import InputError


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


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
    with pytest.raises(InputError, match="wants to run io.open; only plain tensors are read"):
        read_torch_file(tmp_path / "x.bin")
    assert not target.exists()


@pytest.mark.parametrize(
    ("pickled", "complaint"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "wants to run builtins.eval"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(S'1'\nI0\n(t(ttR.", "a tensor in a PyTorch file has offset 0"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n.", "holds a Inert, expected a dict of tensors"),
        (b"(dS'a'\nI1\ns.", "holds int under 'a', expected tensors only"),
        (b"(dI1\nI1\ns.", "holds int under 1, expected tensors only"),
        (b"(I1\nI2\ntQ.", "data.pkl is damaged (ValueError)"),
        (b"\x80\x02}q", "data.pkl is damaged"),
        (b"", "data.pkl is damaged (EOFError)"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}S'function'\nNsb.", "data.pkl is damaged"),
    ],
)
def test_a_pickle_that_is_no_state_dict(tmp_path: pathlib.Path, pickled: bytes, complaint: str):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(InputError) as error:
        read_torch_file(tmp_path / "x.bin")
    assert complaint in str(error.value) and "\n" not in str(error.value)


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
        (lambda name, content: content[:-4] if name.endswith("/data/0") else content, "of its storage, which has"),
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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_corruption_gives_a_traceback(torch, state: dict, tmp_path: pathlib.Path, data: st.DataObject):
    file = tmp_path / "fuzz.bin"
    if not (tmp_path / "good.bin").exists():
        torch.save(state, tmp_path / "good.bin")
    content = bytearray((tmp_path / "good.bin").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        found = read_torch_file(file)
    except InputError:
        return
    for entry in found.values():
        if entry.dtype in DTYPES and entry.nbytes < 1000:
            TensorFiles().read_strided(entry)


def test_pickles_that_poison_our_classes_have_no_effect(torch, tmp_path: pathlib.Path):
    """A pickle can set attributes of what it builds; nothing it can reach outlives the reading."""

    poison = b"ccollections\nOrderedDict\n(N}S'items'\nI1\nstb."
    with zipfile.ZipFile(tmp_path / "bad.bin", "w") as archive:
        archive.writestr("archive/data.pkl", poison)
    with pytest.raises(InputError):
        read_torch_file(tmp_path / "bad.bin")
    torch.save({"w": torch.ones(2)}, tmp_path / "good.bin")
    assert read_torch_file(tmp_path / "good.bin").keys() == {"w"}
