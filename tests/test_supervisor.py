"""One nursery, one fate: every way to end, in virtual time, over an engine in memory."""

from __future__ import annotations

import signal
from functools import partial

import pytest
import trio
import trio.testing

from helpers.fake_engines import DRAIN_S, GRACE_S, FakeEngine, World, open_world
from helpers.scripted_engine import delta, open_stream
from trioengine.client.engine_status import EngineState
from trioengine.config import ServerConfig
from trioengine.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    UnavailableError,
)
from trioengine.exit_codes import ExitCode
from trioengine.heartbeat import Heartbeat
from trioengine.models.source import ModelSource
from trioengine.outputs import FinishReason
from trioengine.protocol import Abort, Fatal, Progress, Shutdown
from trioengine.supervisor import CUT_S, LEAVE_S, TOLD_S

# Death -------------------------------------------------------------------------------------------


async def test_death_is_told_at_once_and_raised_after_the_grace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world() as world:
        stream = open_stream(world.server.client)
        world.engine.die("the engine process was killed by SIGKILL")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await stream.receive()
        assert world.server.status.state is EngineState.DEAD
        assert not world.ended.is_set()
        await world.ended.wait()
    assert type(world.error) is EngineDeadError  # bare, not in a group
    assert "SIGKILL" in str(world.error)
    assert world.ended_s == pytest.approx(GRACE_S, abs=0.1)
    assert world.last_resort.code == ExitCode.ENGINE_DIED
    assert "SIGKILL" in world.last_resort.cause


