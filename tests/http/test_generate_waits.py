"""An answer that has to wait: signs of life, time limits, clients that read slowly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import trio

from helpers.answers import MODES, texts
from helpers.api_world import CHAT, COMPLETION, body_for, open_world
from helpers.asgi_client import Call
from helpers.raw_http import request, running
from trioengine.engine_proc.sim_runner import SimScript

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock


async def test_a_stream_that_waits_shows_life_and_its_failure_is_an_event(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True, timeout=50))
        await trio.sleep(14.9)
        assert call.status == 0
        await trio.sleep(0.2)
        assert (call.status, call.pings) == (200, 1)
        await trio.sleep(30)
        assert call.pings == 3
        await trio.sleep(10)
        assert call.complete
        (event,) = call.events
        assert event["error"]["code"] == "deadline_exceeded"
        assert event["error"]["type"] == "timeout_error"


async def test_a_silent_stream_shows_life_between_tokens(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True, max_tokens=2))
        await world.turn()
        assert call.pings == 0
        await trio.sleep(31)
        assert call.pings == 2
        await world.run_until_idle()
        assert call.events[-1] == "[DONE]"
        assert call.complete


@pytest.mark.parametrize("stream", MODES)
async def test_before_the_head_a_failure_has_a_status(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=stream, timeout=3))
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (504, "deadline_exceeded")
        assert world.counted("requests_aborted", "deadline") == 1


@pytest.mark.parametrize("header", ["0", "-1", "1_0", "nan", "inf", "soon", ""])
async def test_a_timeout_header_that_is_no_time_is_refused(
    header: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = await world.api.post(CHAT, body_for(CHAT), headers={"X-Request-Timeout": header})
        assert (call.status, call.error["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize(
    ("header", "body", "config", "seconds"),
    [("2", None, None, 2), ("5", 3, None, 3), (None, 9, 4, 4), (None, None, 6, 6)],
)
async def test_the_shortest_time_limit_counts(
    header: str | None,
    body: float | None,
    config: float | None,
    seconds: float,
    autojump_clock: MockClock,
) -> None:
    async with open_world(request_timeout_s=config) as world:
        began_s = trio.current_time()
        headers = {} if header is None else {"X-Request-Timeout": header}
        call = world.start("POST", CHAT, body_for(CHAT, timeout=body), headers=headers)
        await call.finished.wait()
        assert call.status == 504
        assert trio.current_time() - began_s == pytest.approx(seconds)


@pytest.mark.parametrize("stream", MODES)
async def test_a_place_in_the_engine_that_never_comes_is_a_queue_timeout(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(max_num_seqs=1, max_queue_time_s=5) as world:
        for _ in range(2):
            world.start("POST", COMPLETION, body_for(COMPLETION))
        await world.settle()
        call = world.start("POST", COMPLETION, body_for(COMPLETION, stream=stream))
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (504, "queue_timeout")


async def test_a_client_that_stops_reading_gets_all_of_it_once_it_reads_again(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """Over a socket: what waits for the client is never cut by a ping that is due."""
    script = SimScript(num_blocks=2048, max_model_len=8192, tokens_from="seed")
    async with (
        open_world(script=script) as world,
        running(world.app, uds=tmp_path / "s", slow_client_timeout_s=1e6) as server,
        await server.connect(receive_buffer=4096) as reader,
        trio.open_nursery() as nursery,
    ):
        body = {"prompt": [[i] for i in range(1, 9)], "seed": 1, "max_tokens": 400}
        whole = world.start("POST", COMPLETION, body)
        await world.run_until_idle()
        data = json.dumps(body | {"stream": True}).encode()
        await reader.send(request("POST", COMPLETION, body=data))
        await nursery.start(world.engine.run_freely, 1.0)
        await trio.sleep(1000)
        assert not world.engine.live
        answer = await reader.read_response(method="POST")
        call = Call(None, {})
        call.status, call.headers, call.chunks = answer.status, answer.headers, [answer.body]
        assert texts(call) == texts(whole)
        nursery.cancel_scope.cancel()
