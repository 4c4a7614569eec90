"""How an incarnation begins and ends: sensors, causes, last deltas, control calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import assert_no_checkpoints, wait_all_tasks_blocked

from helpers.client_tools import fails_with, stepped
from helpers.scripted_engine import ScriptedEngine, ask, delta, open_client, open_stream
from trioengine.client.engine_client import EngineClient
from trioengine.client.engine_status import EngineState
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import (
    EngineDeadError,
    EngineStartError,
    ProtocolError,
    UnavailableError,
)
from trioengine.outputs import FinishReason
from trioengine.protocol import (
    PROTOCOL_VERSION,
    Call,
    CallResult,
    Fatal,
    Hello,
    Progress,
)

if TYPE_CHECKING:
    from trio.testing import MockClock


STOP, ABORT, ERROR = FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR


SETTLE_S = 0.05  # the contract
EXIT_S = 1.0  # for a process that has closed its wire and does not end

# Death --------------------------------------------------------------------------------------


async def test_every_open_request_gets_the_cause_and_later_ones_at_once(
    autojump_clock: MockClock,
) -> None:
    """vLLM's test_evil_forward and test_batch_error: a step raises with ten requests running."""
    engine = stepped(SimScript(num_blocks=256, max_model_len=1024, fail_at_step=4))
    async with open_client(engine) as client, trio.open_nursery() as nursery:
        streams = [open_stream(client, ask(1, max_tokens=250)) for _ in range(10)]
        await nursery.start(engine.run_freely)
        for stream in streams:
            error = await fails_with(stream, EngineDeadError)
            assert "scripted failure of step 4" in error.message
        assert client.status.state is EngineState.DEAD
        assert "RuntimeError" in client.status.traceback
        with pytest.raises(EngineDeadError, match="scripted failure"), assert_no_checkpoints():
            open_stream(client)
        with pytest.raises(EngineDeadError, match="scripted failure"):
            await client.call("stop_profile", {})
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("noticed_by", ["exit", "send", "wire"])
async def test_killed_engine_is_noticed_by_whichever_sensor(
    noticed_by: str, autojump_clock: MockClock
) -> None:
    """vLLM's test_engine_process_death. The process's end is reported 20 ms after the wire's."""
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        streams = [open_stream(client) for _ in range(8)]
        engine.say_outputs(delta(1, "a"))
        await wait_all_tasks_blocked()
        begin_s = trio.current_time()
        engine.gone = True
        if noticed_by == "send":
            streams[7].close()
        elif noticed_by == "wire":
            engine.leave()
        assert (client.status.state is EngineState.DEAD) == (noticed_by == "send")
        await trio.sleep(0.02)
        client.status.report_exit("the engine process was killed by SIGKILL")
        assert await streams[0].receive() == [(0, delta(1, "a"))]
        for stream in streams[:7]:
            error = await fails_with(stream, EngineDeadError)
            assert error.message == "the engine process was killed by SIGKILL"
        assert trio.current_time() <= begin_s + 0.02 + SETTLE_S
        if noticed_by == "wire":  # nothing was left to wait for
            assert trio.current_time() == begin_s + 0.02
        assert client.metrics.requests_aborted.total == (noticed_by == "send")


@pytest.mark.parametrize("exit_s", [0.06, 0.5, 0.99])
async def test_the_cause_waits_for_the_end_of_a_process_that_takes_its_time(
    exit_s: float, autojump_clock: MockClock
) -> None:
    """The kernel closes the sockets of what it kills first, and is busy with others then."""
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        stream = open_stream(client)
        engine.leave()
        await trio.sleep(exit_s)
        assert not stream.ended.is_set()
        client.status.report_exit("the engine process was killed by SIGKILL")
        error = await fails_with(stream, EngineDeadError)
        assert error.message == "the engine process was killed by SIGKILL"
        assert trio.current_time() == exit_s


async def test_death_in_silence_is_told_after_a_second(autojump_clock: MockClock) -> None:
    """Nobody reports an exit, nothing comes over the wire: a send finds nobody, that is all."""
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        engine.gone = True
        stream = open_stream(client)
        begin_s = trio.current_time()
        error = await fails_with(stream, EngineDeadError)
        assert "wire" in error.message
        assert trio.current_time() == begin_s + EXIT_S


async def test_request_whose_last_delta_was_on_its_way_ends_properly(
    autojump_clock: MockClock,
) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        lucky, unlucky = open_stream(client), open_stream(client)
        client.status.report_exit("the engine process was killed by SIGKILL")
        engine.say_outputs(delta(1, "all of it", STOP))
        engine.leave()
        assert await lucky.receive() == [(0, delta(1, "all of it", STOP))]
        assert lucky.finished
        await fails_with(unlucky, EngineDeadError)


