"""What a model or a layer is called with by mistake: one line names the argument, what was expected, and what came."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.nn import init_cache
from tests.support.compilations import counting_compilations
from tests.support.tiers import long

IDS = np.ones((2, 5), np.int32)
DECODER = moe_jax.tiny_model(experts=4).decoder
CONFIG = DECODER.config
MOE = moe_jax.MoE(moe_jax.MoEConfig(expert=moe_jax.FFNConfig(dim=32), num_experts=4, top_k=2), 16, rngs=nnx.Rngs(0))
ENCODER_OUTPUT = np.zeros((2, 3, 16), np.float32)
LOGITS = jnp.zeros((3, 4))
LEARNED = dataclasses.replace(CONFIG, learned_positions=True)


def learned():
    return moe_jax.Decoder(LEARNED, rngs=nnx.Rngs(0))


CALLS = {
    # Tokens.
    "no batch": (lambda: DECODER(IDS[0]), "tokens has one axis, expected (batch, length)"),
    "no batch, a list": (lambda: DECODER([1, 2, 3]), "tokens has one axis"),
    "too many axes": (lambda: DECODER(IDS[None]), "tokens has the shape (1, 2, 5), expected (any, any)"),
    "a number": (lambda: DECODER(3), "tokens is 3, expected an array of integers"),
    "a text": (lambda: DECODER("Once"), "tokens is 'Once', expected an array of integers"),
    "texts": (lambda: DECODER(["Once"]), "tokens is ['Once'], expected an array of integers"),
    "rows of two lengths": (lambda: DECODER([[1, 2], [3]]), "tokens: the rows are not equally long"),
    "no tokens": (lambda: DECODER(IDS[:, :0]), "tokens has the shape (2, 0): there are no tokens"),
    "no rows": (lambda: DECODER(IDS[:0]), "tokens has the shape (0, 5): there are no tokens"),
    "an empty list": (lambda: DECODER([]), "tokens has one axis"),
    "fractions": (lambda: DECODER(IDS * 0.5), "tokens is of float64, expected integers"),
    "truths": (lambda: DECODER(IDS > 0), "tokens is of bool, expected integers"),
    "beyond the vocabulary": (lambda: DECODER(IDS * 64), "tokens has 64 at [0, 0], expected ids of a vocabulary of 64"),
    "below it": (lambda: DECODER([[1, 2, -1]]), "tokens has -1 at [0, 2], expected ids of a vocabulary of 64: 0 to 63"),
    "far beyond": (lambda: DECODER(IDS.astype(np.int64) << 40), "tokens has 1099511627776 at [0, 0]"),
    "neither": (lambda: DECODER(), "either tokens or embeddings"),
    "both": (lambda: DECODER(IDS, embeddings=np.zeros((2, 5, 16))), "either tokens or embeddings"),
    "a wrong width": (lambda: DECODER(embeddings=np.zeros((2, 5, 8))), "embeddings has the shape (2, 5, 8)"),
    "ids as embeddings": (lambda: DECODER(embeddings=np.zeros((2, 5, 16), int)), "embeddings is of int64"),
    # Beside them.
    "valid too short": (lambda: DECODER(IDS, valid=np.ones((2, 4), bool)), "valid has the shape (2, 4), expected"),
    "valid as numbers": (lambda: DECODER(IDS, valid=IDS), "valid is of int32, expected booleans"),
    "segments": (lambda: DECODER(IDS, segment_ids=IDS[:1]), "segment_ids has the shape (1, 5), expected (2, 5)"),
    "segments as truths": (lambda: DECODER(IDS, segment_ids=IDS > 0), "segment_ids is of bool"),
    "positions": (lambda: DECODER(IDS, positions=np.arange(5)), "positions has the shape (5,), expected (2, 5)"),
    "fractions of positions": (lambda: DECODER(IDS, positions=IDS * 0.5), "positions is of float64"),
    "a prefix": (lambda: DECODER(IDS, prefix=[1, 2]), "mask is 'prefix'"),
    "the last": (lambda: DECODER(IDS, last_only=4), "last_only is 4, expected an array of integers"),
    "the last of three": (lambda: DECODER(IDS, last_only=[1, 2, 3]), "last_only has the shape (3,), expected (2)"),
    "behind the last": (lambda: DECODER(IDS, last_only=[4, 5]), "last_only has 5 at [1], expected indices of tokens"),
    "a seed as the key": (lambda: DECODER(IDS, key=0), "key is 0, expected one random key"),
    "many keys": (lambda: DECODER(IDS, key=jax.random.split(jax.random.key(0))), "key is an array (2,)"),
    "an encoder's inputs": (lambda: DECODER(IDS, inputs=IDS), "has no encoder"),
    "an encoder's output": (lambda: DECODER(IDS, encoder_output=ENCODER_OUTPUT), "layers that have cross-attention"),
    "another batch of it": (lambda: DECODER(IDS, encoder_output=ENCODER_OUTPUT[:1]), "encoder_output has the shape"),
    "to encode": (lambda: DECODER.encode(IDS), "has no encoder"),
    "packed, with caches": (
        lambda: DECODER(IDS, segment_ids=IDS, caches=init_cache(CONFIG, 2, 8, jnp.dtype("float32"))),
        "packed documents (segment_ids) have neither caches",
    ),
    "caches of other rows": (
        lambda: DECODER(IDS, caches=init_cache(CONFIG, 3, 8, jnp.dtype("float32"))),
        "the caches are of 3 rows, but the tokens of 2",
    ),
    "more tokens than slots": (
        lambda: DECODER(IDS, caches=init_cache(CONFIG, 2, 4, jnp.dtype("float32")), begins=True),
        "the caches have 4 slots, but the rows have 5 tokens",
    ),
    "a position without a slot": (
        lambda: DECODER(IDS, positions=IDS * 8, caches=init_cache(CONFIG, 2, 8, jnp.dtype("float32"))),
        "positions has 8 at [0, 0], expected positions in caches of 8 slots: 0 to 7",
    ),
    "learned positions": (lambda: learned()(np.ones((1, 70), int)), "texts of 70 tokens, but the model has learned 64"),
    "a position not learned": (lambda: learned()(IDS, positions=IDS * 64), "positions has 64 at [0, 0], expected"),
    # Layers, banks and routing.
    "activations": (lambda: MOE(jnp.zeros((2, 5, 8))), "x has the shape (2, 5, 8), expected (..., any, 16)"),
    "of an MoE": (lambda: MOE(jnp.zeros((2, 5, 16)), jnp.ones((2, 4), bool)), "valid has the shape (2, 4)"),
    "an expert too many": (lambda: MOE.experts.kernels(4), "there is no expert 4; there are 0 to 3"),
    "a negative one": (lambda: MOE.experts.biases(-1), "there is no expert -1"),
    "a name of one": (lambda: MOE.experts.kernels("up"), "expert 'up' is not the index of one: 0 to 3"),
    "of all layers": (lambda: DECODER.stack.segments[0].blocks[0].mlp.experts.kernels(0), "experts of 2 layers"),
    "a gate by no name": (lambda: moe_jax.route(LOGITS, 2, "softmax_topj"), "did you mean 'softmax_topk'"),
    "a function as a gate": (lambda: moe_jax.route(LOGITS, 2, jnp.exp), "unknown gate"),
    "too many choices": (lambda: moe_jax.route(LOGITS, 5, "topk_softmax"), "top_k=5 must lie between 1 and"),
    "half logits": (lambda: moe_jax.route(LOGITS.astype("bfloat16"), 2, "topk_softmax"), "logits are bfloat16"),
    "logits of rows": (lambda: moe_jax.route(LOGITS[None], 2, "topk_softmax"), "logits has the shape (1, 3, 4)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:tokens are 70 long")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_one_line(name):
    call, message = CALLS[name]
    with pytest.raises(InputError) as raised:
        call()
    said = str(raised.value)
    assert message in said and "\n" not in said and len(said) < 250


def test_lists_are_taken():
    given = {"positions": [[0, 1, 2], [0, 1, 2]], "valid": [[True, True, False], [True] * 3], "last_only": [1, 2]}
    lists = DECODER([[1, 2, 3], [4, 5, 6]], **given).logits
    arrays = {name: jnp.asarray(value) for name, value in given.items()}
    np.testing.assert_array_equal(lists, DECODER(jnp.array([[1, 2, 3], [4, 5, 6]]), **arrays).logits)
    batch = {"tokens": [[1, 2, 3]], "targets": [[2, 3, 4]], "segment_ids": [[1, 1, 0]]}
    assert DECODER.loss(batch) == DECODER.loss({name: jnp.asarray(value) for name, value in batch.items()})
    with pytest.raises(InputError):
        DECODER.loss({"tokens": [[1, 2, 3], [1]], "targets": [[2, 3, 4]]})


def test_padding_within_documents_is_seen_by_no_token():
    valid, documents = jnp.arange(6)[None] >= 2, jnp.ones((1, 6), jnp.int32)
    tokens = jnp.arange(1, 7, dtype=jnp.int32)[None]
    given = {"valid": valid, "segment_ids": documents}
    one, other = (DECODER(ids, **given).logits[:, 2:] for ids in (tokens, tokens.at[:, :2].set(9)))
    np.testing.assert_array_equal(one, other)


def test_an_moe_takes_no_tokens_too():
    assert MOE(jnp.zeros((0, 5, 16)))[0].shape == (0, 5, 16)


@long
def test_longer_texts_than_the_model_was_made_for_are_said():
    with pytest.warns(UserWarning, match="70 long"):
        DECODER(np.ones((1, 70), np.int32))


@long
def test_values_are_checked_within_a_program_where_that_is_asked_for():
    """And where it is not, nothing of it is in the program."""
    graphdef, state = nnx.split(DECODER)

    def logits(state, ids):
        return nnx.merge(graphdef, state)(ids).logits

    checked = jax.jit(checkify.checkify(logits))
    error, expected = checked(state, jnp.asarray(IDS))
    error.throw()
    error, _ = checked(state, jnp.asarray(IDS * 64))
    with pytest.raises(checkify.JaxRuntimeError, match="tokens has values"):
        error.throw()
    program = jax.jit(logits).lower(state, IDS).compile()
    np.testing.assert_allclose(program(state, IDS), expected, atol=1e-6)
    assert "vocabulary" not in program.as_text()


def test_checks_compile_nothing():
    ids = jnp.asarray(IDS)
    DECODER(ids)
    with counting_compilations() as compiled:
        DECODER(ids)
        with pytest.raises(InputError):
            DECODER([[1, 2, 64, 4, 5]] * 2)
    assert not compiled
