"""An engine that stands still is told of, or replaced; also while it finishes what runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from helpers.fake_engines import DRAIN_S, GRACE_S, FakeEngine, open_world
from helpers.keeper_steps import engines, finish, wait_ready
from helpers.scripted_engine import open_stream
from trioengine.client.engine_status import EngineState
from trioengine.errors import EngineDeadError
from trioengine.exit_codes import ExitCode
from trioengine.heartbeat import Heartbeat
from trioengine.process.heartbeat_watch import watch_heartbeat
from trioengine.protocol import Shutdown

if TYPE_CHECKING:
    from collections.abc import Callable


# Stall --------------------------------------------------------------------------------------------


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


# Stall while it finishes what runs ----------------------------------------------------------------


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
