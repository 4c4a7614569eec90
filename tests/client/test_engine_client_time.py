"""Deadlines, the time in the queue, and the time that a drain may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from helpers.client_tools import engine_runs, fails_with, read_all, stepped
from helpers.scripted_engine import ScriptedEngine, ask, delta, open_client, open_stream
from trioengine.errors import DeadlineExceededError, QueueTimeoutError, UnavailableError
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from trio.testing import MockClock

STOP, ABORT = FinishReason.STOP, FinishReason.ABORT


# Time ---------------------------------------------------------------------------------------------


async def test_deadline_ends_a_request_in_whatever_phase(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine(max_num_seqs=1)
    async with open_client(engine) as client:
        deadline_s = trio.current_time() + 7
        decoding, prefilling, queued = (
            open_stream(client, deadline_s=deadline_s) for _ in range(3)
        )
        engine.say_outputs(delta(1, "a"))
        assert await decoding.receive() == [(0, delta(1, "a"))]
        for stream in (decoding, prefilling, queued):
            await fails_with(stream, DeadlineExceededError)
            assert trio.current_time() == deadline_s
        assert engine.aborts == [[1], [2]]
        assert client.metrics.requests_aborted.values[("deadline",)] == 3
        engine.say_outputs(delta(1, finish=ABORT), delta(2, finish=ABORT))
        await client.wait_idle()
        assert len(client._timers) == 0


async def test_deadline_does_not_touch_what_is_complete(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        stream = open_stream(client, deadline_s=trio.current_time() + 7)
        engine.say_outputs(delta(1, "abc", STOP))
        await trio.sleep(10)  # a slow reader
        assert await stream.receive() == [(0, delta(1, "abc", STOP))]
        assert client.metrics.requests_aborted.total == 0


async def test_queue_time_is_bounded_until_every_sequence_has_a_place(
    autojump_clock: MockClock,
) -> None:
    engine = ScriptedEngine(max_num_seqs=1)
    async with open_client(engine, max_queue_time_s=30) as client:
        placed = open_stream(client, ask(1))
        half = open_stream(client, ask(2))
        begin_s = trio.current_time()
        await fails_with(half, QueueTimeoutError)
        assert trio.current_time() == begin_s + 30
        assert engine.aborts == [[2]]
        assert client.metrics.requests_aborted.values[("queue_timeout",)] == 1
        await trio.sleep(100)
        assert placed.error is None


async def test_queue_time_ends_with_the_wait(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine(max_num_seqs=1)
    async with open_client(engine, max_queue_time_s=30) as client:
        open_stream(client, ask(2))
        waiting = open_stream(client)
        engine.say_outputs(delta(1, "a", STOP))
        await trio.sleep(100)
        assert waiting.error is None
        assert engine.added == [1, 2, 3]


# Draining -----------------------------------------------------------------------------------------


async def test_drain_waits_for_every_stream_and_then_aborts_the_rest(
    autojump_clock: MockClock,
) -> None:
    engine = stepped(max_num_seqs=2)
    async with open_client(engine) as client, trio.open_nursery() as nursery:
        await client.wait_idle()  # nothing yet
        await nursery.start(engine.run_freely)
        short, endless = open_stream(client), open_stream(client, ask(8, max_tokens=900))
        client.status.mark_draining()
        assert await read_all(short) == [5]
        with trio.move_on_after(1) as patience:
            await client.wait_idle()
        assert patience.cancelled_caught
        client.abort_all("shutdown")
        error = await fails_with(endless, UnavailableError)
        assert error.code == "draining"
        await client.wait_idle()
        assert engine.live == frozenset()
        assert client.metrics.requests_aborted.values[("shutdown",)] == 1
        nursery.cancel_scope.cancel()


async def test_drain_waits_until_the_last_delta_was_taken(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        stream = open_stream(client)
        engine.say_outputs(delta(1, "abc", STOP))
        with trio.move_on_after(1) as patience:
            await client.wait_idle()
        assert patience.cancelled_caught
        client.abort_all("shutdown")  # nothing is owed by the engine: it stays
        assert await stream.receive() == [(0, delta(1, "abc", STOP))]
        await client.wait_idle()


async def test_stall_fails_nobody(autojump_clock: MockClock) -> None:
    engine = stepped()
    async with open_client(engine) as client:
        stream = open_stream(client)
        client.status.mark_stalled("step 1 has been running for 60 s")
        await trio.sleep(1000)
        assert stream.error is None
        client.status.mark_recovered()
        await engine_runs(engine)
        assert await read_all(stream) == [5]
