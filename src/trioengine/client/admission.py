"""Admission: a bounded number of sequences, reserved on arrival and charged after parsing.

A request takes one place the moment it arrives, before its body is read, so that a burst is refused
in microseconds and not after the work. Once parsed, its sequences (prompts times n) are charged at
once, all or none. The places are held until the request's owner releases the slot, also while a
slow client reads its answer: so admission bounds what the server holds in memory, whatever clients
do.
"""

from __future__ import annotations

import math
from typing import Final, Self

import trio

from trioengine.errors import InvalidRequestError, OverloadedError, ProtocolError

__all__ = ["Admission", "Slot"]

MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 60.0
RATE_WINDOW_S: Final = 10.0  # how far back the rate looks: what happened then counts 1/e


class Admission:
    """Counts places.

    Attributes:
        capacity: Most sequences at once, queued and running together.
        in_use: Places taken now.
    """

    def __init__(self, max_queue_sequences: int) -> None:
        """Begin empty. Raises ``ValueError`` below one place."""
        if max_queue_sequences < 1:
            raise ValueError(f"admission needs at least one place, got {max_queue_sequences}")
        self.capacity = max_queue_sequences
        self.in_use = 0
        self._rate = 0.0  # places given back a second, as of then
        self._rate_at_s = 0.0

    @property
    def full(self) -> bool:
        """True where the next ``reserve`` raises."""
        return self.in_use >= self.capacity

    def reserve(self) -> Slot:
        """Take one place for a request that has just arrived. Synchronous, O(1).

        Raises:
            OverloadedError: There is none; nothing was done, so a retry is safe.
        """
        self._take(1)
        return Slot(self)

    def refusal(self, places: int = 1) -> OverloadedError | None:
        """Return what a request for so many places gets now; ``None`` where they are free."""
        if self.in_use + places <= self.capacity:
            return None
        return OverloadedError(
            f"the queue is full ({self.in_use} of {self.capacity} sequences); try again later",
            retry_after_s=self.retry_after_s(places),
        )

    def _take(self, places: int) -> None:
        if (error := self.refusal(places)) is not None:
            raise error
        self.in_use += places

    def _give_back(self, places: int) -> None:
        self.in_use -= places
        now_s = trio.current_time()
        self._rate = self._rate * _decay(now_s - self._rate_at_s) + places / RATE_WINDOW_S
        self._rate_at_s = now_s

    def retry_after_s(self, places: int) -> float:
        """Return when so many places should be free at the rate of late, within [1, 60] seconds."""
        rate = self._rate * _decay(trio.current_time() - self._rate_at_s)
        missing = self.in_use + places - self.capacity
        wait_s = missing / rate if rate > 0.0 else math.inf
        return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def _decay(elapsed_s: float) -> float:
    return math.exp(-elapsed_s / RATE_WINDOW_S)


class Slot:
    """The places of one request. A context manager.

    Attributes:
        arrived_s: When the request arrived, ``trio.current_time()``: latencies count from here.
    """

    def __init__(self, admission: Admission) -> None:
        """Hold one place that ``admission`` has taken already."""
        self.arrived_s = trio.current_time()
        self._admission = admission
        self._places = 1

    def charge(self, num_sequences: int) -> None:
        """Hold ``num_sequences`` places in all. Charging the same number again changes nothing.

        Raises:
            OverloadedError: They are not there now; the slot is as before.
            InvalidRequestError: They never will be.
            ProtocolError: The slot has been released.
        """
        if self._places == 0:
            raise ProtocolError("a released slot cannot be charged")
        if num_sequences > self._admission.capacity:
            raise InvalidRequestError(
                f"this request asks for {num_sequences} sequences (prompts times n); "
                f"this server takes at most {self._admission.capacity}"
            )
        self._admission._take(num_sequences - self._places)
        self._places = num_sequences

    def release(self) -> None:
        """Give every place back. Idempotent."""
        places, self._places = self._places, 0
        self._admission._give_back(places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
