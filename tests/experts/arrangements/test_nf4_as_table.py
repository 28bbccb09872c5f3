"""NF4 kernels of linear maps as codes of a table: same logits, and of few rows no kernel is made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.experts import AdapterConfig, BankConfig, LoRAConfig
from moe_jax.experts.arrangements.nf4_as_table import give_nf4_as_table
from moe_jax.experts.forms.kernel_of_codes import NF4, CodedLevels, CodedNF4
from moe_jax.experts.forms.whole import WithLoRA
from moe_jax.experts.linear import Linear
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from tests.support.numerics import assert_close, logits_of

TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)


def qlora() -> ModelConfig:
    """Adapters after a shared FFN in NF4, and attention in NF4 with LoRA; 72 inputs end inside a block."""
    adapters = BankConfig(kind="adapter", adapter=AdapterConfig(rank=4))
    moe = MoEConfig(expert=FFNConfig(dim=136, nf4=True), num_experts=3, top_k=2, bank=adapters)
    attention = AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=8, nf4=True, lora=LoRAConfig(rank=2, targets=("q", "v"))
    )
    layer = LayerConfig(attention=attention, mlp=moe)
    return ModelConfig(family="llama", vocab_size=64, d_model=72, max_positions=64, layers=(layer,) * 2)


def drawn(module, seed=0):
    graphdef, state = nnx.split(module)
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.integers(0, 256, leaf.shape), leaf.dtype)
        return jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def forms(model) -> set[type]:
    linears = [linear.form for _, linear in nnx.iter_modules(model) if type(linear) is Linear]
    return {type(form.kernel if isinstance(form, WithLoRA) else form) for form in linears}


def test_logits_of_stacked_layers_are_the_same():
    decoder = drawn(abstract_model(qlora()))
    expected = logits_of(decoder, TOKENS)
    assert forms(decoder) == {NF4}
    give_nf4_as_table(decoder)
    assert forms(decoder) == {CodedLevels}
    assert_close(logits_of(decoder, TOKENS), expected, 1e-5)
    shapes = abstract_model(qlora())
    give_nf4_as_table(shapes)
    given, made = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.state(one)) for one in (shapes, decoder))
    assert given == made


@pytest.mark.parametrize("codes", [None, CodedNF4(codes=NF4())])
def test_of_few_rows_no_kernel_is_made(codes):
    linear = drawn(Linear((2048, 512), nf4=codes is None, codes=codes, rngs=nnx.Rngs(0), dtype=jnp.float32))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 2048)), jnp.float32)
    expected = linear(x)
    give_nf4_as_table(linear)
    graphdef, state = nnx.split(linear)
    program = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, x).compile()
    assert_close(program(state, x), expected, 1e-5)
    assert program.memory_analysis().temp_size_in_bytes < 2048 * 512
