"""GGUF files: bytes of their headers, metadata and tensors that say something else, and what would exhaust a reader."""

import json
import math
import random
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_jax.conversion import GGUFModel
from moe_jax.conversion.gguf.gguf_header import read_gguf_header
from moe_jax.conversion.gguf.imatrix import read_imatrix, write_imatrix
from moe_jax.conversion.tensors import TensorFiles
from moe_jax.models.serialize import config_to_json
from tests.attack.attacks import Attack
from tests.attack.mutations import VALUES, mutated_bytes

FILE = "model.gguf"
Leaves = dict[str, np.ndarray]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_D, _F, _VOCAB, _HEADS = 32, 64, 40, 4


class Original(NamedTuple):
    """A small Llama, with a tokenizer.

    Attributes:
      pairs: key, type and value of the metadata; of an array, its type and the values.
      infos: name, shape, type and offset of the tensors.
      data: their bytes.
    """

    pairs: list[tuple[str, int, Any]]
    infos: list[tuple[str, tuple[int, ...], int, int]]
    data: bytes


def _original() -> Original:
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(97, 97 + _VOCAB - 3))]
    pairs: list[tuple[str, int, Any]] = [
        ("general.architecture", 8, "llama"),
        ("general.alignment", 4, 32),
        *((f"llama.{key}", 4, value) for key, value in {
            "context_length": 64, "embedding_length": _D, "block_count": 1, "feed_forward_length": _F,
            "attention.head_count": _HEADS, "attention.head_count_kv": 2, "rope.dimension_count": 8,
        }.items()),
        ("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
        ("llama.rope.freq_base", 6, 10000.0),
        ("tokenizer.ggml.model", 8, "gpt2"),
        ("tokenizer.ggml.pre", 8, "smollm"),
        ("tokenizer.ggml.tokens", 9, (8, tokens)),
        ("tokenizer.ggml.token_type", 9, (5, [3, 3, 3] + [1] * (_VOCAB - 3))),
        ("tokenizer.ggml.merges", 9, (8, [])),
        ("tokenizer.ggml.bos_token_id", 4, 1),
        ("tokenizer.ggml.eos_token_id", 4, 2),
        ("tokenizer.ggml.add_bos_token", 7, True),
        ("tokenizer.chat_template", 8, "{{ messages }}"),
    ]  # fmt: skip
    shapes = {
        "token_embd.weight": (_VOCAB, _D), "output_norm.weight": (_D,), "blk.0.attn_norm.weight": (_D,),
        "blk.0.ffn_norm.weight": (_D,), "blk.0.attn_q.weight": (_D, _D), "blk.0.attn_k.weight": (16, _D),
        "blk.0.attn_v.weight": (16, _D), "blk.0.attn_output.weight": (_D, _D), "blk.0.ffn_gate.weight": (_F, _D),
        "blk.0.ffn_up.weight": (_F, _D), "blk.0.ffn_down.weight": (_D, _F),
    }  # fmt: skip
    return _with_tensors(pairs, shapes)


def _with_tensors(pairs: list[tuple[str, int, Any]], shapes: Mapping[str, tuple[int, ...]]) -> Original:
    """Random numbers: down projections in blocks, attention in halves, the rest in float32."""
    rng = np.random.default_rng(0)
    infos, data = [], b""
    for name, shape in shapes.items():
        kind = 8 if "ffn_down" in name else 1 if "attn" in name and len(shape) > 1 else 0
        values = rng.normal(size=shape).astype(np.float16 if kind == 1 else np.float32)
        stored = rng.integers(0, 60, math.prod(shape) // 32 * 34, np.uint8) if kind == 8 else values
        infos.append((name, shape, kind, len(data)))
        data += stored.tobytes() + b"\0" * (-stored.nbytes % 32)
    return Original(pairs, infos, data)


def _latent() -> Original:
    """A small DeepSeek-V3 of one dense layer and one MoE."""
    rank, queries, rotated, unrotated, values, experts = 16, 24, 4, 8, 12, 4
    numbers = {
        "context_length": 64, "embedding_length": _D, "block_count": 2, "feed_forward_length": _F,
        "attention.head_count": _HEADS, "attention.head_count_kv": 1, "attention.q_lora_rank": queries,
        "attention.kv_lora_rank": rank, "attention.key_length": rank + rotated, "attention.value_length": rank,
        "attention.key_length_mla": unrotated + rotated, "attention.value_length_mla": values,
        "rope.dimension_count": rotated, "leading_dense_block_count": 1, "expert_count": experts,
        "expert_used_count": 2, "expert_shared_count": 1, "expert_feed_forward_length": _F, "expert_gating_func": 2,
        "expert_group_count": 2, "expert_group_used_count": 1, "rope.scaling.original_context_length": 32,
    }  # fmt: skip
    pairs: list[tuple[str, int, Any]] = [
        ("general.architecture", 8, "deepseek2"),
        *((f"deepseek2.{key}", 4, value) for key, value in numbers.items()),
        ("deepseek2.attention.layer_norm_rms_epsilon", 6, 1e-5),
        ("deepseek2.expert_weights_scale", 6, 2.5),
        ("deepseek2.expert_weights_norm", 7, True),
        ("deepseek2.rope.scaling.type", 8, "yarn"),
        ("deepseek2.rope.scaling.factor", 6, 4.0),
        ("deepseek2.rope.scaling.yarn_log_multiplier", 6, 0.1),
    ]
    attention = {
        "attn_norm": (_D,), "ffn_norm": (_D,), "attn_q_a": (queries, _D), "attn_q_a_norm": (queries,),
        "attn_q_b": (_HEADS * (unrotated + rotated), queries), "attn_kv_a_mqa": (rank + rotated, _D),
        "attn_kv_a_norm": (rank,), "attn_k_b": (_HEADS, rank, unrotated), "attn_v_b": (_HEADS, values, rank),
        "attn_output": (_D, _HEADS * values),
    }  # fmt: skip
    dense = {"ffn_gate": (_F, _D), "ffn_up": (_F, _D), "ffn_down": (_D, _F)}
    moe = {
        **{f"{name}_exps": (experts, *shape) for name, shape in dense.items()},
        **{f"{name}_shexp": shape for name, shape in dense.items()},
        "ffn_gate_inp": (experts, _D),
    }
    blocks = {0: attention | dense, 1: attention | moe}
    shapes = {
        "token_embd.weight": (_VOCAB, _D), "output_norm.weight": (_D,), "blk.1.exp_probs_b.bias": (experts,),
        **{f"blk.{i}.{name}.weight": shape for i, block in blocks.items() for name, shape in block.items()},
    }  # fmt: skip
    return _with_tensors(pairs, shapes)


_WORDS = (
    *(value for value in VALUES if isinstance(value, str)), "qwen2", "phi2", "stablelm", "gpt-2", "llama-bpe", "yarn",
    "linear", "{% x", "a b", "b c", "<s>",
)  # fmt: skip


def _text(value: str | bytes) -> bytes:
    value = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def _value(kind: int, value: Any) -> bytes:
    if kind == 9:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, one) for one in values)
    if kind == 8:
        return _text(value)
    return struct.pack(f"<{_NUMBERS[kind]}", value) if kind in _NUMBERS else bytes([value & 0xFF])


