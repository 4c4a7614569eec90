"""Sequences that wait for a place in the engine: first in, first out, within each priority."""

from __future__ import annotations

import collections
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioengine.client.sequence import Sequence

__all__ = ["RequestQueue"]


class RequestQueue:
    """A queue from which anybody may leave at once, wherever it stands.

    One ordered table for each priority in use. Everything is O(1) but the first and last sequence
    of a priority, which cost a search among the priorities.
    """

    def __init__(self) -> None:
        self._priorities: list[int] = []  # sorted; exactly those with somebody in them
        self._waiting: dict[int, collections.OrderedDict[int, Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence behind all of its priority; lower priorities go first."""
        priority = sequence.priority
        if priority not in self._waiting:
            insort(self._priorities, priority)
            self._waiting[priority] = collections.OrderedDict()
        self._waiting[priority][sequence.request_id] = sequence

    def pop(self) -> Sequence | None:
        """Take the next sequence out, ``None`` if nobody waits."""
        if not self._priorities:
            return None
        priority = self._priorities[0]
        _, sequence = self._waiting[priority].popitem(last=False)
        self._drop_if_empty(priority)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take this sequence out. Raises ``KeyError`` where it does not wait here."""
        del self._waiting[sequence.priority][sequence.request_id]
        self._drop_if_empty(sequence.priority)

    def clear(self) -> None:
        """Take everybody out."""
        self._priorities.clear()
        self._waiting.clear()

    def _drop_if_empty(self, priority: int) -> None:
        if not self._waiting[priority]:
            del self._waiting[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
