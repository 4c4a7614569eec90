"""An engine that dies is started again, as often as may be: who hears what meanwhile."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from helpers.fake_engines import DRAIN_S, GRACE_S, FakeEngine, World, open_world
from helpers.scripted_engine import ask, delta, open_stream
from trioengine.client.engine_status import EngineState
from trioengine.errors import (
    ConfigError,
    EngineDeadError,
    QueueTimeoutError,
    UnavailableError,
)
from trioengine.exit_codes import ExitCode
from trioengine.heartbeat import Heartbeat
from trioengine.outputs import FinishReason
from trioengine.process.heartbeat_watch import watch_heartbeat
from trioengine.protocol import Fatal, Progress, Shutdown
from trioengine.supervisor import CUT_S, TOLD_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.client.request_stream import RequestStream

KILLED = "the engine process was killed by SIGKILL"
STOP = FinishReason.STOP
SETTLED_S = 0.06


def engines(number: int, **options: bool) -> list[FakeEngine]:
    return [FakeEngine(**options) for _ in range(number)]


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - virtual time costs nothing
        await trio.sleep(0.01)


async def wait_launched(world: World, number: int) -> FakeEngine:
    """Return the engine of that number once it has been launched."""
    await wait_until(lambda: len(world.launched) >= number)
    return world.launched[number - 1]


async def wait_ready(world: World, number: int) -> None:
    await wait_launched(world, number)
    await wait_until(lambda: world.server.status.state is EngineState.READY)


async def finish(world: World, stream: RequestStream, text: str = "all") -> str:
    """Let the present engine end the stream's only sequence; return what its client gets."""
    await trio.testing.wait_all_tasks_blocked()
    world.engine.scripted.say_outputs(delta(stream.sequences[0].request_id, text, STOP))
    return (await stream.receive())[0][1].text


# Restart -----------------------------------------------------------------------------------------


async def test_a_death_costs_what_ran_and_nothing_else(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(*engines(2), engine_restarts=1) as world:
        server = world.server
        running = open_stream(server.client)
        await trio.testing.wait_all_tasks_blocked()
        world.engine.die(KILLED)
        with pytest.raises(EngineDeadError, match="SIGKILL") as failed:
            await running.receive()
        assert (failed.value.code, failed.value.retry_after_s) == ("restarting", 1.0)
        assert (server.status.state, server.status.reason) == (EngineState.RESTARTING, KILLED)
        assert not server.status.dead.is_set()
        waiting = open_stream(server.client)
        await wait_ready(world, 2)
        assert await finish(world, waiting) == "all"
        assert world.launched[0].closed
        assert not world.launched[1].closed
        assert server.client.metrics.engine_restarts.value == 1
        assert not world.ended.is_set()
    assert any("SIGKILL" in record.message for record in caplog.records)


async def test_whoever_waits_for_a_place_when_the_engine_dies_waits_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(2), engine_restarts=1) as world:
        streams = [open_stream(world.server.client) for _ in range(12)]  # the engine holds 8
        await trio.testing.wait_all_tasks_blocked()
        world.engine.die(KILLED)
        for stream in streams[:8]:
            with pytest.raises(EngineDeadError):
                await stream.receive()
        await wait_ready(world, 2)
        for stream in streams[8:]:
            assert await finish(world, stream) == "all"
        assert world.engine.scripted.added == [9, 10, 11, 12]


