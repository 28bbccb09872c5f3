"""Sparse deltas that are arranged by column to generate: same logits, and only where that is of use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.api.model import Loading, Model
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import BankConfig
from moe_jax.experts.arrangements import sparse_deltas as room
from moe_jax.experts.bank import KernelBank, set_strategy
from moe_jax.experts.forms import Sparse
from moe_jax.experts.forms.sparse_by_column import SparseByColumn
from moe_jax.generation.arrange import arranged
from moe_jax.generation.engine import Engine
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from tests.support.numerics import assert_close, logits_of, made_at_once
from tests.support.tiers import one_in

TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)


def sparse(rate=0.8, **options) -> Decoder:
    """A decoder whose every number is drawn: but of positions, which stay those of its initialisation."""
    bank = BankConfig(kind="sparse", rate=rate, **options)
    moe = MoEConfig(expert=FFNConfig(dim=32), num_experts=3, top_k=2, bank=bank)
    layer = LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8), mlp=moe)
    config = ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=(layer,))
    graphdef, state = nnx.split(made_at_once(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def drawn(path, leaf):
        if "value_codes" in path_name(path):
            return jnp.asarray(rng.integers(0, 256, leaf.shape), leaf.dtype)
        is_drawn = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype) if is_drawn else leaf

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(drawn, state))


def forms(decoder) -> list[type]:
    return [type(bank.config.form) for _, bank in nnx.iter_modules(decoder) if isinstance(bank, KernelBank)]


@one_in(3)
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"encoding": "bitmap", "bits": 4}, "factored-entrywise"),
        ({"encoding": "coo"}, "synthesised"),
        ({"encoding": "csr", "base": "none"}, "factored-grouped"),
    ],
)
def test_logits_are_those_of_the_model(options, strategy):
    decoder = sparse(**options)
    expected = logits_of(decoder, TOKENS)
    given = arranged(decoder)
    assert forms(given) == [SparseByColumn]
    set_strategy(given, strategy)
    assert_close(logits_of(given, TOKENS), expected, 1e-4)
    assert forms(decoder) == [Sparse]
    assert_close(logits_of(decoder, TOKENS), expected, 0)


def test_the_engine_and_what_is_loaded_to_generate_are_arranged(tmp_path):
    model = moe_jax.Model(sparse())
    engine = Engine(model.decoder, draws=False)  # which unstacks the layers
    assert forms(nnx.merge(*engine._parts)) == [SparseByColumn]
    source = moe_jax.load(moe_jax.save(model, tmp_path / "sparse")).source
    loaded = Model.of_source(source, Loading.for_generation(source))
    assert forms(loaded.decoder) == [SparseByColumn]


def test_entries_that_would_take_more_room_than_kernels_stay_as_they_are():
    assert forms(arranged(sparse(rate=0.2))) == [Sparse]


def test_entries_that_lie_in_few_columns_stay_as_they_are():
    """Their columns would be as long as those of whole kernels, and have the rows beside them."""
    decoder = sparse(encoding="coo", rate=0.95)
    for _, bank in nnx.iter_modules(decoder):
        if isinstance(bank, KernelBank):
            for name, matrix in bank.matrices.items():
                leaves = getattr(bank.delta, name)
                count = leaves.rows.shape[-1]
                rows, columns = np.arange(count) % matrix.shape[0], np.arange(count) // matrix.shape[0]
                for leaf, places in ((leaves.rows, rows), (leaves.columns, columns)):
                    leaf[...] = jnp.broadcast_to(jnp.asarray(places, leaf.dtype), leaf.shape)
    assert forms(arranged(decoder)) == [Sparse]


def test_entries_that_memory_has_no_room_for_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(room, "available_memory", lambda: 1000)
    assert forms(arranged(sparse())) == [Sparse]
