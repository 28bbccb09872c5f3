"""Which parameters are trained: whole paths, nothing by accident, nothing in vain."""

import dataclasses

import jax
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.peft import split_model, trainable_paths

LOW_RANK = BankConfig(kind="low-rank", rank=2)


def model_of(bank: BankConfig = LOW_RANK):
    """Dense, MoE, dense, MoE: one segment whose two blocks are stacked twice."""
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4)
    moe = MoEConfig(expert=FFNConfig(dim=16), num_experts=4, top_k=2, bank=bank)
    layers = tuple(LayerConfig(attention=attention, mlp=mlp) for mlp in (FFNConfig(dim=16), moe) * 2)
    return abstract_model(ModelConfig(family="llama", vocab_size=32, d_model=8, max_positions=16, layers=layers))


def paths_of(state) -> set[str]:
    return {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}


def test_everything_is_trained_unless_something_else_is_said():
    model = model_of()
    assert trainable_paths(model) == paths_of(nnx.state(model, nnx.Param))


def test_patterns_match_whole_paths_of_layers():
    model = model_of()
    only_router = trainable_paths(model, train=["layers/.*/router/kernel"])
    assert only_router == {"stack/segments/0/blocks/1/mlp/router/kernel"}
    without = trainable_paths(model, freeze=[r"layers/\d+/attention/.*", "embed/.*|lm_head/.*"])
    frozen = paths_of(nnx.state(model, nnx.Param)) - without
    assert len(frozen) == 2 * 4 + 2
    assert all("/attention/" in path or path.startswith(("embed", "lm_head")) for path in frozen)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"freeze": ["router"]}, "'router' matches no parameter"),
        ({"freeze": ["layers/.*/router"]}, "'layers/.*/router' matches no parameter"),
        ({"train": ["layers/./mlp/router/kernal"]}, "matches no parameter (did you mean"),
        ({"freeze": ["layers/(1/.*"]}, "regular expression"),
        ({"freeze": ["layers/0/.*"]}, "layers/2/"),
        ({"freeze": [".*"]}, "left to train"),
    ],
)
def test_patterns_that_do_not_mean_what_they_say_are_errors(patterns, message):
    with pytest.raises(InputError) as error:
        trainable_paths(model_of(), **patterns)
    assert message in str(error.value)
    assert ("must match a whole" in str(error.value)) == ("matches no parameter" in message or "regular" in message)


def test_stacked_layers_are_named_when_a_pattern_would_part_them():
    with pytest.raises(InputError, match="layers/3/.*router/kernel would .* and layers/1/.*router/kernel not"):
        trainable_paths(model_of(), freeze=["layers/1/mlp/router/kernel"])


@pytest.mark.parametrize("kind", ["low-rank", "sparse"])
def test_a_base_that_is_not_to_be_trained_and_positions_stay_frozen(kind):
    bank = LOW_RANK if kind == "low-rank" else BankConfig(kind="sparse", rate=0.5)
    model = model_of(dataclasses.replace(bank, train_base=False))
    trained = trainable_paths(model)
    assert not any("/experts/base/" in path or path.endswith(("/columns", "/row_ends")) for path in trained)
    assert any("/experts/delta/" in path for path in trained)
    assert any("/experts/base/" in path for path in trainable_paths(model_of(bank)))


def test_a_split_model_merges_to_itself():
    model = model_of(BankConfig(kind="sparse", rate=0.5))
    trained = trainable_paths(model, train=["layers/.*/experts/.*"])
    graphdef, params, frozen = split_model(model, trained)
    assert paths_of(params) == trained
    assert paths_of(params) | paths_of(frozen) == paths_of(nnx.state(model))
    assert paths_of(params).isdisjoint(paths_of(frozen))
    assert paths_of(nnx.state(nnx.merge(graphdef, params, frozen))) == paths_of(nnx.state(model))