def _pair(key: str, kind: int, value: Any) -> bytes:
    return _text(key) + struct.pack("<I", kind) + _value(kind, value)


def _info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def _header(pairs: list[bytes], infos: list[bytes]) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)


def _whole(header: bytes, data: bytes) -> bytes:
    return header + b"\0" * (-len(header) % 32) + data


def _encoded(original: Original) -> tuple[list[bytes], list[bytes]]:
    return [_pair(*pair) for pair in original.pairs], [_info(*info) for info in original.infos]


def _mutate_bytes(chance: random.Random, original: Original, folder: Path) -> None:
    header = _header(*_encoded(original))
    (folder / FILE).write_bytes(_whole(mutated_bytes(chance, header), original.data))


def _mutate_metadata(chance: random.Random, original: Original, folder: Path) -> None:
    """Other values, of this type or another, in one to three keys; or keys that are gone, there twice, or others."""
    pairs = list(original.pairs)
    for _ in range(chance.choice((1, 1, 2, 3))):
        place = chance.randrange(len(pairs))
        key, kind, value = pairs[place]
        choice = chance.random()
        if choice < 0.15:
            del pairs[place]
        elif choice < 0.25:
            pairs.insert(chance.randrange(len(pairs)), pairs[place])
        elif choice < 0.35:
            pairs[place] = (chance.choice((key + "x", "llama.attention.scale", "\0", "x" * 500)), kind, value)
        else:
            pairs[place] = (key, *_other(chance, kind, value))
    encoded = [_pair(*pair) for pair in pairs]
    (folder / FILE).write_bytes(_whole(_header(encoded, _encoded(original)[1]), original.data))


