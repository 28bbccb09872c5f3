"""The scheduler alone, with models whose caches and experts are of other kinds."""

import queue
import threading
import time
import types
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig
from moe_jax.generation.engine import SECONDS_SEEN, Engine
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.nn import Decoder
from moe_jax.serve import scheduler as scheduler_module
from moe_jax.serve.jobs import Job, News
from moe_jax.serve.scheduler import Closed, Scheduler
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


def wait_until_idle(scheduler: Scheduler) -> None:
    """Returns when the rows of a request that was answered are given back."""
    while scheduler._rows is not None:
        time.sleep(0.001)


class Counted(Engine):
    """Counts the rows of every block."""

    widths: list[int] = []

    def advance(self, rows, steps, **options):
        self.widths.append(len(rows.tokens))
        return super().advance(rows, steps, **options)


@pytest.fixture
def counted(model, monkeypatch):
    """A scheduler that gives tokens one by one, and has read a short prompt."""
    monkeypatch.setattr(scheduler_module, "Engine", Counted)
    scheduler = Scheduler(model)
    try:
        answers(scheduler, [[1]], [2])
        scheduler.seconds_a_block = 0.0
        Counted.widths.clear()
        yield scheduler
    finally:
        scheduler.close()


@long
def test_as_many_rows_are_computed_as_requests_need(counted, model):
    """One of five goes on when the others have ended: in one row, in which it is given what it would be given alone."""
    prompts, most = [[1, 2, 3], [4], [5, 6], [7], [8, 9, 10]], [3, 3, 3, 12, 3]
    compiled: list[tuple[int, int]] = []
    counted.on_compile = lambda *program: compiled.append(program)
    together = answers(counted, prompts, most)
    assert Counted.widths == [8] * 2 + [1] * 9 and compiled == [(8, 256)]
    assert answers(counted, prompts[3:], [12, 3]) == together[3:]
    assert Counted.widths[11:] == [2] * 2 + [1] * 9 and compiled[1:] == [(2, 256)]
    expected = generate(model, prompts, max_new_tokens=12)
    assert [tokens[:n] for tokens, n in zip(expected, most, strict=True)] == together


def test_blocks_are_short_while_somebody_reads_along(counted, monkeypatch):
    counted.seconds_a_block, asked = 1.0, []
    monkeypatch.setattr(Counted, "steps_in", lambda self, seconds: asked.append(seconds) or 2)
    for streams in (False, True):
        told: queue.SimpleQueue = queue.SimpleQueue()
        counted.submit([Job([1], 4, told.put, streams=streams)])
        assert ended(told).ended == "length"
    assert asked == [1.0] * 2 + [SECONDS_SEEN] * 2


def test_a_request_that_is_being_admitted_counts_once(counted, monkeypatch):
    """Rows are moved for it, which may have to be compiled: in that time others may wait."""
    loads, move = [], counted._move
    monkeypatch.setattr(counted, "_move", lambda size: (loads.append(counted.load()), move(size))[1])
    answers(counted, [[1]], [2])
    assert loads and all(sum(load.values()) == 1 for load in loads)


def test_who_waits_is_given_the_slot_that_is_left_first(counted):
    """Two of ten have no slot. When one of the eight has ended, others are in the middle of a long block."""
    told: list[tuple[int, int]] = []
    ended = queue.SimpleQueue()

    def news(index: int, one: News) -> None:
        told.extend([(index, len(one.tokens))])
        if one.ended is not None:
            ended.put(index)

    counted.seconds_a_block = 60.0
    counted.submit([Job([1 + i], 3 if i in (5, 8, 9) else 60, lambda one, i=i: news(i, one)) for i in range(10)])
    assert [ended.get(timeout=60) for _ in range(3)] == [5, 8, 9]
    before = told[: [index for index, _ in told].index(8)]
    assert sum(count for index, count in before if index == 0) == 3
    assert set(Counted.widths) == {8}


