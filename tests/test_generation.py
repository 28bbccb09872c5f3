"""KV-cached generation: against recomputation without a cache, for batches of different lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.errors import InputError
from moe_jax.generation import generate
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.nn import Decoder

PROMPTS = [[5, 3, 8, 1, 9, 2, 2], [4], [7, 7, 30]]


@pytest.fixture(scope="module", params=[None, 4], ids=["full", "window"])
def model(request):
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=request.param)
    ffn = FFNConfig(dim=48)
    moe = MoEConfig(expert=FFNConfig(dim=24), num_experts=4, top_k=2)
    layers = (LayerConfig(attention=attention, mlp=ffn), LayerConfig(attention=attention, mlp=moe)) * 2
    config = ModelConfig(family="llama", vocab_size=40, d_model=32, max_positions=64, layers=layers)
    model = Decoder(config, rngs=nnx.Rngs(0))
    # Larger than at initialisation, so that the choices are not near ties.
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a * 8 if a.ndim > 2 else a, state))


@pytest.fixture(scope="module")
def full_forward(model):
    graphdef, state = nnx.split(model)
    return jax.jit(lambda tokens: nnx.merge(graphdef, state)(tokens).logits)


def greedy_without_cache(full_forward, prompt, steps):
    row = list(prompt)
    for _ in range(steps):
        padded = np.zeros((1, 20), np.int32)  # causal: what comes later cannot matter
        padded[0, : len(row)] = row
        row.append(int(jnp.argmax(full_forward(padded)[0, len(row) - 1])))
    return row[len(prompt) :]


def test_greedy_equals_recomputation_for_prompts_of_different_lengths(model, full_forward):
    got = generate(model, PROMPTS, max_new_tokens=9)
    assert got == [greedy_without_cache(full_forward, prompt, 9) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in got}) == 3


@pytest.mark.parametrize("factors", [{}, {"short_factor": (1.0,) * 4, "long_factor": (9.0,) * 4}])
def test_a_prompt_does_not_depend_on_its_neighbours(factors):
    """Where rotation depends on the length of the text: on that of the own prompt, and padding is none of it."""
    scaling = "longrope" if factors else "dynamic"
    rope = RopeConfig(theta=3.0, scaling=scaling, factor=64.0, original_max_positions=4, **factors)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    layers = (LayerConfig(attention=attention, mlp=FFNConfig(dim=48)),)
    config = ModelConfig(family="llama", vocab_size=40, d_model=32, max_positions=4, layers=layers, rope=rope)
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    model = nnx.merge(graphdef, jax.tree.map(lambda a: a * 8, state))
    together = generate(model, PROMPTS, max_new_tokens=6)
    assert together == [generate(model, [prompt], max_new_tokens=6)[0] for prompt in PROMPTS]


def test_a_row_stops_before_its_eos(model):
    free = generate(model, PROMPTS, max_new_tokens=9)
    eos = free[0][4]
    stopped = generate(model, PROMPTS, max_new_tokens=9, eos_ids=[eos])
    assert stopped == [tokens[: tokens.index(eos)] if eos in tokens else tokens for tokens in free]
    assert len(stopped[0]) <= 4


def test_sampling_is_reproducible_and_follows_its_key(model):
    options = dict(max_new_tokens=8, temperature=1.0, top_k=20, top_p=0.95)
    first, again, other = (generate(model, PROMPTS, key=jax.random.key(seed), **options) for seed in (1, 1, 2))
    assert first == again != other


def test_top_k_of_one_is_greedy(model):
    sampled = generate(model, PROMPTS, max_new_tokens=5, temperature=0.7, top_k=1, key=jax.random.key(0))
    assert sampled == generate(model, PROMPTS, max_new_tokens=5)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([[1], []], {}, "at least one token"),
        ([[1, 40]], {}, r"\[40\] lie outside the vocabulary of 40"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"temperature": float("inf")}, "temperature=inf"),
        ([[1]], {"max_new_tokens": 2**31}, "must be at most"),
        ([[1]], {"temperature": 1.0, "top_k": 0, "key": 0}, "top_k=0"),
        ([[1]], {"temperature": 1.0, "top_p": 1.5, "key": 0}, "top_p=1.5"),
        ([[1]], {"temperature": 1.0}, "needs a random key"),
    ],
)
def test_bad_options(model, prompts, options, message):
    with pytest.raises(InputError, match=message):
        generate(model, prompts, **{"max_new_tokens": 3, **options})
