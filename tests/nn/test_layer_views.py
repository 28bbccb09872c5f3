"""Layers by their index: they are those of the file, and what is written to one changes nothing else."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.api.open_source import open_source
from moe_jax.core.errors import InputError
from moe_jax.experts.forms import Quantized
from moe_jax.functional.routing.token_choices import Routing
from tests.support.compilations import counting_compilations
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint
from tests.support.tiers import long, one_in

IDS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 6), np.int32))
MOES = ["mixtral", "qwen2_moe", "qwen3_moe-dense-layers", "olmoe", "deepseek_v2", "deepseek_v3", "switch_transformers"]
PARTS = (Quantized(bits=2, group_size=8), Quantized(bits=4, group_size=8))
FORMS = {
    "full": {},
    "low-rank": {"kind": "low-rank", "rank": 2},
    "sparse": {"kind": "sparse", "rate": 0.5},
    "quantized": {"kind": "quantized", "bits": 4, "group_size": 8},
    "mixed": {"kind": "mixed", "parts": PARTS, "part_of": (0, 1, 0, 1)},
    "adapter": {"kind": "adapter", "adapter": moe_jax.AdapterConfig(rank=2)},
}


def decoder(form="full", layers=3, **options):
    expert = moe_jax.FFNConfig(dim=32, **options)
    moe = moe_jax.MoEConfig(expert=expert, num_experts=4, top_k=2, bank=moe_jax.BankConfig(**FORMS[form]))
    attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    layer = moe_jax.LayerConfig(attention=attention, mlp=moe)
    config = moe_jax.ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=(layer,) * layers)
    made = moe_jax.Decoder(config, rngs=nnx.Rngs(0))
    # Nothing is zero, or the same in all layers.
    graphdef, params, others = nnx.split(made, nnx.Param, ...)
    key = jax.random.key(1)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype), params)
    return nnx.merge(graphdef, params, others)


def outputs(bank, x):
    """The output of every expert, [E, T, d]."""
    ones = jnp.ones((x.shape[0], 1), jnp.float32)
    return jnp.stack([bank(x, Routing(jnp.full(ones.shape, e, jnp.int32), ones)) for e in range(bank.num_experts)])


@one_in(2)
@pytest.mark.parametrize("family", MOES)
def test_experts_are_those_of_the_file(family, tmp_path):
    path = write_checkpoint(tmp_path / "hf", CONFIGS[family], random_tensors(CONFIGS[family]))
    check_experts(moe_jax.load(path).decoder, open_source(path))


@one_in(6)
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_every_form_are_those_of_the_file(form, tmp_path):
    path = moe_jax.save(moe_jax.Model(decoder(form)), tmp_path / "model")
    check_experts(moe_jax.load(path).decoder, open_source(path))


def check_experts(made, source):
    """All leaves of experts are those that the files hold, bit for bit."""
    layers, found = [*(made.encoder.layers if made.config.has_encoder else ()), *made.layers], 0
    for index in made.config.moe_layers:
        experts = layers[index].mlp.experts
        for e in range(len(experts)):
            for leaf, array in experts[e].leaves().items():
                stored = source.read(f"layers/{index}/mlp/experts/{leaf}")
                # Experts in several parts: the place of one in its part.
                place = e if len(stored) == len(experts) else e // 2
                np.testing.assert_array_equal(array, stored[place])
                found += 1
    assert found >= 2 * sum(len(layers[index].mlp.experts) for index in made.config.moe_layers)


@one_in(6)
@pytest.mark.parametrize("form", FORMS)
def test_an_expert_that_is_set_changes_alone(form, tmp_path):
    """In its layer, and in no other; and it is what was set."""
    made = decoder(form)
    x = jax.random.normal(jax.random.key(2), (5, 16))
    before = [outputs(layer.mlp.experts.module, x) for layer in made.layers]
    if form != "adapter":
        chex.assert_trees_all_close(
            made.layers[1].mlp.experts[2].kernels(), made.layers[1].mlp.module.experts.kernels(2)
        )
    made.layers[1].mlp.experts[2] = made.layers[1].mlp.experts[0]
    after = [outputs(layer.mlp.experts.module, x) for layer in made.layers]
    chex.assert_trees_all_equal(made.layers[1].mlp.experts[2].leaves(), made.layers[1].mlp.experts[0].leaves())
    for layer in range(3):
        for e in range(4):
            if (layer, e) == (1, 2):
                np.testing.assert_allclose(after[1][2], before[1][0], atol=1e-6)
                assert not np.allclose(after[1][2], before[1][2], atol=1e-4)
            else:
                np.testing.assert_array_equal(after[layer][e], before[layer][e])


@long
def test_a_whole_expert_is_set_to_kernels():
    made, other = decoder(bias=True), decoder(layers=1, bias=True)
    kernels = other.layers[0].mlp.experts[3].kernels()
    biases = made.layers[2].mlp.experts.biases(1)
    made.layers[2].mlp.experts[1] = kernels
    chex.assert_trees_all_equal(made.layers[2].mlp.experts.kernels(1), kernels)
    chex.assert_trees_all_equal(made.layers[2].mlp.experts.biases(1), biases)


def test_a_parameter_of_one_layer_is_read_and_written():
    made = decoder()
    kernel = made.layers[1].mlp.router.kernel
    assert kernel.shape == (16, 4) and kernel.dtype == jnp.float32 and "layers[1].mlp.router.kernel" in repr(kernel)
    np.testing.assert_array_equal(kernel[...], made.stack.segments[0].blocks[0].mlp.router.kernel[...][1])
    others = [made.layers[at].mlp.router.kernel[...] for at in (0, 2)]
    kernel[...] = jnp.ones((16, 4))
    kernel[3, 1] = 5.0
    expected = np.ones((16, 4))
    expected[3, 1] = 5
    np.testing.assert_array_equal(np.asarray(made.layers[1].mlp.router.kernel), expected)
    np.testing.assert_array_equal(jnp.sum(jnp.asarray(kernel)), expected.sum())
    for at, other in zip((0, 2), others, strict=True):
        np.testing.assert_array_equal(made.layers[at].mlp.router.kernel[...], other)


@long
def test_methods_and_properties_are_of_one_layer():
    made, x = decoder(), jax.random.normal(jax.random.key(3), (1, 4, 16))
    mlp = made.layers[2].mlp
    y, _, routing = mlp.with_routing(x)
    expected, _, decided = mlp.module.with_routing(x)
    np.testing.assert_array_equal(y, expected)
    chex.assert_trees_all_equal(routing, decided)
    assert mlp.experts.num_parameters() == 4 * 3 * 16 * 32 and mlp.experts.num_layers is None
    assert mlp.config is made.config.moe(2) and made.stack.segments[0].blocks[0].mlp.experts.num_layers == 3


@long
def test_a_copy_of_a_layer_stands_alone():
    made = decoder()
    copy = made.layers[0].mlp.module
    copy.router.kernel[...] = jnp.zeros((16, 4))
    assert jnp.any(made.layers[0].mlp.router.kernel[...])
    x = jnp.ones((1, 3, 16))
    np.testing.assert_allclose(made.layers[1].mlp(x)[0], made.layers[1].mlp.module(x)[0], atol=1e-6)
    assert [repr(layer) for layer in made.layers[1:]] == ["<layers[1]: Block>", "<layers[2]: Block>"]
    assert len(made.layers) == 3 and made.layers[-1]._index == 2 and "0 to 2" in repr(made.layers)


class Mean(nnx.Module):
    """In the place of an MoE."""

    def __init__(self):
        self.scale = nnx.Param(jnp.full(16, 0.5))

    def __call__(self, x, valid=None, key=None):
        return x * self.scale[...], ()


@long
def test_any_module_takes_the_place_of_a_part_and_the_rest_goes_on():
    """In the middle: three segments. The logits are those of the layers called one after the other."""
    made = decoder(layers=4)
    before = made(IDS).logits
    made.layers[2].mlp = Mean()
    assert [segment.repeats for segment in made.stack.segments] == [2, 1, 1]
    assert [segment.start for segment in made.stack.segments] == [0, 2, 3]
    out = made(IDS)
    assert not np.allclose(out.logits, before, atol=1e-3) and len(out.router) == 2
    # Statistics of three routers are left; the balance is that of each.
    expected = sum(made.layers[at].mlp.module.auxiliary_loss((_stats(out.router, at),)) for at in (0, 1, 3))
    np.testing.assert_allclose(made.auxiliary_loss(out), expected, rtol=1e-5)
    made.layers[2].mlp.scale[...] = jnp.zeros(16)
    without = made(IDS).logits
    copy = decoder(layers=4)
    for e in range(4):
        copy.layers[2].mlp.experts[e] = jax.tree.map(jnp.zeros_like, copy.layers[2].mlp.experts[e].kernels())
    np.testing.assert_allclose(without, copy(IDS).logits, atol=1e-5)
    grads = nnx.jit(nnx.grad(lambda model: model.loss({"tokens": IDS[:, :-1], "targets": IDS[:, 1:]})))(made)
    assert float(jnp.abs(grads["stack"]["segments"][1]["blocks"][0]["mlp"]["scale"][...]).max()) > 0


class Around(nnx.Module):
    """Calls an MoE, and returns the statistics of its router as well."""

    def __init__(self, moe):
        self.moe = moe

    def __call__(self, x, valid=None, key=None):
        return self.moe(x, valid, key)


def test_a_module_around_an_moe_has_its_losses_or_is_refused():
    made = decoder(layers=1)
    batch = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:]}
    expected = made.loss(batch)
    made.layers[0].mlp = Around(made.layers[0].mlp.module)
    with pytest.raises(InputError, match="1 routers have reported"):
        made.loss(batch)
    made.stack.segments[0].blocks[0].mlp.config = made.layers[0].mlp.moe.config
    np.testing.assert_allclose(made.loss(batch), expected, rtol=1e-6)


def _stats(router, layer):
    """The statistics of a layer's router, where layer 2 has none."""
    at, repeat = (0, layer) if layer < 2 else (1, 0)
    return jax.tree.map(lambda leaf: leaf[repeat], router[at])


