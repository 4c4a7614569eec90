"""The table of a sequence, walked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from trioengine.client.sequence import (
    TRANSITIONS,
    Sequence,
    SequenceEvent,
    SequenceRequest,
    SequenceState,
)
from trioengine.errors import ProtocolError
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

STREAM: Any = None  # a sequence only carries it
PARAMS = SamplingParams(max_tokens=3)


def make() -> Sequence:
    return Sequence(STREAM, 0, 7, SequenceRequest([1, 2], PARAMS), priority=-1)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SequenceState, SequenceEvent)))
def test_every_pair_is_in_the_table_or_raises_and_changes_nothing(
    state: SequenceState, event: SequenceEvent
) -> None:
    sequence = make()
    sequence.state = state
    expected = TRANSITIONS.get((state, event))
    if expected is None:
        with pytest.raises(ProtocolError, match=f"sequence 7 is {state.name}"):
            sequence.advance(event)
        assert sequence.state is state
    else:
        assert sequence.advance(event) is state
        assert sequence.state is expected


def test_every_state_can_be_closed_and_every_end_is_final() -> None:
    assert {state for state, event in TRANSITIONS if event is SequenceEvent.CLOSE} == set(
        SequenceState
    )
    for end in (SequenceState.FINISHED, SequenceState.WITHDRAWN, SequenceState.FAILED):
        assert {to for (state, _), to in TRANSITIONS.items() if state is end} == {end}


def test_add_carries_everything_and_lets_go_of_the_prompt() -> None:
    sequence = make()
    assert sequence.take_add() == Add(7, [1, 2], PARAMS, -1)
    assert sequence.request is None
    with pytest.raises(ProtocolError, match="already"):
        sequence.take_add()
    assert repr(sequence) == "<Sequence 7 QUEUED>"


def test_add_that_may_be_sent_again_is_the_same_again() -> None:
    sequence = make()
    assert sequence.take_add(again=True) == sequence.take_add()
    assert sequence.request is None
