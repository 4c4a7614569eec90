"""Places: reserved on arrival, charged all or none, given back once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from hypothesis.strategies import integers

from trioengine.client.admission import Admission, Slot
from trioengine.errors import InvalidRequestError, OverloadedError, ProtocolError

if TYPE_CHECKING:
    from trio.testing import MockClock

CAPACITY = 8


async def test_reserve_charge_release() -> None:
    admission = Admission(CAPACITY)
    with admission.reserve() as slot:
        assert slot.arrived_s == pytest.approx(trio.current_time(), abs=1)
        assert admission.in_use == 1
        slot.charge(5)
        assert admission.in_use == 5
        slot.charge(5)  # again: nothing changes
        assert admission.in_use == 5
        assert not admission.full
    assert admission.in_use == 0
    slot.release()
    assert admission.in_use == 0


async def test_full_is_refused_with_a_time_to_come_back() -> None:
    admission = Admission(2)
    admission.reserve()
    admission.reserve()
    assert admission.full
    with pytest.raises(OverloadedError, match="2 of 2") as caught:
        admission.reserve()
    assert caught.value.retry_after_s > 0
    assert admission.in_use == 2


async def test_charge_is_all_or_none() -> None:
    admission = Admission(4)
    slot, other = admission.reserve(), admission.reserve()
    other.charge(2)
    with pytest.raises(OverloadedError):
        slot.charge(3)
    assert admission.in_use == 3
    slot.charge(2)
    assert admission.in_use == 4


async def test_what_can_never_fit_is_the_clients_mistake_not_overload() -> None:
    admission = Admission(4)
    with admission.reserve() as slot, pytest.raises(InvalidRequestError, match="at most 4"):
        slot.charge(5)
    assert admission.in_use == 0


async def test_released_slot_cannot_be_charged() -> None:
    slot = Admission(4).reserve()
    slot.release()
    with pytest.raises(ProtocolError, match="released"):
        slot.charge(1)


async def test_a_server_without_places_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Admission(0)


class AdmissionMachine(RuleBasedStateMachine):
    """No history of reserve, charge and release loses or doubles a place."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(CAPACITY)
        self.held: dict[Slot, int] = {}

    @rule(target=slots)
    def reserve(self) -> Slot | None:
        room = self.admission.in_use < CAPACITY
        assert self.admission.full == (not room)
        try:
            slot = self.admission.reserve()
        except OverloadedError:
            assert not room
            return None
        assert room
        self.held[slot] = 1
        return slot

    @rule(slot=slots, num=integers(1, CAPACITY + 2))
    def charge(self, slot: Slot | None, num: int) -> None:
        if slot is None:
            return
        others = self.admission.in_use - self.held[slot]
        try:
            slot.charge(num)
        except InvalidRequestError:
            assert num > CAPACITY
        except OverloadedError:
            assert others + num > CAPACITY
        else:
            assert others + num <= CAPACITY
            self.held[slot] = num

    @rule(slot=consumes(slots))
    def release(self, slot: Slot | None) -> None:
        if slot is not None:
            slot.release()
            slot.release()
            del self.held[slot]

    @invariant()
    def places_are_conserved(self) -> None:
        assert self.admission.in_use == sum(self.held.values()) <= CAPACITY


def test_places_are_conserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio, "current_time", lambda: 0.0)  # no Trio run here
    AdmissionMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
    AdmissionMachine.TestCase("runTest").runTest()


async def test_the_time_to_come_back_follows_the_rate_of_late(mock_clock: MockClock) -> None:
    admission = Admission(100)
    slots = [admission.reserve() for _ in range(100)]
    assert admission.retry_after_s(1) == 60.0  # nobody has ever left
    for slot in slots[:50]:  # ten a second
        mock_clock.jump(0.1)
        slot.release()
        slots.append(admission.reserve())
    assert admission.retry_after_s(1) == 1.0
    assert admission.retry_after_s(100) == pytest.approx(100 / 4, rel=0.1)  # 4: not yet all of 10
    mock_clock.jump(60)
    assert admission.retry_after_s(1) > 30
