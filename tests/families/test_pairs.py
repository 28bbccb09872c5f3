"""Models with an encoder against Transformers, through the doors that people use: scores of pairs, and generation."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.data.tokenizer import Pair  # noqa: E402
from moe_jax.evaluation.held_out import Evaluator, score_rows, target_losses  # noqa: E402
from moe_jax.model_io.loading import load_model  # noqa: E402
from tests.families.test_encoder_decoder import NEW_TOKENS, random_model  # noqa: E402
from tests.support.generated import generate, stream  # noqa: E402
from tests.support.tiers import long, one_in  # noqa: E402

random = np.random.default_rng(1)
LENGTHS = ((40, 17), (9, 14), (33, 1), (3, 5))
INPUTS = [random.integers(2, 96, first) for first, _ in LENGTHS]
TARGETS = [random.integers(2, 96, second) for _, second in LENGTHS]


def pair_of(inputs: np.ndarray, targets: np.ndarray, start: int) -> Pair:
    tokens = np.concatenate([[start], targets[:-1]])
    return Pair(tokens, targets, np.ones(len(targets), np.float32), inputs)


@one_in(2)
@pytest.mark.parametrize("name", ["t5", "switch"])
def test_pairs_are_scored_as_by_transformers(name, tmp_path):
    """Each alone there, and here padded in one batch."""
    reference, source = random_model(name, tmp_path)
    pairs = [pair_of(*ids, source.config.decoder_start_id) for ids in zip(INPUTS, TARGETS, strict=True)]
    expected = []
    for inputs, targets in zip(INPUTS, TARGETS, strict=True):
        with torch.no_grad():
            given = {"input_ids": torch.tensor(inputs)[None], "decoder_input_ids": None}
            logits = reference(**given, labels=torch.tensor(targets)[None]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum")
        expected.append(loss.item())
    graphdef, state = nnx.split(load_model(source))
    evaluator = Evaluator(graphdef, pairs, batch_size=4)
    losses = score_rows(target_losses, pairs, graphdef=graphdef, states=(state,), batch_size=4)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    tokens = sum(map(len, TARGETS))
    assert evaluator(state).tokens == tokens
    np.testing.assert_allclose(evaluator(state).nll, sum(expected) / tokens, rtol=1e-4)


@long
@pytest.mark.parametrize("name", ["t5", "switch"])
def test_answers_are_those_of_transformers(name, tmp_path):
    """64 greedy tokens for inputs of different lengths in one batch; one by one in Transformers."""
    reference, source = random_model(name, tmp_path, 0.35)
    options = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, use_cache=False)
    expected = []
    for inputs in INPUTS[:3]:
        with torch.no_grad():
            theirs = reference.generate(torch.tensor(inputs)[None], **options, eos_token_id=None)
        expected.append(theirs[0, 1:].tolist())
    assert len({token for row in expected for token in row}) > 4  # otherwise equality would say little
    model = load_model(source)
    prompts = [inputs.tolist() for inputs in INPUTS[:3]]
    assert generate(model, prompts, max_new_tokens=NEW_TOKENS) == expected
    # Token by token, as they come.
    streamed = stream(model, prompts, max_new_tokens=NEW_TOKENS)
    assert [next(streamed).tolist() for _ in range(3)] == [list(column) for column in zip(*expected, strict=True)][:3]
    stop = expected[0][5]
    ended = generate(model, prompts[:1], max_new_tokens=NEW_TOKENS, eos_ids=[stop])
    assert ended == [expected[0][: expected[0].index(stop)]]
    sampled = [
        generate(model, prompts, max_new_tokens=8, temperature=2.0, key=jax.random.key(seed)) for seed in (0, 0, 1)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    nearly_greedy = generate(model, prompts, max_new_tokens=8, temperature=2.0, top_k=1, key=jax.random.key(0))
    assert nearly_greedy == [row[:8] for row in expected]
