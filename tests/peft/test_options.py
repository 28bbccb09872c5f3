"""What tuning is asked to do: every method's config, and all that is refused."""

import dataclasses

import pytest

from moe_jax.core.errors import InputError
from moe_jax.model_io.tuned_base import base_config
from moe_jax.models import BankConfig
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec
from tests.support.peft_models import BARE, FFN, FULL, SHARED, model_of

MIXED = model_of(FFN, FULL)


def adapted(config, method, adapter="lora:4", **options):
    return adapted_config(config, AdaptSpec(method=method, adapter=adapter, **options))


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("perft-r", {"experts": 3, "top_k": 2}, ("routed", 3, 2)),
        ("perft-e", {}, ("embedded", 4, None)),
        ("perft-d", {"experts": 3}, ("dense", 3, None)),
        ("perft-s", {}, ("single", 1, None)),
    ],
)
def test_perft_stands_beside_every_moe(method, options, expected):
    config = adapted(MIXED, method, **options)
    assert config.layers[0] == MIXED.layers[0] and config.frozen_base
    perft = config.layers[1].mlp.perft
    assert (perft.variant, perft.num_experts, perft.top_k) == expected
    assert base_config(config) == MIXED


def test_adapters_are_scaled_as_their_kind_says():
    def adapter(*args, **options):
        return adapted(MIXED, "perft-s", *args, **options).layers[1].mlp.perft.adapter

    lora, parallel = adapter("lora:4"), adapter("parallel:8")
    assert (lora.rank, lora.activation, lora.scale, lora.dropout) == (4, "none", 2.0, 0.05)
    assert (parallel.rank, parallel.activation, parallel.scale) == (8, "silu", 1.0)
    assert adapter("lora:4", alpha=16.0).scale == 4.0
    assert adapter("parallel:4", scale=0.5, dropout=0.0) == dataclasses.replace(
        parallel, rank=4, scale=0.5, dropout=0.0
    )


def test_the_losses_of_the_adapters_router_are_its_own():
    perft = adapted(MIXED, "perft-r", experts=2, top_k=1, balance_coef=0.02, z_coef=0.001).layers[1].mlp.perft
    assert (perft.balance_coef, perft.z_coef) == (0.02, 0.001)
    assert adapted(MIXED, "perft-r", experts=2, top_k=1).layers[1].mlp.perft.balance_coef == 0.01
    assert adapted(MIXED, "perft-e").layers[1].mlp.balance_coef == FULL.balance_coef


def test_lora_stands_beside_the_kernels_that_are_named_wherever_they_are():
    config = adapted(model_of(FFN, FULL, SHARED, BARE), "lora", targets=("q", "v", "up", "router"))
    dense, full, shared, bare = (layer.mlp for layer in config.layers)
    assert all(layer.attention.lora.targets == ("q", "v") for layer in config.layers)
    assert dense.lora.targets == full.expert.lora.targets == shared.expert.lora.targets == ("up",)
    assert bare.expert.lora is None
    assert [moe.router_lora.targets for moe in (full, shared, bare)] == [("router",)] * 3
    # The inputs of full experts are sorted rows.
    assert (dense.lora.dropout, full.expert.lora.dropout, shared.expert.lora.dropout) == (0.05, 0.0, 0.05)


def test_targets_may_be_an_iterator_and_are_kept():
    spec = AdaptSpec(method="lora", adapter="lora:4", targets=iter(("q", "v")))
    assert adapted_config(MIXED, spec) == adapted_config(MIXED, spec)
    assert spec.targets == ("q", "v")


def test_lora_works_without_an_moe():
    config = adapted(model_of(FFN, FFN), "lora", targets=("q",))
    assert config.layers[0].attention.lora.targets == ("q",) and config.layers[0].mlp.lora is None


def test_nf4_takes_attention_ffns_and_experts():
    config = adapted(model_of(FFN, FULL, SHARED, BARE), "perft-s", base="nf4")
    dense, full, shared, bare = (layer.mlp for layer in config.layers)
    assert all(layer.attention.nf4 for layer in config.layers)
    assert (dense.nf4, full.expert.nf4, shared.expert.nf4, bare.expert.nf4) == (True, True, True, False)


