"""The owner of a request lets go when the client is lost, in every phase, and never later.

The clock stands still: a test that passes has waited for nothing but the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from quart import Quart, Response

from helpers.demo_app import DemoApp
from helpers.raw_http import RawClient, request, running, wall_clock_limit
from trioengine.http.connection import OwnedRequest, current_request, own_connections
from trioengine.http.stream_writer import response_writer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from trio.testing import MockClock

LEAVE: dict[str, Callable[[RawClient], None]] = {
    "close": RawClient.close,
    "half-close": RawClient.half_close,
    "reset": RawClient.reset,
}
leave_in_any_way = pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)

# What was sent when the client leaves: the request's bytes, and what the app has said by then.
PHASES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "body not begun": (request("POST", "/wait", "Content-Length: 10"), ("started /wait",)),
    "half a body": (request("POST", "/wait", "Content-Length: 10") + b"x", ("started /wait",)),
    "half a chunk": (
        request("POST", "/wait", "Transfer-Encoding: chunked") + b"5\r\nab",
        ("started /wait",),
    ),
    "waiting": (request("POST", "/wait", body=b"x"), ("started /wait", "waiting")),
    "waiting, no body": (request("GET", "/wait"), ("started /wait", "waiting")),
    "stray byte": (request("POST", "/wait", body=b"x") + b"?", ("started /wait", "waiting")),
    "stray line": (request("POST", "/wait", body=b"x") + b"\r\n", ("started /wait", "waiting")),
    "pipelined": (
        request("POST", "/wait", body=b"x") + request("POST", "/echo", body=b"y" * 5000),
        ("started /wait", "waiting"),
    ),
    "upgrade offered": (
        request("POST", "/wait", "Connection: Upgrade", "Upgrade: h2c", body=b"x"),
        ("started /wait", "waiting"),
    ),
    "handler ignores body": (
        request("POST", "/wait-unread", "Content-Length: 100000") + b"x" * 50_000,
        ("started /wait-unread",),
    ),
    "streaming, silent": (request("POST", "/stream", body=b"x"), ("started /stream",)),
    "generator, silent": (request("POST", "/generate", body=b"x"), ("started /generate",)),
    "flooding": (request("POST", "/flood", body=b"x"), ("started /flood",)),
    "flooding, pipelined": (
        request("POST", "/flood", body=b"x") + request(),
        ("started /flood",),
    ),
}


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@leave_in_any_way
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
async def test_a_client_that_leaves_is_lost_at_once(
    phase: tuple[bytes, tuple[str, ...]],
    leave: Callable[[RawClient], None],
    transport: str,
    tmp_path: Path,
    mock_clock: MockClock,
) -> None:
    data, said = phase
    app = DemoApp()
    uds = tmp_path / "s" if transport == "unix" else None
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(data)
        await app.expect(*said)
        await trio.testing.wait_all_tasks_blocked()
        leave(client)
        await app.expect("ended: client_disconnect")
        await world.all_closed()
        assert app.silent()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["waiting", "pipelined", "streaming, silent", "flooding"])
async def test_it_takes_less_than_10_ms(phase: str) -> None:
    data, said = PHASES[phase]
    app = DemoApp()
    took_s: list[float] = []
    async with running(app) as world:
        for _ in range(21):
            client = await world.connect()
            await client.send(data)
            await app.expect(*said)
            await trio.testing.wait_all_tasks_blocked()
            start_s = trio.current_time()
            client.close()
            await app.expect("ended: client_disconnect")
            took_s.append(trio.current_time() - start_s)
    assert sorted(took_s)[len(took_s) // 2] < 0.010


async def test_a_client_that_has_left_before_its_handler_runs_is_lost(tmp_path: Path) -> None:
    app = DemoApp()
    async with running(app, uds=tmp_path / "s") as world:
        client = await world.connect()
        await client.send(request("POST", "/wait", body=b"x"))
        client.close()  # all of it is there when the server first looks
        while world.connections != [1, 0]:
            await world.changed.park()
    events = app.heard()
    assert events in ([], ["started /wait", "ended: client_disconnect"])


async def test_a_request_that_ends_by_itself_lets_go_without_a_loss(tmp_path: Path) -> None:
    app = DemoApp()
    async with running(app, uds=tmp_path / "s") as world, await world.connect() as client:
        for path in ("/ok", "/refuse", "/boom", "/last-words"):
            await client.exchange(request("POST", path, body=b""))
            await app.expect(f"started {path}", "ended: None")
            if path == "/last-words":
                assert await client.read_to_end() == b""


async def test_a_client_may_go_once_it_has_the_last_byte_of_a_known_length(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    """The length was announced, so no end needs to follow: its going is no disconnect."""
    app = DemoApp()

    @app.get("/sized")
    async def sized() -> Response:
        request_ = current_request()
        request_.owned.callback(lambda: app.say(f"ended: {request_.loss}"))

        async def body() -> AsyncIterator[bytes]:
            yield b"12345"
            app.say("sent")
            await app.release.wait()  # the client leaves here

        return Response(body(), headers={"Content-Length": "5"})

    async with running(app, uds=tmp_path / "s") as world:
        client = await world.connect()
        await client.send(request("GET", "/sized"))
        await client.read_until(b"12345")
        await app.expect("sent")
        client.close()
        await trio.testing.wait_all_tasks_blocked()
        assert app.silent()
        app.release.set()
        await app.expect("ended: None")
        await world.all_closed()


async def test_a_handler_that_goes_on_after_its_end_does_not_touch_the_next_request(
    tmp_path: Path,
) -> None:
    app = DemoApp()
    ended: list[OwnedRequest] = []

    @app.get("/ends-twice")
    async def ends_twice() -> Response:
        request_ = current_request()
        writer = response_writer(request_)
        await writer.start(200, {})
        await writer.end()
        ended.append(request_)
        await app.release.wait()
        return writer.response

    async with running(app, uds=tmp_path / "s") as world:
        client = await world.connect()
        await client.exchange(request("GET", "/ends-twice"))
        await client.send(request("POST", "/wait", body=b"x") + b"?")
        await app.expect("started /wait", "waiting")
        ended[0].end()
        await trio.testing.wait_all_tasks_blocked()
        client.close()
        await app.expect("ended: client_disconnect")


async def test_under_another_server_the_owner_hears_of_asgis_disconnect() -> None:
    app = DemoApp()
    to_app, receive = trio.open_memory_channel[Any](10)
    scope: Any = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/wait",
        "query_string": b"",
        "headers": [(b"host", b"test")],
    }

    async def send(message: object) -> None:
        raise AssertionError(f"nobody is there to be told {message}")

    with wall_clock_limit(), to_app, receive:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app, scope, receive.receive, send)
            await to_app.send({"type": "http.request", "body": b"x", "more_body": False})
            await app.expect("started /wait", "waiting")
            await to_app.send({"type": "http.disconnect"})
            await app.expect("ended: client_disconnect")


async def test_only_owned_requests_can_be_asked_for() -> None:
    app = Quart("bare")
    async with app.test_request_context("/"):
        with pytest.raises(RuntimeError, match="own_connections"):
            current_request()


def test_quarts_own_bounds_are_off() -> None:
    app = DemoApp()
    own_connections(app)
    for bound in ("RESPONSE_TIMEOUT", "BODY_TIMEOUT", "MAX_CONTENT_LENGTH"):
        assert app.config[bound] is None
