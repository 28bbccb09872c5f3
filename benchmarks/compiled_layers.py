"""One layer of large models at its true size, compiled for accelerators on a machine that has none.

    python benchmarks/compiled_layers.py [--topologies v5e:2x2 h100:1] [--only WORD ...] [--out benchmarks/results]

For GPUs, JAX's CUDA plugin must be there. A layer has what is in the place of attention, the router and all experts,
which stay in codes: those of MXFP4 as gpt-oss is published in, or of 4 bits. It is compiled for one device, for a text
that begins and for a token more of each of 32 rows, whose caches hold as many. OUT receives `compiled_layers.json`.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.planning.planned_devices import prepare_environment

prepare_environment()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

from evidence.layouts import COMPILED  # noqa: E402
from evidence.programs import compiled_row  # noqa: E402
from evidence.results import RESULTS, Figures  # noqa: E402
from moe_jax.conversion import read_hf_config  # noqa: E402
from moe_jax.experts import BankConfig  # noqa: E402
from moe_jax.nn.block import make_layer  # noqa: E402
from moe_jax.nn.context import init_cache, make_context  # noqa: E402

# No width of these layers is a multiple of so many: arrays of tokens x tokens would be seen.
TOKENS, ROWS = 3200, 32
FOUR_BITS = BankConfig(kind="quantized", bits=4, group_size=128)
MXFP4 = BankConfig(kind="quantized", bits=4, group_size=32, table=True, scale_bits=32)


class TrueLayer(NamedTuple):
    """Keys of a model's config.json, as far as the family has no such defaults; which layer; and its experts' codes."""

    keys: dict[str, Any]
    index: int
    bank: BankConfig = FOUR_BITS


_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_hidden_layers": 2, "num_local_experts": 128, "num_experts_per_tok": 4,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    "vocab_size": 201088, "max_position_embeddings": 131072, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
LAYERS = {
    "gpt-oss-120b, window, MXFP4": TrueLayer(_GPT_OSS, 0, MXFP4),
    "gpt-oss-120b, full attention, MXFP4": TrueLayer(_GPT_OSS, 1, MXFP4),
    "Qwen3-Next-80B-A3B, gated delta rule": TrueLayer(
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
            "vocab_size": 151936, "max_position_embeddings": 262144,
        },
        0,
    ),
    "DeepSeek-V3.2, indexer": TrueLayer(
        {
            "model_type": "deepseek_v32", "num_hidden_layers": 4, "vocab_size": 129280,
            "max_position_embeddings": 163840,
        },
        3,
    ),
    "Mamba-2 of 128 heads (Granite 4)": TrueLayer(
        {
            "model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"], "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "mamba_n_heads": 128,
            "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "vocab_size": 100352,
            "max_position_embeddings": 131072,
        },
        0,
    ),
    "short convolution of 2048 channels (LFM2)": TrueLayer(
        {
            "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 2,
            "num_dense_layers": 0, "layer_types": ["conv", "full_attention"], "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
            "vocab_size": 65536, "max_position_embeddings": 128000,
        },
        0,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2", "h100:1"], help="for one device of each")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="layers whose names contain one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("compiled_layers", options.out, writes=True)
    for name in (name for name in LAYERS if any(word in name for word in options.only)):
        for topology in options.topologies:
            for rows, length in ((1, TOKENS), (ROWS, 1)):
                words = f"{name}, {rows} x {length} tokens"
                row = compiled_row(topology, words, *program(LAYERS[name], rows, length), tokens=TOKENS)
                figures.put_row(COMPILED.name, f"{topology}, {words}", row)
    print(COMPILED.text(figures))


def program(true: TrueLayer, rows: int, length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the layer as a function, and the shapes of its arguments: texts that begin, or a token more of each."""
    config = read_hf_config(true.keys)
    layer = config.layers[true.index]
    layer = dataclasses.replace(layer, mlp=dataclasses.replace(config.moe(true.index), bank=true.bank))
    config = dataclasses.replace(config, layers=(layer,), dtype="bfloat16")
    block = nnx.eval_shape(lambda: make_layer(layer, config, rngs=nnx.Rngs(0), dtype=jnp.dtype("bfloat16")))
    graphdef, state = nnx.split(block)
    caches = jax.eval_shape(lambda: init_cache(config, rows, TOKENS, jnp.dtype("bfloat16"), stacked=False))
    cache = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape[1:], one.dtype), caches[0][0])
    slots = 0 if layer.is_recurrent else TOKENS

    def apply(state: Any, x: Any, cache: Any) -> Any:
        context = make_context(config, x.shape[:2], num_slots=slots, begins=length > 1)
        return nnx.merge(graphdef, state)(x, context, cache)[:2]

    return apply, (state, jax.ShapeDtypeStruct((rows, length, config.d_model), jnp.bfloat16), cache)


if __name__ == "__main__":
    main()
