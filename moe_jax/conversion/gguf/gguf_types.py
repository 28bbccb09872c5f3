"""The types in which the tensors of a GGUF file are written: the mixes of llama.cpp, by their names.

A mix has a type for most matrices, and more bits for those whose errors do most harm: values, the down projections of
some layers, the output. Norms, biases and routers are always float32. Rows that are no multiple of a type's blocks take
a type of smaller blocks. Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moe_jax.conversion.gguf.gguf_header import BLOCKS, PLAIN
from moe_jax.conversion.tensors import Blocks

# `general.file_type`
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32,
}  # fmt: skip

NUMBERS = {name: number for number, name in PLAIN.items()} | {one.name: number for number, one in BLOCKS.items()}
BLOCKS_BY_NAME = {blocks.name: blocks for blocks in BLOCKS.values()}


class Facts(NamedTuple):
    """Numbers of a model that a mix depends on.

    Attributes:
      num_layers: L.
      num_experts: of an MoE layer; 0: there is none.
      heads_per_kv_head: queries that share a key.
      is_tied: whether the output is the embedding.
    """

    num_layers: int
    num_experts: int
    heads_per_kv_head: int
    is_tied: bool


# In which layers, counted from 0, a matrix has another type than most.
_Where = Callable[[int, Facts], bool]


def _everywhere(layer: int, facts: Facts) -> bool:
    return True


def _first(count: int) -> _Where:
    return lambda layer, facts: layer < count


def _first_part(parts: int) -> _Where:
    return lambda layer, facts: layer < facts.num_layers // parts


def _chosen(layer: int, facts: Facts) -> bool:
    """Whether a layer is in the first or the last eighth, or is a third one of the others."""
    eighth = facts.num_layers // 8
    return layer < eighth or layer >= 7 * facts.num_layers // 8 or (layer - eighth) % 3 == 2


def _few_kv_heads(layer: int, facts: Facts) -> bool:
    return facts.heads_per_kv_head >= 4


# Kind of matrix -> its types, of which the first holds that is for the layer.
_Rules = Mapping[str, tuple[tuple[_Where, str], ...]]
_EVERYWHERE = {name: ((_everywhere, "Q5_K"),) for name in ("attn_v", "ffn_down", "attn_output")}
_RULES: dict[str, _Rules] = {
    "Q2_K": {
        "attn_v": ((_few_kv_heads, "Q4_K"), (_everywhere, "Q3_K")),
        "ffn_down": ((_everywhere, "Q3_K"),),
        "attn_output": ((_everywhere, "Q3_K"),),
    },
    "Q3_K_M": {
        "attn_v": ((_first(2), "Q5_K"), (_everywhere, "Q4_K")),
        "ffn_down": ((_first_part(16), "Q5_K"), (_everywhere, "Q4_K")),
        "attn_output": ((_everywhere, "Q4_K"),),
        "attn_qkv": ((_everywhere, "Q4_K"),),
    },
    "Q3_K_L": {**_EVERYWHERE, "attn_qkv": ((_everywhere, "Q4_K"),)},
    "Q4_K_S": {"attn_v": ((_first(4), "Q5_K"),), "ffn_down": ((_first_part(8), "Q5_K"),)},
    "Q4_K_M": {"attn_v": ((_chosen, "Q6_K"),), "ffn_down": ((_chosen, "Q6_K"),), "attn_qkv": ((_everywhere, "Q5_K"),)},
    "Q5_K_M": {"attn_v": ((_chosen, "Q6_K"),), "ffn_down": ((_chosen, "Q6_K"),), "attn_qkv": ((_everywhere, "Q6_K"),)},
}
# Attention is a small part of a model with eight experts.
_EIGHT_EXPERTS = {"attn_v": "Q8_0", "attn_k": "Q8_0"}
_WIDER_OUTPUT = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
# For rows that are multiples of 32 only.
_SMALLER_BLOCKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+?)(?:_exps|_shexp)?\.weight")
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


class Planned(NamedTuple):
    """A tensor that is to be written.

    Attributes:
      kind: its type, such as `F32` or `Q4_K`.
      shape: its shape.
      wanted: the type that the mix has for it, and whose blocks do not fit its rows; None: it has that.
    """

    kind: str
    shape: tuple[int, ...]
    wanted: str | None = None

    @property
    def blocks(self) -> Blocks | None:
        """The blocks of its type; None: its elements are stored one by one."""
        return BLOCKS_BY_NAME.get(self.kind)

    @property
    def num_elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return self.stored_bytes(self.num_elements)

    def stored_bytes(self, count: int) -> int:
        """Bytes of this many of its elements; in blocks, whole ones."""
        if self.blocks is not None:
            return count // self.blocks.elements * self.blocks.nbytes
        return count * (4 if self.kind == "F32" else 2)


def planned_tensor(
    name: str, shape: tuple[int, ...], own: str, mix: str | None, facts: Facts, *, wanted: str | None = None
) -> Planned:
    """Returns how a tensor is written.

    Args:
      name: in the file.
      shape: in the file.
      own: the type in which the model has it, such as `BF16`.
      mix: one of `spec.GGUF_TYPES`; None: matrices keep their type.
      facts: of the model.
      wanted: a type that comes before that of the mix.
    """
    if len(shape) < 2 or name.endswith("_norm.weight") or ".ffn_gate_inp" in name:
        return Planned("F32", shape)  # llama.cpp computes with nothing else there
    kind = wanted or (own if mix is None else _type_in(name, mix, shape, facts))
    blocks = BLOCKS_BY_NAME.get(kind)
    if blocks is None or shape[-1] % blocks.elements == 0:
        return Planned(kind, shape)
    smaller = _SMALLER_BLOCKS.get(kind, "F16")
    fits = smaller == "F16" or shape[-1] % BLOCKS_BY_NAME[smaller].elements == 0
    return Planned(smaller if fits else "F16", shape, wanted=kind)


def _type_in(name: str, mix: str, shape: tuple[int, ...], facts: Facts) -> str:
    base = mix[:4] if "_K" in mix else mix  # Q4_K of Q4_K_M
    if base not in BLOCKS_BY_NAME:
        return base
    if name == _OUTPUT or (name == _EMBEDDING and facts.is_tied):
        return "Q8_0" if base == "Q8_0" or shape[-1] % BLOCKS_BY_NAME[base].elements else "Q6_K"
    found = _LAYER.fullmatch(name)
    if found is None:
        return base
    layer, kind = int(found[1]), found[2]
    if facts.num_experts == 8:
        if kind in _EIGHT_EXPERTS:
            return _EIGHT_EXPERTS[kind]
        if kind == "attn_output":
            return "Q5_K" if mix in _WIDER_OUTPUT else base
    rules = _RULES.get(mix, {}).get(kind, ())
    chosen = next((kind for is_there, kind in rules if is_there(layer, facts)), base)
    # Models of 70 billion parameters have small value projections, as eight queries share a key.
    is_70b = facts.num_layers == 80 and facts.heads_per_kv_head > 1
    return "Q5_K" if is_70b and kind == "attn_v" and chosen in ("Q3_K", "Q4_K") else chosen


def said_of_fallbacks(planned: Mapping[str, Planned]) -> list[str]:
    """Returns a line for each kind of tensor whose rows do not fit the type that the mix has for it."""
    counts = Counter(
        (re.sub(r"\d+", "{i}", name), tensor.wanted, tensor.kind, tensor.shape[-1])
        for name, tensor in planned.items()
        if tensor.wanted is not None
    )
    return [
        f"{name} (x{count}): {kind} in place of {wanted}, as rows of {row:,} are no multiple of "
        f"{BLOCKS_BY_NAME[str(wanted)].elements}"
        for (name, wanted, kind, row), count in counts.items()
    ]
