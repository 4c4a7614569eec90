"""Cancel by id: from another connection, confirmed, only under the key that made the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers.api_world import CHAT, COMPLETION, PATHS, World, body_for, open_world
from trioengine.http.cancel import PATIENCE_S

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.asgi_client import Call

LONG: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "stream": True}


def cancel(world: World, response_id: str, **kwargs: Any) -> Call:
    return world.start("POST", f"/v1/requests/{response_id}/cancel", **kwargs)


async def stream_of(world: World, path: str = CHAT, **kwargs: Any) -> tuple[Call, str]:
    """Return a call whose stream has begun, and the id that its chunks carry."""
    call = world.start("POST", path, body_for(path, **LONG), **kwargs)
    await world.turn(2)
    return call, call.events[0]["id"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_ends_with_an_error_event_and_frees_its_blocks(
    path: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call, response_id = await stream_of(world, path)
        ending = cancel(world, response_id)
        await world.settle()
        assert not ending.finished.is_set()  # the engine has not confirmed yet
        await world.turn()
        assert ending.status == 200
        assert ending.json["id"] == response_id
        assert ending.json["status"] == "cancelled"
        assert ending.json["seconds"] >= 0.0
        assert world.engine.live == frozenset()
        assert world.engine.free_blocks == world.num_blocks
        assert call.events[-1]["error"]["code"] == "cancelled"
        assert call.events[-1]["error"]["type"] == "cancelled_error"
        assert world.counted("requests_aborted", "cancelled") == 1


async def test_every_sequence_of_a_request_ends(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = world.start("POST", COMPLETION, {"prompt": ["a", "b"], "n": 3, **LONG})
        await world.turn(2)
        ending = cancel(world, call.events[0]["id"])
        await world.turn()
        assert ending.status == 200
        assert world.engine.live == frozenset()


async def test_the_queue_is_left_at_once_without_the_engine(autojump_clock: MockClock) -> None:
    async with open_world(max_queue_sequences=200) as world:
        first, first_id = await stream_of(world)
        many = world.start("POST", COMPLETION, {"prompt": "a", "n": 100, **LONG})
        await world.turn(2)
        ending = cancel(world, many.events[0]["id"])
        await world.turn()
        assert ending.status == 200
        assert len(world.engine.live) == 1
        cancel(world, first_id)
        await world.turn()
        assert first.complete


async def test_a_second_time_there_is_nothing_to_cancel(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        _, response_id = await stream_of(world)
        both = [cancel(world, response_id), cancel(world, response_id)]
        await world.turn()
        assert [call.status for call in both] == [200, 200]  # both came before the end
        late = cancel(world, response_id)
        await world.settle()
        assert (late.status, late.error["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("response_id", ["nobody", "chatcmpl-", "x" * 5000, "%00", "a%20b"])
async def test_an_id_of_nobody_is_a_404(response_id: str, autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = cancel(world, response_id)
        await world.settle()
        assert (call.status, call.error["type"]) == (404, "invalid_request_error")
        assert len(call.error["message"]) < 300


async def test_a_finished_request_is_forgotten(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        done = await world.api.post(COMPLETION, body_for(COMPLETION, max_tokens=1))
        call = await world.api.post(f"/v1/requests/{done.json['id']}/cancel")
        assert call.status == 404


async def test_another_key_sees_nothing(autojump_clock: MockClock) -> None:
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
    async with open_world(api_keys=("mine", "theirs")) as world:
        call, response_id = await stream_of(world, headers=mine)
        foreign = cancel(world, response_id, headers=theirs)
        await world.settle()
        assert foreign.status == 404
        own = cancel(world, response_id, headers=mine)
        await world.turn()
        assert own.status == 200
        assert call.events[-1]["error"]["code"] == "cancelled"


async def test_an_engine_that_dies_meanwhile_is_no_confirmation(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        _, response_id = await stream_of(world)
        ending = cancel(world, response_id)
        await world.settle()
        world.engine.crash()
        world.client.status.report_exit("killed by SIGKILL")
        await ending.finished.wait()
        assert (ending.status, ending.error["code"]) == (503, "engine_dead")


async def test_an_engine_that_does_not_answer_is_not_waited_for_for_ever(
    mock_clock: MockClock,
) -> None:
    async with open_world() as world:
        _, response_id = await stream_of(world)
        ending = cancel(world, response_id)
        await world.settle()
        mock_clock.jump(PATIENCE_S + 0.1)
        await world.settle()
        assert (ending.status, ending.error["code"]) == (503, "stalled")
        await world.turn()
