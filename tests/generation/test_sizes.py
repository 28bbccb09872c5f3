"""Programs that are compiled before they are called, and rows of another size that need no others."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.generation.ahead import Ahead
from moe_jax.generation.continued_rows import ask
from moe_jax.generation.engine import Engine
from moe_jax.generation.sizes import Size, shapes_of
from tests.generation.test_generation import DENSE, make_model
from tests.support.generated import generate


def test_what_was_compiled_ahead_is_called_and_nothing_is_compiled_twice():
    traced = []

    @jax.jit
    def add(state, x):
        traced.append(x.shape)
        return state + x

    program = Ahead(add, state=jnp.float32(1))
    for _ in range(2):
        program.compile(x=jax.ShapeDtypeStruct((3,), jnp.float32))
    assert program(x=jnp.zeros(3)).tolist() == [1, 1, 1] and traced == [(3,)]
    assert program(x=jnp.zeros(2)).tolist() == [1, 1]
    program.compile(x=jax.ShapeDtypeStruct((2,), jnp.float32))
    assert traced == [(3,), (2,)]


def test_who_calls_a_program_that_is_being_compiled_waits_for_it():
    begun, go = threading.Event(), threading.Event()

    class Slow:
        def lower(self, **_):
            begun.set()
            assert go.wait(30)
            return self

        def compile(self):
            return lambda x: x + 1

    program = Ahead(Slow())
    thread = threading.Thread(target=lambda: program.compile(x=np.zeros(1)))
    thread.start()
    assert begun.wait(30)
    threading.Timer(0.05, go.set).start()
    assert program(x=np.zeros(1)) == [1]
    thread.join()


def test_a_program_that_cannot_be_compiled_says_so_to_all():
    class Broken:
        def lower(self, **_):
            raise MemoryError

    program = Ahead(Broken())
    for call in (program.compile, program):
        with pytest.raises(MemoryError):
            call(x=np.zeros(1))


def test_rows_move_and_go_on_by_programs_that_were_compiled_for_their_shapes():
    model = make_model(DENSE, DENSE, window=4)
    engine = Engine(model, draws=True, scores=True)
    prompts = [[1, 2, 3], [4, 5]]

    def read(prompt):
        rows, block, _ = engine.read([prompt], ask(1, 6, key=jax.random.key(0)[None]), least=32)
        return rows, block.tokens[:, 0].tolist()

    (rows, first), (row, second) = map(read, prompts)
    engine.compile(shapes_of(rows), Size(2, 64), 32)
    rows = engine.mover.put(engine.mover.move(rows, [0, -1], Size(2, 64)), row, 1)
    rows, block = engine.advance(rows, 5, stay=np.array([True, True]))
    found = [[*first, *block.tokens[:, 0].tolist()], [*second, *block.tokens[:, 1].tolist()]]
    assert found == generate(model, prompts, max_new_tokens=6)
    mover = engine.mover
    for program in (engine._continue, mover._take, mover._move_cache, mover._put, mover._put_cache):
        assert program._compiled and not program._called
