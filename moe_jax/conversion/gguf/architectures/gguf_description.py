"""The description of an architecture of GGUF files, and the rows that most of their tables have."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored, Row, Table, linear, norm
from moe_jax.conversion.tensors import TensorEntry
from moe_jax.core.errors import InputError, is_finite, shown
from moe_jax.models import ModelConfig

ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING = "token_embd.weight"
# Of latent attention, a tenth of `mscale_all_dim`, which is `mscale`, too.
YARN_MAGNITUDE = "rope.scaling.yarn_log_multiplier"

# --- reading metadata -----------------------------------------------------------------------------


class Metadata:
    """The metadata of one architecture, read key by key; remembers which keys were read."""

    def __init__(self, data: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorEntry]):
        self._data, self._prefix, self._tensors = data, f"{prefix}.", tensors
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key of the architecture; for an array of one equal number per layer, the number."""
        self._read.add(self._prefix + key)
        value = self._data.get(self._prefix + key, default)
        if isinstance(value, np.ndarray):
            if not value.size or (value != value.flat[0]).any():
                raise InputError(f"{self._prefix}{key} differs between layers, which is not supported")
            return value.flat[0].item()
        return value

    def number(self, key: str, default: int | float | None = None) -> Any:
        """Returns a number that must be there unless it has a default."""
        value = self.get(key, default)
        if value is None:
            raise InputError(f"it has no {self._prefix}{key}, which cannot be guessed")
        if not is_finite(value):
            raise InputError(f"{self._prefix}{key} is {shown(value)}, expected a number")
        return value

    def full_name(self, key: str) -> str:
        """Returns a key with the architecture's name."""
        return self._prefix + key

    def is_read(self, key: str) -> bool:
        """Whether a key of the architecture was read."""
        return self._prefix + key in self._read

    def has(self, *names: str) -> bool:
        """Whether the first layer has a tensor of one of these names."""
        return any(f"blk.0.{name}" in self._tensors for name in names)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None: there is none of this name."""
        return self._tensors[name].shape if name in self._tensors else None

    def must_be(self, key: str, *values: Any) -> None:
        """Raises `InputError` unless the key has one of these values, or is left out."""
        found = self.get(key, values[0])
        if found not in values:
            raise InputError(f"{self._prefix}{key} is {shown(found)}, only {shown(values[0])} is supported")

    def unread(self) -> list[str]:
        """Returns the keys of the architecture that were not read."""
        return [key for key in self._data if key.startswith(self._prefix) and key not in self._read]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
      config: metadata -> the keys of config.json that not all architectures have, `model_type` among them.
      keys: key of the metadata, without the architecture's name -> key of config.json.
      table: its tensors, but for `rows`.
      families: the families whose models are written in it.
      metadata: config and its config.json -> the keys of the metadata that not all architectures have.
      interleaved: whether the rows of queries and keys alternate between the halves of a head's rotary dimensions.
      partial: whether only a part of a head may be rotated.
      scales_frequencies: whether llama.cpp reads the tensor `ROPE_FACTORS`.
      head_apart: whether llama.cpp reads an output in a tensor of its own only, and not from the embedding.
      square_heads: whether llama.cpp reads only heads that together are as wide as the model.
      own_keys: whether llama.cpp reads only heads that have keys of their own each.
      unread: ends of names of tensors that llama.cpp does not know in it.
      ignored: keys of the metadata that llama.cpp does not read in it.
      vectors: tensors that have one axis here, and a row of it in the table.
      norms_from_one: whether norms hold 1 + their weight in the checkpoint.
      latent: whether keys and values come from a latent: `config` reads the heads, and `metadata` describes them.
      leading_dense: whether the first layers may be dense in a model with experts.
      rows: config and names of a file's tensors, none of one to be written -> rows that depend on them.
      notes: config -> lines about what llama.cpp computes otherwise.
    """

    config: Callable[[Metadata], dict[str, Any]]
    keys: Mapping[str, str]
    table: Table
    families: tuple[str, ...]
    metadata: Callable[[ModelConfig, Mapping[str, Any]], dict[str, Any]] = lambda config, keys: {}
    interleaved: bool = False
    partial: bool = False
    scales_frequencies: bool = False
    head_apart: bool = False
    square_heads: bool = False
    own_keys: bool = False
    unread: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    norms_from_one: bool = False
    latent: bool = False
    leading_dense: bool = False
    rows: Callable[[ModelConfig, Collection[str]], Table] = lambda config, names: ()
    notes: Callable[[ModelConfig], list[str]] = lambda config: []

    def table_of(self, config: ModelConfig, names: Collection[str] = ()) -> Table:
        """Returns the table of a model, of whose file these are the names of tensors; none: it is to be written."""
        return (*self.table, *self.rows(config, names))

    def in_table(self, name: str, entry: TensorEntry) -> TensorEntry:
        """Returns the entry of a tensor as the table has it: with the same axes and numbers."""
        is_vector = any(name.endswith(vector) for vector in self.vectors)
        entry = entry._replace(shape=(1, *entry.shape)) if is_vector and len(entry.shape) == 1 else entry
        return entry._replace(added=self.added_to(name))

    def added_to(self, name: str) -> float:
        """Returns what is added to the numbers of a tensor when it is written."""
        return 1.0 if self.norms_from_one and name.endswith("norm.weight") else 0.0


