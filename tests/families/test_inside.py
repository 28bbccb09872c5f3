"""Hidden states and routers of every layer are those that Transformers returns of the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import moe_jax  # noqa: E402
from moe_jax.core.errors import InputError  # noqa: E402
from moe_jax.nn import init_cache  # noqa: E402
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint  # noqa: E402
from tests.support.tiers import long, one_in  # noqa: E402

IDS = np.random.default_rng(0).integers(0, 60, (2, 7))
FAMILIES = ["mixtral", "qwen2_moe-dense-layers", "qwen3_moe", "olmoe", "switch_transformers"]


@one_in(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_shows_what_transformers_shows(family, tmp_path):
    path = write_checkpoint(tmp_path / "hf", CONFIGS[family], random_tensors(CONFIGS[family]))
    decoder = moe_jax.load(path).decoder
    pairs, asked = decoder.config.has_encoder, {"output_hidden_states": True, "output_router_logits": True}
    auto = transformers.AutoModelForSeq2SeqLM if pairs else transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(path, dtype=torch.float32).eval()
    ids, of = torch.tensor(IDS), "decoder_" if pairs else ""
    with torch.no_grad():
        theirs = reference(ids, **({"decoder_input_ids": ids} if pairs else {}), **asked)
    count = len(decoder.layers)
    ours = decoder(IDS, routing=True, hidden_states=range(count + 1), **({"inputs": IDS} if pairs else {}))
    assert sorted(ours.hidden_states) == [*range(count + 1)]
    for layer, states in enumerate(getattr(theirs, f"{of}hidden_states")):
        np.testing.assert_allclose(ours.hidden_states[layer], states, atol=1e-5)
    logits = getattr(theirs, f"{of}router_logits")
    assert len(logits) == len(ours.routing) > 1
    for (layer, routing), expected in zip(sorted(ours.routing.items()), logits, strict=True):
        found = np.asarray(routing.logits)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)
        top_k = routing.experts.shape[-1]
        np.testing.assert_array_equal(routing.experts, np.argsort(-found, axis=-1)[..., :top_k])
        assert routing.weights.shape == (2, 7, top_k) and layer in decoder.config.decoder.moe_layers


def test_an_encoder_shows_what_transformers_shows(tmp_path):
    made = CONFIGS["switch_transformers"]
    path = write_checkpoint(tmp_path / "hf", made, random_tensors(made))
    decoder = moe_jax.load(path).decoder
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = reference.get_encoder()(torch.tensor(IDS), output_hidden_states=True)
    count = len(decoder.encoder.layers)
    encoded = decoder.encode(IDS, routing=True, hidden_states=range(count + 1))
    for layer, states in enumerate(theirs.hidden_states):
        np.testing.assert_allclose(encoded.hidden_states[layer], states, atol=1e-5)
    assert set(encoded.routing) == set(decoder.config.encoder.moe_layers)
    layer, routing = next(iter(encoded.routing.items()))
    off = decoder.encode(IDS, routing=True, experts_off={layer: [int(routing.experts[0, 0, 0])]})
    assert off.routing[layer].experts[0, 0, 0] != routing.experts[0, 0, 0]
    with pytest.raises(InputError, match="which is no"):
        decoder.encode(IDS, experts_off={99: [0]})


@pytest.fixture(scope="module")
def decoder():
    expert = moe_jax.FFNConfig(dim=32)
    attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    moe = moe_jax.MoEConfig(expert=expert, num_experts=4, top_k=2)
    pattern = tuple(moe_jax.LayerConfig(attention=attention, mlp=mlp) for mlp in (expert, moe))
    config = moe_jax.ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=pattern * 3)
    return moe_jax.Decoder(config, rngs=nnx.Rngs(0))


@nnx.jit(static_argnames=("routing", "hidden_states"))
def inside(decoder, ids, routing=True, hidden_states=(0, 3, 6), **given):
    out = decoder(ids, routing=routing, hidden_states=hidden_states, **given)
    return out.routing, out.hidden_states


def close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


@long
def test_it_is_the_same_in_programs_with_remat_apart_and_with_caches(decoder):
    expected = decoder(IDS, routing=True, hidden_states=(0, 3, 6))[3:]
    assert set(expected[0]) == {1, 3, 5} and set(expected[1]) == {0, 3, 6}
    assert expected[0][3].experts.shape == (2, 7, 2) and expected[1][6].shape == (2, 7, 16)
    close(inside(decoder, IDS), expected)
    remat = moe_jax.Decoder(decoder.config, rngs=nnx.Rngs(0), remat="full")
    close(inside(remat, IDS), expected)
    close(inside(moe_jax.nn.unstacked(decoder), IDS), expected)
    # In two parts, with caches.
    caches, parts = init_cache(decoder.config, 2, 7, jnp.dtype("float32")), []
    for begin, end in ((0, 4), (4, 7)):
        positions = np.broadcast_to(np.arange(begin, end), (2, end - begin))
        out = decoder(
            IDS[:, begin:end],
            positions=positions,
            caches=caches,
            begins=begin == 0,
            routing=True,
            hidden_states=(0, 3, 6),
        )
        caches = out.caches
        parts.append(out[3:])
    close(jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts), expected)


@long
def test_padding_goes_to_no_expert(decoder):
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]] * 2)
    routing, hidden_states = inside(decoder, IDS, segment_ids=segments)
    experts = np.asarray(routing[1].experts)
    assert (experts[:, 5:] == -1).all() and (experts[:, :5] >= 0).all() and not routing[1].weights[:, 5:].any()
    close({3: hidden_states[3][:, :3]}, {3: inside(decoder, IDS[:, :3])[1][3]})


@long
def test_weights_and_experts_are_those_that_the_layer_used(decoder):
    """The output of an MoE is the sum of its experts' outputs with these weights."""
    out = decoder(IDS, routing=True, hidden_states=(3, 4))
    layer, routing = decoder.layers[3].module, out.routing[3]
    x = jax.random.normal(jax.random.key(0), (1, 5, 16))
    y, _, decided = layer.mlp.with_routing(x)
    tokens = x.reshape(5, 16)
    every = jnp.stack([_ffn(layer.mlp.experts.kernels(e), tokens) for e in range(4)], axis=1)
    chosen = jnp.take_along_axis(every, decided.experts[0][..., None], axis=1)
    np.testing.assert_allclose(y[0], jnp.sum(chosen * decided.weights[0][..., None], axis=1), atol=1e-5)
    np.testing.assert_allclose(jnp.sum(routing.weights, axis=-1), np.ones((2, 7)), atol=1e-5)


