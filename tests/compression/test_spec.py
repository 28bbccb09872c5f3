"""Options of `compress` as Python gives them."""

import pytest

import moe_jax
from moe_jax.compression import make_method, make_swept_methods
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import METHODS, CompressSpec
from moe_jax.compression.stream import _check_universal
from moe_jax.core.errors import InputError
from moe_jax.models import BankConfig
from tests.support.moe_models import memory_moe


def test_a_method_is_given_by_its_name_or_itself():
    made = make_method("up", {"keep": 0.25})
    for spec in (
        moe_jax.CompressSpec(method="up", options={"keep": 0.25, "bits": None}),
        moe_jax.CompressSpec(method=made),
    ):
        assert spec.named_method() == ("up", made)
    name, sized = moe_jax.CompressSpec(method="resmoe", options={"target_bytes": "1.5MB"}).named_method()
    assert (name, sized.target_bytes) == ("resmoe", 1_500_000)
    for options, said in (
        ({}, "--method is missing"),
        ({"method": made, "options": {"keep": 0.5, "bits": 2}}, "^keep, bits: "),
        ({"method": "resmoe", "options": {"target_bytes": "1.5XB"}}, "1.5XB"),
    ):
        with pytest.raises(InputError, match=said):
            moe_jax.CompressSpec(**options).named_method()


def test_a_universal_ffn_counts_as_an_expert_if_it_has_the_shape_of_one():
    banks = [BankConfig()] * 6
    without = memory_moe(*banks, num_experts=2).config
    for layers, said in ((range(4), "layers 0, 1, 2, 3;"), (range(6), "layers 0, 1, 2, 3, ...;")):
        with pytest.raises(InputError, match=said):
            _check_universal(without, layers)
    beside = memory_moe(*banks[:2], num_experts=2, universal="one").config
    _check_universal(beside, [0, 1])
    narrow = memory_moe(*banks[:2], num_experts=2, universal="one", universal_dim=8).config
    with pytest.raises(InputError, match="layer 1 is 8 wide"):
        _check_universal(narrow, [1])
    assert SourceLayer(memory_moe(*banks[:1], num_experts=2, universal="one"), 0, with_universal=True).num_experts == 3


def test_what_a_sweep_tries_is_made_of_several_methods():
    made = make_swept_methods(["up", "svd"], {"keep": (0.5, 0.25, 0.5)})
    assert [(name, method.keep) for name, method in made] == [("up", 0.5), ("up", 0.25), ("svd", 0.5), ("svd", 0.25)]
    for names, options, said in ((["up"], {"bits": (2,)}, "bits"), (["upp"], {}, "did you mean 'up'")):
        with pytest.raises(InputError, match=said):
            make_swept_methods(names, options)


def test_a_method_given_itself_has_its_own_name(monkeypatch):
    class Mine(METHODS["quantize"]):
        """A method that is made of another one."""

    monkeypatch.setitem(METHODS, "mine", Mine)
    assert CompressSpec(method=Mine(bits=4)).named_method()[0] == "mine"
    assert CompressSpec(method=METHODS["quantize"](bits=4)).named_method()[0] == "quantize"