async def test_the_engines_last_word_beats_its_exit_status(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world() as world:
        world.engine.scripted.say(Fatal("out of memory", "Traceback …"))
        world.engine.die("the engine process exited with status 1")
        await world.ended.wait()
    assert str(world.error) == "out of memory"


async def test_death_during_the_start_is_raised_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(FakeEngine(ready=False)) as world:
        world.engine.die("the engine process exited with status 9")
        assert not await world.server.wait_ready()
        await world.ended.wait()
    assert type(world.error) is EngineStartError
    assert world.ended_s < GRACE_S
    assert world.last_resort.code == ExitCode.ENGINE_NOT_STARTED


async def test_an_engine_that_cannot_be_what_it_is_told_is_a_configuration_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(FakeEngine(ready=False)) as world:
        world.engine.scripted.say(Fatal("no such option", "Traceback …", refused=True))
        world.engine.die("the engine process exited with status 1")
        await world.ended.wait()
    assert type(world.error) is ConfigError
    assert str(world.error) == "no such option"
    assert world.last_resort.code == ExitCode.USAGE


async def test_a_start_is_given_up_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(FakeEngine(ready=False), start_timeout_s=60.0) as world:
        await world.ended.wait()
    assert type(world.error) is EngineStartError
    assert str(world.error) == "the engine was not ready within 60 s"
    assert world.ended_s == pytest.approx(60.0)


async def test_asked_to_stop_a_dead_engines_server_does_not_wait_out_the_grace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world() as world:
        world.engine.die("killed")
        await world.server.status.wait_settled()
        world.server.stop()
        await world.ended.wait()
    assert type(world.error) is EngineDeadError
    assert world.ended_s < GRACE_S
    assert world.last_resort.code == ExitCode.ENGINE_DIED


async def test_an_unexpected_error_fells_everything(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = FakeEngine()

    def broken() -> Heartbeat:
        raise OSError("the page has gone")

    engine.read_heartbeat = broken
    async with open_world(engine) as world:
        await world.ended.wait()
    with pytest.RaisesGroup(OSError, flatten_subgroups=True):
        raise world.error or AssertionError
    assert world.last_resort.code == ExitCode.UNEXPECTED
    assert world.last_resort.armed


# Asked to stop -----------------------------------------------------------------------------------


async def test_a_stop_finishes_what_runs(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world() as world:
        stream = open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        world.server.stop()
        world.server.stop()
        states = [world.server.status.state]
        await trio.sleep(10.0)
        with pytest.raises(UnavailableError) as refused:
            open_stream(world.server.client)
        assert refused.value.code == "draining"
        assert not world.ended.is_set()
        (request_id,) = world.engine.scripted.added
        world.engine.scripted.say_outputs(delta(request_id, "all", FinishReason.STOP))
        assert (await stream.receive())[0][1].text == "all"
        await world.ended.wait()
    assert world.error is None
    assert world.ended_s == pytest.approx(10.0)
    assert Shutdown() in world.engine.scripted.sent
    assert world.engine.stop_grace_s == LEAVE_S
    assert world.last_resort.code == ExitCode.ASKED
    assert [*states, world.server.status.state] == [EngineState.DRAINING, EngineState.STOPPED]


async def test_a_stop_is_bounded_whatever_runs(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(FakeEngine(obedient=False)) as world:
        stream = open_stream(world.server.client)
        world.server.stop()
        with pytest.raises(UnavailableError) as failed:
            await stream.receive()
        assert failed.value.code == "draining"
        await world.ended.wait()
    assert world.error is None
    assert [type(m) for m in world.engine.scripted.sent[-2:]] == [Abort, Shutdown]
    assert world.ended_s <= DRAIN_S + TOLD_S + CUT_S + LEAVE_S
    assert world.last_resort.armed[0] < DRAIN_S + 5.0


async def test_a_stop_during_the_start_waits_for_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(FakeEngine(ready=False)) as world:
        world.server.stop()
        assert not await world.server.wait_ready()
        await world.ended.wait()
    assert world.error is None
    assert world.ended_s == pytest.approx(0.0)
    assert world.last_resort.code == ExitCode.ASKED


async def test_a_death_while_draining_is_a_death(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world() as world:
        stream = open_stream(world.server.client)
        world.server.stop()
        await trio.testing.wait_all_tasks_blocked()
        world.engine.die("killed")
        with pytest.raises(EngineDeadError):
            await stream.receive()
        stream.close()
        await world.ended.wait()
    assert type(world.error) is EngineDeadError
    assert world.ended_s == pytest.approx(GRACE_S, abs=0.1)
    assert world.last_resort.code == ExitCode.ENGINE_DIED


async def test_the_first_signal_drains_and_the_second_leaves_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(with_signals=True) as world:
        open_stream(world.server.client)
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep(1.0)
        assert world.server.status.state is EngineState.DRAINING
        signal.raise_signal(signal.SIGINT)
        await world.ended.wait()
    assert world.error is None
    assert world.ended_s == pytest.approx(1.0)
    assert world.last_resort.code == ExitCode.ASKED


async def test_a_second_signal_keeps_the_code_of_a_death(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(with_signals=True) as world:
        stream = open_stream(world.server.client)
        signal.raise_signal(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()
        world.engine.die("killed")
        with pytest.raises(EngineDeadError):
            await stream.receive()
        assert not world.ended.is_set()
        signal.raise_signal(signal.SIGTERM)
        await world.ended.wait()
    assert type(world.error) is EngineDeadError
    assert world.ended_s < GRACE_S
    assert world.last_resort.code == ExitCode.ENGINE_DIED


# The beginning -----------------------------------------------------------------------------------


async def test_progress_and_tokenizer_on_the_way_to_ready(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(FakeEngine(ready=False)) as world:
        await trio.testing.wait_all_tasks_blocked()
        assert world.server.status.progress == ("starting the engine", 0.0)
        with pytest.raises(UnavailableError) as refused:
            world.server.tokenizer()
        assert refused.value.code == "starting"
        world.engine.scripted.say(Progress("loading", 0.5))
        await trio.testing.wait_all_tasks_blocked()
        assert world.server.status.progress == ("loading", 0.5)
        world.engine.scripted.say_ready()
        assert await world.server.wait_ready()
        assert world.server.status.state is EngineState.READY
        assert world.server.tokenizer().vocab_size == 2048


async def test_a_model_that_cannot_be_had_ends_the_server(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(name: str, *args: object, **kwargs: object) -> None:
        await trio.lowlevel.checkpoint()
        raise ConfigError(f"{name} cannot be fetched")

    monkeypatch.setattr("trioengine.process.start.prepare_in_child", refuse)
    world = World(FakeEngine(ready=False))
    async with trio.open_nursery() as nursery:
        run = partial(
            world.run,
            ServerConfig(),
            with_signals=False,
            source=ModelSource("owner/name", None),
        )
        await nursery.start(run)
        await world.ended.wait()
    assert type(world.error) is ConfigError
    assert str(world.error) == "owner/name cannot be fetched"


async def test_the_age_of_a_step_is_measured_from_the_page(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world() as world:
        metrics = world.server.client.metrics
        assert b"trioengine_engine_step_age_seconds 0.0" in metrics.render()
        world.engine.read_heartbeat = lambda: Heartbeat("step", 1, 0.0, 1e12)
        assert b"trioengine_engine_step_age_seconds 0.0" not in metrics.render()