def _other(chance: random.Random, kind: int, value: Any) -> tuple[int, Any]:
    """A value of a type, most often the same type."""
    if kind == 9 and chance.random() < 0.8:
        inner, values = value
        values = list(values)
        for _ in range(chance.choice((1, 3))):
            if values:
                values[chance.randrange(len(values))] = chance.choice(_WORDS) if inner == 8 else chance.randrange(9)
        return 9, (inner, values[: chance.choice((len(values), len(values), 0, 1))])
    kind = kind if chance.random() < 0.6 and kind != 9 else chance.choice((*_NUMBERS, 7, 8))
    if kind == 8:
        return 8, chance.choice(_WORDS)
    if kind == 7:
        return 7, chance.choice((0, 1, 2, 255))
    if _NUMBERS[kind] in "fd":
        return kind, chance.choice((0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), 1.5, 32.0))
    bits = 8 * struct.calcsize(f"<{_NUMBERS[kind]}")
    low, high = (0, 2**bits - 1) if _NUMBERS[kind].isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return kind, min(max(chance.choice((low, high, 0, 1, 2, 3, 7, 16, 33, 1000, 10**6, 2**31 - 1)), low), high)


def _mutate_tensors(chance: random.Random, original: Original, folder: Path) -> None:
    """What the file says of its tensors: their names, shapes, types and places."""
    infos = list(original.infos)
    for _ in range(chance.choice((1, 1, 2))):
        place = chance.randrange(len(infos))
        name, shape, kind, offset = infos[place]
        numbers = (0, 1, 2, 31, 32, 33, 64, 2**20, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)
        infos[place] = chance.choice(
            (
                (chance.choice((*(info[0] for info in infos), "blk.1.x", "x\n", "")), shape, kind, offset),
                (name, tuple(chance.choice(numbers) for _ in range(chance.randint(0, 6))), kind, offset),
                (name, shape[::-1], kind, offset),
                (name, shape, chance.choice((*range(45), 2**31)), offset),
                (name, shape, kind, chance.choice((*numbers, offset + 32, max(0, offset - 32)))),
                (name, shape, kind, chance.choice(infos)[3]),
            )
        )
    encoded = [_info(*info) for info in infos]
    (folder / FILE).write_bytes(_whole(_header(_encoded(original)[0], encoded), original.data))


def _exhaust(chance: random.Random, original: Original, folder: Path) -> None:
    pairs, infos = _encoded(original)
    extra = chance.choice(_EXHAUSTING)(chance)
    (folder / FILE).write_bytes(_whole(_header([*pairs, *extra], infos), original.data))


def _strings(count: int, of: bytes) -> bytes:
    return struct.pack("<IQ", 8, count) + (struct.pack("<Q", len(of)) + of) * count


_EXHAUSTING: tuple[Callable[[random.Random], list[bytes]], ...] = (
    lambda chance: [_text("a") + struct.pack("<I", 9) + _strings(chance.randint(1000, 6_000_000), b"")],
    lambda chance: [_text("a") + struct.pack("<I", 9) + _strings(chance.randint(1000, 4_000_000), b"abc")],
    lambda chance: [_text("a") + struct.pack("<I", 9) + _strings(chance.randint(1000, 1_900_000), b"\xc4\xa0abcdefgh")],
    lambda chance: [_pair(f"key{i}", 4, i) for i in range(chance.randint(5000, 100_000))],
    lambda chance: [_text("a") + struct.pack("<I", 8) + _text(b"a" * chance.randint(1000, 90_000_000))],
    lambda chance: [_text("a") + struct.pack("<IIQ", 9, 0, 60_000_000) + b"\0" * 60_000_000],
    lambda chance: [_text("a") + struct.pack("<IIQ", 9, 9, 10**6) + struct.pack("<IQ", 9, 1) * 10**6],
    lambda chance: [_pair(f"x{i}", 9, (12, [0.0] * 1000)) for i in range(chance.randint(100, 5000))],
    lambda chance: [_pair("tokenizer.ggml.scores", 9, (6, [0.0] * 10**6))],
)


def _read(folder: Path, out: Path) -> tuple[dict[str, Any], Leaves]:
    tempfile.tempdir = str(out)  # where tokenizers are made
    model = GGUFModel(folder / FILE)
    leaves = {path: model.read(path) for path in model.specs()}
    for file in model.tokenizer_files:
        json.loads(file.read_text(encoding="utf-8"))
    return config_to_json(model.config), leaves


