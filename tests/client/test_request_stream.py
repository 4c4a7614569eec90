"""The consumer's end: one cell a sequence, order of news, errors, and a close that cannot fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
import trio
from hypothesis import given
from hypothesis.strategies import integers, lists
from trio.testing import assert_checkpoints, assert_no_checkpoints, wait_all_tasks_blocked

from helpers.scripted_engine import ask, delta
from trioengine.client.request_stream import RequestStream, error_for
from trioengine.errors import (
    CancelledByUserError,
    DeadlineExceededError,
    EngineDeadError,
    InternalError,
    QueueTimeoutError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.metrics import AbortReason
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from trio.testing import MockClock

STOP = FinishReason.STOP


class Owner:
    """Keeps what a stream asks of it."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.forgotten = 0

    def close_stream(self, stream: RequestStream, reason: AbortReason) -> None:
        self.closed.append(reason)
        stream.discard()

    def forget_stream(self, stream: RequestStream) -> None:
        self.forgotten += 1


def make(num_sequences: int = 1) -> tuple[RequestStream, Owner]:
    owner = Owner()
    stream = RequestStream(
        owner, ask(num_sequences), first_id=7, key="", priority=0, arrived_s=0.0, opened_s=0.0
    )
    return stream, owner


def put(stream: RequestStream, index: int, text: str, finish: FinishReason | None = None) -> bool:
    return stream.put(stream.sequences[index], delta(7 + index, text, finish))


async def test_deltas_merge_while_the_consumer_is_behind() -> None:
    stream, _ = make(2)
    assert not put(stream, 1, "a")
    assert put(stream, 1, "b")
    assert not put(stream, 0, "x")
    assert put(stream, 1, "c", STOP)
    assert await stream.receive() == [(1, delta(8, "abc", STOP)), (0, delta(7, "x"))]
    assert not put(stream, 0, "y")
    assert await stream.receive() == [(0, delta(7, "y"))]


@given(lists(integers(0, 2), min_size=1, max_size=40))
def test_joined_deltas_are_the_text_whatever_the_pace(pace: list[int]) -> None:
    """0: a delta arrives; 1 and 2: the consumer looks."""
    stream, _ = make()
    joined, written = "", 0

    def look() -> None:
        nonlocal joined
        joined += "".join(d.text for _, d in stream._take())

    for step in pace:
        if step == 0:
            put(stream, 0, chr(97 + written % 26))
            written += 1
        elif stream._full:
            look()
    look()
    assert joined == "".join(chr(97 + i % 26) for i in range(written))


async def test_receive_waits_for_the_first_delta(autojump_clock: MockClock) -> None:
    stream, _ = make()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def consume() -> None:
            assert await stream.receive() == [(0, delta(7, "a"))]
            assert trio.current_time() == 3

        await trio.sleep(3)
        put(stream, 0, "a")


async def test_cancelled_receive_loses_nothing(autojump_clock: MockClock) -> None:
    stream, _ = make()
    with trio.move_on_after(1):
        await stream.receive()
    put(stream, 0, "a")
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.receive()
    assert scope.cancelled_caught  # before anything was taken
    assert await stream.receive() == [(0, delta(7, "a"))]


async def test_finished_when_every_terminal_was_handed_out() -> None:
    stream, owner = make(2)
    finished = []
    for index in range(2):
        put(stream, index, "a", STOP)
        finished.append(stream.finished)
        await stream.receive()
        finished.append(stream.finished)
    assert finished == [False, False, False, True]
    assert owner.forgotten == 1
    with pytest.raises(trio.EndOfChannel):
        await stream.receive()


async def test_iteration_ends_after_the_last_terminal() -> None:
    stream, _ = make(2)
    put(stream, 0, "a", STOP)
    put(stream, 1, "b", STOP)
    assert [deltas async for deltas in stream] == [
        [(0, delta(7, "a", STOP)), (1, delta(8, "b", STOP))]
    ]


async def test_what_has_arrived_comes_before_what_went_wrong() -> None:
    stream, _ = make()
    put(stream, 0, "a")
    stream.fail(EngineDeadError("killed by SIGKILL"))
    stream.fail(InternalError("something later"))
    assert await stream.receive() == [(0, delta(7, "a"))]
    for _ in range(2):  # again and again, each a copy: tracebacks don't pile up
        with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
            await stream.receive()
        assert caught.value is not stream.error