def test_a_layer_that_is_like_the_one_before_changes_no_program():
    made = decoder(layers=3)
    made(IDS)
    made.layers[2] = made.layers[0]
    with counting_compilations() as compiled:
        made(IDS)
    assert not compiled and len(made.stack.segments) == 1
    chex.assert_trees_all_equal(nnx.state(made.layers[2].module), nnx.state(made.layers[0].module))


@long
def test_a_model_with_a_replaced_part_is_saved_if_its_config_is_about_it(tmp_path):
    """An MoE that computes in another way is one of its config, whatever is stacked with it; another module is not."""
    made = decoder(layers=4)
    other = decoder(layers=1).layers[0].mlp.module
    moe_jax.experts.set_strategy(other, "synthesised")
    made.layers[1].mlp = other
    assert [segment.repeats for segment in made.stack.segments] == [1, 1, 2]
    again = moe_jax.load(moe_jax.save(moe_jax.Model(made), tmp_path / "model"))
    np.testing.assert_allclose(again(IDS).logits, made(IDS).logits, atol=1e-5)
    made.layers[3].mlp = Mean()
    with pytest.raises(InputError, match="layers/3/mlp/scale is unexpected"):
        moe_jax.save(moe_jax.Model(made), tmp_path / "other")
    assert not (tmp_path / "other").exists()


