"""Every trap of the stack that was measured (Hypercorn 0.18, Quart-Trio 0.12), sprung on ours.

On the stock stack each of these fails. Details are tested where the remedy lives; this is the list.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from helpers.demo_app import DemoApp
from helpers.raw_http import RunningServer, request, running
from trioengine.http.limits import Limits

LIMITS = Limits()
SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())
WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: bKdPyn3u98cTfZJSh4TNeQ==",
)


@pytest.fixture
def uds(tmp_path: Path) -> Path:
    return tmp_path / "s"


async def pass_time(clock: MockClock, seconds: float) -> None:
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


async def assert_alive(world: RunningServer) -> None:
    async with await world.connect() as client:
        assert (await client.exchange(request())).body == b"ok"


# One client must not end the process -------------------------------------------------------------


def http2() -> tuple[h2.connection.H2Connection, bytes]:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    stream_id = connection.get_next_available_stream_id()
    fields = [(":method", "POST"), (":path", "/refuse"), (":authority", "x"), (":scheme", "http")]
    connection.send_headers(stream_id, fields)
    head = connection.data_to_send()
    connection.send_data(stream_id, b"x" * 100)
    return connection, head


async def test_http2_with_prior_knowledge_answered_early_and_one_data_frame(uds: Path) -> None:
    """Stock: KeyError in the connection's task, and with it the server."""
    async with running(DemoApp(), uds=uds) as world:
        async with await world.connect() as client:
            connection, head = http2()
            await client.send(head)
            response = await client.read_response()
            assert response.error["code"] == "http_version_not_supported"
            await client.send(connection.data_to_send())
            await client.send(b"\xff" * 10_000)
            assert await client.read_to_end() == b""
        await assert_alive(world)


async def test_upgrade_to_http2_is_not_taken(uds: Path) -> None:
    """Stock: HTTP/2 without back-pressure; 280 MiB in 3 s from one client."""
    app = DemoApp()
    headers = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")
    async with running(app, uds=uds) as world, await world.connect() as client:
        for data in (request("GET", "/ok", *headers), request("POST", "/ok", *headers, body=b"x")):
            response = await client.exchange(data)
            assert (response.status, response.body) == (200, b"ok")  # as what it is in HTTP/1.1


async def test_websocket_upgrade_and_one_trailing_byte(uds: Path) -> None:
    """Stock: an exception in the connection's task, and with it the end of the server."""
    async with running(DemoApp(), uds=uds) as world:
        async with await world.connect() as client:
            await client.send(request("GET", "/ok", *WEBSOCKET) + b"x")
            response = await client.read_response()
            assert (response.status, response.error["code"]) == (400, "websocket_not_supported")
            await client.send(b"\x81\x05hello")
            assert await client.read_to_end() == b""
        await assert_alive(world)


# What should close, closes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        request("POST", "/echo", "Connection: close", body=b"x"),
        request("GET", "/ok", version="1.0"),
    ],
    ids=["Connection: close", "HTTP/1.0"],
)
async def test_a_connection_that_should_close_does(
    data: bytes, uds: Path, mock_clock: MockClock
) -> None:
    """Stock: never. The app is cancelled from inside the send that would close."""
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(data)
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 200")
        await world.all_closed()


async def test_an_idle_connection_times_out(uds: Path, mock_clock: MockClock) -> None:
    """Stock: never, after a first request."""
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.exchange(request())
        await pass_time(mock_clock, LIMITS.keep_alive_s + 0.1)
        assert await client.read_to_end() == b""


@pytest.mark.slow
async def test_200_closing_requests_leave_no_descriptor() -> None:
    """Stock: they leave 200."""
    async with running(DemoApp()) as world:
        before = len(os.listdir("/proc/self/fd"))
        clients = [await world.connect() for _ in range(200)]
        for client in clients:
            await client.send(request("GET", "/ok", "Connection: close"))
        await world.all_closed()
        assert len(os.listdir("/proc/self/fd")) == before + len(clients)
        for client in clients:
            client.close()


@pytest.mark.slow
async def test_more_than_1000_requests_on_one_connection(uds: Path) -> None:
    """Stock: the connection ends after 1,000, which a proxy sees as a reset."""
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(request() * 1010)
        for _ in range(1010):
            assert (await client.read_response()).status == 200


# No client can hold anything up ------------------------------------------------------------------


@pytest.mark.parametrize("sent_after", [b"", b"?"], ids=["", "stray byte"])
@pytest.mark.parametrize("path", ["/flood", "/generate"])
async def test_a_client_that_does_not_read_is_cut_off(
    path: str, sent_after: bytes, uds: Path, mock_clock: MockClock
) -> None:
    """Stock: its send is shielded for ever."""
    app = DemoApp()
    for _ in range(1000):
        app.feed.send_nowait(b"x" * 2**16)
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", path, body=b"x") + sent_after)
        await app.expect(f"started {path}")
        await pass_time(mock_clock, LIMITS.slow_client_timeout_s - 0.1)
        assert app.silent()
        await pass_time(mock_clock, 0.2)
        await app.expect("ended: slow_client")
        await world.all_closed()


