"""A client has so long for each thing it owes, and a close does not take the answer with it.

All under a clock that stands still unless a test moves it: what happens, happens without a timer.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from trio.testing import MockClock, wait_all_tasks_blocked

from helpers.demo_app import DemoApp
from helpers.raw_http import RawClient, request, running, with_tls
from trioengine.http.client_connection import ClientConnection
from trioengine.http.disconnects import DisconnectWatcher
from trioengine.http.h1 import ServerContext
from trioengine.http.limits import Limits
from trioengine.http.transport import ClientStream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMITS = Limits()
CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture
def uds(tmp_path: Path) -> Path:
    return tmp_path / "s"


async def pass_time(clock: MockClock, seconds: float) -> None:
    """Let ``seconds`` pass once everybody waits, and everybody react."""
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


async def is_open(client: RawClient) -> bool:
    """True if the server has neither closed nor sent anything."""
    await wait_all_tasks_blocked()
    try:
        client.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(
    uds: Path, mock_clock: MockClock
) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        for _ in range(3):
            assert (await client.exchange(request())).body == b"ok"
            await pass_time(mock_clock, LIMITS.keep_alive_s - 0.1)
        assert await is_open(client)
        await pass_time(mock_clock, 0.2)
        assert await client.read_to_end() == b""
        await world.all_closed()


async def test_a_connection_that_never_says_anything_is_closed(
    uds: Path, mock_clock: MockClock
) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await pass_time(mock_clock, LIMITS.keep_alive_s + 0.1)
        assert await client.read_to_end() == b""


async def test_an_answer_may_take_for_ever(uds: Path, mock_clock: MockClock) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/wait", body=b"x"))
        await app.expect("started /wait", "waiting")
        await pass_time(mock_clock, 86_400)
        app.release.set()
        assert (await client.read_response()).body == b"waited"


async def test_half_a_head_is_answered_408(uds: Path, mock_clock: MockClock) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        assert (await client.exchange(request())).body == b"ok"
        await pass_time(mock_clock, LIMITS.keep_alive_s - 1)  # the head's time starts with it
        await client.send(b"GET /ok HTT")
        await pass_time(mock_clock, LIMITS.head_s / 2)
        await client.send(b"P/1.1\r\n")
        await pass_time(mock_clock, LIMITS.head_s / 2 + 0.1)
        response = await client.read_response()
        assert (response.status, response.error["code"]) == (408, "request_timeout")
        assert await client.read_to_end() == b""
        assert world.refused == ["request_timeout"]


async def test_each_head_has_its_own_time(uds: Path, mock_clock: MockClock) -> None:
    """Also where the next one is begun before the one before it is answered."""
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(b"GET /o")
        for _ in range(4):
            await pass_time(mock_clock, LIMITS.head_s * 0.6)
            await client.send(b"k HTTP/1.1\r\nHost: x\r\n\r\nGET /o")
            assert (await client.read_response()).body == b"ok"


@pytest.mark.parametrize("framing", ["Content-Length: 10", CHUNKED])
async def test_half_a_body_is_answered_408_and_the_handler_is_let_go(
    uds: Path, mock_clock: MockClock, framing: str
) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/echo", framing) + b"1\r\n")
        await app.expect("started /echo")
        await pass_time(mock_clock, LIMITS.body_grace_s - 0.1)
        assert app.silent()
        await pass_time(mock_clock, 0.2)
        response = await client.read_response()
        assert (response.status, response.error["code"]) == (408, "request_timeout")
        await app.expect("ended: client_disconnect")
        assert await client.read_to_end() == b""
        client.close()
        await world.all_closed()


async def test_a_large_body_earns_its_time(uds: Path, mock_clock: MockClock) -> None:
    app = DemoApp()
    piece = 2**16
    piece_s = piece / LIMITS.body_min_rate
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/echo", f"Content-Length: {20 * piece}"))
        for _ in range(19):  # a little slower than the rate would allow without its grace
            await client.send(b"x" * piece)
            await pass_time(mock_clock, piece_s + LIMITS.body_grace_s / 20)
        await client.send(b"x" * piece)
        assert (await client.read_response()).status == 200


async def test_a_body_that_drips_is_cut(uds: Path, mock_clock: MockClock) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/echo", "Content-Length: 1000"))
        start_s = trio.current_time()
        while not world.refused:
            await client.send(b"x")
            await pass_time(mock_clock, 1)
        assert trio.current_time() - start_s <= LIMITS.body_grace_s + 1
        assert (await client.read_response()).status == 408


async def test_a_client_that_waits_to_be_asked_is_not_hurried(
    uds: Path, mock_clock: MockClock
) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        head = request("POST", "/wait-unread", "Content-Length: 2", "Expect: 100-continue")
        await client.send(head)
        await app.expect("started /wait-unread")
        await pass_time(mock_clock, 1000)
        app.release.set()
        assert (await client.read_response()).body == b"waited"


async def test_an_early_answer_reaches_a_client_that_is_still_sending(uds: Path) -> None:
    app = DemoApp()
    size = 4_000_000
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/refuse", f"Content-Length: {size}"))
        await app.expect("started /refuse", "ended: None")
        await client.send(b"x" * size)  # would fail, and lose the answer, had the server closed
        response = await client.read_response()
        assert (response.status, response.headers["connection"]) == (429, "close")
        assert await client.read_to_end() == b""
        client.close()
        await world.all_closed()


async def test_the_lingering_close_is_bounded(uds: Path, mock_clock: MockClock) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/refuse", "Content-Length: 1000000"))
        assert (await client.read_response()).status == 429
        for _ in range(5):
            await pass_time(mock_clock, LIMITS.linger_s / 5 - 0.01)
            await client.send(b"x")
        assert world.server.open_connections == 1
        await pass_time(mock_clock, 0.1)
        await world.all_closed()


async def test_a_whole_body_costs_no_connection_even_if_nobody_reads_it(uds: Path) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        for _ in range(3):
            response = await client.exchange(request("POST", "/refuse", body=b"x" * 1000))
            assert response.status == 429
            assert "connection" not in response.headers


async def test_an_owner_that_fails_to_clean_up_hurts_nobody(
    uds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = DemoApp()

    @app.post("/bad-owner")
    async def bad_owner() -> str:
        from trioengine.http.connection import current_request

        def fail() -> None:
            raise ZeroDivisionError

        current_request().owned.callback(fail)
        app.say("waiting")
        await app.release.wait()
        return ""

    async with running(app, uds=uds) as world:
        client = await world.connect()
        await client.send(request("POST", "/bad-owner", body=b""))
        await app.expect("waiting")
        client.close()
        await world.all_closed()
        assert "failed to clean up" in caplog.text
        async with await world.connect() as other:
            assert (await other.exchange(request())).body == b"ok"


async def test_an_owner_that_comes_too_late_is_told_at_once() -> None:
    ours, theirs = socket.socketpair()
    told: list[str] = []
    with theirs, DisconnectWatcher() as watcher:
        stream = ClientStream(ours, None, slow_client_timeout_s=1)
        context = ServerContext(LIMITS, lambda _: None, lambda *_: None)
        connection = ClientConnection(ASGIWrapper(DemoApp()), Config(), context, watcher, stream)
        assert "IDLE" in repr(connection)
        connection.lost("slow_client")  # nobody is attached: noted
        connection.lost("shutdown")  # the first reason stays
        stream.close()
        connection.attach(told.append)
        connection.lost("client_disconnect")  # once is enough
        assert told == ["slow_client"]


# TLS ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.half_close, RawClient.reset])
@pytest.mark.parametrize("hidden_by", [b"", request()], ids=["", "pipelined"])
async def test_a_disconnect_under_tls_is_seen(
    leave: Callable[[RawClient], None], hidden_by: bytes, mock_clock: MockClock
) -> None:
    app = DemoApp()
    async with (
        running(app, **with_tls()) as world,
        await world.connect() as client,
    ):
        await client.send(request("POST", "/wait", body=b"x") + hidden_by)
        await app.expect("started /wait", "waiting")
        await wait_all_tasks_blocked()
        leave(client)
        await app.expect("ended: client_disconnect")
        await world.all_closed()


async def test_a_client_that_does_not_read_is_cut_off_under_tls(mock_clock: MockClock) -> None:
    app = DemoApp()
    async with (
        running(app, **with_tls()) as world,
        await world.connect(receive_buffer=4096) as client,
    ):
        await client.send(request("POST", "/flood", body=b"x"))
        await app.expect("started /flood")
        await wait_all_tasks_blocked(0.05)  # until all buffers are full
        mock_clock.jump(LIMITS.slow_client_timeout_s + 0.1)
        await app.expect("ended: slow_client")
        await world.all_closed()


async def test_the_end_of_a_tls_session_is_said() -> None:
    """So that an answer whose end is the connection's cannot be cut short by somebody between."""
    app = DemoApp()
    async with (
        running(app, **with_tls()) as world,
        await world.connect() as client,
    ):
        await client.send(request("GET", "/ok", version="1.0"))
        assert (await client.read_to_end()).endswith(b"ok")  # would raise without the farewell


async def test_who_does_not_speak_tls_is_dropped(mock_clock: MockClock) -> None:
    async with running(DemoApp(), **with_tls()) as world:
        world.tls = None
        async with await world.connect() as silent, await world.connect() as plain:
            await plain.send(request())
            await plain.read_to_end()  # perhaps an alert, then the end
            while world.server.open_connections != 1:
                await world.changed.park()
            mock_clock.jump(LIMITS.handshake_s + 0.1)
            assert await silent.read_to_end() == b""
            await world.all_closed()


async def test_a_handshake_does_not_hold_up_the_shutdown(mock_clock: MockClock) -> None:
    async with running(DemoApp(), **with_tls()) as world:
        world.tls = None
        async with await world.connect():
            while not world.server.open_connections:
                await world.changed.park()
            world.server.begin_shutdown()
            await world.all_closed()
