"""`pytorch_model.bin`: its bytes, its zip, its pickle, and what would exhaust the machine."""

import io
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.conversion.tensors import DTYPES, TensorEntry, TensorFiles
from moe_jax.conversion.torch_file import read_torch_file
from tests.attack.attacks import Attack, canary
from tests.attack.mutations import mutated_bytes

try:
    import torch
except ImportError:  # it has no wheels for every Python
    torch = None

FILE = "pytorch_model.bin"
ROOT = "archive/"  # that PyTorch gives to a file without a name
PICKLE = f"{ROOT}data.pkl"
Tensors = dict[str, tuple[tuple[int, ...], bytes]]


def _original() -> tuple[bytes, Tensors]:
    """A file and what it holds: contiguous, transposed and sliced tensors, several of one storage, several dtypes."""
    assert torch is not None
    big = torch.arange(48, dtype=torch.float32).reshape(6, 8) * 0.37
    state = torch.nn.Linear(3, 2).state_dict()  # an OrderedDict with metadata
    state.update(whole=big, turned=big.T, sliced=big[1:3, ::2], half=big.half(), brain=big.bfloat16())
    state["count"] = torch.tensor(3)
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue(), _of_torch(state)


def _of_torch(state: Any) -> Tensors:
    assert torch is not None
    return {
        name: (tuple(tensor.shape), tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in state.items()
        if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    }


def _read(folder: Path, out: Path) -> Tensors:
    files = TensorFiles()
    return {
        name: (entry.shape, _bytes(files, entry))
        for name, entry in read_torch_file(folder / FILE).items()
        if entry.dtype in DTYPES
    }


def _bytes(files: TensorFiles, entry: TensorEntry) -> bytes:
    return np.ascontiguousarray(files.read_strided(entry)).tobytes()


# --- mutations ------------------------------------------------------------------------------------


def _mutate_bytes(chance: random.Random, original: Any, folder: Path) -> None:
    (folder / FILE).write_bytes(mutated_bytes(chance, original[0]))


def _mutate_data(chance: random.Random, original: Any, folder: Path) -> None:
    """One bit of what the storages hold."""
    content = bytearray(original[0])
    with zipfile.ZipFile(io.BytesIO(original[0])) as archive:
        storages = [info for info in archive.infolist() if info.filename.startswith(f"{ROOT}data/")]
    info = chance.choice(storages)
    lengths = struct.unpack_from("<HH", content, info.header_offset + 26)
    content[info.header_offset + 30 + sum(lengths) + chance.randrange(info.file_size)] ^= 1 << chance.randrange(8)
    (folder / FILE).write_bytes(content)


def _mutate_zip(chance: random.Random, original: Any, folder: Path) -> None:
    """The members in another order, compressed, renamed, twice, cut, or with others beside them."""
    members = _members(original[0])
    for _ in range(chance.choice((1, 1, 2))):
        index = chance.randrange(len(members))
        name, content = members[index]
        match chance.randrange(6):
            case 0:
                chance.shuffle(members)
            case 1:
                del members[index]
            case 2:
                other = chance.choice((mutated_bytes(chance, content), chance.choice(members)[1]))
                members.insert(chance.randrange(len(members)), (name, other))
            case 3:
                members[index] = (chance.choice((f"../{name}", f"/{name}", name.upper(), f"{name}\0x", "")), content)
            case 4:
                members[index] = (name, mutated_bytes(chance, content))
            case 5:
                members.append(
                    (chance.choice((f"{ROOT}byteorder", "b/data.pkl", "data.pkl", f"{ROOT}data/99")), content)
                )
    compressed = chance.randrange(len(members)) if members and chance.random() < 0.3 else None
    (folder / FILE).write_bytes(_zip(members, compressed))


def _mutate_pickle(chance: random.Random, original: Any, folder: Path) -> None:
    """Operations of the pickle that are left out, repeated, exchanged, changed or added; some run a payload."""
    members = dict(_members(original[0]))
    pickled = members[PICKLE]
    starts = [position for _, _, position in pickletools.genops(pickled)] + [len(pickled)]
    steps = [pickled[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        index = chance.randrange(1, len(steps))
        match chance.randrange(6):
            case 0:
                del steps[index]
            case 1:
                steps.insert(index, steps[chance.randrange(1, len(steps))])
            case 2:
                other = chance.randrange(1, len(steps))
                steps[index], steps[other] = steps[other], steps[index]
            case 3:
                steps[index] = mutated_bytes(chance, steps[index])
            case 4:
                steps.insert(index, chance.choice(_OPERATIONS))
            case 5:
                steps.insert(index, chance.choice(_payloads(canary(folder))))
    (folder / FILE).write_bytes(_zip([*(members | {PICKLE: b"".join(steps)}).items()], None))


def _payloads(target: Path) -> tuple[bytes, ...]:
    """Ways in which a pickle can run what it likes; all would write a file."""
    path = str(target).encode()
    text = b"X" + struct.pack("<I", len(path)) + path
    touch = b"touch " + path
    shell = b"X" + struct.pack("<I", len(touch)) + touch
    mode = b"X\1\0\0\0w"
    return (
        b"cposix\nsystem\n" + shell + b"\x85R0",
        b"cos\nsystem\n" + shell + b"\x85R0",
        b"cbuiltins\nopen\n" + text + mode + b"\x86R0",
        b"c__builtin__\nopen\n" + text + mode + b"\x86R0",
        b"\x8c\x08builtins\x8c\x04open\x93" + text + mode + b"\x86R0",
        b"(" + text + mode + b"ibuiltins\nopen\n0",
        b"cio\nopen\n" + text + mode + b"\x86\x810",
        b"ctorch.serialization\nload\n" + text + b"\x85R0",
        b"csubprocess\nPopen\n]" + b"X\5\0\0\0touch" + b"a" + text + b"a\x85R0",
    )


_OPERATIONS = (
    b"2", b"0", b"1", b"(", b")", b"}", b"]", b"N", b"\x88", b"\x85", b"\x86", b"\x87", b"t", b"b", b"R", b"Q", b"u",
    b"s", b"a", b"e", b".", b"h\x01", b"q\xff", b"r\0\0\0\x08", b"j\xff\xff\xff\x7f", b"K\xff", b"J\xff\xff\xff\xff",
    b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"\x8b" + struct.pack("<i", 5000) + b"\x7f" * 5000, b"G\x7f\xf8" + bytes(6),
    b"X\xff\xff\xff\x7f", b"\x80\x05", b"\x95" + b"\xff" * 8, b"\x94", b"\x82\x01", b"\x97", b"\x98", b"P1\n", b"I1\n",
    b"L" + b"9" * 4500 + b"L\n", b"X\3\0\0\0\xed\xa0\x80", b"ccollections\nOrderedDict\n", b"ctorch\nFloatStorage\n",
    b"q\0h\0\x86" * 60, b"2\x86" * 60,
)  # fmt: skip


def _members(content: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def _zip(members: list[tuple[str, bytes]], compressed: int | None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for index, (name, content) in enumerate(members):
            method = zipfile.ZIP_DEFLATED if index == compressed else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


# --- what would exhaust ---------------------------------------------------------------------------


def _exhaust(chance: random.Random, original: Any, folder: Path) -> None:
    """Files below 100 MB that cost their readers far more than that."""
    (folder / FILE).write_bytes(chance.choice(_EXHAUSTING)(chance))


def _pickled(make: Callable[[random.Random], bytes]) -> Callable[[random.Random], bytes]:
    return lambda chance: _zip([(PICKLE, b"\x80\x02" + make(chance))], None)


def _deflated(chance: random.Random) -> bytes:
    size = chance.randint(1 << 20, 300 << 20)
    members = [(PICKLE, b"}."), (f"{ROOT}byteorder", b"little"), (f"{ROOT}data/0", b"")]
    index = chance.randrange(3)
    members[index] = (members[index][0], bytes(size))
    return _zip(members, index)


def _many_members(chance: random.Random) -> bytes:
    count = chance.randint(10_000, 400_000)
    one = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"x"
    size = count * len(one)
    return one * count + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count & 0xFFFF, count & 0xFFFF, size, 0, 0)


def _shape_of_many(chance: random.Random) -> bytes:
    start = b"}X\1\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"
    axes = b"(" + b"K\1" * chance.randint(65, 900_000) + b"t"
    return start + b"0X\3\0\0\0cpuK\1tQK\0" + axes + axes + b"\x89}tRs."


_EXHAUSTING: tuple[Callable[[random.Random], bytes], ...] = (
    _deflated,
    _many_members,
    _pickled(_shape_of_many),
    _pickled(lambda chance: b"Nr" + struct.pack("<I", chance.choice((1 << 20, 1 << 27, (1 << 31) - 1))) + b"."),
    _pickled(lambda chance: b"]" * chance.randint(1 << 20, 60 << 20) + b"."),
    _pickled(lambda chance: b"(" * chance.randint(1 << 20, 30 << 20) + b"."),
    _pickled(lambda chance: b"N" + b"\x94" * chance.randint(1 << 20, 30 << 20) + b"."),
    _pickled(lambda chance: b"]" + b"]\x94a" * chance.randint(1 << 19, 3 << 20) + b"."),
    _pickled(lambda chance: b"}" + b")" + b"2\x86" * chance.randint(30, 2000) + b"Ns."),
    _pickled(lambda chance: b"}" + b")" + b"q\0h\0\x86" * chance.randint(30, 100_000) + b"Ns."),
    _pickled(lambda chance: b")" + b"q\0h\0\x86" * chance.randint(30, 100_000) + b"Q."),
    _pickled(lambda chance: b")" + b"\x85" * chance.randint(1000, 5 << 20) + b"."),
    _pickled(lambda chance: b"\x8b" + struct.pack("<i", 1 << 24) + b"\x7f" * (1 << 24) + b"."),
    _pickled(lambda chance: b"X" + struct.pack("<I", 1 << 24) + b"x" * (1 << 24) + b"}s."),
    _pickled(lambda chance: b"c" + b"x" * chance.randint(1000, 20 << 20) + b"\ny\n."),
    lambda chance: b"PK\5\6" + bytes(18) + chance.randbytes(1 << 16) * chance.randint(1, 1000),
    lambda chance: b"PK\1\2" * chance.randint(1000, 20 << 20),
)


# --- what is wrong --------------------------------------------------------------------------------


def _differs_from_original(original: Any, folder: Path, read: Tensors) -> str | None:
    return None if read == original[1] else "other tensors than were saved"


def _differs_from_torch(original: Any, folder: Path, read: Tensors) -> str | None:
    assert torch is not None
    try:
        state = torch.load(folder / FILE, weights_only=True)
        state = state["state_dict"] if isinstance(state.get("state_dict"), dict) else state
        expected = _of_torch(state)
    except Exception:
        return None  # it has other rules for what it refuses
    return None if read == expected else "other tensors than PyTorch reads"


def _attack(name: str, make: Any, wrong: Any, quick: int = 300) -> Attack:
    return Attack(name=f"{FILE}: {name}", original=_original, make=make, read=_read, wrong=wrong, quick=quick)


ATTACKS = () if torch is None else (
    _attack("bytes", _mutate_bytes, _differs_from_original),
    _attack("bits of weights", _mutate_data, _differs_from_original),
    _attack("zip", _mutate_zip, _differs_from_torch),
    _attack("pickle", _mutate_pickle, _differs_from_torch),
    _attack("exhausting", _exhaust, _differs_from_torch, quick=6),
)  # fmt: skip
