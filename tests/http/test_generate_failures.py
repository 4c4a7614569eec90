"""What a client hears of an engine that fails, before the head and within the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.answers import MODES
from helpers.api_world import CHAT, COMPLETION, PATHS, World, body_for, open_world
from helpers.stepped_engine import SteppedEngine
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import PeerGoneError

if TYPE_CHECKING:
    from trio.testing import MockClock


def kill(world: World) -> None:
    world.engine.crash()
    world.client.status.report_exit("the engine was killed by SIGKILL")


@pytest.mark.parametrize("stream", MODES)
@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_dies_before_the_head_is_a_503(
    path: str, stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = world.start("POST", path, body_for(path, stream=stream))
        await world.settle()
        kill(world)
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (503, "engine_dead")
        assert "SIGKILL" in call.error["message"]


@pytest.mark.parametrize("turns", [1, 5])
@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_dies_in_a_stream_is_one_event_without_done(
    path: str, turns: int, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = world.start("POST", path, body_for(path, stream=True, n=2, max_tokens=50))
        await world.turn(turns)
        assert call.status == 200
        kill(world)
        await call.finished.wait()
        assert call.complete
        assert call.events[-1]["error"]["code"] == "engine_dead"
        assert [event for event in call.events if "error" in event or event == "[DONE]"] == (
            call.events[-1:]
        )
        assert world.counted("requests", path, "engine_dead") == 1


async def test_an_engine_that_dies_while_the_whole_is_gathered_is_a_503(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, max_tokens=50))
        await world.turn(5)
        kill(world)
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("stream", MODES)
async def test_an_error_of_one_sequence_is_a_500_and_hurts_nobody_else(
    stream: bool, autojump_clock: MockClock
) -> None:
    script = SimScript(num_blocks=256, max_model_len=1024, bad_token_at_step=1)
    async with open_world(script=script) as world:
        bad = world.start("POST", COMPLETION, body_for(COMPLETION, stream=stream, n=2))
        await world.settle()
        good = world.start("POST", COMPLETION, body_for(COMPLETION))
        await world.run_until_idle()
        assert good.status == 200
        if bad.status == 200:
            assert bad.events[-1]["error"]["type"] == "internal_error"
        else:
            assert (bad.status, bad.error["code"]) == (500, "internal_error")


async def test_a_step_that_fails_ends_everything_with_its_cause(autojump_clock: MockClock) -> None:
    engine = SteppedEngine(
        SimScript(num_blocks=64, max_model_len=256, fail_at_step=3),
        send_error=lambda: PeerGoneError("gone"),
    )
    async with open_world(engine=engine) as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True))
        await world.turn(5)
        await call.finished.wait()
        assert call.events[-1]["error"]["code"] == "engine_dead"
        later = await world.api.post(CHAT, body_for(CHAT))
        assert (later.status, later.error["code"]) == (503, "engine_dead")


async def test_a_shutdown_ends_streams_with_draining(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True))
        whole = world.start("POST", CHAT, body_for(CHAT))
        await world.turn(2)
        world.client.abort_all("shutdown")
        await world.settle()
        assert call.events[-1]["error"]["code"] == "draining"
        assert (whole.status, whole.error["code"]) == (503, "draining")


async def test_a_bug_in_a_stream_is_an_event_too(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    def boom(*_: object) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("trioengine.http.narrate.Narration.closing", boom)
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT, stream=True, max_tokens=2))
        assert call.complete
        assert call.events[-1]["error"]["code"] == "internal_error"
        assert b"secret" not in call.body