async def test_last_word_on_the_wire_beats_the_exit_status(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        stream = open_stream(client)
        client.status.report_exit("the engine process exited with status 1")
        engine.say(Fatal("CUDA out of memory", "Traceback …"))
        engine.leave()
        error = await fails_with(stream, EngineDeadError)
        assert error.message == "CUDA out of memory"


async def test_idle_engine_that_dies_is_noticed(autojump_clock: MockClock) -> None:
    """vLLM's test_failed_health_check: nobody asks, the status knows."""
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        engine.say(Fatal("the runner failed its own check", ""))
        await client.status.wait_settled()
        assert client.status.reason == "the runner failed its own check"
        refusal = client.status.refusal()
        assert isinstance(refusal, EngineDeadError)


@pytest.mark.parametrize(
    "nonsense",
    [
        [Hello(PROTOCOL_VERSION + 1, "")],
        [ScriptedEngine()._said[0]],  # Ready again
    ],
)
async def test_engine_that_breaks_the_protocol_is_dead_to_us(
    nonsense: list[Hello], autojump_clock: MockClock
) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        stream = open_stream(client)
        engine.say(*nonsense)
        error = await fails_with(stream, EngineDeadError)
        assert "broke the protocol" in error.message


async def test_queued_requests_fail_too_and_nothing_is_sent_to_a_dead_engine(
    autojump_clock: MockClock,
) -> None:
    engine = ScriptedEngine(max_num_seqs=1)
    async with open_client(engine) as client:
        streams = [open_stream(client) for _ in range(5)]
        client.status.report_exit("killed")
        engine.say_outputs(delta(1, "a", STOP))
        for stream in streams[1:]:
            await fails_with(stream, EngineDeadError)
        assert engine.added == [1, 2]
        for stream in streams:
            stream.close()
        assert engine.aborts == []


# Incarnations -------------------------------------------------------------------------------


async def test_start_reports_ready_and_progress(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine(ready=False)
    client = EngineClient()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def load() -> None:
            engine.say(Hello(PROTOCOL_VERSION, "whatever"), Progress("load", 0.5))
            await trio.sleep(3)
            assert client.status.progress == ("load", 0.5)
            with pytest.raises(UnavailableError):
                await client.call("start_profile", {})
            engine.say_ready()

        ready = await nursery.start(client.run_incarnation, engine)
        assert (client.model, client.limits) == (ready.model, ready.limits)
        assert trio.current_time() == 3
        assert client.status.state is EngineState.STARTING  # the caller says when
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["fatal", "exit", "wire", "stopped"])
async def test_engine_that_ends_before_it_is_ready(how: str, autojump_clock: MockClock) -> None:
    """vLLM's test_mp_crash_detection, within a second instead of 60."""
    engine = ScriptedEngine(ready=False)
    client = EngineClient()

    async def end() -> None:
        await trio.sleep(2)
        if how == "fatal":
            engine.say(Fatal("no such checkpoint", ""))
        elif how == "exit":
            client.status.report_exit("exited with status 1")
        elif how == "stopped":
            client.status.mark_stopped()
        engine.leave()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        with pytest.raises(EngineStartError) as caught:
            await nursery.start(client.run_incarnation, engine)
    assert caught.value.message == client.status.reason
    assert trio.current_time() <= 2 + (EXIT_S if how == "wire" else SETTLE_S)


async def test_engine_that_leaves_as_asked_is_no_death(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    client = EngineClient()
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run_incarnation, engine)
        client.status.mark_ready()
        stream = open_stream(client)
        client.status.mark_stopped()
        engine.leave()
    assert (await fails_with(stream, UnavailableError)).code == "draining"
    assert not client.status.dead.is_set()


async def test_cancelled_reader_leaves_nobody_waiting(autojump_clock: MockClock) -> None:
    async with open_client(ScriptedEngine()) as client:
        stream = open_stream(client)
    assert (await fails_with(stream, UnavailableError)).code == "draining"


async def test_one_incarnation_at_a_time(autojump_clock: MockClock) -> None:
    async with open_client(ScriptedEngine()) as client:
        with pytest.raises(ProtocolError, match="another"):
            await client.run_incarnation(ScriptedEngine())


async def test_ids_are_never_used_twice(autojump_clock: MockClock) -> None:
    """Nor are they the client's: a late abort can only hit what it was meant for."""
    client, seen = EngineClient(), []
    client.status.mark_ready()
    for _ in range(2):
        engine = ScriptedEngine()
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run_incarnation, engine)
            for _ in range(3):
                open_stream(client, ask(2))
            seen += engine.added
            nursery.cancel_scope.cancel()
    assert seen == list(range(1, 13))


# Control calls ------------------------------------------------------------------------------


async def test_calls_reach_the_engine_and_their_results_come_back(
    autojump_clock: MockClock,
) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def answer() -> None:
            await wait_all_tasks_blocked()
            assert engine.sent == [Call(1, "reset_prefix_cache", {})]
            engine.say(CallResult(1, 42))

        assert await client.call("reset_prefix_cache", {}) == 42


async def test_call_that_the_engine_never_answers_ends_with_it(autojump_clock: MockClock) -> None:
    engine = ScriptedEngine()
    async with open_client(engine) as client, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call() -> None:
            with trio.fail_after(1000), pytest.raises(EngineDeadError, match="SIGKILL"):
                await client.call("stop_profile", {})

        await wait_all_tasks_blocked()
        client.status.report_exit("killed by SIGKILL")
        engine.leave()