# --- what they have in common ---------------------------------------------------------------------

RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}

KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

EMBEDDING_ROW: Table = (Row(EMBEDDING, "embed/embedding"),)

NORMS: Table = (
    *norm("blk.{i}.attn_norm", "layers/{i}/attention_norm"),
    *norm("blk.{i}.attn_q_norm", "layers/{i}/attention/q_norm"),
    *norm("blk.{i}.attn_k_norm", "layers/{i}/attention/k_norm"),
    *norm("blk.{i}.ffn_norm", "layers/{i}/mlp_norm"),
)

ATTENTION: Table = (
    *NORMS,
    *linear("blk.{i}.attn_q", "layers/{i}/attention/q"),
    *linear("blk.{i}.attn_k", "layers/{i}/attention/k"),
    *linear("blk.{i}.attn_v", "layers/{i}/attention/v"),
    *linear("blk.{i}.attn_output", "layers/{i}/attention/o"),
)

FFN: Table = (
    *linear("blk.{i}.ffn_gate", "layers/{i}/mlp/gate"),
    *linear("blk.{i}.ffn_up", "layers/{i}/mlp/up"),
    *linear("blk.{i}.ffn_down", "layers/{i}/mlp/down"),
)

EXPERTS: Table = (
    *linear("blk.{i}.ffn_gate_inp", "layers/{i}/mlp/router"),
    *(
        row
        for name in ("gate", "up", "down")
        for row in (
            # The first files of Mixtral have a tensor for each expert.
            *linear(f"blk.{{i}}.ffn_{name}.{{e}}", f"layers/{{i}}/mlp/experts/{name}", PER_EXPERT),
            *linear(f"blk.{{i}}.ffn_{name}_exps", f"layers/{{i}}/mlp/experts/{name}", FUSED),
        )
    ),
)

TIED_HEAD: Table = (
    *norm("output_norm", "final_norm"),
    Ignored(re.escape(ROPE_FACTORS), "factors of the RoPE frequencies, which the config holds"),
)
HEAD: Table = (*TIED_HEAD, *linear("output", "lm_head"))

OUTPUT_BIAS = "attn_output.bias"

SHARED_GATE = "ffn_gate_inp_shexp.weight"

SHARED_EXPERT: Table = (
    *linear("blk.{i}.ffn_gate_inp_shexp", "layers/{i}/mlp/router/universal"),
    *linear("blk.{i}.ffn_gate_shexp", "layers/{i}/mlp/universal/gate"),
    *linear("blk.{i}.ffn_up_shexp", "layers/{i}/mlp/universal/up"),
    *linear("blk.{i}.ffn_down_shexp", "layers/{i}/mlp/universal/down"),
)

LLAMA_LIKE: Table = (*EMBEDDING_ROW, *ATTENTION, *FFN, *HEAD)
LLAMA_LIKE_MOE: Table = (*EMBEDDING_ROW, *ATTENTION, *EXPERTS, *HEAD)
