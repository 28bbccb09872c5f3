import os
import threading

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from moe_jax.compression.threads import ahead, decomposing, in_threads


def test_items_come_in_order_and_one_is_made_meanwhile():
    made = threading.Semaphore(0)

    def items():
        for number in range(4):
            made.release()
            yield number

    found = []
    for number in ahead(items()):
        if number < 3:  # the next one is made although nobody has asked for it
            for _ in range(2 if number == 0 else 1):
                assert made.acquire(timeout=10)
        found.append(number)
    assert found == [0, 1, 2, 3]


def test_what_raises_there_raises_here_after_what_came_before():
    def items():
        yield 1
        raise ValueError("broken")

    coming = ahead(items())
    assert next(coming) == 1
    with pytest.raises(ValueError, match="broken"):
        next(coming)


def test_nothing_of_nothing():
    assert list(ahead([])) == []


def test_results_are_in_the_order_of_the_items():
    assert in_threads(lambda number: number * number, iter(range(100))) == [number * number for number in range(100)]


def test_an_error_in_a_thread_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda number: 1 // number, [1, 0])


@pytest.mark.parametrize(("cores", "most", "expected"), [(64, 3, 3), (2, 8, 2), (None, 8, 1)])
def test_there_are_as_many_threads_as_cores_but_not_too_many(cores, most, expected, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    together = threading.Barrier(expected, timeout=10)

    def work(number):
        together.wait()
        return threading.get_ident()

    assert len(set(in_threads(work, range(12), most=most))) == expected


def test_small_matrices_are_decomposed_by_one_thread_whoever_else_does():
    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    with threadpool_limits(2, "blas"):  # on one core, too
        assert set(threads()) == {2}
        with decomposing(100):
            with decomposing(50):
                assert set(threads()) == {1}
            assert set(threads()) == {1}  # one that ends leaves the other alone
        with decomposing(1 << 20):
            assert set(threads()) == {2}
        assert set(threads()) == {2}
