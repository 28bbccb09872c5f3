"""The language models of MoE-LLaVA (Lin et al. 2024) and Med-MoE (Jiang et al. 2024): StableLM, Qwen and Phi, some of
whose layers are MoEs of DeepSpeed.

Their keys and tensors are those of the model that they were made of, beside those of what they see with
(`vision_formats/moe_llava.py`). Without a tower they are models of text.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.dense.qwen import QWEN
from moe_jax.conversion.families.dense.stablelm import PHI, STABLELM
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.table import Ignored, Row, Table, linear
from moe_jax.core.errors import InputError
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, MoEConfig

# --- MoE layers -----------------------------------------------------------------------------------

# DeepSpeed's capacity counts the tokens of a device's whole batch, padding too, in training and evaluation apart. Read
# models drop nothing; these keys are kept, and written back.
_MOE_KEPT = frozenset(
    ("capacity_factor", "ep_size", "eval_capacity_factor", "min_capacity", "moe_mode", "train_modules", "use_residual"),
)
# Two keys are ours, for what the published code knows by itself: Med-MoE's copy of the FFN that sees every token, and
# the bias of its gate.
_UNIVERSAL, _GATE_BIAS = "meta_moe", "gate_bias"
_MOE_DEFAULTS = {"moe_enable": True, "top_k_experts": 2, "use_residual": False, "router_aux_loss_coef": 0.01}
# DeepSpeed divides the weights of two experts by their sum, and leaves that of a single one.
_GATES: dict[int, Any] = {1: "softmax_topk", 2: "topk_softmax"}


def _with_moes(config: ModelConfig, keys: HFConfig) -> ModelConfig:
    """Returns a dense model with the MoEs that the key `moe` describes."""
    moe = HFConfig(keys.mapping("moe") or {"moe_enable": False}, _MOE_DEFAULTS)
    if not moe.flag("moe_enable"):
        return config
    moe.must_be("use_residual", False)
    moe.require("moe_layers_idx", "num_experts")
    indices, counts = moe.integers("moe_layers_idx", lists_only=True), moe.integers("num_experts")
    counts = counts * len(indices) if len(counts) == 1 else counts
    top_k = moe.required_integer("top_k_experts")
    if sorted({*indices} & {*range(config.num_layers)}) != list(indices) or len(counts) != len(indices):
        raise InputError(
            f"config.json: moe_layers_idx {list(indices)} and num_experts {list(counts)}: expected layers of "
            f"{config.num_layers} in order, and a number of experts for each"
        )
    if top_k not in _GATES:
        raise InputError(f"config.json: top_k_experts is {top_k}: DeepSpeed's gates choose 1 or 2 experts")
    ffn, has_universal = config.ffn(0), moe.flag(_UNIVERSAL)
    layers = list(config.layers)
    for i, count in zip(indices, counts, strict=True):
        mlp = MoEConfig(
            expert=ffn,
            num_experts=count,
            top_k=top_k,
            gate=_GATES[top_k],
            balance_coef=moe.required_number("router_aux_loss_coef"),
            balance_choices="first",
            universal="one" if has_universal else "none",
            universal_dim=ffn.dim if has_universal else None,
            router_bias=moe.flag(_GATE_BIAS),
        )
        layers[i] = dataclasses.replace(layers[i], mlp=mlp)
    keys.keep("moe", moe.unread_keys())
    keys.unknown_inside("moe", [key for key in moe.unread_keys() if key not in _MOE_KEPT])
    return dataclasses.replace(config, layers=tuple(layers), foreign=keys.unread_keys())


def _write_moes(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys in `moe`; the capacities of models of ours are such that an evaluation drops nothing."""
    found = config.moe_layers
    if not found:
        return {"moe_enable": False}

    def same(what: str, get: Callable[[MoEConfig], Any]) -> Any:
        return usual.same_in_all_layers(config, what, lambda layer: get(_moe(layer)), among=found)

    top_k, first = same("number of experts per token", lambda moe: moe.top_k), config.moe(found[0])
    most = max(config.moe(i).num_experts for i in found)
    usual_values = {
        "ep_size": 1,
        "min_capacity": 0,
        "capacity_factor": 1.5 if first.capacity_factor is None else first.capacity_factor,
        "eval_capacity_factor": most / top_k,
    }
    kept = config.foreign.get("moe")
    return {
        **usual_values,
        **(kept if isinstance(kept, Mapping) else {}),
        "moe_enable": True,
        "moe_layers_idx": list(found),
        "num_experts": [config.moe(i).num_experts for i in found],
        "top_k_experts": top_k,
        "use_residual": False,
        "router_aux_loss_coef": same("coefficient of the balance loss", lambda moe: moe.balance_coef),
        **({_UNIVERSAL: True} if same("universal FFN", lambda moe: moe.universal) != "none" else {}),
        **({_GATE_BIAS: True} if same("bias of the router", lambda moe: moe.router_bias) else {}),
    }


