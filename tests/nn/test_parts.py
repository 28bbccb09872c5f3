"""Embedding, stack and head, alone and together: models of several kinds, built from configs alone, against NumPy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.devices import BATCH_AXES
from moe_jax.functional.head_chunks import LossAxes
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig, SelectionConfig
from moe_jax.nn import Decoder, Embed, Head, Stack, init_cache
from moe_jax.nn.layers import _axes as loss_axes
from moe_jax.planning.model_costs import make_plan, trained_leaves
from tests.nn import plain_transformer as plain
from tests.support.dense_models import random_leaves, write_model
from tests.support.tiers import long, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

TOKENS = np.random.default_rng(0).integers(0, 24, (2, 7)).astype(np.int32)
NO_ROPE = RopeConfig(fraction=0.0)
GATED, PLAIN = FFNConfig(dim=20), FFNConfig(dim=20, gated=False, activation="gelu_tanh", bias=True)
BIASES = ("q", "k", "v", "o")
EPS = 0.1  # so large that another one, or none, would be noticed


def model_config(*layers, **changes):
    given = dict(family="none", vocab_size=24, d_model=16, max_positions=32, norm_eps=EPS)
    return ModelConfig(**{**given, **changes}, layers=layers)


PARALLEL = model_config(
    # The second layer has wider heads, and a rotary embedding of its own.
    LayerConfig(
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, biases=BIASES),
        mlp=PLAIN,
        parallel=True,
        shared_norm=True,
    ),
    LayerConfig(
        attention=AttentionConfig(
            num_heads=2, num_kv_heads=1, head_dim=12, biases=("v",), rope=RopeConfig(theta=9.0, fraction=0.4)
        ),
        mlp=PLAIN,
        parallel=True,
    ),
    rope=RopeConfig(theta=50.0, fraction=0.5),
    norm="layer",
    head_bias=True,
    logit_scale=0.5,
    logit_soft_cap=2.0,
)


ONE_LAYER = dataclasses.replace(PARALLEL, layers=PARALLEL.layers[:1])


def test_a_parallel_decoder_with_partial_rotation_and_layer_norm():
    def reference(w):
        x = w["embed/embedding"][TOKENS]
        seen = plain.causal(TOKENS.shape)
        for i, (rotated, theta) in enumerate(((2, 50.0), (4, 9.0))):
            at, attention = f"layers/{i}", PARALLEL.layers[i].attention
            h = plain.norm(w, f"{at}/attention_norm", x, EPS)
            attended = plain.attention(w, f"{at}/attention", attention, h, h, seen, rotated=rotated, theta=theta)
            h = h if i == 0 else plain.norm(w, f"{at}/mlp_norm", x, EPS)
            x = x + attended + plain.ffn(w, f"{at}/mlp", h)
        logits = plain.linear(w, "lm_head", plain.norm(w, "final_norm", x, EPS))
        return 2.0 * np.tanh(0.5 * logits / 2.0)

    model = plain.randomised(lambda: Decoder(PARALLEL, rngs=nnx.Rngs(0)))
    plain.check_values_and_gradients(model, reference, jnp.asarray(TOKENS))


def bidirectional(mlp=PLAIN, norm_position="pre", **changes):
    given = dict(num_heads=4, num_kv_heads=4, head_dim=4, mask="bidirectional")
    return LayerConfig(attention=AttentionConfig(**{**given, **changes}), mlp=mlp, norm_position=norm_position)


@one_in(2)
@pytest.mark.parametrize("position", ["post", "output"])
def test_a_bidirectional_stack_without_rotation_on_embeddings(position):
    layer = bidirectional(norm_position=position, biases=BIASES)
    config = model_config(*[layer] * 3, rope=NO_ROPE, norm="layer", final_norm=False)
    x0 = np.random.default_rng(0).standard_normal((2, 7, 16)).astype(np.float32)
    valid = np.arange(7)[None, :] < np.array([[7], [4]])

    def reference(w):
        def add(x, at, y):
            return plain.norm(w, at, x + y, EPS) if position == "post" else x + plain.norm(w, at, y, EPS)

        x, seen = np.float64(x0), valid[:, :, None] == valid[:, None, :]
        for i in range(3):
            y = plain.attention(w, f"layers/{i}/attention", config.layers[i].attention, x, x, seen)
            x = add(x, f"layers/{i}/attention_norm", y)
            x = add(x, f"layers/{i}/mlp_norm", plain.ffn(w, f"layers/{i}/mlp", x))
        return x

    stack = plain.randomised(lambda: Stack(config, rngs=nnx.Rngs(0)))
    assert [segment.repeats for segment in stack.segments] == [3]
    plain.check_values_and_gradients(stack, reference, jnp.asarray(x0), valid=jnp.asarray(valid))


ENCODER = model_config(*[bidirectional(GATED, num_heads=3, num_kv_heads=3)] * 2, d_model=12, rope=NO_ROPE)
DECODER = model_config(
    *[
        LayerConfig(
            attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, scale=1.0),
            cross=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, mask="bidirectional", source_dim=12),
            mlp=GATED,
            norm_position="both",
        )
    ]
    * 2,
    rope=NO_ROPE,
    learned_positions=True,
    embed_scale=4.0,
    tie_embeddings=True,
)


def encoded():
    """Input of the encoder, what of it is no padding, and what the encoder makes of it."""
    x = np.random.default_rng(3).standard_normal((2, 5, 12)).astype(np.float32)
    valid = np.arange(5)[None, :] < np.array([[3], [5]])
    encoder = plain.randomised(lambda: Stack(ENCODER, rngs=nnx.Rngs(0)))
    return x, valid, encoder


@long
def test_an_encoder_and_a_decoder():
    x0, valid, encoder = encoded()

    def encode(w):
        x, seen = np.float64(x0), valid[:, :, None] == valid[:, None, :]
        for i in range(2):
            h = plain.norm(w, f"layers/{i}/attention_norm", x, EPS)
            x = x + plain.attention(w, f"layers/{i}/attention", ENCODER.layers[i].attention, h, h, seen)
            x = x + plain.ffn(w, f"layers/{i}/mlp", plain.norm(w, f"layers/{i}/mlp_norm", x, EPS))
        return plain.norm(w, "final_norm", x, EPS)

    plain.check_values_and_gradients(encoder, encode, jnp.asarray(x0), valid=jnp.asarray(valid))
    output = encode(plain.named(ENCODER, nnx.state(encoder)))

    def decode(w):
        x = 4.0 * w["embed/embedding"][TOKENS] + w["embed/positions"][: TOKENS.shape[1]]
        before, of_output = plain.causal(TOKENS.shape), np.broadcast_to(valid[:, None, :], (2, 7, 5))
        for i, layer in enumerate(DECODER.layers):
            at = f"layers/{i}"
            h = plain.norm(w, f"{at}/attention_norm", x, EPS)
            y = plain.attention(w, f"{at}/attention", layer.attention, h, h, before)
            x = x + plain.norm(w, f"{at}/attention_output_norm", y, EPS)
            h = plain.norm(w, f"{at}/cross_attention_norm", x, EPS)
            y = plain.attention(w, f"{at}/cross_attention", layer.cross, h, output, of_output)
            x = x + plain.norm(w, f"{at}/cross_attention_output_norm", y, EPS)
            y = plain.ffn(w, f"{at}/mlp", plain.norm(w, f"{at}/mlp_norm", x, EPS))
            x = x + plain.norm(w, f"{at}/mlp_output_norm", y, EPS)
        return plain.norm(w, "final_norm", x, EPS) @ w["embed/embedding"].T

    decoder = plain.randomised(lambda: Decoder(DECODER, rngs=nnx.Rngs(1)))
    given = dict(encoder_output=jnp.asarray(output, jnp.float32), encoder_valid=jnp.asarray(valid))
    plain.check_values_and_gradients(decoder, decode, jnp.asarray(TOKENS), **given)

    # Token by token, with caches: of the decoder's own keys and values alone, or also of those of the encoder's output.
    # Each kind of step is compiled once, whatever the position: the last is with the encoder's output in the cache.
    step = nnx.jit(chex.assert_max_traces(lambda model, tokens, **options: model(tokens, **options), n=3))
    expected = decode(plain.named(DECODER, nnx.state(decoder)))
    for source_slots in (None, output.shape[1]):
        caches = init_cache(DECODER, 2, 7, jnp.float32, source_slots=source_slots)
        brought = dict(given)
        for t in range(7):
            positions = jnp.full((2, 1), t, jnp.int32)
            tokens = jnp.asarray(TOKENS[:, t : t + 1])
            logits, caches, *_ = step(decoder, tokens, positions=positions, caches=caches, **brought)
            np.testing.assert_allclose(logits[:, 0], expected[:, t], rtol=1e-4, atol=1e-4 * np.abs(expected).max())
            if source_slots is not None:
                brought.pop("encoder_output", None)


def test_an_encoders_output_has_the_length_that_caches_have_slots_for():
    decoder = plain.randomised(lambda: Decoder(DECODER, rngs=nnx.Rngs(1)))
    caches = init_cache(DECODER, 2, 7, jnp.float32, source_slots=4)
    with pytest.raises(InputError, match="slots for 4 .* has 5"):
        decoder(jnp.asarray(TOKENS), caches=caches, encoder_output=jnp.zeros((2, 5, 12)))


def test_the_prefix_of_a_row_is_seen_by_all():
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, mask="prefix")
    config = model_config(LayerConfig(attention=attention, mlp=GATED))
    prefix = np.array([3, 0], np.int32)

    def reference(w):
        x = w["embed/embedding"][TOKENS]
        seen = plain.causal(TOKENS.shape) | (np.arange(7)[None, None, :] < prefix[:, None, None])
        h = plain.norm(w, "layers/0/attention_norm", x, EPS)
        x = x + plain.attention(w, "layers/0/attention", attention, h, h, seen, rotated=4, theta=1e4)
        x = x + plain.ffn(w, "layers/0/mlp", plain.norm(w, "layers/0/mlp_norm", x, EPS))
        return plain.linear(w, "lm_head", plain.norm(w, "final_norm", x, EPS))

    model = plain.randomised(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    plain.check_values_and_gradients(model, reference, jnp.asarray(TOKENS), prefix=jnp.asarray(prefix))


def test_embeddings_in_place_of_tokens():
    """A soft prompt, or an image, is spliced into what the tokens are looked up as; positions come after that."""
    config = dataclasses.replace(ONE_LAYER, learned_positions=True, embed_scale=3.0)
    model = plain.randomised(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    spliced = model.embed.look_up(jnp.asarray(TOKENS)).at[:, 2].set(1.0)
    logits_of = nnx.jit(lambda model, embeddings: model(embeddings=embeddings).logits)
    of_tokens = nnx.jit(lambda model: model(jnp.asarray(TOKENS)).logits)(model)
    np.testing.assert_allclose(logits_of(model, spliced)[:, :2], of_tokens[:, :2], atol=1e-5)
    same = logits_of(model, model.embed.look_up(jnp.asarray(TOKENS)))
    np.testing.assert_allclose(same, of_tokens, rtol=1e-6)
    for given in ({}, {"tokens": jnp.asarray(TOKENS), "embeddings": spliced}):
        with pytest.raises(InputError, match="tokens or embeddings"):
            model(**given)


def test_attention_sees_the_positions_that_are_given():
    """A rotary embedding tells how far tokens are from each other, not where they are."""
    model = plain.randomised(lambda: Decoder(PARALLEL, rngs=nnx.Rngs(0)))
    apply = nnx.jit(lambda model, positions: model(jnp.asarray(TOKENS), positions=positions).logits)
    counted, moved, stretched = (
        apply(model, jnp.broadcast_to(jnp.asarray(row, jnp.int32), TOKENS.shape))
        for row in (np.arange(7), np.arange(7) + 5, np.arange(7) * 3)
    )
    np.testing.assert_allclose(moved, counted, atol=1e-5)
    assert float(jnp.max(jnp.abs(stretched - counted))) > 1e-3


def test_the_parts_alone_are_the_decoder():
    model = plain.randomised(lambda: Decoder(PARALLEL, rngs=nnx.Rngs(0)))
    embed, stack, head = (
        plain.randomised(lambda part=part: part(PARALLEL, rngs=nnx.Rngs(1))) for part in (Embed, Stack, Head)
    )
    for part, of in ((embed, model.embed), (stack, model.stack), (head, model.lm_head)):
        nnx.update(part, nnx.state(of))
    tokens = jnp.asarray(TOKENS)
    apart = nnx.jit(lambda embed, stack, head: head(stack(embed(tokens)).x))
    whole = nnx.jit(lambda model: model(tokens).logits)
    np.testing.assert_array_equal(apart(embed, stack, head), whole(model))


def test_a_head_for_classes():
    config = dataclasses.replace(ONE_LAYER, num_classes=3)
    model = plain.randomised(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    last = jnp.array([6, 2], jnp.int32)
    apply = nnx.jit(lambda model, **options: model(jnp.asarray(TOKENS), **options).logits)
    scores = apply(model, last_only=last)
    assert scores.shape == (2, 1, 3)
    np.testing.assert_allclose(scores[:, 0], apply(model)[jnp.arange(2), last], atol=1e-6)


def test_padding_reaches_the_router_of_a_padded_prompt():
    """Tokens that are not valid count in no statistics, with a cache as without."""
    moe = MoEConfig(expert=GATED, num_experts=4, top_k=2)
    config = model_config(LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), mlp=moe))
    model = plain.randomised(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    tokens, valid = jnp.asarray(TOKENS[:1]), jnp.arange(7)[None] < 4
    positions = jnp.arange(7, dtype=jnp.int32)[None]
    apply = nnx.jit(lambda model, tokens, **options: model(tokens, **options).router)
    padded = apply(model, tokens, positions=positions, valid=valid, caches=init_cache(config, 1, 9, jnp.float32))
    cut = apply(model, tokens[:, :4])
    chex.assert_trees_all_close(padded, cut, rtol=1e-4, atol=1e-5)


def test_a_model_of_many_kinds_of_parts_is_written_and_read(tmp_path):
    """Cross-attention, learned positions, a shared expert, and a bias of selection, which keeps its dtype."""
    moe = MoEConfig(
        expert=GATED,
        num_experts=4,
        top_k=2,
        gate="topk_sigmoid",
        selection=SelectionConfig(bias=True, groups=2, group_score="best_two"),
        universal="sigmoid",
    )
    layers = (dataclasses.replace(DECODER.layers[0], mlp=moe), DECODER.layers[1])
    config = dataclasses.replace(DECODER, layers=layers, dtype="bfloat16")
    leaves, bias = random_leaves(config), "layers/0/mlp/router/selection_bias"
    leaves[bias] = np.random.default_rng(0).standard_normal(4).astype(np.float32)
    source = ModelDirectory(write_model(tmp_path / "model", config, leaves))
    assert source.config == config
    model = load_model(source, param_dtype="bfloat16")
    router = model.stack.segments[0].blocks[0].mlp.router
    assert router.selection_bias[...].dtype == jnp.float32 and router.kernel[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(router.selection_bias[0], leaves[bias])
    assert trained_leaves(config) == leaves.keys() - {bias}
    plan = make_plan(config)
    assert plan.total_params == sum(leaf.size for leaf in leaves.values())
    assert plan.router_params == 16 * (4 + 1) + 4


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (PARALLEL, {"prefix": jnp.zeros(2, jnp.int32)}, "lengths of prefixes"),
        (PARALLEL, {"encoder_output": jnp.zeros((2, 3, 16))}, "encoder's output goes"),
        (DECODER, {}, "encoder's output goes"),
        (PARALLEL, {"encoder_valid": jnp.ones((2, 3), bool)}, "encoder_output, which is not"),
        (model_config(bidirectional()), {"caches": 7}, "'bidirectional' has no cache"),
        (PARALLEL, {"caches": 7, "segment_ids": jnp.ones((2, 7), jnp.int32)}, "packed documents .* neither caches"),
    ],
)
def test_what_does_not_go_together(config, given, message):
    if "caches" in given:
        given = {**given, "caches": init_cache(config, 2, given["caches"], jnp.float32)}
    with pytest.raises(InputError, match=message):
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))(jnp.asarray(TOKENS), **given).logits)


@pytest.mark.parametrize(
    ("axes", "batch", "sizes", "expected"),
    [
        ({"fsdp": 4, "tensor": 2}, (8, 16), (64, 100), LossAxes(BATCH_AXES, None, ("fsdp",), "tensor")),
        ({"fsdp": 4, "tensor": 2}, (8, 16), (66, 101), LossAxes(BATCH_AXES, None, (), None)),
        ({"fsdp": 4, "tensor": 2}, (6, 16), (64, 100), LossAxes((), None, (), "tensor")),
        (
            {"fsdp": 2, "sequence": 4},
            (8, 16),
            (64, 100),
            LossAxes(BATCH_AXES, "sequence", ("fsdp", "sequence"), "tensor"),
        ),
        ({"fsdp": 2, "sequence": 4}, (8, 16), (66, 100), LossAxes(BATCH_AXES, "sequence", ("fsdp",), "tensor")),
        ({"fsdp": 2, "sequence": 4}, (8, 18), (64, 100), LossAxes(BATCH_AXES, None, ("fsdp",), "tensor")),
    ],
)
def test_operands_of_a_loss_are_split_where_they_divide(axes, batch, sizes, expected):
    assert loss_axes(batch, *sizes) is None
    with jax.set_mesh(make_mesh(axes)):
        assert loss_axes(batch, *sizes) == expected


def test_fresh_heads_have_biases_of_zero():
    layer = bidirectional(mask="causal")
    for fields, biases in ((dict(num_classes=3, head_hidden=True), {"bias", "hidden/bias"}), ({}, {"bias"})):
        head = Head(model_config(layer, head_bias=True, **fields), rngs=nnx.Rngs(0))
        state = nnx.to_flat_state(nnx.state(head))
        found = {"/".join(map(str, path)): bool(np.any(np.asarray(leaf[...]))) for path, leaf in state}
        assert {name for name, any_at_all in found.items() if not any_at_all} == biases
        assert {name for name, any_at_all in found.items() if any_at_all} == {
            at.replace("bias", "kernel") for at in biases
        }
