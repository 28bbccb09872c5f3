"""Kernels that are given as bits, and experts of all layers in one array: same logits, and only where it is of use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.experts import BankConfig
from moe_jax.experts.arrangements import as_bits
from moe_jax.experts.arrangements.of_all_layers import join_experts
from moe_jax.experts.bank import KernelBank, set_strategy
from moe_jax.experts.bank_config import BaseCodes
from moe_jax.experts.forms import Full
from moe_jax.experts.forms.low_rank_as_bits import LowRankAsBits
from moe_jax.experts.forms.quantized import Quantized
from moe_jax.experts.forms.whole_as_bits import WholeAsBits
from moe_jax.experts.linear import Linear
from moe_jax.generation.arrange import arranged
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from tests.support.numerics import assert_close, logits_of
from tests.support.tiers import one_in

TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
BANKS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=4),
    "codes over a base": BankConfig(Quantized(bits=4, group_size=16)),
    "codes over a base in codes": BankConfig(
        Quantized(bits=4, group_size=16), base_codes=BaseCodes(code="4", group_size=16)
    ),
}
AS_BITS = {"full": WholeAsBits, "low-rank": LowRankAsBits}


def config_of(bank: BankConfig, dtype="bfloat16", **expert) -> ModelConfig:
    moe = MoEConfig(expert=FFNConfig(dim=32, **expert), num_experts=3, top_k=2, bank=bank)
    layer = LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8), mlp=moe)
    return ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=(layer,) * 2, dtype=dtype)


def drawn(config: ModelConfig) -> Decoder:
    """A decoder of two stacked layers whose every number is drawn."""
    graphdef, state = nnx.split(abstract_model(config))
    rng = np.random.default_rng(0)

    def draw(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.integers(0, 256, leaf.shape), leaf.dtype)
        return jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def banks(decoder) -> list[KernelBank]:
    return [bank for _, bank in nnx.iter_modules(decoder) if isinstance(bank, KernelBank)]


def forms(decoder) -> tuple[type, set[type]]:
    """Of the experts, and of linear maps, those of a base included."""
    (bank,) = banks(decoder)
    linears = {type(linear.form) for _, linear in nnx.iter_modules(decoder) if type(linear) is Linear}
    return type(bank.config.form), linears


@one_in(3)
@pytest.mark.parametrize("strategy", ["factored", "factored-side-by-side", "synthesised"])
@pytest.mark.parametrize("name", BANKS)
def test_logits_are_those_of_the_model(name, strategy):
    decoder = drawn(config_of(BANKS[name]))
    set_strategy(decoder, strategy)
    before, expected = forms(decoder), logits_of(decoder, TOKENS)
    given = arranged(decoder)
    assert forms(given)[0] == AS_BITS.get(name, Quantized)
    assert WholeAsBits in forms(given)[1] and Full not in forms(given)[1]
    assert isinstance(given.lm_head.codes, WholeAsBits)
    assert forms(arranged(abstract_model(decoder.config))) == forms(given)
    assert_close(logits_of(given, TOKENS), expected, 1e-4)
    join_experts(given)
    assert banks(given)[0].places is not None
    assert_close(logits_of(given, TOKENS), expected, 1e-4)
    assert forms(decoder) == before
    assert_close(logits_of(decoder, TOKENS), expected, 0)


def test_experts_of_all_layers_have_their_biases_and_side_by_side_are_those_of_the_layer():
    decoder = drawn(config_of(BANKS["low-rank"], dtype="float32", bias=True))
    set_strategy(decoder, "factored-side-by-side")
    expected = logits_of(decoder, TOKENS)
    join_experts(decoder)
    assert_close(logits_of(decoder, TOKENS), expected, 1e-4)


def test_other_dtypes_and_what_memory_has_no_room_for_stay_as_they_are(monkeypatch):
    config = config_of(BankConfig())
    assert forms(arranged(drawn(dataclasses.replace(config, dtype="float32")))) == (Full, {Full})
    monkeypatch.setattr(as_bits, "available_memory", lambda: 100)
    assert forms(arranged(drawn(config))) == (Full, {Full})
