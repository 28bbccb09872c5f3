import pytest

from moe_jax.core.errors import InputError
from moe_jax.experts import AdapterConfig, AdapterExperts
from moe_jax.models import BankConfig, FFNConfig, MoEConfig
from moe_jax.upcycling import UpcycleSpec, keeps_the_function, parse_delta, upcycled_config
from tests.support.dense_models import dense_config


@pytest.mark.parametrize(
    ("text", "bank"),
    [
        ("full", BankConfig()),
        ("low-rank:4", BankConfig(kind="low-rank", rank=4)),
        ("sparse:0.999", BankConfig(kind="sparse", rate=0.999)),
        ("sparse:0", BankConfig(kind="sparse", rate=0.0)),
    ],
)
def test_deltas_are_read(text, bank):
    assert parse_delta(text) == bank


def test_the_base_can_be_frozen():
    assert not parse_delta("low-rank:4", freeze_base=True).train_base
    assert not parse_delta("sparse:0.5", freeze_base=True).train_base
    assert parse_delta("sparse:0.5").train_base


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lowrank:4", "did you mean 'low-rank:4'"),
        ("dense", "one of full, low-rank:R, sparse:RATE"),
        ("low-rank", "expected low-rank:R"),
        ("full:2", "expected full"),
        ("low-rank:1.5", "whole number"),
        ("low-rank:0", "rank=0 must be a"),
        ("sparse:most", "expected a number"),
        ("sparse:1", r"rate=1.0 must lie in \[0, 1\)"),
        ("sparse:-0.1", r"rate=-0.1 must lie in \[0, 1\)"),
        ("sparse:nan", r"rate=nan must lie in \[0, 1\)"),
    ],
)
def test_bad_deltas_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_delta(text)


def test_there_is_no_base_to_freeze_in_full_experts():
    with pytest.raises(InputError, match="--freeze-base needs a shared"):
        parse_delta("full", freeze_base=True)


@pytest.mark.parametrize(
    ("num_layers", "options", "moe_layers"),
    [
        (5, {"every": 1}, (0, 1, 2, 3, 4)),
        (5, {"every": 2}, (1, 3)),
        (6, {"every": 3}, (2, 5)),
        (5, {"every": 5}, (4,)),
        (5, {"layers": (4, 0)}, (0, 4)),
    ],
)
def test_every_nth_layer_becomes_an_moe(num_layers, options, moe_layers):
    dense = dense_config(num_layers=num_layers, bias=True, foreign={"kept": 1})
    config = upcycled_config(dense, UpcycleSpec(**options))
    assert config.moe_layers == moe_layers
    moe = MoEConfig(expert=FFNConfig(dim=24, bias=True), num_experts=8, top_k=2, gate="topk_softmax")
    for i, layer in enumerate(config.layers):
        assert layer.attention == dense.layers[i].attention
        assert layer.mlp == (moe if i in moe_layers else dense.layers[i].mlp)
    assert config.foreign == {"kept": 1} and config.vocab_size == dense.vocab_size


def test_options_reach_the_moe():
    bank = parse_delta("low-rank:3", freeze_base=True)
    options = UpcycleSpec(
        experts=4, top_k=1, every=1, delta="low-rank:3", freeze_base=True, gate="top1", balance_coef=0.5, z_coef=0.1
    )
    moe = upcycled_config(dense_config(), options).layers[0].mlp
    assert (moe.num_experts, moe.top_k, moe.gate, moe.bank) == (4, 1, "top1", bank)
    assert (moe.balance_coef, moe.z_coef) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 must be at"),
        ({"every": 5}, "every=5 must lie between 1 and .* layers, 4"),
        ({"layers": (1, 4)}, "layers 4 do .* layers 0 to 3"),
        ({"layers": (-1,)}, "layers -1 do not exist"),
        ({"layers": ()}, "layers are named"),
        ({"layers": (1,), "every": 2}, "give one of them"),
        ({"experts": 1}, "top_k=2 is above num_experts=1"),
        ({"experts": 0, "top_k": 0}, "experts=0 must be a"),
        ({"gate": "top1"}, "top1' routes .* expert, top_k=2"),
        ({"top_k": 1}, "top_k=1 with gate 'topk_softmax' weights .* by 1 .*; use top_k=2, a universal FFN"),
        ({"top_k": 1, "method": "pesc"}, "top_k=1 with gate 'topk_softmax' .*; use top_k=2$"),
        ({"delta": BankConfig(kind="low-rank", rank=17)}, r"rank 17 is above min\(d, f\) = 16"),
        ({"delta": BankConfig(kind="sparse", rate=0.9999)}, "rate 0.9999 leaves no entry"),
        ({"delta": BankConfig(kind="sparse", rate=0.5, entries=(3, 4))}, r"entries=\(3, 4\) is not one"),
    ],
)
def test_options_that_do_not_go_with_the_model_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        upcycled_config(dense_config(), UpcycleSpec(**options))


def test_all_problems_are_reported_together():
    with pytest.raises(InputError, match="(?s)every=9 must.*rank 17 is above"):
        upcycled_config(dense_config(), UpcycleSpec(every=9, delta="low-rank:17"))
    with pytest.raises(InputError, match="(?s)every=0 must.*top_k=3 is above num_experts=2"):
        UpcycleSpec(every=0, experts=2, top_k=3)


def test_an_moe_becomes_a_larger_one():
    config = upcycled_config(upcycled_config(dense_config(), UpcycleSpec()), UpcycleSpec())
    assert config.moe_layers == (1, 3) and config.moe(1).num_experts == 16


def test_gates_whose_weights_sum_to_one():
    assert keeps_the_function(UpcycleSpec())
    assert keeps_the_function(UpcycleSpec(gate="softmax_topk", experts=2))
    assert keeps_the_function(UpcycleSpec(gate="top1", experts=1, top_k=1))
    assert not keeps_the_function(UpcycleSpec(gate="softmax_topk"))
    assert not keeps_the_function(UpcycleSpec(gate="top1", top_k=1))


def test_adapter_experts_given_as_a_bank_have_no_routers_from_texts():
    adapters = AdapterExperts(adapter=AdapterConfig(rank=2, activation="gelu", scale=1.0, dropout=0.0))
    with pytest.raises(InputError, match="--router-from .* adapter experts"):
        UpcycleSpec(delta=BankConfig(adapters), experts=2, top_k=2, router_from=("a", "b"))


def test_layers_from_python_are_indices():
    with pytest.raises(InputError, match="layers='all'"):
        UpcycleSpec(layers="all")  # type: ignore[arg-type]
