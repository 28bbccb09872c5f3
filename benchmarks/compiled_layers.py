"""Single layers of large models, whose experts are in codes of 4 bits, compiled for a TPU v5e and an H100.

    python benchmarks/compiled_layers.py [--compile v5e:2x2 h100:1] [--only WORD ...] [--out benchmarks/results]

No device is needed, but the compilers are: libtpu, and JAX's CUDA plugin, which may be in another environment, as rows
stay in the file. The layers are of true size, on one device, in bfloat16: gpt-oss-120b with and without a window, its
experts in MXFP4 as `convert --codes keep` has them; and with experts of 4 bits Qwen3-Next-80B-A3B with the delta rule,
DeepSeek-V3.2 with its indexer, and layers with Mamba-2 and short convolutions. Each is compiled for a text of 3072
tokens that begins, and for a token more of each of 32 rows of up to 3072. Codes must stay codes: no array of floating-
point numbers may be as large as one matrix of all experts.

XLA lays out arguments on TPUs as they are padded least, which may put the axis of experts last; `in order` are
programs that take the experts' arrays in the order of their axes. OUT receives `compiled_layers.json`.
"""

import argparse
import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from delta_rule import QWEN3_NEXT
from evidence.layouts import COMPILED_LAYERS
from evidence.results import RESULTS, Figures
from moe_jax.conversion import read_hf_config
from moe_jax.experts import BankConfig
from moe_jax.models import ModelConfig
from moe_jax.nn.block import make_layer
from moe_jax.nn.context import init_cache, make_context
from moe_jax.planning.planned_devices import described_devices, is_gpu, prepare_environment

MIB = 1 << 20
CONTEXT, ROWS = 3072, 32
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "vocab_size": 201088,
}
DEEPSEEK_V32 = {
    "model_type": "deepseek_v32", "hidden_size": 7168, "num_hidden_layers": 4, "first_k_dense_replace": 3,
    "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "vocab_size": 129280,
    "max_position_embeddings": 163840,
}  # fmt: skip
MAMBA2 = {
    "model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"], "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "num_local_experts": 72, "num_experts_per_tok": 10,
    "shared_intermediate_size": 1536, "vocab_size": 100352, "max_position_embeddings": 131072,
}  # fmt: skip
SHORT_CONVOLUTIONS = {
    "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 2,
    "num_dense_layers": 0, "layer_types": ["conv", "full_attention"], "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
    "vocab_size": 65536, "max_position_embeddings": 128000,
}  # fmt: skip
MXFP4 = BankConfig(kind="quantized", bits=4, group_size=32, table=True, scale_bits=32, base="none")
FOUR_BITS = BankConfig(kind="quantized", bits=4, group_size=128)


class TrueLayer(NamedTuple):
    """Keys of a config.json, an index of its layers, and the form of the experts."""

    keys: dict[str, Any]
    index: int
    bank: BankConfig

    @property
    def config(self) -> ModelConfig:
        """A model of this layer alone."""
        whole = read_hf_config(self.keys)
        layer = dataclasses.replace(
            whole.layers[self.index], mlp=dataclasses.replace(whole.moe(self.index), bank=self.bank)
        )
        return dataclasses.replace(whole, layers=(layer,), dtype="bfloat16")


