"""The life of a request is its table, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from helpers.requests import make_request
from trioengine.engine_proc.request import TRANSITIONS, RequestEvent, RequestStatus
from trioengine.errors import ProtocolError
from trioengine.outputs import FinishReason
from trioengine.sampling_params import SamplingParams


@pytest.mark.parametrize(("status", "event"), list(itertools.product(RequestStatus, RequestEvent)))
def test_a_move_is_in_the_table_or_raises_and_changes_nothing(
    status: RequestStatus, event: RequestEvent
) -> None:
    request = make_request([1, 2, 3], status=status)
    if (status, event) in TRANSITIONS:
        request.advance(event)
        assert request.status is TRANSITIONS[status, event]
    else:
        with pytest.raises(ProtocolError, match=event.value):
            request.advance(event)
        assert request.status is status


def test_nothing_leaves_finished() -> None:
    assert not any(status is RequestStatus.FINISHED for status, _ in TRANSITIONS)


def test_a_second_end_is_refused_and_does_not_change_the_reason() -> None:
    request = make_request([1, 2, 3])
    request.finish(FinishReason.STOP)
    with pytest.raises(ProtocolError):
        request.finish(FinishReason.ABORT)
    assert request.finish_reason is FinishReason.STOP


def test_counts_output_tokens_only() -> None:
    request = make_request([1, 2, 3], num_output_tokens=1, params=SamplingParams(min_tokens=2))
    assert request.num_output_tokens == 1
    assert request.must_not_end()
    request.tokens.append(4)
    assert not request.must_not_end()


def test_repr_tells_the_state() -> None:
    assert "waiting 0/3 computed" in repr(make_request([1, 2, 3]))
