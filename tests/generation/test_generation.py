"""KV-cached generation: against recomputation without a cache, for batches of different lengths."""

import dataclasses
import re
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.generation import continued_rows, engine, texts
from moe_jax.generation.engine import Engine
from moe_jax.generation.spec import GenerateSpec
from moe_jax.generation.texts import NonFiniteLogits
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.nn import Decoder, unstacked
from tests.support.environment import HAS_OLD_EMITTERS
from tests.support.generated import generate, stream
from tests.support.numerics import initialised
from tests.support.tiers import one_in
from tests.support.training_models import encoder_decoder

PROMPTS = [[5, 3, 8, 1, 9, 2, 2], [4], [7, 7, 30]]
LONGER = [np.random.default_rng(n).integers(0, 40, n).tolist() for n in (1, 17, 30)]


def make_model(*mlps, window=None):
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=window)
    layers = tuple(LayerConfig(attention=attention, mlp=mlp) for mlp in mlps)
    config = ModelConfig(family="llama", vocab_size=40, d_model=32, max_positions=64, layers=layers)
    model = initialised(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    # Larger than at initialisation, so that the choices are not near ties.
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a * 8 if a.ndim > 2 else a, state))


DENSE = FFNConfig(dim=48)


@pytest.fixture(scope="module", params=[None, 4], ids=["full", "window"])
def model(request):
    """Layers that are stacked; and with a window, one that is not."""
    experts = [MoEConfig(expert=FFNConfig(dim=24), num_experts=4, top_k=2)] if request.param else []
    return make_model(DENSE, DENSE, *experts, window=request.param)


@pytest.fixture(scope="module")
def small():
    return make_model(DENSE)


@pytest.fixture(scope="module")
def full_forward(model):
    graphdef, state = nnx.split(model)
    return jax.jit(lambda tokens: nnx.merge(graphdef, state)(tokens).logits)


@pytest.fixture(scope="module")
def greedy(model) -> list[list[int]]:
    return generate(model, LONGER, max_new_tokens=12)


def greedy_without_cache(full_forward, prompt, steps):
    row = list(prompt)
    for _ in range(steps):
        padded = np.zeros((1, 64), np.int32)  # causal: what comes later cannot matter
        padded[0, : len(row)] = row
        row.append(int(jnp.argmax(full_forward(padded)[0, len(row) - 1])))
    return row[len(prompt) :]


