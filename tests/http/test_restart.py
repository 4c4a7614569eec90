"""An engine dies and another takes its place: what clients of either time are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from helpers.api_world import CHAT, COMPLETION, PATHS, World, body_for, open_world
from helpers.stepped_engine import SteppedEngine
from trioengine.errors import PeerGoneError

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.asgi_client import Call

LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


def engine() -> SteppedEngine:
    return SteppedEngine(send_error=lambda: PeerGoneError("the engine is gone"))


def kill(world: World) -> None:
    world.client.status.report_exit("the engine process was killed by SIGKILL")
    world.engine.crash()  # within a turn, nothing is done after this


def text_of(call: Call) -> str:
    """Return a completion's text, whole or joined."""
    assert call.status == 200, call.body
    if call.headers["content-type"] == "application/json":
        return str(call.json["choices"][0]["text"])
    assert call.events[-1] == "[DONE]"
    return "".join(c["text"] for event in call.events[:-1] for c in event["choices"])


async def ask_undisturbed(*, stream: bool = False) -> str:
    """Return the text that the first request of a world gets."""
    async with open_world() as world:
        call = world.start("POST", COMPLETION, body_for(COMPLETION, stream=stream, **LONG))
        await world.run_until_idle()
        return text_of(call)


@pytest.mark.parametrize("path", PATHS)
async def test_whoever_is_answered_is_told_to_come_again(
    path: str, autojump_clock: MockClock
) -> None:
    async with open_world(engine_restarts=1) as world:
        whole = world.start("POST", path, body_for(path, **LONG))
        streamed = world.start("POST", path, body_for(path, stream=True, **LONG))
        await world.turn(5)
        kill(world)
        await whole.finished.wait()
        await streamed.finished.wait()
        assert (whole.status, whole.error["code"]) == (503, "restarting")
        assert whole.error["type"] == "unavailable_error"
        assert whole.headers["retry-after"] == "1"
        assert "SIGKILL" in whole.error["message"]
        assert streamed.events[-1]["error"]["code"] == "restarting"
        assert [e for e in streamed.events if e == "[DONE]"] == []
        assert world.counted("requests", path, "restarting") == 2
        await world.replace_engine(engine())


@pytest.mark.parametrize("stream", [True, False])
async def test_whoever_comes_meanwhile_waits_for_the_next(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(engine_restarts=1) as world:
        kill(world)
        call = world.start("POST", COMPLETION, body_for(COMPLETION, stream=stream, **LONG))
        await trio.sleep(16.0)
        assert (call.status, call.pings) == ((200, 1) if stream else (0, 0))
        await world.replace_engine(engine())
        await world.run_until_idle()
        assert text_of(call)


async def test_health_says_restarting_and_why(autojump_clock: MockClock) -> None:
    async with open_world(engine_restarts=1) as world:
        kill(world)
        calls = [await world.api.get(f"/health{path}") for path in ("/live", "/ready", "")]
        assert [call.status for call in calls] == [200, 503, 503]
        assert calls[1].json["status"] == "restarting"
        assert "SIGKILL" in calls[1].json["reason"]
        assert (await world.api.get("/v1/models")).status == 200
        await world.replace_engine(engine())
        assert (await world.api.get("/health/ready")).status == 200


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_whole_answer_is_replayed_whatever_had_come_of_it(
    turns: int, autojump_clock: MockClock
) -> None:
    undisturbed = await ask_undisturbed()
    async with open_world(engine_restarts=1, replay=True) as world:
        call = world.start("POST", COMPLETION, body_for(COMPLETION, **LONG))
        await world.turn(turns)
        kill(world)
        await world.replace_engine(engine())
        await world.run_until_idle()
        assert text_of(call) == undisturbed
        assert call.json["usage"]["completion_tokens"] == LONG["max_tokens"]
        assert world.counted("requests", COMPLETION, "ok") == 1


async def test_a_stream_is_replayed_until_its_first_token(autojump_clock: MockClock) -> None:
    undisturbed = await ask_undisturbed(stream=True)
    async with open_world(engine_restarts=1, replay=True) as world:
        call = world.start("POST", COMPLETION, body_for(COMPLETION, stream=True, **LONG))
        world.engine.at("commands", lambda: kill(world))
        await world.turn()
        await world.replace_engine(engine())
        await world.run_until_idle()
        assert text_of(call) == undisturbed


async def test_a_stream_that_has_told_something_is_not(autojump_clock: MockClock) -> None:
    async with open_world(engine_restarts=1, replay=True) as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True, **LONG))
        await world.turn(3)
        kill(world)
        await call.finished.wait()
        assert call.events[-1]["error"]["code"] == "restarting"
        replacement = engine()
        await world.replace_engine(replacement)
        await world.settle()
        assert not replacement.sent


async def test_a_client_that_leaves_while_it_waits_is_forgotten(autojump_clock: MockClock) -> None:
    async with open_world(engine_restarts=1, replay=True) as world:
        call = world.start("POST", COMPLETION, body_for(COMPLETION, **LONG))
        await world.turn()
        kill(world)
        await world.client.status.death.wait_settled()
        call.disconnect()
        await call.finished.wait()
        replacement = engine()
        await world.replace_engine(replacement)
        await world.settle()
        assert not replacement.sent