WRONG = {
    "a layer too many": (lambda made: made.layers[3], "there is no layer 3; there are 0 to 2"),
    "from the end": (lambda made: made.layers[-4], "there is no layer -4"),
    "by name": (lambda made: made.layers["mlp"], "layer 'mlp' is not the index of one"),
    "an expert too many": (lambda made: made.layers[0].mlp.experts[4], "there is no expert 4; there are 0 to 3"),
    "an expert from the end": (lambda made: made.layers[0].mlp.experts[-1], "there is no expert -1"),
    "kernels of another": (lambda made: made.layers[0].mlp.experts.kernels(9), "there is no expert 9"),
    "no module": (lambda made: made.layers.__setitem__(0, 3), "layer 0 becomes 3, expected a module"),
    "an array as a part": (lambda made: setattr(made.layers[0].mlp.router, "kernel", 3), "kernel[...] = them"),
    "another shape": (
        lambda made: made.layers[0].mlp.router.kernel.__setitem__(..., jnp.ones((4, 16))),
        "layers[0].mlp.router.kernel has the shape (4, 16), expected (16, 4)",
    ),
    "no such leaf": (
        lambda made: made.layers[0].mlp.experts[0].set({"upp": 0}),
        "known: down/kernel, gate/kernel, up/kernel",
    ),
    "a kernel too small": (
        lambda made: made.layers[0].mlp.experts[0].set({"up": jnp.ones((3, 3))}),
        "up/kernel has the",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_there_is_said(name):
    call, message = WRONG[name]
    made = decoder()
    before = nnx.state(made)
    with pytest.raises(InputError) as raised:
        call(made)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    chex.assert_trees_all_equal(nnx.state(made), before)


def test_a_dense_layer_becomes_an_moe_and_an_moe_an_ffn():
    """What is called, and which routers report, is what the layer holds now."""
    decoder = moe_jax.tiny_model(experts=4).decoder
    ids = np.random.default_rng(0).integers(0, 64, (2, 5))
    moe = decoder.layers[1].mlp.module
    decoder.layers[1].mlp = moe_jax.nn.FFN(moe_jax.FFNConfig(dim=32), 16, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
    out = decoder(ids, routing=True)
    assert list(out.routing) == [0] and len(out.router) == 1 and np.isfinite(decoder.auxiliary_loss(out))
    decoder.layers[1].mlp = moe
    assert list(decoder(ids, routing=True).routing) == [0, 1]
    dense = moe_jax.tiny_model().decoder
    dense.layers[0].mlp = moe
    out = dense(ids, routing=True)
    assert list(out.routing) == [0] and dense.auxiliary_loss(out) > 0
