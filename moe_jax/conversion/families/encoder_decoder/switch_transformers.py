"""Switch Transformers: T5 1.0 in which every n-th FFN is an MoE that routes a token to one expert.

Here no token is dropped. Transformers lets an expert take `expert_capacity` tokens of a sequence, padding included, and
drops the others, also at evaluation; the key is kept, and written back. In training `capacity_factor` limits the tokens
of an expert, as a share of all tokens. Noise on the router's inputs in training (`router_jitter_noise`) is not made.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    Family,
    read_activation,
    same_in_all_layers,
    uniform_moe,
    write_activation,
)
from moe_jax.conversion.families.parts.two_stacks import (
    DEFAULTS,
    EMBEDDING,
    HARMLESS,
    NORMS_AND_HEAD,
    attention_rows,
    read_encoder_decoder,
    read_lengths,
    write_encoder_decoder,
)
from moe_jax.conversion.table import Row, in_stack, linear, norm
from moe_jax.core.errors import InputError
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, MoEConfig


def _read(config: HFConfig) -> ModelConfig:
    for key, value in _FIXED.items():
        config.must_be(key, value)
    activation = read_activation(config, "dense_act_fn")
    ffn = FFNConfig(dim=config.required_integer("d_ff"), gated=False, activation=activation)
    stacks = []
    for stack, count in zip(("encoder", "decoder"), read_lengths(config), strict=True):
        sparse = config.required_integer(f"num_sparse_{stack}_layers")
        if sparse < 0:
            raise InputError(f"config.json: num_sparse_{stack}_layers={sparse} must be at least 0")
        # The step is written in addition to the number that it follows from.
        config.must_be(f"{stack}_sparse_step", _sparse_step(sparse, count))
        stacks.append(_is_sparse(sparse, count))
    moe = _read_moe(config, ffn) if any(map(any, stacks)) else ffn
    encoder, decoder = ([moe if is_moe else ffn for is_moe in stack] for stack in stacks)
    return read_encoder_decoder(config, "switch_transformers", encoder, decoder, scaled_head=True)


def _read_moe(config: HFConfig, expert: FFNConfig) -> MoEConfig:
    return MoEConfig(
        expert=expert,
        num_experts=config.required_integer("num_experts"),
        # The weight is p_1 of the full softmax, as with gate `top1`.
        top_k=1,
        gate="softmax_topk",
        balance_coef=config.required_number("router_aux_loss_coef"),
        z_coef=config.required_number("router_z_loss_coef"),
    )


def _sparse_step(sparse: int, count: int) -> int:
    return count // sparse if sparse > 0 else count


def _is_sparse(sparse: int, count: int) -> list[bool]:
    """Returns for each of `count` layers whether it is an MoE, if `sparse` of them shall be.

    As Transformers computes it: if `sparse` is 0, the second layer is one all the same, and if it is above `count` none
    is.
    """
    step = _sparse_step(sparse, count)
    return [step > 0 and (i % step == 1 or step == 1) for i in range(count)]


def _write(config: ModelConfig) -> dict[str, Any]:
    if not config.tie_embeddings:
        raise InputError(f"in the format of {config.family!r} the head is the embedding, and this model has its own")
    keys = write_encoder_decoder(config)
    ffn = same_in_all_layers(config, "shape of FFNs and experts", _ffn)
    keys |= {"d_ff": ffn.dim, "dense_act_fn": write_activation(ffn)}
    first = config.num_encoder_layers
    for stack, layers in (("encoder", config.layers[:first]), ("decoder", config.layers[first:])):
        is_moe = [isinstance(layer.mlp, MoEConfig) for layer in layers]
        fitting = [n for n in range(len(layers) + 2) if _is_sparse(n, len(layers)) == is_moe]
        if not fitting:
            raise InputError(
                f"the format of {config.family!r} has an MoE in every n-th layer from the second on, or in all; "
                f"in the {stack}, layers {[i for i, here in enumerate(is_moe) if here]} of {len(layers)} are MoEs"
            )
        # If several numbers give these layers, the true one is taken if it is among them.
        keys[f"num_sparse_{stack}_layers"] = min(fitting, key=lambda n: abs(n - sum(is_moe)))
    if config.moe_layers:
        moe = uniform_moe(config, among=config.moe_layers)
        keys |= {
            "num_experts": moe.num_experts,
            "router_aux_loss_coef": moe.balance_coef,
            "router_z_loss_coef": moe.z_coef,
        }
    return keys


def _ffn(layer: LayerConfig) -> FFNConfig:
    return layer.mlp.expert if isinstance(layer.mlp, MoEConfig) else layer.mlp


def _ffn_rows(block: str) -> tuple[Row, ...]:
    """Returns the rows of the FFN or MoE in a block's last part."""
    return (
        *norm(f"{block}.layer_norm", "layers/{i}/mlp_norm"),
        *linear(f"{block}.mlp.wi", "layers/{i}/mlp/up"),
        *linear(f"{block}.mlp.wo", "layers/{i}/mlp/down"),
        *linear(f"{block}.mlp.router.classifier", "layers/{i}/mlp/router"),
        *linear(f"{block}.mlp.experts.expert_{{e}}.wi", "layers/{i}/mlp/experts/up"),
        *linear(f"{block}.mlp.experts.expert_{{e}}.wo", "layers/{i}/mlp/experts/down"),
    )


# The reader relies on these. Untied, Transformers 5 has an embedding for each stack, which no checkpoint holds.
_FIXED = {"router_bias": False, "router_dtype": "float32", "is_gated_act": False, "tie_word_embeddings": True}

FAMILY = Family(
    name="switch_transformers",
    architecture="SwitchTransformersForConditionalGeneration",
    defaults={
        **DEFAULTS,
        "d_model": 768,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "num_sparse_encoder_layers": 3,
        "num_sparse_decoder_layers": 3,
        "num_experts": 8,
        "dense_act_fn": "relu",
        "router_aux_loss_coef": 0.001,
        "router_z_loss_coef": 0.001,
    },
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *in_stack("encoder", attention_rows("encoder") + _ffn_rows("encoder.block.{i}.layer.1")),
        *in_stack("decoder", attention_rows("decoder") + _ffn_rows("decoder.block.{i}.layer.2")),
        *NORMS_AND_HEAD,
    ),
    # Of these, Transformers uses only the capacity at evaluation (see above).
    harmless=(
        *HARMLESS,
        "expert_capacity",
        "router_ignore_padding_tokens",
        "router_type",
        "add_router_probs",
        "feed_forward_proj",
    ),
)
