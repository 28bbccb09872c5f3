"""The mesh and the rule table."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.distributed import own_rules
from moe_jax.distributed.sharding import leaf_spec, make_mesh, state_shardings
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder


def model_config(**ffn):
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, biases=("q", "k", "v", "o"), qk_norm="head")
    ffn = FFNConfig(dim=32, **ffn)
    banks = (BankConfig(), BankConfig(kind="low-rank", rank=2), BankConfig(kind="sparse", rate=0.5))
    moes = tuple(MoEConfig(expert=ffn, num_experts=4, top_k=2, bank=bank) for bank in banks)
    layers = tuple(LayerConfig(attention=attention, mlp=mlp) for mlp in (ffn, *moes))
    return ModelConfig(
        family="x", vocab_size=64, d_model=16, max_positions=8, layers=layers, norm="layer", head_bias=True
    )


def test_mesh():
    ones = {"expert": 1, "sequence": 1, "tensor": 1}
    assert dict(make_mesh({"data": 2, "fsdp": -1}).shape) == {"data": 2, "fsdp": 4} | ones
    assert make_mesh({}, jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3}, "devices: data=3 takes 3;"),
        ({"dta": 8}, "unknown mesh axis 'dta' .did you mean 'data'"),
        ({"data": -1, "fsdp": -1}, "most one is -1"),
        ({"data": 0, "fsdp": 8}, "sizes are positive"),
        ({"data": 3, "fsdp": -1}, "which data=3 does not divide"),
    ],
)
def test_bad_mesh(axes, message):
    with pytest.raises(InputError, match=message):
        make_mesh(axes)


@pytest.mark.parametrize("ffn", [{}, {"gated": False, "bias": True}], ids=["gated", "plain-biases"])
def test_every_parameter_has_a_rule_of_its_rank(ffn):
    config = model_config(**ffn)
    for path, leaf in leaf_specs(config).items():
        assert len(leaf_spec(path)) <= len(leaf.shape), path
    mesh = make_mesh({"data": 1, "fsdp": 2, "expert": 2, "tensor": 2})
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    shardings = state_shardings(state, mesh)
    experts = shardings["stack"]["segments"][1]["blocks"][0]["mlp"]["experts"]
    assert experts["up"]["kernel"].spec == P(None, "expert", "fsdp", "tensor")


def test_a_parameter_without_a_rule_is_named(monkeypatch):
    monkeypatch.setattr(own_rules, "_rules", {})  # parts that other tests have registered have rules for any name
    with pytest.raises(InputError, match="rule matches parameter 'layers/0/attention/gate_scale'"):
        leaf_spec("layers/0/attention/gate_scale")


def test_every_indivisible_dimension_is_named():
    state = {
        "embed": {"embedding": jax.ShapeDtypeStruct((63, 16), jnp.float32)},
        "lm_head": {"kernel": jax.ShapeDtypeStruct((10, 64), jnp.float32)},
    }
    with pytest.raises(InputError) as error:
        state_shardings(state, make_mesh({"fsdp": 4, "tensor": 2}))
    assert "embed/embedding (63, 16): 63 is not divisible by mesh axis tensor=2" in str(error.value)
    assert "lm_head/kernel (10, 64): 10 is not divisible by mesh axis fsdp=4" in str(error.value)