def _moe(layer: LayerConfig) -> MoEConfig:
    assert isinstance(layer.mlp, MoEConfig)
    return layer.mlp


def _dense(layer: LayerConfig) -> LayerConfig:
    return layer if isinstance(layer.mlp, FFNConfig) else dataclasses.replace(layer, mlp=layer.mlp.expert)


def _experts(dense: Table) -> Table:
    """Returns the rows of MoE layers, from those of a dense model's FFNs."""
    ffn = [row for row in dense if isinstance(row, Row) and str(row.leaves).startswith("layers/{i}/mlp/")]
    places = {"deepspeed_moe.experts.deepspeed_experts.{e}": "experts", _UNIVERSAL: "universal"}
    block = ffn[0].tensor.partition(".mlp.")[0]
    return (
        *linear(f"{block}.mlp.deepspeed_moe.gate.wg", "layers/{i}/mlp/router"),
        *(
            dataclasses.replace(
                row,
                tensor=row.tensor.replace(".mlp.", f".mlp.{theirs}."),
                leaves=str(row.leaves).replace("/mlp/", f"/mlp/{ours}/"),
            )
            for theirs, ours in places.items()
            for row in ffn
        ),
    )


def _completed(data: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """Returns the keys of a config.json, and in `moe` the two that only Med-MoE's tensors say."""
    moe = data.get("moe")
    if not isinstance(moe, Mapping):
        return data
    shown = {_UNIVERSAL: rf".*\.mlp\.{_UNIVERSAL}\..*", _GATE_BIAS: r".*\.deepspeed_moe\.gate\.wg\.bias"}
    found = {key: True for key, pattern in shown.items() if any(re.fullmatch(pattern, name) for name in tensors)}
    return {**data, "moe": {**found, **moe}}


# --- the families ---------------------------------------------------------------------------------


def _made_of(base: Family, name: str, architecture: str, sees: str, **changes: Any) -> Family:
    """Returns the dense family of MoE-LLaVA that is made of another one, with further fields changed."""
    names: Mapping[str, str] = changes.get("names", {})

    def read(keys: HFConfig) -> ModelConfig:
        for key in _UNSUPPORTED.get(base.name, ()):
            keys.must_be(key, False)
        config = dataclasses.replace(base.read(keys), family=name)
        return dataclasses.replace(config, head_bias=False)  # of Phi's, which the published code does not make

    def write(config: ModelConfig) -> dict[str, Any]:
        keys = base.write(config)
        dropped = _UNSUPPORTED.get(base.name, ())
        return {names.get(key, key): value for key, value in keys.items() if key not in dropped}

    return dataclasses.replace(
        base,
        name=name,
        architecture=architecture,
        read=read,
        write=write,
        moe_formats=(f"moe_{name}",),
        classifier=None,
        sees=sees,
        own_code=True,
        **{"table": base.table} | changes,
    )


# What StableLM-2 12B has, and the code of MoE-LLaVA does not.
_UNSUPPORTED = {"stablelm": ("qk_layernorm", "use_parallel_residual")}


def _with_experts(dense: Family, architecture: str) -> Family:
    """Returns the family whose layers may be MoEs, of a dense one."""

    def read(keys: HFConfig) -> ModelConfig:
        return dataclasses.replace(_with_moes(dense.read(keys), keys), family=f"moe_{dense.name}")

    def write(config: ModelConfig) -> dict[str, Any]:
        layers = tuple(_dense(layer) for layer in config.layers)
        return {**dense.write(dataclasses.replace(config, layers=layers)), "moe": _write_moes(config)}

    return dataclasses.replace(
        dense,
        name=f"moe_{dense.name}",
        architecture=architecture,
        read=read,
        write=write,
        table=(*dense.table, *_experts(dense.table)),
        moe_formats=(),
        completed=_completed,
    )


LLAVA_STABLELM = _made_of(
    STABLELM,
    "llava_stablelm",
    "LlavaStablelmForCausalLM",
    "moe_llava",
    names={"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"},
    defaults={
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_pct": 0.25,
        "use_qkv_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    harmless=("rotary_scaling_factor",),  # read by no code
)
LLAVA_QWEN = _made_of(QWEN, "llava_qwen", "LlavaQWenForCausalLM", "moe_llava_qwen")
LLAVA_PHI = _made_of(
    PHI,
    "llava_phi",
    "LlavaPhiForCausalLM",
    "moe_llava",
    table=(*PHI.table, Ignored(r"lm_head\.bias", "of Phi's head, which has no bias in the code of MoE-LLaVA")),
)

MOE_LLAVA_STABLELM = _with_experts(LLAVA_STABLELM, "MoELLaVAStablelmForCausalLM")
MOE_LLAVA_QWEN = _with_experts(LLAVA_QWEN, "MoELLaVAQWenForCausalLM")
MOE_LLAVA_PHI = _with_experts(LLAVA_PHI, "MoELLaVAPhiForCausalLM")