@one_in(2)
@pytest.mark.parametrize("factors", [{}, {"short_factor": (1.0,) * 4, "long_factor": (9.0,) * 4}])
def test_a_prompt_does_not_depend_on_its_neighbours(factors):
    """Where rotation depends on the length of the text: on that of the own prompt, and padding is none of it."""
    scaling = "longrope" if factors else "dynamic"
    rope = RopeConfig(theta=3.0, scaling=scaling, factor=64.0, original_max_positions=4, **factors)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    layers = (LayerConfig(attention=attention, mlp=FFNConfig(dim=48)),)
    config = ModelConfig(family="llama", vocab_size=40, d_model=32, max_positions=4, layers=layers, rope=rope)
    graphdef, state = nnx.split(initialised(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    model = nnx.merge(graphdef, jax.tree.map(lambda a: a * 8, state))
    together = generate(model, PROMPTS, max_new_tokens=6)
    assert together == [generate(model, [prompt], max_new_tokens=6)[0] for prompt in PROMPTS]


def test_a_row_stops_before_its_eos(model, greedy):
    eos = greedy[0][4]
    stopped = generate(model, LONGER, max_new_tokens=12, eos_ids=[eos])
    assert stopped == [tokens[: tokens.index(eos)] if eos in tokens else tokens for tokens in greedy]
    assert len(stopped[0]) <= 4


def test_sampling_is_reproducible_and_follows_its_key(small):
    options = dict(max_new_tokens=8, temperature=1.0, top_k=20, top_p=0.95)
    first, again, other = (generate(small, PROMPTS, key=jax.random.key(seed), **options) for seed in (1, 1, 2))
    assert first == again != other


def test_greedy_equals_recomputation_whatever_batch_and_block(model, full_forward, greedy, monkeypatch):
    """Prompts shorter and longer than the window and the ring of slots that it has, and blocks of every kind."""
    assert greedy == [greedy_without_cache(full_forward, prompt, 12) for prompt in LONGER]
    assert len({tuple(tokens) for tokens in greedy}) == 3
    for first, most, chosen in ((3, 5, (1, 0, 2)), (1, 1, (2,))):
        monkeypatch.setattr(texts, "FIRST_BLOCK", first)
        monkeypatch.setattr(texts, "MOST_STEPS", most)
        assert generate(model, [LONGER[row] for row in chosen], max_new_tokens=12) == [greedy[row] for row in chosen]


def test_an_encoders_answers_equal_recomputation_whatever_the_neighbours():
    """Keys and values of its output are made once, from as many tokens as the prompt has."""
    both = encoder_decoder(DENSE, DENSE)
    config = dataclasses.replace(both, layers=(both.layers[0], both.layers[-1]), num_encoder_layers=1)
    graphdef, state = nnx.split(initialised(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def scaled(path, leaf):  # what the encoder says weighs most
        return leaf * (30 if "cross_attention" in jax.tree_util.keystr(path) else 8) if leaf.ndim > 1 else leaf

    state = jax.tree_util.tree_map_with_path(scaled, state)
    inputs, valid = np.array([[5, 3, 8, 1], [4, 0, 0, 0]], np.int32), np.array([[True] * 4, [True] + [False] * 3])

    @jax.jit
    def best(tokens):
        model = nnx.merge(graphdef, state)
        return jnp.argmax(model(tokens, inputs=inputs, inputs_valid=valid).logits, axis=-1)

    answers = np.zeros((2, 5), np.int32)  # the first is the decoder's own
    for step in range(4):
        answers[:, step + 1] = best(answers)[:, step]
    assert generate(nnx.merge(graphdef, state), [[5, 3, 8, 1], [4]], max_new_tokens=4) == answers[:, 1:].tolist()
    assert len(set(answers[0].tolist())) == 5 and answers[1, 1] != answers[0, 1]


def test_prompts_of_other_lengths_compile_nothing(small):
    def programs() -> tuple[int, int]:
        return engine.read_prompts._cache_size(), engine.continue_rows._cache_size()

    generate(small, [[1] * 18, [2]], max_new_tokens=4)
    first = programs()
    for lengths in ((23, 24), (17, 3), (20, 19)):
        generate(small, [[3] * length for length in lengths], max_new_tokens=4, eos_ids=range(lengths[1] % 5))
    assert programs() == first
    generate(small, [[1] * 25, [2]], max_new_tokens=4)
    assert programs() == (first[0] + 1, first[1] + 1)
    generate(small, PROMPTS, max_new_tokens=4, key=jax.random.key(0), temperature=0.5, top_p=0.5)
    sampled = programs()
    generate(small, PROMPTS, max_new_tokens=8, key=jax.random.key(1), temperature=0.7, top_p=0.9)
    assert programs() == sampled


def test_tokens_come_in_blocks_and_end_where_all_rows_have_ended(small, monkeypatch):
    calls = []

    class Counted(Engine):
        def advance(self, rows, steps, **options):
            rows, block = super().advance(rows, steps, **options)
            calls.append(len(block.tokens))
            return rows, block

    monkeypatch.setattr(texts, "Engine", Counted)
    sampled = dict(max_new_tokens=45, temperature=1.0, key=jax.random.key(3))

    def tokens(**options) -> list[int]:
        return [int(token[0]) for token in stream(small, PROMPTS[:1], **sampled, **options)]

    free = tokens()
    assert len(free) == 45 and calls == [8, 32, 4]
    calls.clear()
    assert int(next(stream(small, PROMPTS[:1], **sampled))[0]) == free[0] and calls == []
    stop = next(token for at, token in enumerate(free) if at > 10 and token not in free[:at])
    assert tokens(eos_ids=[stop]) == free[: free.index(stop) + 1] and calls == [8, free.index(stop) - 8]


def test_logits_that_are_not_finite_are_told_with_prompt_and_token(small):
    """One token, generated after others, leads to logits that are not finite."""
    sampled = dict(max_new_tokens=12, temperature=1.0, key=jax.random.key(5))
    prompts = [[4], [5], [6]]
    free = [tokens.tolist() for tokens in stream(small, prompts, **sampled)]
    at, spoiling = next((i, b) for i, (_, b, _) in enumerate(free) if i > 2 and b not in (4, 5, 6, *np.ravel(free[:i])))
    assert spoiling not in (free[at][0], free[at][2])
    spoilt = nnx.clone(small)
    spoilt.embed.embedding[...] = spoilt.embed.embedding[...].at[spoiling].set(jnp.nan)
    tokens = stream(spoilt, prompts, **sampled)
    assert [next(tokens).tolist() for _ in range(at + 1)] == free[: at + 1]
    with pytest.raises(NonFiniteLogits, match=rf"prompt 2 has logits .* at token {at + 2}"):
        next(tokens)


@one_in(3)  # full attention with one row, and a window with three
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 4])
def test_caches_are_updated_in_place_and_rings_are_no_longer_than_their_window(window, batch):
    parts = nnx.split(unstacked(make_model(DENSE, DENSE, window=window)))
    asked = continued_rows.ask(batch, 9, key=jax.random.key(0))
    prompts, lengths = jnp.ones((batch, 48), jnp.int32), jnp.arange(48, 48 - batch, -1, dtype=jnp.int32)
    begin = partial(engine.read_prompts, *parts, prompts, lengths, asked, cache_length=96, draws=False)
    begun = jax.eval_shape(begin)[0]
    length = 96 if window is None else 16
    assert {leaf.shape for leaf in jax.tree.leaves(begun.caches)} == {(1, batch, 2, length, 8)}
    # As programs are compiled outside of tests.
    options = {"xla_backend_optimization_level": 1}
    options |= {"xla_cpu_use_fusion_emitters": True} if HAS_OLD_EMITTERS else {}
    stay = jnp.ones(batch, bool)
    lowered = engine.continue_rows.lower(*parts, begun, stay, jnp.int32(9), jnp.int32(1), draws=False)
    program = lowered.compile(compiler_options=options)
    whole = rf"f32\[(1,)*({batch},2|{2 * batch}),{length},8\]"
    assert re.search(whole, program.as_text())
    assert not re.findall(rf"= {whole}\S* (copy|concatenate|transpose)\(.*", program.as_text())
    donated = program.memory_analysis().alias_size_in_bytes
    assert donated >= sum(leaf.size * 4 for leaf in jax.tree.leaves(begun.caches))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "least one token"),
        ([[1], []], {}, "least one token"),
        ([[1, 40]], {}, r"\[40\] lie .* of 40"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"temperature": float("inf")}, "temperature=inf"),
        ([[1]], {"max_new_tokens": 2**31}, "be at most"),
        ([[1]], {"temperature": 1.0, "top_k": 0, "key": 0}, "top_k=0"),
        ([[1]], {"temperature": 1.0, "top_p": 1.5, "key": 0}, "top_p=1.5"),
    ],
)
def test_bad_options(small, prompts, options, message):
    with pytest.raises(InputError, match=message):
        generate(small, prompts, **{"max_new_tokens": 3, **options})


