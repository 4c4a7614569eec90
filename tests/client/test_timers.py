"""Many deadlines in one task: on time, in order, cancelled for good, and no heap of the dead."""

from __future__ import annotations

import gc
import math
import weakref
from typing import TYPE_CHECKING

import trio
from hypothesis import given
from hypothesis.strategies import booleans, floats, lists, tuples
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.client.timers import FEW, Timers

if TYPE_CHECKING:
    from collections.abc import Callable


async def test_actions_come_on_time_and_in_order(autojump_clock: MockClock) -> None:
    timers, done = Timers(), []

    def note(name: str) -> Callable[[], None]:
        return lambda: done.append((trio.current_time(), name))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(timers.run)
        timers.at(5, note("b"))
        timers.at(5, note("c"))
        timers.at(math.inf, note("never"))
        await wait_all_tasks_blocked()
        timers.at(2, note("a"))  # earlier than what it sleeps for
        await trio.sleep(6)
        timers.at(1, note("late"))  # has passed already
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert done == [(2, "a"), (5, "b"), (5, "c"), (6, "late")]


async def test_cancelled_timer_never_acts(autojump_clock: MockClock) -> None:
    timers, done = Timers(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timers.run)
        kept = timers.at(1, lambda: done.append("kept"))
        cancelled = timers.at(1, lambda: done.append("cancelled"))
        cancelled.cancel()
        cancelled.cancel()
        assert len(timers) == 1
        await trio.sleep(2)
        kept.cancel()  # too late, harmless
        assert len(timers) == 0
        nursery.cancel_scope.cancel()
    assert done == ["kept"]


async def test_several_tasks_may_run_it_and_each_action_is_done_once(
    autojump_clock: MockClock,
) -> None:
    timers, done = Timers(), []
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as first:
            nursery.start_soon(timers.run)
            async with trio.open_nursery() as inner:
                inner.start_soon(timers.run)
                timers.at(1, lambda: done.append("a"))
                await trio.sleep(2)
                first.cancel()
        timers.at(3, lambda: done.append("b"))
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    assert done == ["a", "b"]


async def test_action_may_cancel_and_add(autojump_clock: MockClock) -> None:
    timers, done = Timers(), []
    other = timers.at(1, lambda: done.append("other"))

    def act() -> None:
        other.cancel()
        timers.at(0, lambda: done.append("added"))

    timers.at(0.5, act)
    with trio.move_on_after(2):
        await timers.run()
    assert done == ["added"]


def test_memory_follows_the_timers_that_matter() -> None:
    class Request:
        pass

    timers = Timers()
    request = Request()
    alive = weakref.ref(request)
    timer = timers.at(1e9, lambda r=request: None)  # type: ignore[misc]
    timer.cancel()
    del request
    gc.collect()
    assert alive() is None  # at once
    for _ in range(10_000):
        timers.at(1e9, lambda: None).cancel()
    assert len(timers._heap) <= 2 * FEW + 1


@given(lists(tuples(floats(0, 10), booleans()), max_size=200))
def test_exactly_what_is_due_and_not_cancelled_acts(plan: list[tuple[float, bool]]) -> None:
    timers = Timers()
    done: list[int] = []
    made = [timers.at(when, lambda i=i: done.append(i)) for i, (when, _) in enumerate(plan)]  # type: ignore[misc]
    for timer, (_, cancelled) in zip(made, plan, strict=True):
        if cancelled:
            timer.cancel()
    timers.fire_due(5.0)
    due = [i for i, (when, cancelled) in enumerate(plan) if when <= 5.0 and not cancelled]
    assert done == sorted(due, key=lambda i: (plan[i][0], i))
    assert len(timers) == sum(not cancelled for _, cancelled in plan) - len(due)
