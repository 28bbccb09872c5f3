"""Shared by families of MoEs above some dense layers: shared experts, and the choice of experts of DeepSeek-V3.

The shared experts of a layer are stored as one FFN as wide as all of them together, and that is what they are: an FFN
that sees every token with weight 1. The readers ask for DeepSeek's keys, and `Family.names` says how a family calls
them; `renamed` turns what was written into these names.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.table import Row, Table
from moe_jax.core.errors import InputError
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig, SelectionConfig


def selection_bias(names: Mapping[str, str]) -> Table:
    """Returns the rows of the bias to choose by, whose tensor has one of these names in a layer in either layout."""
    return tuple(
        Row(f"model.layers.{{i}}.{name}", "layers/{i}/mlp/router/selection_bias", layout=layout)
        for layout, name in names.items()
    )


SHARED_EXPERTS = usual.gated_ffn("model.layers.{i}.mlp.shared_experts", "layers/{i}/mlp/universal")

MOE_MLP: Table = (
    *usual.ROUTER,
    Row("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers/{i}/mlp/router/selection_bias"),
    *usual.gated_experts(),
    *SHARED_EXPERTS,
    *usual.GATED_FFN,
)
"""Rows of MoEs and of dense FFNs."""

FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of the number of layers that predict tokens after the next: see `Family.further`."""

_MOST_FURTHER = 100
_DENSE, _SPARSE = "dense", "sparse"

# --- layers ---------------------------------------------------------------------------------------


def above_dense(config: HFConfig, key: str = "first_k_dense_replace") -> range:
    """Reads the number of dense layers, which come first, and returns the indices of the others."""
    first = config.required_integer(key)
    if first < 0:
        raise InputError(f"config.json: {key}={first} must be at least 0")
    return range(first, usual.num_layers(config))


def listed_as_sparse(config: HFConfig) -> list[int] | None:
    """Reads `mlp_layer_types`, and returns the indices of layers that are MoEs; None: the config does not say."""
    types, count = config.texts("mlp_layer_types"), usual.num_layers(config)
    if types is None:
        return None
    if len(types) != count or not set(types) <= {_DENSE, _SPARSE}:
        raise InputError(
            f"config.json: mlp_layer_types has {len(types)} entries, expected {count} (num_hidden_layers), each "
            f"{_DENSE!r} or {_SPARSE!r}"
        )
    return [i for i, kind in enumerate(types) if kind == _SPARSE]


def read_moe_layers(
    config: HFConfig, attention: Sequence[AttentionConfig], moes: Collection[int], **moe_fields: Any
) -> list[LayerConfig]:
    """Reads dense layers, and MoEs with the indices `moes`; further keywords go to `MoEConfig`."""

    def read_moe() -> MoEConfig:
        expert = usual.read_gated_ffn(config, dim="moe_intermediate_size")
        shared = config.integer("n_shared_experts") or 0
        if shared < 0:
            raise InputError(f"config.json: n_shared_experts={shared} must not be negative")
        return MoEConfig(
            expert=expert,
            num_experts=config.required_integer("n_routed_experts"),
            top_k=config.required_integer("num_experts_per_tok"),
            universal="one" if shared else "none",
            universal_dim=shared * expert.dim if shared else None,
            **moe_fields,
        )

    return usual.mixed_layers(config, attention, moes, read_moe)


def write_moe_layers(config: ModelConfig, *, nothing_shared: int | None = 0) -> dict[str, Any]:
    """Writes the keys that `read_moe_layers` reads; `nothing_shared` is the number where no experts are shared."""
    return usual.write_mixed(
        config,
        lambda moe: {
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": _num_shared(config, moe) if moe.universal_beside else nothing_shared,
            "num_experts_per_tok": moe.top_k,
        },
    )


def write_first_dense(config: ModelConfig) -> dict[str, Any]:
    """Writes the key that `above_dense` reads."""
    return {"first_k_dense_replace": config.moe_layers[0] if config.moe_layers else config.num_layers}


def write_sparse(config: ModelConfig) -> dict[str, Any]:
    """Writes the key that `listed_as_sparse` reads."""
    return {"mlp_layer_types": [_SPARSE if i in config.moe_layers else _DENSE for i in range(config.num_layers)]}


def _num_shared(config: ModelConfig, moe: MoEConfig) -> int:
    count, remainder = divmod(moe.universal_ffn.dim, moe.expert.dim)
    if remainder:
        raise InputError(
            f"in the format of {config.family!r} shared experts are a whole number of experts wide, but they are "
            f"{moe.universal_ffn.dim} wide and an expert {moe.expert.dim}"
        )
    return count


# --- routing --------------------------------------------------------------------------------------


def read_balanced(config: HFConfig) -> dict[str, Any]:
    """Reads sigmoid scores with a bias to choose by, which keeps experts in balance: fields of `MoEConfig`."""
    return {
        "gate": "topk_sigmoid" if config.flag("norm_topk_prob") else "sigmoid_topk",
        "gate_scale": config.required_number("routed_scaling_factor"),
        "selection": SelectionConfig(
            bias=True,
            groups=config.required_integer("n_group"),
            top_groups=config.required_integer("topk_group"),
            group_score="best_two",
        ),
    }


def write_balanced(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `read_balanced` reads, if there is an MoE."""
    if not config.moe_layers:
        return {}
    moe = config.moe(config.moe_layers[0])
    return {
        "norm_topk_prob": moe.gate == "topk_sigmoid",
        "routed_scaling_factor": moe.gate_scale,
        "n_group": moe.selection.groups,
        "topk_group": moe.selection.top_groups,
    }


# --- other keys -----------------------------------------------------------------------------------


def check_further(config: HFConfig) -> None:
    """Takes the keys in `FURTHER`, and raises `InputError` for numbers that cannot be."""
    for key in FURTHER:
        count = config.integer(key)
        if count is not None and not 0 <= count <= _MOST_FURTHER:
            raise InputError(f"config.json: {key}={count} must lie between 0 and {_MOST_FURTHER}")


def renamed(keys: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the keys with the names that a family has for them; without those that it names nothing (`""`)."""
    return {names.get(key, key): value for key, value in keys.items() if names.get(key, key)}
