"""Functions in a thread beside the event loop."""

import asyncio
import threading

import pytest

from moe_jax.serve.lanes import Lane


def test_one_comes_after_another_and_who_is_cancelled_never_begins():
    begins, done = threading.Event(), threading.Event()
    called: list[str] = []

    def first():
        begins.set()
        assert done.wait(30)
        called.append("first")

    async def run() -> int:
        lane = Lane()
        one = asyncio.create_task(lane.run(first))
        while not begins.is_set():  # the loop goes on
            await asyncio.sleep(0.001)
        one.cancel()  # nobody waits for it any more, but its thread goes on
        cancelled = asyncio.create_task(lane.run(lambda: called.append("cancelled")))
        last = asyncio.create_task(lane.run(lambda: called.append("last")))
        await asyncio.sleep(0.01)
        assert called == []
        cancelled.cancel()
        done.set()
        await last
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
        return await lane.run(lambda: 7)

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 7 and called == ["first", "last"]