LAYERS = {
    "gpt-oss-120b, window of 128": TrueLayer(GPT_OSS, 0, MXFP4),
    "gpt-oss-120b, no window": TrueLayer(GPT_OSS, 1, MXFP4),
    "Qwen3-Next-80B-A3B, delta rule": TrueLayer(QWEN3_NEXT, 0, FOUR_BITS),
    "DeepSeek-V3.2, indexer": TrueLayer(DEEPSEEK_V32, 3, FOUR_BITS),
    "72 experts, Mamba-2 of 128 heads": TrueLayer(MAMBA2, 0, FOUR_BITS),
    "32 experts, short convolutions": TrueLayer(SHORT_CONVOLUTIONS, 0, FOUR_BITS),
}
PROGRAMS = {f"1 x {CONTEXT} tokens": (1, CONTEXT), f"{ROWS} x 1 token": (ROWS, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--compile", nargs="+", default=["v5e:2x2", "h100:1"], metavar="TOPOLOGY", help="for these")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="layers whose names contain one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("compiled_layers", options.out, writes=True)
    prepare_environment()
    for topology in options.compile:
        mesh = Mesh(np.array(described_devices(topology)[:1]), ("data",))
        for layer, true_layer in LAYERS.items():
            if not any(word in layer for word in options.only):
                continue
            for program, shape in PROGRAMS.items():
                # GPUs take all arrays in the order of their axes.
                for in_order in (False,) if is_gpu(topology) else (False, True):
                    name = [topology, layer, program + (", in order" if in_order else "")]
                    row = compiled(mesh, true_layer.config, *shape, in_order=in_order)
                    figures.put_row(COMPILED_LAYERS.name, ", ".join(name), [*name, *row])
    print(COMPILED_LAYERS.text(figures))


def compiled(mesh: Mesh, config: ModelConfig, rows: int, length: int, *, in_order: bool) -> list[Any]:
    """Returns what is said of a compiled program; raises `SystemExit` if experts are not left in their codes."""
    whole = NamedSharding(mesh, P())

    def placed(path: Any, leaf: Any) -> Any:
        ordered = in_order and "experts" in jax.tree_util.keystr(path)
        where = Format(Layout(tuple(range(len(leaf.shape)))), whole) if ordered else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    function, arguments = program_of(config, rows, length)
    with jax.set_mesh(mesh):
        done = jax.jit(function).lower(*jax.tree_util.tree_map_with_path(placed, arguments)).compile()
    memory, text = done.memory_analysis(), done.as_text()
    assert memory is not None, "these compilers all say it"
    floats = {
        (dtype, tuple(int(size) for size in sizes.split(",")))
        for dtype, sizes in re.findall(r"\b((?:bf|f)\d+)\[([\d,]+)\]", text)
    }
    dtype, sizes = max(floats, key=lambda one: (math.prod(one[1]), one))  # of several, always the same
    moe = config.moe(0)
    of_experts = moe.num_experts * config.d_model * moe.expert.dim
    if math.prod(sizes) >= of_experts:
        raise SystemExit(f"{dtype}{list(sizes)} is as large as a matrix of all {moe.num_experts} experts")
    kernels = Counter(re.findall(r'custom-call\(.*op_name="[^"]*?([\w-]+)/pallas_call"', text))
    called = ", ".join(f"{count} {kernel}" for kernel, count in sorted(kernels.items()))
    numbers = [memory.argument_size_in_bytes / MIB, memory.temp_size_in_bytes / MIB]
    return [*numbers, f"{dtype}{list(sizes)}", called or "none"]


def program_of(config: ModelConfig, rows: int, length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the layer as a function, and its arguments: texts that begin, or one token more of every row."""
    dtype, (layer,) = jnp.dtype("bfloat16"), config.layers
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make_layer(layer, config, rngs=nnx.Rngs(0), dtype=dtype)))
    caches = jax.eval_shape(lambda: init_cache(config, rows, CONTEXT, dtype, stacked=False))
    cache = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape[1:], one.dtype), caches[0][0])

    def apply(state: Any, x: Any, positions: Any, cache: Any) -> Any:
        context = make_context(config, x.shape[:2], positions=positions, num_slots=CONTEXT, begins=length > 1)
        return nnx.merge(graphdef, state)(x, context, cache)[:2]

    x = jax.ShapeDtypeStruct((rows, length, config.d_model), dtype)
    return apply, (state, x, jax.ShapeDtypeStruct((rows, length), jnp.int32), cache)


if __name__ == "__main__":
    main()
