"""Open, read, close: against a script, and the real core in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import assert_no_checkpoints, wait_all_tasks_blocked

from helpers.client_tools import engine_runs, fails_with, read_all, stepped
from helpers.scripted_engine import ScriptedEngine, ask, delta, open_client, open_stream
from trioengine.client.engine_client import EngineClient, SequenceRequest
from trioengine.client.engine_status import EngineState
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import (
    CancelledByUserError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from trioengine.outputs import FinishReason
from trioengine.protocol import Abort, Accepted, Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio.testing import MockClock


STOP, ABORT, ERROR = FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR


# Opening ------------------------------------------------------------------------------------------


async def test_open_registers_charges_and_sends_without_a_checkpoint(
    autojump_clock: MockClock,
) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        with client.admission.reserve() as slot:
            with assert_no_checkpoints():
                stream = client.open_stream(ask(2), slot=slot, priority=5)
            assert client.admission.in_use == 2
            request = ask()[0]
            assert engine.sent == [
                Add(i, request.prompt_token_ids, request.params, 5) for i in (1, 2)
            ]
            with assert_no_checkpoints():
                stream.close()
            assert engine.aborts == [[1, 2]]


async def test_refused_request_leaves_nothing(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine, max_queue_sequences=3) as client:
        open_stream(client, ask(2))
        with client.admission.reserve() as slot:
            with pytest.raises(OverloadedError):
                client.open_stream(ask(2), slot=slot)
            with pytest.raises(DeadlineExceededError):
                client.open_stream(ask(1), slot=slot, deadline_s=trio.current_time())
            with pytest.raises(ValueError, match="at least one"):
                client.open_stream([], slot=slot)
        assert client.admission.in_use == 2
        assert engine.added == [1, 2]


@pytest.mark.parametrize("state", ["starting", "stalled", "draining", "stopped", "dead"])
async def test_request_is_refused_in_any_state_but_ready(
    state: str, autojump_clock: MockClock
) -> None:
    client = EngineClient()
    if state not in ("starting", "dead"):
        client.status.mark_ready()
    if state == "stalled":
        client.status.mark_stalled("no beat for 5 s")
    elif state == "draining":
        client.status.mark_draining()
    elif state == "stopped":
        client.status.mark_stopped()
    elif state == "dead":
        client.status.mark_dead("killed by SIGKILL")
    await trio.sleep(1)
    with client.admission.reserve() as slot, pytest.raises(UnavailableError) as caught:
        client.open_stream(ask(), slot=slot)
    assert caught.value.code == {"dead": "engine_dead", "stopped": "draining"}.get(state, state)


async def test_request_admitted_before_the_drain_is_still_served(
    autojump_clock: MockClock,
) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        early = client.admission.reserve()  # its body is being parsed
        await trio.sleep(1)
        client.status.mark_draining()
        await trio.sleep(1)
        client.open_stream(ask(), slot=early)
        with pytest.raises(UnavailableError) as caught:
            open_stream(client)
        assert caught.value.code == "draining"
        assert engine.added == [1]


async def test_engine_holds_at_most_twice_what_it_can_run(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine(max_num_seqs=2)
    async with open_client(engine) as client:
        first = open_stream(client, ask(3))
        late = open_stream(client, ask(2))
        urgent = open_stream(client, ask(2), priority=-1)
        last = open_stream(client, ask(1))
        assert engine.added == [1, 2, 3, 4]
        engine.say_outputs(delta(1, "a", STOP), delta(2, "b", STOP))
        await wait_all_tasks_blocked()
        assert engine.added == [1, 2, 3, 4, 6, 7]  # the urgent ones go first
        urgent.close()  # they keep their place until the engine has confirmed
        assert engine.aborts == [[6, 7]]
        assert engine.added == [1, 2, 3, 4, 6, 7]
        late.close()  # 5 was still queued: it costs the engine nothing
        assert engine.aborts == [[6, 7], [4]]
        engine.say_outputs(*(delta(i, finish=ABORT) for i in (4, 6, 7)))
        await wait_all_tasks_blocked()
        assert engine.added == [1, 2, 3, 4, 6, 7, 8]
        assert [len(s.sequences) for s in (first, last)] == [3, 1]


async def test_what_cannot_be_encoded_hurts_only_its_own_request(
    autojump_clock: MockClock,
) -> None:
    engine = stepped()
    async with open_client(engine) as client:
        healthy = open_stream(client)
        poisoned = open_stream(client, ask(2), priority=2**80)
        assert "OverflowError" in (await fails_with(poisoned, InternalError)).message
        await engine_runs(engine)
        assert await read_all(healthy) == [5]
        assert engine.live == frozenset()
        await client.wait_idle()


# Reading ------------------------------------------------------------------------------------------


async def test_reader_never_waits_for_a_consumer(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        slow, quick = open_stream(client), open_stream(client)
        for i in range(1000):
            engine.say_outputs(delta(1, "x"), delta(2, "y"), step=i)
            assert await quick.receive() == [(0, delta(2, "y"))]
        [(_, merged)] = await slow.receive()
        assert merged.text == "x" * 1000
        assert client.metrics.deltas_merged.value == 999


async def test_accepted_comes_before_any_step(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        stream = open_stream(client, ask(2))
        with trio.move_on_after(10) as scope:
            await stream.wait_accepted()
        assert scope.cancelled_caught
        engine.say(Accepted([1, 2]))
        await stream.wait_accepted()


async def test_bad_request_fails_alone_and_the_next_one_works(autojump_clock: MockClock) -> None:
    engine = stepped()
    async with open_client(engine) as client, trio.open_nursery() as nursery:
        await nursery.start(engine.run_freely)
        bad = open_stream(
            client, [ask()[0], SequenceRequest([10**6], SamplingParams(max_tokens=2))]
        )
        with pytest.raises(InvalidRequestError, match="token ids of the prompt"):
            await bad.wait_accepted()
        await bad.ended.wait()
        assert engine.live == frozenset()  # the good half was aborted
        assert await read_all(open_stream(client)) == [5]
        nursery.cancel_scope.cancel()


async def test_impossible_token_ends_one_request_of_two(autojump_clock: MockClock) -> None:
    engine = stepped(SimScript(num_blocks=256, max_model_len=1024, bad_token_at_step=3))
    async with open_client(engine) as client, trio.open_nursery() as nursery:
        await nursery.start(engine.run_freely)
        first, second = open_stream(client), open_stream(client)
        assert "vocabulary" in (await fails_with(first, InternalError)).message
        assert await read_all(second) == [5]
        nursery.cancel_scope.cancel()


# Closing ------------------------------------------------------------------------------------------


async def test_close_sends_one_frame_and_is_confirmed(autojump_clock: MockClock) -> None:
    engine = stepped()
    async with open_client(engine) as client:
        with open_stream(client, ask(3)) as stream:
            await wait_all_tasks_blocked()
            engine.turn()
            assert engine.live == {1, 2, 3}
            await trio.sleep(1)
        stream.close()
        assert list(engine.sent) == [Abort([1, 2, 3])]
        await trio.sleep(0.25)
        engine.turn()
        assert engine.live == frozenset()  # freed before anything else is scheduled
        await stream.ended.wait()
        metrics = client.metrics
        assert metrics.requests_aborted.values[("client_disconnect",)] == 1
        assert (metrics.abort_latency.count, metrics.abort_latency.sum) == (1, 0.25)


async def test_late_news_of_a_closed_request_hurt_nobody(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        stream = open_stream(client)
        stream.close("cancelled")
        engine.say(Accepted([1, 77]))
        engine.say_outputs(delta(1, "late"))
        engine.say_outputs(delta(1, "it had finished before", STOP))
        engine.say_outputs(delta(1, "", ABORT), delta(77, "of nobody"))
        await client.wait_idle()
        assert client.metrics.deltas_dropped.values == {("aborted",): 1, ("unknown",): 2}
        with pytest.raises(CancelledByUserError):
            await stream.receive()


async def test_engine_ignores_aborts_of_what_it_no_longer_has(autojump_clock: MockClock) -> None:
    """vLLM's test_failed_abort, with the outcome that is right: nothing happens."""
    engine = stepped()
    async with open_client(engine) as client, trio.open_nursery() as nursery:
        await nursery.start(engine.run_freely)
        await read_all(open_stream(client))
        for ids in ([1], [1, 1], [10**9]):  # finished, twice, never seen
            engine.send(Abort(ids))
        assert await read_all(open_stream(client)) == [5]
        assert client.metrics.aborts_ignored.value == 4
        assert client.status.state is EngineState.READY
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "phase", ["commands", "schedule", "build", "execute", "poll aborts", "apply", "send"]
)
@pytest.mark.parametrize("tokens", [1, 2, 50])
async def test_close_at_every_boundary_of_a_step(
    phase: str, tokens: int, autojump_clock: MockClock
) -> None:
    """Also of the step on which the request finishes: freed once, ended once, counted once."""
    engine = stepped()
    async with open_client(engine) as client:
        stream = open_stream(client, ask(2, max_tokens=tokens))
        bystander = open_stream(client, ask(1, max_tokens=3))
        if tokens > 1:
            engine.turn()
            await wait_all_tasks_blocked()
        engine.at(phase, stream.close)
        engine.turn()
        await wait_all_tasks_blocked()
        engine.turn()  # at the latest now it is gone
        assert engine.live <= {3}
        await engine_runs(engine)
        assert await read_all(bystander) == [3]
        await client.wait_idle()
        assert stream.ended.is_set()
        assert engine.free_blocks == engine.core.limits.num_blocks
        assert client.metrics.requests_aborted.total == client.metrics.abort_latency.count == 1
