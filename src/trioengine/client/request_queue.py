"""Sequences that wait for a place in the engine: a fair share for each key, priorities within it.

Theory of operation
-------------------
Each key has a *pass*: how much it has been served, divided by its weight. The key with the lowest
pass goes next, so over any stretch in which several keys wait, each gets places by its weight, and
none waits longer than the others' weights together, however many sequences one of them has queued
or what priority they claim. A key that comes (back) to the queue begins where the queue stands:
time without waiting is no credit.
Source: stride scheduling, Waldspurger and Weihl 1995, MIT/LCS/TM-528.
"""

from __future__ import annotations

import collections
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioengine.client.sequence import Sequence

__all__ = ["RequestQueue"]


class RequestQueue:
    """A queue from which anybody may leave at once, wherever it stands.

    Taking the next costs a look at each key in the queue; keys are few.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """Begin empty; a key that ``weights`` does not name has weight 1."""
        self._weights = dict(weights or {})
        self._lanes: dict[str, _Lane] = {}  # of every key seen
        self._position = 0.0  # the pass of whoever was served last
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence behind all of its key and priority."""
        lane = self._lanes.get(sequence.key)
        if lane is None:
            lane = _Lane(1.0 / self._weights.get(sequence.key, 1.0))
            self._lanes[sequence.key] = lane
        if not lane:
            lane.position = max(lane.position, self._position)
        lane.push(sequence)
        self._num_waiting += 1

    def give_back(self, sequence: Sequence) -> None:
        """Queue a sequence as if it had not been taken out: before all of its key and priority."""
        lane = self._lanes[sequence.key]
        lane.push(sequence, first=True)
        lane.position -= lane.stride
        self._num_waiting += 1

    def pop(self) -> Sequence | None:
        """Take the next sequence out, ``None`` if nobody waits."""
        if not self._num_waiting:
            return None
        lane = min(filter(None, self._lanes.values()), key=lambda lane: lane.position)
        self._position = lane.position
        lane.position += lane.stride
        self._num_waiting -= 1
        return lane.pop()

    def remove(self, sequence: Sequence) -> None:
        """Take this sequence out. Raises ``KeyError`` where it does not wait here."""
        self._lanes[sequence.key].remove(sequence)
        self._num_waiting -= 1

    def clear(self) -> None:
        """Take everybody out."""
        self._num_waiting = 0
        self._lanes.clear()
        self._position = 0.0


class _Lane:
    """The sequences of one key: first in, first out within each priority; lower ones go first.

    One ordered table for each priority in use. Everything is O(1) but the first and last sequence
    of a priority, which cost a search among the priorities.

    Attributes:
        position: The key's pass.
        stride: What one sequence adds to it.
    """

    def __init__(self, stride: float) -> None:
        self.position = 0.0
        self.stride = stride
        self._priorities: list[int] = []  # sorted; exactly those with somebody in them
        self._waiting: dict[int, collections.OrderedDict[int, Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def push(self, sequence: Sequence, *, first: bool = False) -> None:
        priority = sequence.priority
        if priority not in self._waiting:
            insort(self._priorities, priority)
            self._waiting[priority] = collections.OrderedDict()
        self._waiting[priority][sequence.request_id] = sequence
        if first:
            self._waiting[priority].move_to_end(sequence.request_id, last=False)

    def pop(self) -> Sequence:
        priority = self._priorities[0]
        _, sequence = self._waiting[priority].popitem(last=False)
        self._drop_if_empty(priority)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.priority][sequence.request_id]
        self._drop_if_empty(sequence.priority)

    def _drop_if_empty(self, priority: int) -> None:
        if not self._waiting[priority]:
            del self._waiting[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