def test_what_has_to_be_compiled_keeps_nobody_waiting(counted, monkeypatch):
    """A prompt of a length that was never read waits for its program; who came after it is answered before."""
    begun, go = threading.Event(), threading.Event()
    read = Counted.read

    def slowly(self, prompts, asked, **options):
        if len(prompts[0]) > 32:
            begun.set()
            assert go.wait(30)
            prompts = [prompts[0][:32]]  # whose program is there
        return read(self, prompts, asked, **options)

    monkeypatch.setattr(Counted, "read", slowly)
    long = queue.SimpleQueue()
    counted.submit([Job([1] * 40, 3, long.put)])
    assert begun.wait(30)
    assert len(answers(counted, [[4], [5]], [3, 3])) == 2
    assert long.empty() and counted.load() == {"running": 0, "waiting": 1}
    go.set()
    assert sum(len(long.get(timeout=60).tokens) for _ in range(3)) == 3


class Compiler:
    """Compiles nothing ahead, and takes as long for it as the test lets it."""

    def __init__(self):
        self.begun: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)

    def __call__(self, before, size, row_length=None):
        self.begun.put(size)
        assert self.go.acquire(timeout=30)


@pytest.fixture
def compiler(counted, monkeypatch):
    found = Compiler()
    monkeypatch.setattr(counted._engine, "compile", found)
    yield found
    found.go.release(100)  # nobody waits at the end


def test_requests_go_on_while_more_rows_are_compiled_for(counted, compiler, model):
    """One that needs another row waits for its program, and the one before it does not; nor is it in one block less."""
    first, second = queue.SimpleQueue(), queue.SimpleQueue()
    counted.submit([Job([1, 2, 3], 200, first.put)])
    given = list(first.get(timeout=60).tokens)
    counted.submit([Job([4, 5], 3, second.put)])
    assert compiler.begun.get(timeout=60) == (2, 256)
    before = len(Counted.widths)
    while len(Counted.widths) < before + 8:
        given += first.get(timeout=60).tokens
    assert second.empty() and set(Counted.widths) == {1}
    compiler.go.release()
    told = [second.get(timeout=60) for _ in range(3)]
    assert told[-1].ended == "length" and 2 in Counted.widths
    while (one := first.get(timeout=60)).ended is None:
        given += one.tokens
    expected = generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=200)
    assert [given + one.tokens, [token for one in told for token in one.tokens]] == [expected[0], expected[1][:3]]


def test_who_waits_is_told_that_it_ends_while_a_program_is_compiled(counted, compiler):
    """Nothing interrupts a compiler: `close` says that it has not ended."""
    told = [queue.SimpleQueue(), queue.SimpleQueue()]
    counted.submit([Job([1, 2, 3], 200, told[0].put)])
    told[0].get(timeout=20)
    counted.submit([Job([4, 5], 3, told[1].put)])
    compiler.begun.get(timeout=20)
    assert counted.close(0.05) is False
    for news in told:
        while (one := news.get(timeout=20)).ended is None:
            pass
        assert one.ended == "error" and "shutting down" in one.problem
    compiler.go.release(100)
    assert counted.close() is True


@long
def test_a_row_whose_cache_is_full_waits_for_a_longer_one_and_no_other_does(counted, compiler, model, monkeypatch):
    monkeypatch.setattr(scheduler_module, "_LEAST_CACHE", 32)
    wait_until_idle(counted)
    counted._ran.clear()
    long, short = queue.SimpleQueue(), queue.SimpleQueue()
    counted.submit([Job([1, 2, 3], 40, long.put), Job([4], 20, short.put)])
    assert compiler.begun.get(timeout=60) == (2, 64)
    given: list[int] = []
    while len(given) < 29:  # 32 tokens with those of the prompt
        given += long.get(timeout=60).tokens
    others: list[int] = []
    while len(others) < 20:
        others += short.get(timeout=60).tokens
    answered = answers(counted, [[9]], [3])[0]  # in the row that is left
    assert long.empty()
    compiler.go.release(2)
    while len(given) < 40:
        given += long.get(timeout=60).tokens
    assert [given, others, answered] == [
        tokens[:n]
        for tokens, n in zip(generate(model, [[1, 2, 3], [4], [9]], max_new_tokens=40), (40, 20, 3), strict=True)
    ]