@pytest.mark.parametrize(
    ("config", "options", "messages"),
    [
        (MIXED, {"method": "perft-x"}, ["unknown --method 'perft-x' (did you mean 'perft-"]),
        (MIXED, {"method": "perft-s", "adapter": "lora"}, ["it is lora:R or parallel:R"]),
        (MIXED, {"method": "perft-s", "adapter": "lorra:4"}, ["'lorra:4' (did you mean 'lora'?)"]),
        (MIXED, {"method": "perft-s", "adapter": "lora:x"}, ["expected a whole number"]),
        (MIXED, {"method": "perft-s", "adapter": "lora:0"}, ["lora:0: the rank must be at least 1"]),
        (MIXED, {"method": "perft-s", "dropout": 1.0}, ["dropout=1.0 must lie in [0, 1)"]),
        (MIXED, {"method": "perft-s", "scale": 0.0}, ["scale of 0"]),
        (MIXED, {"method": "perft-s", "scale": 1e-320}, ["makes nothing of"]),
        (MIXED, {"method": "perft-s", "scale": float("nan")}, ["scale of nan"]),
        (MIXED, {"method": "perft-s", "scale": 1.0, "alpha": 8.0}, ["--alpha or --scale"]),
        (MIXED, {"method": "perft-s", "adapter": "parallel:4", "alpha": 8.0}, ["--alpha is LoRA's"]),
        (MIXED, {"method": "perft-r", "experts": 2, "top_k": 3}, ["top_k=3 must lie between 1 and"]),
        (MIXED, {"method": "perft-r"}, ["--experts is missing", "--top-k is missing"]),
        (MIXED, {"method": "perft-d"}, ["--experts is missing"]),
        (MIXED, {"method": "perft-d", "experts": 0}, ["experts=0 must be a positive integer"]),
        (MIXED, {"method": "perft-d", "experts": 2, "top_k": 1}, ["--top-k goes with perft-r only"]),
        (MIXED, {"method": "perft-s", "experts": 2}, ["--experts goes with perft-r and perft-d only"]),
        (MIXED, {"method": "perft-e", "experts": 8}, ["one adapter for each of the MoE's experts"]),
        (MIXED, {"method": "perft-e", "balance_coef": 0.1}, ["--balance-coef goes with perft-r only"]),
        (MIXED, {"method": "perft-s", "targets": ("q",)}, ["--targets goes with lora only"]),
        (MIXED, {"method": "lora"}, ["--targets is missing"]),
        (MIXED, {"method": "lora", "targets": ()}, ["nothing matches no kernel"]),
        (MIXED, {"method": "lora", "targets": ("q", "q")}, ["name every kernel once"]),
        (MIXED, {"method": "lora", "targets": ("q", "query")}, ["query matches no kernel; this model has q, k, v, o"]),
        (MIXED, {"method": "lora", "targets": ("q",), "adapter": "parallel:4"}, ["whose adapters are lora:R"]),
        (MIXED, {"method": "lora", "targets": ("up",), "dropout": 0.1}, ["full experts has no dropout"]),
        (model_of(BARE), {"method": "lora", "targets": ("up",)}, ["this model has q, k, v, o, router"]),
        (model_of(FFN), {"method": "lora", "targets": ("router",)}, ["this model has q, k, v, o, gate, up, down"]),
        (model_of(FFN), {"method": "perft-e"}, ["the model is dense; upcycle it first"]),
        (
            model_of(FFN),
            {"method": "perft-e", "adapter": "lora:0", "experts": 3, "targets": ("q",)},
            ["3 problems", "rank must be", "leave --experts out", "--targets goes"],
        ),
    ],
)
def test_what_makes_no_sense_is_refused(config, options, messages):
    with pytest.raises(InputError) as error:
        adapted_config(config, AdaptSpec(**{"adapter": "lora:4", **options}))
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("method", "options", "most"),
    [
        ("lora", {"targets": ("q", "router")}, MIXED.d_model),  # what is too much for the router is not for q
        ("lora", {"targets": ("router",)}, FULL.num_experts),
        ("perft-s", {}, MIXED.d_model),
    ],
)
def test_a_rank_above_those_of_all_maps_is_refused(method, options, most):
    assert adapted(MIXED, method, f"lora:{most}", **options).frozen_base
    with pytest.raises(InputError, match=f"lora:{most} or less"):
        adapted(MIXED, method, f"lora:{most + 1}", **options)
    if method != "lora":
        assert adapted(MIXED, method, f"parallel:{most + 1}", **options).frozen_base


@pytest.mark.parametrize("method", ["perft-s", "lora"])
def test_a_model_with_adapters_is_not_adapted_again(method):
    options = {"targets": ("k",)} if method == "lora" else {}
    tuned = adapted(MIXED, "lora", targets=("q",))
    pesc = BankConfig(kind="adapter", adapter=adapted(MIXED, "perft-s").layers[1].mlp.perft.adapter)
    over_base = dataclasses.replace(model_of(FFN, dataclasses.replace(FULL, bank=pesc)), frozen_base=True)
    for config in (tuned, over_base):
        with pytest.raises(InputError, match="adapters already; merge"):
            adapted(config, method, **options)


def test_merged_experts_have_an_adapter_for_every_output_of_the_router():
    config = adapted(model_of(dataclasses.replace(FULL, merged_experts=2)), "perft-e")
    assert config.layers[0].mlp.perft.num_experts == 4
