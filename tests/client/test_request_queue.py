"""First in, first out within each priority, a fair share for each key; anybody may leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import (
    DataObject,
    binary,
    data,
    dictionaries,
    integers,
    lists,
    sampled_from,
)

from trioengine.client.request_queue import RequestQueue
from trioengine.client.sequence import Sequence, SequenceRequest
from trioengine.sampling_params import SamplingParams

STREAM: Any = None


def make(request_id: int, priority: int = 0, key: str = "") -> Sequence:
    return Sequence(STREAM, 0, request_id, SequenceRequest([1], SamplingParams()), priority, key)


def served(queue: RequestQueue, count: int) -> list[str]:
    """Return the keys of the next sequences."""
    taken = [queue.pop() for _ in range(count)]
    return [sequence.key for sequence in taken if sequence is not None]


class QueueMachine(RuleBasedStateMachine):
    """The queue against a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.model: list[Sequence] = []
        self.made = 0
        self.taken: Sequence | None = None

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
        self.taken = self.queue.pop()
        assert self.taken is expected

    @precondition(lambda self: self.taken is not None)
    @rule()
    def give_back(self) -> None:
        if self.taken is not None:
            self.queue.give_back(self.taken)
            self.model.append(self.taken)
            self.model.sort(key=lambda s: (s.priority, s.request_id))
            self.taken = None

    @precondition(lambda self: self.model)
    @rule(data=data())
    def remove(self, data: DataObject) -> None:
        sequence = data.draw(sampled_from(self.model))
        self.model.remove(sequence)
        self.queue.remove(sequence)

    @rule()
    def clear(self) -> None:
        self.model.clear()
        self.taken = None
        self.queue.clear()

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.queue) == len(self.model)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(stateful_step_count=30)


def test_who_does_not_wait_cannot_leave() -> None:
    queue = RequestQueue()
    with pytest.raises(KeyError):
        queue.remove(make(1))
    queue.push(make(2))
    with pytest.raises(KeyError):
        queue.remove(make(1))


def test_keys_take_turns_however_much_one_has_queued() -> None:
    queue = RequestQueue()
    for number in range(100):
        queue.push(make(number, priority=-number, key="greedy"))
    for number in range(100, 103):
        queue.push(make(number, key="modest"))
    assert sorted(served(queue, 6)) == ["greedy"] * 3 + ["modest"] * 3
    assert served(queue, 3) == ["greedy"] * 3


def test_a_key_is_served_by_its_weight() -> None:
    queue = RequestQueue({"heavy": 3.0})
    for number in range(40):
        queue.push(make(number, key="heavy"))
        queue.push(make(100 + number, key="light"))
    assert served(queue, 40).count("heavy") == 30


def test_what_is_given_back_costs_its_key_no_second_turn() -> None:
    queue = RequestQueue()
    for number in range(4):
        queue.push(make(number, key="a"))
        queue.push(make(10 + number, key="b"))
    first = queue.pop()
    assert first is not None
    queue.give_back(first)
    assert served(queue, 8) == ["a", "b"] * 4


def test_one_request_at_a_time_does_not_pass_those_who_wait() -> None:
    queue = RequestQueue()
    for number in range(10):
        queue.push(make(number, key="waits"))
    queue.push(make(100, key="returns"))
    assert served(queue, 2) == ["waits", "returns"]
    order = []
    for number in range(101, 109):
        queue.push(make(number, key="returns"))
        order += served(queue, 1)
    assert order.count("waits") == 4


def test_time_without_waiting_is_no_credit() -> None:
    queue = RequestQueue()
    for number in range(50):
        queue.push(make(number, key="early"))
    served(queue, 20)
    for number in range(100, 150):
        queue.push(make(number, key="late"))
    assert served(queue, 20).count("late") == 10


@given(data=data(), weights=dictionaries(sampled_from("abc"), sampled_from([0.5, 1.0, 2.0, 7.0])))
def test_nobody_starves(data: DataObject, weights: dict[str, float]) -> None:
    """Between two turns of a key that waits, no other gets more than its weight's part and one."""
    queue = RequestQueue(weights)
    keys = "abc" * 60 + "".join(data.draw(lists(sampled_from("abc"), min_size=30, max_size=120)))
    # All priorities in one draw: hundreds of draws would take longer than everything else.
    priorities = data.draw(binary(min_size=len(keys), max_size=len(keys)))
    for number, (key, priority) in enumerate(zip(keys, priorities, strict=True)):
        queue.push(make(number, priority=priority % 19 - 9, key=key))
    order = served(queue, 90)
    for key in "abc":
        for other in set("abc") - {key}:
            bound = weights.get(other, 1.0) / weights.get(key, 1.0) + 1
            turns = [place for place, who in enumerate(order) if who == key]
            for begin, end in zip([-1, *turns], turns, strict=False):
                assert order[begin + 1 : end].count(other) <= bound