async def test_teardown_does_not_wait_for_a_client_that_does_not_read(
    uds: Path, mock_clock: MockClock
) -> None:
    """Stock: 6 to 12 s after a graceful stop of 2 s, ``serve`` had not returned."""
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/flood", body=b"x"))
        await app.expect("started /flood")
        await wait_all_tasks_blocked()
    # `running` has cancelled the server and waited for it, while the clock stood still.


async def test_half_a_body_is_not_waited_for_for_ever(uds: Path, mock_clock: MockClock) -> None:
    """Stock, with Quart's BODY_TIMEOUT off as streams need it: the connection stays for ever."""
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/echo", "Content-Length: 10") + b"12345")
        await app.expect("started /echo")
        await pass_time(mock_clock, LIMITS.body_grace_s + 0.1)
        assert (await client.read_response()).status == 408
        await app.expect("ended: client_disconnect")


# Disconnects are seen ----------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_by", [b"?", b"\r\n", request(), b"x" * 5000])
@pytest.mark.parametrize("path", ["/wait", "/stream"])
async def test_a_disconnect_behind_unread_bytes_is_seen(
    path: str, hidden_by: bytes, uds: Path, mock_clock: MockClock
) -> None:
    """Stock: unseen until the answer is ready, 3.85 s of 3.85 s."""
    app = DemoApp()
    async with running(app, uds=uds) as world:
        client = await world.connect()
        await client.send(request("POST", path, body=b"x") + hidden_by)
        await app.expect(f"started {path}", *(["waiting"] if path == "/wait" else []))
        await wait_all_tasks_blocked()
        client.close()
        await app.expect("ended: client_disconnect")
        await world.all_closed()


async def test_a_half_close_is_a_disconnect(uds: Path, mock_clock: MockClock) -> None:
    """On purpose: it cannot be told from a client that has gone."""
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/wait", body=b"x"))
        await app.expect("started /wait", "waiting")
        client.half_close()
        await app.expect("ended: client_disconnect")
        assert await client.read_to_end() == b""  # no answer, and no error either


async def test_a_handler_that_never_receives_hears_of_a_disconnect(
    uds: Path, mock_clock: MockClock
) -> None:
    """Stock, raw ASGI: 20 sends succeeded in silence."""
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/wait-unread", body=b"x"))
        await app.expect("started /wait-unread")
        client.close()
        await app.expect("ended: client_disconnect")


# Streams are not cut, and are cheap --------------------------------------------------------------


@pytest.mark.parametrize("path", ["/stream", "/generate"])
async def test_a_stream_of_hours_is_not_cut(path: str, uds: Path, mock_clock: MockClock) -> None:
    """Stock: cut after 60 s, without a terminator."""
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", path, body=b"x"))
        for _ in range(3):
            app.feed.send_nowait(b"data: 1\n\n")
            await client.read_until(b"data: 1\n\n\r\n")
            await pass_time(mock_clock, 3600)
        app.feed.close()
        await client.read_until(b"0\r\n\r\n")
        assert (await client.exchange(request())).body == b"ok"


async def test_a_chunk_is_one_write_by_the_handlers_own_task(
    uds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock: a lock, a shield, three dataclasses and checkpoints; 71 µs a chunk."""
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/stream", body=b"x"))
        await client.read_until(b"\r\n\r\n")
        writes: list[bytes] = []
        connection = next(iter(world.server._connections))
        original = connection.stream.try_send

        def try_send(data: bytes) -> int:
            writes.append(data)
            return original(data)

        monkeypatch.setattr(connection.stream, "try_send", try_send)
        for index in range(5):
            app.feed.send_nowait(b"%d" % index)
        await client.read_until(b"1\r\n4\r\n")
        assert writes == [b"1\r\n%d\r\n" % index for index in range(5)]


async def test_nothing_of_hypercorns_access_log_runs(uds: Path) -> None:
    """Stock: 34 µs a request, copying ``os.environ``."""
    async with running(DemoApp(), uds=uds) as world:
        config: Any = world.server._hypercorn
        assert config.accesslog is None
        assert config.log.access_logger is None


async def test_the_backlog_holds_a_burst(uds: Path) -> None:
    """Stock: 100. A Unix socket refuses what is beyond it, TCP lets it wait for seconds."""
    num_clients = min(300, SOMAXCONN)
    async with running(DemoApp(), uds=uds):
        with contextlib.ExitStack() as clients:
            for _ in range(num_clients):  # the server cannot accept meanwhile
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(uds))
