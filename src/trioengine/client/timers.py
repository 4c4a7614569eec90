"""Many deadlines, one task: a heap of actions to be done at a time.

A request may have a total deadline and a bound on its wait; a task for each would cost more than
the request. A cancelled timer lets go of its action at once, and the heap is rebuilt when half of
it is cancelled, so memory follows the timers that still matter.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

__all__ = ["Timer", "Timers"]

FEW: Final = 64  # cancelled timers that are not worth a rebuild


class Timer:
    """One action to come."""

    __slots__ = ("_timers", "action")

    def __init__(self, timers: Timers, action: Callable[[], None]) -> None:
        """Belong to ``timers``, which makes it."""
        self._timers = timers
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Never act, unless it has acted. Idempotent."""
        if self.action is not None:
            self.action = None
            self._timers._note_cancelled()


class Timers:
    """The heap, and the task that works it off."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._made = 0
        self._cancelled = 0
        self._earlier = trio.Event()
        self._running = trio.Lock()

    def __len__(self) -> int:
        """Timers that will act."""
        return len(self._heap) - self._cancelled

    def at(self, when_s: float, action: Callable[[], None]) -> Timer:
        """Do ``action`` at ``when_s``, ``trio.current_time()``; soon, if that has passed.

        Actions of one instant are done in the order of these calls. What an action raises ends
        ``run``.
        """
        timer = Timer(self, action)
        if when_s < self._next_s():
            self._earlier.set()
        self._made += 1
        heapq.heappush(self._heap, (when_s, self._made, timer))
        return timer

    def fire_due(self, now_s: float) -> None:
        """Do what is due at ``now_s``."""
        while self._heap and self._heap[0][0] <= now_s:
            timer = heapq.heappop(self._heap)[2]
            if timer.action is None:
                self._cancelled -= 1
            else:
                action, timer.action = timer.action, None
                action()

    async def run(self) -> NoReturn:
        """Do everything when it is due, until cancelled.

        Any number of tasks may run this; one of them does the work.
        """
        async with self._running:
            while True:
                self._earlier = trio.Event()
                with trio.move_on_at(self._next_s()):
                    await self._earlier.wait()
                self.fire_due(trio.current_time())

    def _next_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def _note_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > max(FEW, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0
