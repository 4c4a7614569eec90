"""The administrator's end of sleeping, and what clients are told meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.api_world import CHAT, PATHS, body_for, open_world

if TYPE_CHECKING:
    from trio.testing import MockClock


@pytest.mark.parametrize("path", PATHS)
async def test_asleep_requests_are_refused_and_health_says_why(
    path: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        world.client.status.mark_sleeping()
        call = await world.api.post(path, body_for(path))
        assert (call.status, call.error["code"]) == (503, "sleeping")
        assert "retry-after" not in call.headers
        calls = [await world.api.get(f"/health{which}") for which in ("/live", "/ready", "")]
        assert [call.status for call in calls] == [200, 503, 503]
        assert calls[1].json["status"] == "sleeping"
        world.client.status.mark_ready()


async def test_without_the_switch_there_is_nothing_at_these_paths(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        assert (await world.api.post("/sleep")).status == 404
        assert (await world.api.get("/is_sleeping")).status == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("level=3", "level"),
        ("level=", "level"),
        ("timeout=-1", "timeout"),
        ("timeout=inf", "timeout"),
        ("timeout=soon", "timeout"),
        ("mode=abort", "mode"),
        ("tags=weights", "tags"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    query: str, param: str, autojump_clock: MockClock
) -> None:
    async with open_world(enable_admin=True) as world:
        call = world.api.open_call("POST", "/sleep")
        call._scope["query_string"] = query.encode()
        call.send_body(b"")
        await call.run()
        assert (call.status, call.error["param"]) == (400, param)
        assert world.client.nap.wanted


async def test_what_runs_when_its_patience_is_over_is_a_409(autojump_clock: MockClock) -> None:
    async with open_world(enable_admin=True) as world:
        assert (await world.api.get("/is_sleeping")).json == {"is_sleeping": False}
        call = world.start("POST", "/sleep")
        await world.settle()
        assert not world.client.nap.wanted
        await world.api.post("/wake_up")
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (409, "called_off")
        assert (await world.api.post(CHAT, body_for(CHAT, max_tokens=0))).status == 400