def _ffn(kernels, x):
    return (jax.nn.silu(x @ kernels["gate"]) * (x @ kernels["up"])) @ kernels["down"]


@long
def test_not_asked_for_it_is_not_there_and_gradients_go_through(decoder):
    out = decoder(IDS)
    assert out.routing == out.hidden_states == {}
    grads = nnx.grad(lambda model: jnp.sum(model(IDS, hidden_states=(2,)).hidden_states[2] ** 2))(decoder)
    changed = [bool(jnp.any(leaf)) for leaf in jax.tree.leaves(grads["stack"]["segments"][0]["blocks"][1]["mlp"])]
    assert all(changed)  # of layer 1, before layer 2
    graphdef, state = nnx.split(decoder)
    lowered = [
        jax.jit(lambda state, given=given: nnx.merge(graphdef, state)(IDS, **given).logits).lower(state).as_text()
        for given in ({}, {"routing": True, "hidden_states": (0, 3)})
    ]
    assert lowered[0].count("stablehlo.while") == lowered[1].count("stablehlo.while")


@pytest.mark.parametrize("layers", [(7,), (-1,), ("3",), (0, 2.0)])
def test_there_are_no_other_layers(decoder, layers):
    with pytest.raises(InputError, match="hidden_states names"):
        decoder(IDS, hidden_states=layers)