def ended(news: queue.SimpleQueue) -> News:
    """The last news of a request."""
    while (one := news.get(timeout=60)).ended is None:
        pass
    return one


def no_memory(*_: object, **__: object) -> None:
    raise RuntimeError("no memory")


NO_MEMORY = ("error", "RuntimeError: no memory")


def test_who_was_to_be_given_a_row_is_told_when_that_fails(counted, monkeypatch):
    """A row cannot be put where another one goes on: both end with an error, and who comes later is answered."""
    alone = answers(counted, [[7]], [5])
    wait_until_idle(counted)
    with monkeypatch.context() as now:
        now.setattr(counted._engine.mover, "put", no_memory)
        told = [queue.SimpleQueue(), queue.SimpleQueue()]
        counted.submit([Job([1], 400, told[0].put)])
        told[0].get(timeout=60)
        counted.submit([Job([1], 400, told[1].put)])
        assert [ended(news)[-2:] for news in told] == [NO_MEMORY] * 2
    assert answers(counted, [[7]], [5]) == alone and counted.failure is None


def test_a_block_that_fails_ends_those_in_it_and_one_that_always_fails_the_server(counted, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    advance, alone = counted._engine.advance, answers(counted, [[7]], [5])

    def fails(rows, steps, **options):
        return no_memory() if len(rows.tokens) > 1 else advance(rows, steps, **options)

    monkeypatch.setattr(counted._engine, "advance", fails)
    told = [queue.SimpleQueue(), queue.SimpleQueue()]
    counted.submit([Job([1], 60, news.put) for news in told])
    assert [ended(news)[-2:] for news in told] == [NO_MEMORY] * 2
    assert answers(counted, [[7]], [5]) == alone and counted.failure is None
    monkeypatch.setattr(counted._engine, "advance", no_memory)
    counted.submit([Job([1], 60, told[0].put)])
    assert ended(told[0])[-2:] == NO_MEMORY
    counted._thread.join(60)
    assert counted.failure == NO_MEMORY[1]
    with pytest.raises(Closed, match="no memory"):
        counted.submit([Job([1], 60, told[0].put)])


@long
def test_who_needs_a_program_that_cannot_be_compiled_ends_and_no_other_does(counted, model, monkeypatch):
    """A newcomer that would take a row more, and one whose cache is full; another row with as much room goes on."""
    monkeypatch.setattr(counted._engine, "compile", no_memory)
    monkeypatch.setattr(scheduler_module, "_LEAST_CACHE", 32)
    wait_until_idle(counted)
    counted._ran.clear()
    long, short, newcomer = queue.SimpleQueue(), queue.SimpleQueue(), queue.SimpleQueue()
    counted.submit([Job([1, 2, 3], 60, long.put), Job([4], 28, short.put)])
    given = list(short.get(timeout=60).tokens)
    counted.submit([Job([5], 60, newcomer.put)])
    assert ended(newcomer)[-2:] == NO_MEMORY and ended(long)[-2:] == NO_MEMORY
    while len(given) < 28:
        given += short.get(timeout=60).tokens
    expected = generate(model, [[4], [9]], max_new_tokens=28)
    assert given == expected[0] and answers(counted, [[9]], [5]) == [expected[1][:5]] and counted.failure is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"slots": 0}, "seats=0"), ({"waiting": 0}, "waiting=0"), ({"context": 1}, "context=1 must .* least 2")],
)
def test_bad_sizes_are_refused(model, options, message):
    with pytest.raises(InputError, match=message):
        Scheduler(model, **options)


def test_short_prompts_are_read_by_one_program():
    """Programs differ by the room of a prompt: of 32 tokens for all that have no more."""
    config = types.SimpleNamespace(bounded_positions=True, max_positions=100)
    room = partial(Engine.room, types.SimpleNamespace(config=config))
    stub = types.SimpleNamespace(_engine=types.SimpleNamespace(room=room))
    lengths = [Scheduler._length(stub, types.SimpleNamespace(ids=[1] * count)) for count in (1, 17, 32, 33, 99)]
    assert lengths == [32, 32, 32, 48, 100]
