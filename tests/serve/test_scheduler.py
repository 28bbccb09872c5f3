"""The scheduler alone, with models whose caches and experts are of other kinds."""

import queue

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig
from moe_jax.generation.engine import Engine
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from moe_jax.serve import scheduler as scheduler_module
from moe_jax.serve.scheduler import Closed, Job, Scheduler
from tests.support.generated import generate
from tests.support.numerics import initialised
from tests.support.tiers import long


def make_model() -> Decoder:
    """A dense layer with a window, whose cache is a ring, and experts over a shared base in a layer without."""
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=8)
    ffn = FFNConfig(dim=24)
    experts = MoEConfig(expert=ffn, num_experts=4, top_k=2, bank=BankConfig(kind="low-rank", rank=4))
    layers = (
        LayerConfig(attention=AttentionConfig(sliding_window=5, **heads), mlp=ffn),
        LayerConfig(attention=AttentionConfig(**heads), mlp=experts),
    )
    config = ModelConfig(family="llama", vocab_size=40, d_model=32, max_positions=512, layers=layers)
    graphdef, state = nnx.split(initialised(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    # Larger than at initialisation, so that the choices are not near ties.
    return nnx.merge(graphdef, jax.tree.map(lambda a: a * 8 if a.ndim > 2 else a, state))


@pytest.fixture(scope="module")
def model():
    return make_model()


def answers(scheduler: Scheduler, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
    told = [queue.SimpleQueue() for _ in prompts]
    scheduler.submit([Job(ids, n, news.put) for ids, n, news in zip(prompts, most, told, strict=True)])
    found: list[list[int]] = [[] for _ in prompts]
    for tokens, news in zip(found, told, strict=True):
        ended = None
        while ended is None:
            one = news.get(timeout=60)
            tokens.extend(one.tokens)
            ended = one.ended
        assert ended == "length"
    return found


@long
def test_rings_and_experts_and_caches_that_grow_change_no_token(model):
    """Prompts shorter and longer than the ring; one row that outgrows the first caches while others come and go."""
    prompts = [np.random.default_rng(n).integers(0, 40, n).tolist() for n in (3, 30, 17, 1, 32)]
    most = [270, 9, 12, 5, 7]
    scheduler = Scheduler(model, slots=2)
    try:
        together = answers(scheduler, prompts, most)
        # A slot that had a long text has a short one after it.
        assert answers(scheduler, prompts[:0:-1], most[:0:-1]) == together[:0:-1]
        with pytest.raises(Closed, match="shutting down"):
            scheduler.close()
            scheduler.submit([Job([1], 1, print)])
    finally:
        scheduler.close()
    expected = generate(model, prompts, max_new_tokens=max(most))
    assert together == [tokens[:n] for tokens, n in zip(expected, most, strict=True)]


def test_as_many_rows_are_computed_as_requests_need(model, monkeypatch):
    """One of five goes on when the others have ended: in one row, in which it is given what it would be given alone."""
    widths: list[int] = []

    class Counted(Engine):
        def advance(self, rows, steps, **options):
            widths.append(len(rows.tokens))
            return super().advance(rows, steps, **options)

    monkeypatch.setattr(scheduler_module, "Engine", Counted)
    scheduler = Scheduler(model)
    scheduler.seconds_a_block = 0.0  # tokens come one by one
    compiled: list[tuple[int, int]] = []
    scheduler.on_compile = lambda *program: compiled.append(program)
    prompts = [[1, 2, 3], [4], [5, 6], [7], [8, 9, 10]]
    try:
        together = answers(scheduler, prompts, [3, 3, 3, 12, 3])
        assert widths == [8] * 2 + [1] * 9 and compiled == [(8, 256), (1, 256)]
        assert answers(scheduler, prompts[3:], [12, 3]) == together[3:]
        assert widths[11:] == [2] * 2 + [1] * 9 and compiled[2:] == [(2, 256)]
    finally:
        scheduler.close()
    expected = generate(model, prompts, max_new_tokens=12)
    assert [tokens[:n] for tokens, n in zip(expected, [3, 3, 3, 12, 3], strict=True)] == together


@pytest.mark.parametrize(
    ("options", "message"),
    [({"slots": 0}, "seats=0"), ({"waiting": 0}, "waiting=0"), ({"context": 1}, "context=1 must .* least 2")],
)
def test_bad_sizes_are_refused(model, options, message):
    with pytest.raises(InputError, match=message):
        Scheduler(model, **options)