async def test_error_wakes_who_waits(autojump_clock: MockClock) -> None:
    stream, _ = make()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def consume() -> None:
            with pytest.raises(EngineDeadError):
                await stream.receive()

        await wait_all_tasks_blocked()
        stream.fail(EngineDeadError("killed by SIGKILL"))


async def test_wait_accepted_wants_every_sequence(autojump_clock: MockClock) -> None:
    stream, _ = make(2)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def consume() -> None:
            await stream.wait_accepted()
            assert trio.current_time() == 2

        await trio.sleep(1)
        stream.accept(stream.sequences[0])
        stream.accept(stream.sequences[0])
        await trio.sleep(1)
        stream.accept(stream.sequences[1])
    await stream.wait_accepted()


async def test_wait_accepted_raises_what_went_wrong() -> None:
    stream, _ = make()
    stream.accept(stream.sequences[0])
    stream.fail(EngineDeadError("killed by SIGKILL"))
    with pytest.raises(EngineDeadError):
        await stream.wait_accepted()


async def test_one_task_waits_at_a_time() -> None:
    stream, _ = make()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.receive()
        nursery.cancel_scope.cancel()


async def test_close_is_synchronous_and_happens_once() -> None:
    stream, owner = make()
    with assert_no_checkpoints():
        stream.close("deadline")
        stream.close("cancelled")
    assert owner.closed == ["deadline"]


async def test_leaving_the_block_closes_also_under_cancellation() -> None:
    stream, owner = make()
    put(stream, 0, "a")
    with trio.CancelScope() as scope, stream:
        scope.cancel()
        await trio.lowlevel.checkpoint()
    assert owner.closed == ["client_disconnect"]
    assert stream.sequences[0].cell is None  # what was not taken is forgotten


async def test_receive_and_wait_accepted_see_a_cancellation_even_if_there_is_news() -> None:
    stream, _ = make()
    stream.accept(stream.sequences[0])
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.wait_accepted()
    assert scope.cancelled_caught
    with assert_checkpoints(), trio.move_on_after(0):
        await stream.receive()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("client_disconnect", CancelledByUserError),
        ("slow_client", CancelledByUserError),
        ("cancelled", CancelledByUserError),
        ("deadline", DeadlineExceededError),
        ("queue_timeout", QueueTimeoutError),
        ("shutdown", UnavailableError),
    ],
)
def test_each_reason_has_its_error(reason: AbortReason, kind: type[TrioEngineError]) -> None:
    error = error_for(reason)
    assert type(error) is kind
    assert error.message
    if reason == "shutdown":
        assert error.code == "draining"


def test_no_reason_is_forgotten() -> None:
    assert all(error_for(reason) for reason in get_args(AbortReason))


def test_repr_tells_the_states() -> None:
    stream, _ = make(2)
    assert repr(stream) == "<RequestStream 7 QUEUED, 8 QUEUED>"


# All at once ------------------------------------------------------------------------------------


async def test_the_whole_comes_merged_once_everything_has_ended() -> None:
    stream, owner = make(2)
    got: list[object] = []

    async def consume() -> None:
        got.extend(await stream.receive_whole())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        await wait_all_tasks_blocked()
        put(stream, 0, "a")
        assert not put(stream, 0, "b")  # it is not behind, it gathers
        put(stream, 1, "x", STOP)
        await wait_all_tasks_blocked()
        assert not got
        put(stream, 0, "c", STOP)
    assert got == [(0, delta(7, "abc", STOP)), (1, delta(8, "x", STOP))]
    assert (stream.finished, owner.forgotten) == (True, 1)
    with pytest.raises(trio.EndOfChannel):
        await stream.receive_whole()


async def test_the_whole_fails_at_once_whatever_has_arrived() -> None:
    stream, _ = make()
    put(stream, 0, "a")
    stream.fail(EngineDeadError("killed"))
    with pytest.raises(EngineDeadError, match="killed"):
        await stream.receive_whole()


async def test_the_whole_that_was_closed_before_it_was_taken_is_an_error() -> None:
    stream, _ = make()
    put(stream, 0, "a", STOP)
    stream.close()
    stream.fail(error_for("cancelled"))
    with pytest.raises(CancelledByUserError):
        await stream.receive_whole()
