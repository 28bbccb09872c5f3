"""`plan` against the counts that DeRS publishes and their closed formulas (methods.md 8), universal FFN included."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.commands import cli
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import BankConfig, ModelConfig
from moe_jax.planning.model_costs import dense_config, make_plan
from moe_jax.training.flops import active_matmul_params
from moe_jax.upcycling import UpcycleSpec, upcycled_config
from tests.planning.test_plan import PHI_2, STABLELM_2, dense_model

DEEPSEEK_CODER = dense_model(2048, 5504, 24, heads=16, vocab_size=32256)


def planned(dense: ModelConfig, **options):
    return make_plan(upcycled_config(dense, UpcycleSpec(**{"experts": 4, **options})))


# ---- published added parameters ---------------------------------------------------------------------------------


def test_stablelm_2():
    """Every second of 24 blocks, 4 experts, linear gate; the published SM count does not round entries per matrix."""
    sparse = planned(STABLELM_2, delta=BankConfig(kind="sparse", rate=0.9999))
    low_rank = planned(STABLELM_2, delta=BankConfig(kind="low-rank", rank=1))
    assert (sparse.formula_added_params, low_rank.formula_added_params) == (264_398, 1_204_224)
    assert sparse.router_params == low_rank.router_params == 12 * 4 * 2048


def test_phi_2():
    """Vanilla: full experts, plain FFNs with biases."""
    assert round(planned(PHI_2).formula_added_params / 1e6) == 2517


@pytest.mark.parametrize(("rank", "millions"), [(1, "2.569"), (4, "9.094"), (16, "35.19"), (64, "139.6")])
def test_deepseek_coder(rank, millions):
    """All 24 blocks, `coder` gate; the published counts leave out the universal FFN beside the experts."""
    bank = BankConfig(kind="low-rank", rank=rank)
    plan = planned(DEEPSEEK_CODER, every=1, delta=bank, universal="coder")
    assert f"{plan.formula_added_params / 1e6:#.4g}" == millions
    assert plan.router_params == 24 * (2 * 2048 * 4 + 16)
    assert plan.universal_params == 24 * 3 * 2048 * 5504
    assert plan.added_params == plan.formula_added_params + plan.universal_params


def test_deepseek_coder_from_its_own_config(data_dir, capsys):
    config = data_dir / "configs" / "derived" / "deepseek-ai__deepseek-coder-1.3b-base.json"
    options = ("--experts", "4", "--every", "1", "--universal", "coder", "--delta", "low-rank:16", "--json")
    assert cli.main(["plan", str(config), *options]) == 0
    assert round(json.loads(capsys.readouterr().out)["formula_added_params"], -4) == 35_190_000


# ---- closed formulas --------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["full", "low-rank", "sparse", "quantized"]),
    universal=st.sampled_from(["none", "coder", "med"]),
    extended=st.booleans(),
    gated=st.booleans(),
    bias=st.booleans(),
    num_experts=st.integers(1, 6),
    every=st.integers(1, 3),
    f=st.integers(9, 50),
    data=st.data(),
)
def test_the_formulas_of_methods_8(kind, universal, extended, gated, bias, num_experts, every, f, data):
    d, num_layers, n = 16, 3, num_experts
    rank = data.draw(st.integers(1, 9)) if kind == "low-rank" else None
    rate = data.draw(st.sampled_from([0.0, 0.25, 0.9, 0.97])) if kind == "sparse" else None
    top_k = data.draw(st.integers(1, n))
    extended = extended and universal != "none" and kind != "full"
    bits, group = (data.draw(st.sampled_from([8, 4, 2, 1])), 8) if kind == "quantized" else (None, None)
    bank = BankConfig(kind=kind, rank=rank, rate=rate, bits=bits, group_size=group)
    dense = dense_model(d, f, num_layers, gated=gated, bias=bias, dtype="bfloat16")
    options = dict(experts=n, top_k=top_k, every=every, delta=bank, universal=universal, extended=extended)
    if universal == "none" and top_k == 1:
        options["gate"] = "top1"  # a softmax over one expert gives its router no gradient
    config = upcycled_config(dense, UpcycleSpec(**options))
    plan = make_plan(config)

    layers, m = num_layers // every, 3 if gated else 2
    p, b = m * d * f, ((m - 1) * f + d if bias else 0)
    r = layers * (2 * d * n + n * n if universal == "coder" else n * d)
    deltas, bias_copies = (n + 1, n) if extended else (n, n - 1)
    # Codes are integers; the parameters of a quantised delta are its scales, one per 8 entries of a column.
    scales = (m - 1) * math.ceil(d / 8) * f + math.ceil(f / 8) * d
    formula = {
        "full": (n - 1) * (p + b) * layers + r,
        "low-rank": deltas * layers * m * (rank or 0) * (d + f) + r + bias_copies * b * layers,
        "sparse": deltas * layers * p * (1 - (rate or 0)) + r + bias_copies * b * layers,
        "quantized": deltas * layers * scales + r + bias_copies * b * layers,
    }[kind]
    beside = layers * (p + b) if universal != "none" and not extended else 0

    assert plan.formula_added_params == round(formula)
    assert plan.universal_params == beside and plan.router_params == r
    # Entries are whole numbers per matrix, and the FFN beside the experts is there although no formula counts it.
    rounding = deltas * layers * m * (round(d * f * (1 - rate)) - d * f * (1 - rate)) if kind == "sparse" else 0
    assert plan.added_params == round(formula + rounding) + beside
    assert plan.total_params == make_plan(dense).total_params + plan.added_params
    assert dense_config(config) == dense

    # What one token meets, and what it is multiplied with: an expert of quantised entries is as dense as a full one.
    own = {
        "full": p,
        "low-rank": m * (rank or 0) * (d + f),
        "sparse": m * round(d * f * (1 - (rate or 0))),
        "quantized": scales,
    }[kind]
    shared, chosen = 0 if kind == "full" else p, top_k + extended
    embeddings, attention = 2 * 100 * d, num_layers * 4 * d * d
    dense_ffns = (num_layers - layers) * (p + b)
    banks = layers * (shared + chosen * (own + b))
    assert plan.active_params == embeddings + attention + dense_ffns + banks + beside + r
    multiplied = layers * (chosen * p if kind == "quantized" else shared + chosen * own)
    multiplied += (num_layers - layers) * p + (layers * p if beside else 0)
    assert active_matmul_params(config) == 100 * d + attention + multiplied + r


def test_bytes_are_those_of_the_leaves():
    options = dict(experts=3, every=1, universal="coder", delta=BankConfig(kind="sparse", rate=0.5))
    for extended in (False, True):
        config = upcycled_config(dense_model(16, 24, 2, bias=True), UpcycleSpec(extended=extended, **options))
        specs = leaf_specs(config).values()
        assert make_plan(config).param_bytes == sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        trained = sum(math.prod(spec.shape) for spec in specs if spec.dtype.kind == "f")
        assert make_plan(config).trainable_params == trained
