"""The death of one engine incarnation: many sensors, one cause.

Theory of operation
-------------------
Death may be seen by three sensors: the engine's own last word, the end of its process, and a wire
on which nobody is left. The first that speaks is believed at once (``seen``). The *cause* is chosen
among everything said in time, in the order just given, because the sensor that is quickest knows
least; then it is frozen (``settled``). No task is needed for that: a report that comes later is
ignored, and whoever waits in ``wait_settled`` freezes the cause when the time is up.

The time is up 50 ms after the end of the process, and at once where no report could improve the
cause: after a last word, or when the process has ended and its wire is drained. A wire that closes
is not yet an end: the kernel closes what a dying process had open, and only then, when it finds the
time, has its exit status for us. So a wire alone is given a second. A process that lives on without
it would take longer, and nobody else knows why it did that.
"""

from __future__ import annotations

import enum
import math
from typing import Final

import trio

__all__ = ["EXIT_S", "SETTLE_S", "EngineDeath", "Sensor"]

SETTLE_S: Final = 0.05  # from the end of the process to its frozen cause
EXIT_S: Final = 1.0  # from a closed wire to the end of the process, which follows it


class Sensor(enum.IntEnum):
    """Who tells of a death; the lowest knows best."""

    LAST_WORD = 0
    EXIT = 1
    WIRE = 2


class EngineDeath:
    """What is known of the end of one incarnation. Must be made within a Trio run.

    Attributes:
        seen: Set at the first sign; ``cause`` may still improve.
        settled: Set when the cause is frozen.
        cause: One sentence; empty while it lives.
    """

    def __init__(self) -> None:
        """It lives."""
        self.seen = trio.Event()
        self.settled = trio.Event()
        self.cause = ""
        self._told = trio.Event()  # by somebody who knows more than that the wire is closed
        self._deadline_s = math.inf
        self._reports: dict[Sensor, str] = {}
        self._drained = False

    def note_drained(self) -> None:
        """Take note that everything it had sent has been received: no last word can come."""
        self._drained = True

    def report(self, sensor: Sensor, reason: str) -> bool:
        """Weigh one report; False where it comes too late to matter."""
        now_s = trio.current_time()
        if not self.seen.is_set():
            self._deadline_s = now_s + EXIT_S
            self.seen.set()
        if now_s > self._deadline_s:
            self.settled.set()
        if self.settled.is_set():
            return False
        if sensor is not Sensor.WIRE and not self._told.is_set():
            self._deadline_s = min(self._deadline_s, now_s + SETTLE_S)
            self._told.set()
        self._reports.setdefault(sensor, reason)
        self.cause = self._reports[min(self._reports)]
        if Sensor.LAST_WORD in self._reports or (self._drained and Sensor.EXIT in self._reports):
            self.settled.set()
        return True

    async def wait_settled(self) -> None:
        """Wait until it is dead and the cause frozen, within 50 ms of the end of its process."""
        await self.seen.wait()
        with trio.move_on_at(self._deadline_s):
            await self._told.wait()
        with trio.move_on_at(self._deadline_s):
            await self.settled.wait()
        self.settled.set()