def test_rows_have_the_room_of_a_bucket_within_the_context():
    def room(*lengths, bounded, **options):
        config = types.SimpleNamespace(bounded_positions=bounded, max_positions=100)
        return [Engine.room(types.SimpleNamespace(config=config), length, **options) for length in lengths]

    assert room(3, 16, 17, 97, 120, bounded=False) == [16, 16, 24, 128, 128]
    assert room(3, 16, 17, 97, 120, bounded=True) == [16, 16, 24, 100, 120]
    assert room(3, 97, bounded=True, least=4, needed=110) == [110, 110]
    assert room(3, 97, bounded=True, least=4) == [4, 100]


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": float("nan")},
        {"max_new_tokens": "3"},
        {"top_k": "a"},
        {"top_p": "a"},
        {"seed": 1.5},
        {"seed": 1 << 64},
        {"stop": 3},
        {"stop_ids": 5},
        {"stop_ids": ["a"]},
        {"stop_ids": [1 << 31]},
    ],
)
def test_options_of_another_type_are_refused(options):
    with pytest.raises(InputError):
        GenerateSpec(**options)


@pytest.mark.parametrize("prompt", [5, [1.5, 2], [[1], 5], [None], [True], [[1, [2]]], np.array([1.5])])
def test_prompts_of_another_form_are_refused(prompt):
    with pytest.raises(InputError, match="a prompt is"):
        moe_jax.generate(moe_jax.tiny_model(), prompt, max_new_tokens=1)


def test_ids_may_be_an_array():
    model = moe_jax.tiny_model()
    expected = moe_jax.generate(model, [1, 2], max_new_tokens=2)
    assert expected == moe_jax.generate(model, jnp.array([1, 2]), max_new_tokens=2)
    assert [expected] == moe_jax.generate(model, np.array([[1, 2]]), max_new_tokens=2)