async def test_a_request_of_many_sequences_fails_as_a_whole(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(2), engine_restarts=1) as world:
        many = open_stream(world.server.client, ask(12))
        await trio.testing.wait_all_tasks_blocked()
        world.engine.die(KILLED)
        with pytest.raises(EngineDeadError):
            await many.receive()
        assert many.ended.is_set()
        await wait_ready(world, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.scripted.added == []


async def test_waiting_for_the_next_engine_is_bounded_by_the_queue_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    hung = FakeEngine(ready=False)
    async with open_world(FakeEngine(), hung, engine_restarts=1, max_queue_time_s=5.0) as world:
        world.engine.die(KILLED)
        await trio.sleep(SETTLED_S)
        began_s = trio.current_time()
        with pytest.raises(QueueTimeoutError):
            await open_stream(world.server.client).receive()
        assert trio.current_time() - began_s == pytest.approx(5.0)
        assert world.launched[1] is hung


async def test_too_many_deaths_end_the_server_as_the_first_would_have(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(*engines(3), engine_restarts=2) as world:
        for number in (1, 2, 3):
            await wait_ready(world, number)
            running = open_stream(world.server.client)
            await trio.testing.wait_all_tasks_blocked()
            died_s = trio.current_time()
            world.engine.die(f"death {number}")
            with pytest.raises(EngineDeadError, match=f"death {number}") as failed:
                await running.receive()
        assert failed.value.code == "engine_dead"
        assert world.server.status.state is EngineState.DEAD
        await world.ended.wait()
        assert trio.current_time() == pytest.approx(died_s + GRACE_S, abs=0.1)
    assert type(world.error) is EngineDeadError
    assert str(world.error) == "death 3"
    assert world.last_resort.code == ExitCode.ENGINE_DIED
    logged = " ".join(record.message for record in caplog.records)
    assert all(f"death {number}" in logged for number in (1, 2, 3))


async def test_the_wait_before_a_start_grows(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(*engines(4), engine_restarts=3) as world:
        waits = []
        for number in (1, 2, 3):
            await wait_ready(world, number)
            world.engine.die(KILLED)
            died_s = trio.current_time()
            await wait_launched(world, number + 1)
            waits.append(trio.current_time() - died_s)
    assert waits == pytest.approx([0.5, 1.0, 2.0], abs=0.1)


@pytest.mark.parametrize("how", ["exit", "fatal", "hang", "no launch"])
async def test_a_start_that_fails_is_a_death_that_counts(
    how: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    second = [] if how == "no launch" else [FakeEngine(ready=False)]
    async with open_world(FakeEngine(), *second, engine_restarts=1, start_timeout_s=20.0) as world:
        world.engine.die(KILLED)
        await trio.sleep(SETTLED_S)
        waiting = open_stream(world.server.client)
        if second:
            engine = await wait_launched(world, 2)
            await trio.testing.wait_all_tasks_blocked()
            if how == "fatal":
                engine.scripted.say(Fatal("no memory", "", refused=True))
            if how != "hang":
                engine.die("the engine process exited with status 9")
        with pytest.raises(EngineDeadError) as failed:
            await waiting.receive()
        assert failed.value.code == "engine_dead"
        await world.ended.wait()
    cause = {
        "exit": "status 9",
        "fatal": "no memory",
        "hang": "within 20 s",
        "no launch": "no more",
    }
    assert type(world.error) is EngineDeadError
    assert cause[how] in str(world.error)
    assert world.last_resort.code == ExitCode.ENGINE_DIED


async def test_a_start_that_fails_is_tried_again(autojump_clock: trio.testing.MockClock) -> None:
    crew = [FakeEngine(), FakeEngine(ready=False), FakeEngine()]
    async with open_world(*crew, engine_restarts=2) as world:
        world.engine.die(KILLED)
        await trio.sleep(SETTLED_S)
        waiting = open_stream(world.server.client)
        (await wait_launched(world, 2)).die("the engine process exited with status 9")
        await trio.testing.wait_all_tasks_blocked()
        assert "status 9" in world.server.status.reason
        await wait_ready(world, 3)
        assert await finish(world, waiting) == "all"


async def test_the_first_start_is_not_tried_again(autojump_clock: trio.testing.MockClock) -> None:
    """What never worked is a mistake in the configuration, and waiting does not mend it."""
    async with open_world(FakeEngine(ready=False), *engines(3), engine_restarts=3) as world:
        await trio.testing.wait_all_tasks_blocked()
        world.engine.scripted.say(Fatal("no such option", "", refused=True))
        world.engine.die("the engine process exited with status 1")
        await world.ended.wait()
    assert type(world.error) is ConfigError
    assert len(world.launched) == 1


async def test_the_start_of_the_next_engine_is_told(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(FakeEngine(), FakeEngine(ready=False), engine_restarts=1) as world:
        world.engine.die(KILLED)
        engine = await wait_launched(world, 2)
        engine.scripted.say(Progress("load", 0.5))
        await trio.testing.wait_all_tasks_blocked()
        status = world.server.status
        assert (status.state, status.progress) == (EngineState.RESTARTING, ("load", 0.5))
        with pytest.raises(UnavailableError) as refused:
            await world.server.client.call("start_profile", {})
        assert refused.value.code == "restarting"
        engine.scripted.say_ready()
        await wait_ready(world, 2)
        assert status.progress is None


# Asked to stop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["settling", "backoff", "loading"])
async def test_a_stop_without_an_engine_waits_for_none(
    when: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(FakeEngine(), FakeEngine(ready=False), engine_restarts=1) as world:
        world.engine.die(KILLED)
        await trio.testing.wait_all_tasks_blocked()
        if when != "settling":
            await trio.sleep(SETTLED_S)
        waiting = open_stream(world.server.client)
        if when == "loading":
            await wait_launched(world, 2)
        began_s = trio.current_time()
        world.server.stop()
        assert world.server.status.state is EngineState.DRAINING
        with pytest.raises(UnavailableError) as failed:
            await waiting.receive()
        assert failed.value.code == "draining"
        await world.ended.wait()
        assert trio.current_time() - began_s <= TOLD_S + CUT_S
        assert len(world.launched) == (2 if when == "loading" else 1)
    assert world.error is None
    assert world.last_resort.code == ExitCode.ASKED


async def test_the_next_engine_drains_as_the_first_does(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(2), engine_restarts=1) as world:
        world.engine.die(KILLED)
        await wait_ready(world, 2)
        stream = open_stream(world.server.client)
        world.server.stop()
        await trio.sleep(DRAIN_S / 2)
        assert await finish(world, stream) == "all"
        await world.ended.wait()
    assert world.error is None
    assert Shutdown() in world.launched[1].scripted.sent


async def test_a_death_while_draining_is_the_end(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(*engines(2), engine_restarts=1) as world:
        open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        world.server.stop()
        world.engine.die(KILLED)
        await world.ended.wait()
    assert type(world.error) is EngineDeadError
    assert len(world.launched) == 1


# Replay ------------------------------------------------------------------------------------------


async def test_what_nobody_has_seen_an_answer_to_is_sent_once_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(2), engine_restarts=1, replay=True) as world:
        unseen, untaken, seen, later = (open_stream(world.server.client) for _ in range(4))
        await trio.testing.wait_all_tasks_blocked()
        sent = world.engine.scripted.sent[:2]
        world.engine.scripted.say_outputs(delta(2, "lost"), delta(3, "a"))
        await trio.testing.wait_all_tasks_blocked()
        assert (await seen.receive())[0][1].text == "a"
        later.close()
        world.engine.die(KILLED)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await seen.receive()
        await wait_ready(world, 2)
        after = open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.scripted.sent[:2] == sent  # the same, prompt and id and order
        assert world.engine.scripted.added == [1, 2, 5]
        assert await finish(world, untaken, "whole") == "whole"
        assert await finish(world, unseen) == "all"
        assert await finish(world, after) == "all"


async def test_a_poison_request_kills_twice_and_never_thrice(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(5), engine_restarts=4, replay=True) as world:
        poison = open_stream(world.server.client)
        for number in (1, 2):
            await wait_ready(world, number)
            await trio.testing.wait_all_tasks_blocked()
            assert world.engine.scripted.added == [1]
            world.engine.die(KILLED)
        with pytest.raises(EngineDeadError):
            await poison.receive()
        await wait_ready(world, 3)
        await trio.sleep(10.0)
        assert world.engine.scripted.added == []
        assert len(world.launched) == 3


async def test_replayed_requests_go_before_those_that_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(2), engine_restarts=1, replay=True) as world:
        for _ in range(10):
            open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.scripted.added == [1, 2, 3, 4, 5, 6, 7, 8]
        world.engine.die(KILLED)
        await wait_ready(world, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.scripted.added == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_the_time_in_the_queue_begins_anew_with_a_replay(
    autojump_clock: trio.testing.MockClock,
) -> None:
    crew = [FakeEngine(), FakeEngine(ready=False)]
    async with open_world(*crew, engine_restarts=1, replay=True, max_queue_time_s=5.0) as world:
        streams = [open_stream(world.server.client) for _ in range(9)]
        await trio.testing.wait_all_tasks_blocked()
        world.engine.scripted.say_outputs(delta(1, "a", STOP))  # the ninth gets its place
        await trio.sleep(4.0)
        world.engine.die(KILLED)
        await trio.sleep(SETTLED_S)
        began_s = trio.current_time()
        with pytest.raises(QueueTimeoutError):
            await streams[8].receive()
        assert trio.current_time() - began_s == pytest.approx(5.0, abs=0.1)


async def test_a_deadline_holds_through_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    crew = [FakeEngine(), FakeEngine(ready=False)]
    async with open_world(*crew, engine_restarts=1, replay=True) as world:
        deadline_s = trio.current_time() + 0.3  # within the wait before the start
        stream = open_stream(world.server.client, deadline_s=deadline_s)
        await trio.testing.wait_all_tasks_blocked()
        world.engine.die(KILLED)
        await stream.ended.wait()
        assert trio.current_time() == pytest.approx(deadline_s)
        assert stream.error is not None
        assert stream.error.code == "deadline_exceeded"


# Stall -------------------------------------------------------------------------------------------


@pytest.fixture
def pages_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trioengine.process.engine_keeper.watch_heartbeat",
        partial(watch_heartbeat, clock=trio.current_time),
    )


def hung(engine: FakeEngine) -> None:
    engine.read_heartbeat = lambda: Heartbeat("step", 7, 0.0, 1e12)


def silent(engine: FakeEngine) -> None:
    engine.read_heartbeat = lambda: Heartbeat("idle", 7, 0.0, 0.0)


@pytest.mark.parametrize(
    ("stall", "reason"), [(hung, "step 7 has been running"), (silent, "no sign of life")]
)
async def test_a_stalled_engine_is_killed_and_started_again(
    stall: Callable[[FakeEngine], None],
    reason: str,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    pages_in_virtual_time: None,
) -> None:
    async with open_world(*engines(2), engine_restarts=1, on_stall="restart") as world:
        running = open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        stall(world.engine)
        with pytest.raises(EngineDeadError, match=reason):
            await running.receive()
        assert world.server.status.state is EngineState.RESTARTING
        await wait_ready(world, 2)
        assert await finish(world, open_stream(world.server.client)) == "all"
        assert [engine.killed for engine in world.launched] == [True, False]
    assert any(reason in record.message for record in caplog.records)


async def test_a_stalled_engine_may_be_the_end(
    autojump_clock: trio.testing.MockClock, pages_in_virtual_time: None
) -> None:
    async with open_world(*engines(2), engine_restarts=1, on_stall="exit") as world:
        hung(world.engine)
        await world.ended.wait()
    assert type(world.error) is EngineDeadError
    assert str(world.error).startswith("the engine stalled: step 7 has been running")
    assert [engine.killed for engine in world.launched] == [True]


async def test_a_stall_that_is_only_reported_passes(
    autojump_clock: trio.testing.MockClock, pages_in_virtual_time: None
) -> None:
    async with open_world(*engines(2), engine_restarts=1) as world:
        well = world.engine.read_heartbeat
        hung(world.engine)
        await trio.sleep(100.0)
        states = [world.server.status.state]
        world.engine.read_heartbeat = well
        await trio.sleep(1.0)
        states.append(world.server.status.state)
        assert states == [EngineState.STALLED, EngineState.READY]
        assert len(world.launched) == 1


# Stall while it finishes what runs ---------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["exit", "restart"])
async def test_a_stall_ends_a_drain_long_before_its_time(
    wanted: str, autojump_clock: trio.testing.MockClock, pages_in_virtual_time: None
) -> None:
    """There is nothing to start another engine for: what is left of the drain is the death's."""
    options: dict[str, Any] = {"on_stall": wanted, "stall_timeout_s": 1.0}
    async with open_world(*engines(2), engine_restarts=1, **options) as world:
        running = open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        world.server.stop()
        hung(world.engine)
        began_s = trio.current_time()
        with pytest.raises(EngineDeadError, match="step 7 has been running"):
            await running.receive()
        await world.ended.wait()
        assert trio.current_time() - began_s <= GRACE_S + 2.0
        assert [engine.killed for engine in world.launched] == [True]
    assert str(world.error).startswith("the engine stalled: step 7 has been running")
    assert world.last_resort.code == ExitCode.ENGINE_DIED


@pytest.mark.parametrize("wanted", ["exit", "restart"])
async def test_a_stall_while_it_falls_asleep_is_acted_on(
    wanted: str, autojump_clock: trio.testing.MockClock, pages_in_virtual_time: None
) -> None:
    options: dict[str, Any] = {"on_stall": wanted, "stall_timeout_s": 1.0}
    async with open_world(*engines(2), engine_restarts=1, **options) as world:
        running = open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        hung(world.engine)
        with pytest.raises(EngineDeadError, match="step 7 has been running"):
            await world.server.client.nap.sleep(patience_s=DRAIN_S)
        with pytest.raises(EngineDeadError):
            await running.receive()
        assert trio.current_time() < 3.0
        if wanted == "restart":
            await wait_ready(world, 2)
            assert await finish(world, open_stream(world.server.client)) == "all"
        else:
            await world.ended.wait()
            assert str(world.error).startswith("the engine stalled: step 7 has been running")
        assert world.launched[0].killed


@pytest.mark.parametrize("finishing", ["draining", "sleeping"])
async def test_a_stall_of_an_engine_that_finishes_is_only_told_and_passes(
    finishing: str, autojump_clock: trio.testing.MockClock, pages_in_virtual_time: None
) -> None:
    async with (
        open_world(*engines(1), stall_timeout_s=1.0) as world,
        trio.open_nursery() as nursery,
    ):
        status = world.server.status
        running = open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        if finishing == "draining":
            world.server.stop()
        else:
            nursery.start_soon(world.server.client.nap.sleep, DRAIN_S)
        well = world.engine.read_heartbeat
        hung(world.engine)
        await trio.sleep(2.0)
        assert status.state == finishing
        assert "step 7 has been running" in status.stall
        world.engine.read_heartbeat = well
        await trio.sleep(1.0)
        assert (status.state, status.stall) == (finishing, "")
        assert await finish(world, running) == "all"
    assert world.error is None


async def test_an_engine_that_was_asked_to_leave_is_not_judged(
    autojump_clock: trio.testing.MockClock, pages_in_virtual_time: None
) -> None:
    stubborn = FakeEngine(obedient=False)
    async with open_world(stubborn, *engines(1), on_stall="exit", stall_timeout_s=0.1) as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.server.client.nap.sleep, DRAIN_S)
            await trio.testing.wait_all_tasks_blocked()
            assert Shutdown() in stubborn.scripted.sent
            hung(stubborn)
        assert not stubborn.killed
        assert world.server.status.state is EngineState.SLEEPING
