"""First in, first out within each priority; anybody may leave at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import DataObject, data, integers, sampled_from

from trioengine.client.request_queue import RequestQueue
from trioengine.client.sequence import Sequence, SequenceRequest
from trioengine.sampling_params import SamplingParams

STREAM: Any = None


def make(request_id: int, priority: int = 0) -> Sequence:
    return Sequence(STREAM, 0, request_id, SequenceRequest([1], SamplingParams()), priority)


class QueueMachine(RuleBasedStateMachine):
    """The queue against a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.model: list[Sequence] = []
        self.made = 0

    @rule(priority=integers(-3, 3))
    def push(self, priority: int) -> None:
        self.made += 1
        sequence = make(self.made, priority)
        self.queue.push(sequence)
        self.model.append(sequence)
        self.model.sort(key=lambda s: (s.priority, s.request_id))

    @rule()
    def pop(self) -> None:
        expected = self.model.pop(0) if self.model else None
        assert self.queue.pop() is expected

    @precondition(lambda self: self.model)
    @rule(data=data())
    def remove(self, data: DataObject) -> None:
        sequence = data.draw(sampled_from(self.model))
        self.model.remove(sequence)
        self.queue.remove(sequence)

    @rule()
    def clear(self) -> None:
        self.model.clear()
        self.queue.clear()

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.queue) == len(self.model)
        assert self.queue._priorities == sorted({s.priority for s in self.model})


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(stateful_step_count=30)


def test_who_does_not_wait_cannot_leave() -> None:
    queue = RequestQueue()
    with pytest.raises(KeyError):
        queue.remove(make(1))
    queue.push(make(2))
    with pytest.raises(KeyError):
        queue.remove(make(1))
