"""An engine that dies is started again, as often as may be: who hears what meanwhile."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from helpers.fake_engines import DRAIN_S, GRACE_S, FakeEngine, open_world
from helpers.keeper_steps import KILLED, SETTLED_S, engines, finish, wait_launched, wait_ready
from helpers.scripted_engine import ask, open_stream
from trioengine.client.engine_status import EngineState
from trioengine.errors import ConfigError, EngineDeadError, QueueTimeoutError, UnavailableError
from trioengine.exit_codes import ExitCode
from trioengine.protocol import Fatal, Progress, Shutdown
from trioengine.supervisor import CUT_S, TOLD_S

# Restart ------------------------------------------------------------------------------------------


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


# Asked to stop ------------------------------------------------------------------------------------


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
