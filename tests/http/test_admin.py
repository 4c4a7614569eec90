from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.api_world import CHAT, COMPLETION, body_for, open_world
from helpers.stepped_engine import SteppedEngine
from trioengine.errors import PeerGoneError
from trioengine.http.admin import METHODS

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock


async def test_without_the_flag_there_is_nothing_there(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        for method in METHODS:
            assert (await world.api.post(f"/{method}")).status == 404


async def test_the_prefix_cache_is_reset(autojump_clock: MockClock) -> None:
    async with open_world(running=True, enable_admin=True) as world:
        body = {"prompt": list(range(1, 65)), "max_tokens": 1}
        for _ in range(2):
            call = await world.api.post(COMPLETION, body)
        assert call.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        reset = await world.api.post("/reset_prefix_cache")
        assert (reset.status, reset.json["status"]) == (200, "ok")
        call = await world.api.post(COMPLETION, body)
        assert call.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_profiling_under_load(autojump_clock: MockClock, tmp_path: Path) -> None:
    engine = SteppedEngine(profile_dir=tmp_path, send_error=lambda: PeerGoneError("gone"))
    async with open_world(running=True, enable_admin=True, engine=engine) as world:
        load = world.start("POST", CHAT, body_for(CHAT, stream=True, max_tokens=30))
        assert (await world.api.post("/start_profile")).status == 200
        again = await world.api.post("/start_profile")
        assert (again.status, again.error["code"]) == (400, "invalid_value")
        assert (await world.api.post("/stop_profile")).status == 200
        assert (await world.api.post("/stop_profile")).status == 400
        await load.finished.wait()
        assert load.events[-1] == "[DONE]"
    assert list(tmp_path.iterdir())  # noqa: ASYNC240 - in memory but for this


@pytest.mark.parametrize("method", METHODS)
async def test_there_must_be_an_engine(method: str, autojump_clock: MockClock) -> None:
    async with open_world(ready=False, enable_admin=True) as world:
        call = await world.api.post(f"/{method}")
        assert (call.status, call.error["code"]) == (503, "starting")


async def test_an_engine_that_dies_meanwhile_is_a_503(autojump_clock: MockClock) -> None:
    async with open_world(enable_admin=True) as world:
        call = world.start("POST", "/reset_prefix_cache")
        await world.settle()
        world.engine.crash()
        world.client.status.report_exit("killed")
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (503, "engine_dead")