_SAME = {"embed/embedding": "token_embd.weight", "layers/0/mlp_norm/scale": "blk.0.ffn_norm.weight"}


def _differs(original: Original, folder: Path, read: tuple[dict[str, Any], Leaves]) -> str | None:
    """Leaves that no change of the metadata can put in another order are those that were written."""
    for leaf, tensor in _SAME.items():
        _, shape, _, offset = next(info for info in original.infos if info[0] == tensor)
        size = 4 * int(np.prod(shape))
        if leaf in read[1] and read[1][leaf].tobytes() != original.data[offset : offset + size]:
            return f"other numbers in {leaf}"
    return None


def _read_tensors(folder: Path, out: Path) -> Leaves:
    files, tensors = TensorFiles(), {}
    for name, entry in read_gguf_header(folder / FILE).tensors.items():
        array = np.empty(entry.shape, np.float16 if entry.dtype == "F16" else np.float32)
        if entry.dtype != "BF16":
            files.read_into(entry, 0, array)
            tensors[name] = array
    return tensors


def _differs_from_package(original: Original, folder: Path, read: Leaves) -> str | None:
    from gguf import GGUFReader, dequantize

    try:
        found = {tensor.name: tensor for tensor in GGUFReader(folder / FILE).tensors}
    except Exception as error:
        return f"the package refuses it: {error}"
    for name, values in read.items():
        theirs = dequantize(found[name].data, found[name].tensor_type).astype(np.float32)
        if theirs.tobytes() != values.astype(np.float32).tobytes():
            return f"other numbers in {name}"
    return None


_IMATRIX = {"blk.0.ffn_up_exps.weight": (3, 4, 8), "blk.0.attn_q.weight": (8, 8)}


def _imatrices() -> dict[str, bytes]:
    """An imatrix in both forms."""
    rng = np.random.default_rng(0)
    squares = {
        name: rng.random((shape[0] if len(shape) == 3 else 1, shape[-1]), np.float32)
        for name, shape in _IMATRIX.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imatrix.gguf"
        counts = {name: np.full(len(one), 4, np.float32) for name, one in squares.items()}
        write_imatrix(file, squares, counts, datasets=["text"], chunk_count=2, chunk_size=64)
        newer = file.read_bytes()
    older = struct.pack("<i", len(squares))
    for name, one in squares.items():
        text = name.encode()
        older += struct.pack("<i", len(text)) + text + struct.pack("<ii", 4, one.size) + one.tobytes()
    return {"imatrix.gguf": newer, "imatrix.dat": older + struct.pack("<ii", 2, 4) + b"text"}


def _mutate_imatrix(chance: random.Random, original: dict[str, bytes], folder: Path) -> None:
    name = chance.choice(sorted(original))
    (folder / name).write_bytes(mutated_bytes(chance, original[name]))


def _read_imatrix(folder: Path, out: Path) -> Leaves:
    (file,) = folder.iterdir()
    return read_imatrix(file, _IMATRIX)


def _no_moments(original: dict[str, bytes], folder: Path, read: Leaves) -> str | None:
    for name, moments in read.items():
        shape = _IMATRIX[name]
        if moments.shape != (shape[0] if len(shape) == 3 else 1, shape[-1]):
            return f"{name} has shape {moments.shape}"
        if not (np.isfinite(moments).all() and (moments >= 0).all()):
            return f"{name} holds no second moments"
    return None


ATTACKS = (
    Attack(name="imatrix: bytes", original=_imatrices, make=_mutate_imatrix, read=_read_imatrix, wrong=_no_moments,
           quick=100, share=150),
    Attack(name=f"{FILE}: bytes of the header", original=_original, make=_mutate_bytes, read=_read_tensors,
           wrong=_differs_from_package, quick=100, share=250),
    Attack(name=f"{FILE}: metadata", original=_original, make=_mutate_metadata, read=_read, wrong=_differs, quick=100,
           share=250),
    Attack(name=f"{FILE}: metadata of latents", original=_latent, make=_mutate_metadata, read=_read, wrong=_differs,
           quick=60, share=150),
    Attack(name=f"{FILE}: tensors", original=_original, make=_mutate_tensors, read=_read_tensors,
           wrong=_differs_from_package, quick=60, share=150),
    Attack(name=f"{FILE}: exhausting", original=_original, make=_exhaust, read=_read, wrong=_differs, quick=6),
)  # fmt: skip
