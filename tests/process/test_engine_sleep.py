"""An engine is put to sleep and woken up: what runs, what comes meanwhile, what calls it off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers.fake_engines import FakeEngine, World, open_world
from helpers.scripted_engine import delta, open_stream
from trioengine.client.engine_status import EngineState
from trioengine.errors import EngineDeadError, InvalidRequestError, UnavailableError
from trioengine.exit_codes import ExitCode
from trioengine.outputs import FinishReason
from trioengine.protocol import Shutdown
from trioengine.supervisor import CUT_S, TOLD_S

if TYPE_CHECKING:
    from trio.testing import MockClock

    from trioengine.client.request_stream import RequestStream

KILLED = "the engine process was killed by SIGKILL"
PATIENCE_S = 20.0


def engines(number: int) -> list[FakeEngine]:
    return [FakeEngine() for _ in range(number)]


async def finish(world: World, stream: RequestStream) -> None:
    """Let the present engine end the stream's only sequence."""
    await wait_all_tasks_blocked()
    request_id = stream.sequences[0].request_id
    world.engine.scripted.say_outputs(delta(request_id, "all", FinishReason.STOP))
    assert (await stream.receive())[0][1].text == "all"


def state_of(world: World) -> EngineState:
    return world.server.status.state


async def test_asleep_the_engine_is_gone_and_awake_there_is_another(
    autojump_clock: MockClock,
) -> None:
    async with open_world(*engines(2)) as world:
        nap = world.server.client.nap
        await nap.sleep(PATIENCE_S)
        assert Shutdown() in world.launched[0].scripted.sent
        assert world.launched[0].closed
        states = [state_of(world)]
        with pytest.raises(UnavailableError) as refused:
            open_stream(world.server.client)
        assert (refused.value.code, refused.value.retry_after_s) == ("sleeping", None)
        await nap.sleep(PATIENCE_S)  # it does
        await trio.sleep(100.0)
        assert len(world.launched) == 1
        await nap.wake_up()
        await nap.wake_up()
        states.append(state_of(world))
        assert states == [EngineState.SLEEPING, EngineState.READY]
        await finish(world, open_stream(world.server.client))
        assert len(world.launched) == 2
        assert world.server.client.metrics.engine_restarts.value == 0
        assert not world.ended.is_set()


async def test_what_runs_ends_first_and_nothing_new_begins(autojump_clock: MockClock) -> None:
    async with open_world(*engines(1)) as world, trio.open_nursery() as nursery:
        running = open_stream(world.server.client)
        nursery.start_soon(world.server.client.nap.sleep, PATIENCE_S)
        await trio.sleep(PATIENCE_S / 2)
        with pytest.raises(UnavailableError) as refused:
            open_stream(world.server.client)
        assert refused.value.code == "sleeping"
        assert Shutdown() not in world.engine.scripted.sent
        await finish(world, running)
        await wait_all_tasks_blocked()
        assert world.launched[0].closed


async def test_what_does_not_end_in_time_keeps_it_awake(autojump_clock: MockClock) -> None:
    async with open_world(*engines(1)) as world:
        running = open_stream(world.server.client)
        began_s = trio.current_time()
        with pytest.raises(InvalidRequestError, match="still ran after 20 s") as refused:
            await world.server.client.nap.sleep(PATIENCE_S)
        assert trio.current_time() - began_s == pytest.approx(PATIENCE_S)
        assert refused.value.http_status == 409
        assert state_of(world) is EngineState.READY
        await finish(world, running)
        await world.server.client.nap.sleep(0.0)


async def test_a_request_wakes_it_and_waits(autojump_clock: MockClock) -> None:
    async with open_world(*engines(2), wake_on_request=True) as world:
        await world.server.client.nap.sleep(PATIENCE_S)
        stream = open_stream(world.server.client)
        while len(world.launched) < 2:  # noqa: ASYNC110 - virtual time costs nothing
            await trio.sleep(0.01)
        await finish(world, stream)
        assert state_of(world) is EngineState.READY


@pytest.mark.parametrize("by", ["order", "request"])
async def test_falling_asleep_is_called_off(by: str, autojump_clock: MockClock) -> None:
    async with open_world(*engines(1), wake_on_request=by == "request") as world:
        client = world.server.client
        running = open_stream(client)

        async def call_off() -> None:
            await trio.sleep(1.0)
            if by == "order":
                await client.nap.wake_up()
            else:
                await finish(world, open_stream(client))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_off)
            with pytest.raises(InvalidRequestError) as refused:
                await client.nap.sleep(PATIENCE_S)
            assert refused.value.code == "called_off"
        assert state_of(world) is EngineState.READY
        await finish(world, running)
        assert len(world.launched) == 1


async def test_waking_up_is_called_off(autojump_clock: MockClock) -> None:
    """Who waits for the engine to wake up must not wait for the next who wants it awake."""
    slow = FakeEngine(ready=False)
    async with open_world(FakeEngine(), slow) as world, trio.open_nursery() as nursery:
        nap = world.server.client.nap
        await nap.sleep(PATIENCE_S)

        async def wake_up() -> None:
            with pytest.raises(InvalidRequestError, match="wanted asleep") as refused:
                await nap.wake_up()
            assert (refused.value.http_status, refused.value.code) == (409, "called_off")

        nursery.start_soon(wake_up)
        await trio.sleep(1.0)
        nursery.start_soon(nap.sleep, PATIENCE_S)
        await trio.sleep(1.0)
        slow.scripted.say_ready()
        await wait_all_tasks_blocked()
        assert state_of(world) is EngineState.SLEEPING
        assert slow.closed


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_death_while_it_falls_asleep_is_a_death(
    restarts: int, autojump_clock: MockClock
) -> None:
    async with open_world(*engines(2), engine_restarts=restarts) as world:
        open_stream(world.server.client)

        async def die() -> None:
            await trio.sleep(1.0)
            world.engine.die(KILLED)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await world.server.client.nap.sleep(PATIENCE_S)
        await trio.sleep(10.0)
        assert world.ended.is_set() == (restarts == 0)
        assert len(world.launched) == 1 + restarts
    assert world.last_resort.code == (ExitCode.UNEXPECTED if restarts else ExitCode.ENGINE_DIED)


async def test_an_engine_that_does_not_wake_up_is_dead(autojump_clock: MockClock) -> None:
    async with open_world(FakeEngine()) as world:  # there is no other to be launched
        await world.server.client.nap.sleep(PATIENCE_S)
        with pytest.raises(EngineDeadError, match="no more engines"):
            await world.server.client.nap.wake_up()
        await world.ended.wait()
    assert type(world.error) is EngineDeadError


async def test_asked_to_stop_asleep_it_waits_for_nothing(autojump_clock: MockClock) -> None:
    async with open_world(*engines(1)) as world:
        await world.server.client.nap.sleep(PATIENCE_S)
        began_s = trio.current_time()
        world.server.stop()
        await world.ended.wait()
        assert trio.current_time() - began_s <= TOLD_S + CUT_S
    assert world.error is None
    assert world.last_resort.code == ExitCode.ASKED


async def test_asked_to_stop_while_it_falls_asleep_it_drains(autojump_clock: MockClock) -> None:
    async with open_world(*engines(1)) as world, trio.open_nursery() as nursery:
        running = open_stream(world.server.client)

        async def sleep() -> None:
            with pytest.raises(InvalidRequestError, match="shutting down"):
                await world.server.client.nap.sleep(PATIENCE_S)

        nursery.start_soon(sleep)
        await trio.sleep(1.0)
        world.server.stop()
        await finish(world, running)
        await world.ended.wait()
    assert world.error is None
