from __future__ import annotations

import threading

import pytest
import trio

from trioengine.http.offload import InlineOffload, ThreadOffload


async def test_short_work_stays_and_long_work_goes() -> None:
    offload = ThreadOffload(inline_chars=10)
    here = threading.get_ident()
    assert await offload(threading.get_ident, num_chars=10) == here
    assert await offload(threading.get_ident, num_chars=11) != here


async def test_inline_never_leaves() -> None:
    assert await InlineOffload()(threading.get_ident, num_chars=10**9) == threading.get_ident()


@pytest.mark.parametrize("num_chars", [0, 100])
async def test_an_error_comes_back(num_chars: int) -> None:
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await ThreadOffload(inline_chars=10)(work, num_chars=num_chars)


async def test_a_client_that_leaves_does_not_wait_for_the_thread() -> None:
    offload = ThreadOffload(inline_chars=0, max_threads=1)
    started, release = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: offload(work, num_chars=1))
        await trio.to_thread.run_sync(started.wait)
        nursery.cancel_scope.cancel()
    release.set()
    # The thread's place comes back when it ends, so the number of threads stays bounded.
    assert await offload(lambda: 5, num_chars=1) == 5


async def test_at_most_so_many_at_once() -> None:
    offload = ThreadOffload(inline_chars=0, max_threads=2)
    lock, running, most = threading.Lock(), 0, 0
    barrier = threading.Barrier(2)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(lambda: offload(work, num_chars=1))
    assert most == 2
