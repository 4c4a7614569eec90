"""Accepting survives what it meets, and going down is bounded whatever clients do."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from helpers.demo_app import DemoApp
from helpers.raw_http import RawClient, request, running, wall_clock_limit
from trioengine.config import ServerConfig
from trioengine.errors import ConfigError
from trioengine.http.server import HttpServer, serve_http

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def uds(tmp_path: Path) -> Path:
    return tmp_path / "s"


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Nursery:
    """A server as the supervisor holds it: started, then ended by its own methods."""

    def __init__(self, nursery: trio.Nursery, app: Any, uds: Path) -> None:
        self._nursery, self._app = nursery, app
        self._config = ServerConfig(uds=str(uds))
        self.returned = trio.Event()

    async def start(self) -> HttpServer:
        server: HttpServer = await self._nursery.start(self._run)
        return server

    async def _run(self, task_status: trio.TaskStatus[HttpServer]) -> None:
        await serve_http(self._app, self._config, task_status=task_status)
        self.returned.set()


async def connect(uds: Path) -> RawClient:
    sock = socket.socket(socket.AF_UNIX)
    trio_sock = trio.socket.from_stdlib_socket(sock)
    try:
        await trio_sock.connect(str(uds))
    except OSError:
        sock.close()
        raise
    return RawClient(sock, trio.SocketStream(trio_sock))


# Starting ----------------------------------------------------------------------------------------


async def test_it_reports_where_it_listens_and_counts_connections() -> None:
    async with running(DemoApp()) as world:
        (bind,) = world.server.binds
        assert bind.startswith("http://127.0.0.1:")
        assert not bind.endswith(":0")
        async with await world.connect() as one, await world.connect() as two:
            await one.exchange(request())
            await two.exchange(request())
            assert world.server.open_connections == 2
        await world.all_closed()
        assert world.connections == [1, 2, 1, 0]


async def test_a_taken_port_is_a_configuration_error_before_it_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        async with trio.open_nursery() as nursery:
            with pytest.raises(ConfigError, match="Address already in use"):
                await nursery.start(partial(serve_http, DemoApp(), config))


async def test_the_apps_lifespan_encloses_the_servers(uds: Path) -> None:
    app = DemoApp()
    app.before_serving(_says(app, "before"))
    app.after_serving(_says(app, "after"))
    with wall_clock_limit():
        async with trio.open_nursery() as nursery:
            server = await Nursery(nursery, app, uds).start()
            await app.expect("before")
            server.begin_shutdown()
            await app.expect("after")


def _says(app: DemoApp, what: str) -> Any:
    async def say() -> None:
        app.say(what)

    return say


# Accepting ---------------------------------------------------------------------------------------


async def test_running_out_of_descriptors_is_survived(
    uds: Path, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The backlog waits, connections that have long been idle make room, and all goes on."""
    gc.collect()  # or a descriptor may become free at any time
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with running(DemoApp(), uds=uds) as world:
        idle = await world.connect()
        await idle.exchange(request())
        await wait_all_tasks_blocked()
        mock_clock.jump(10)
        fresh = await world.connect()
        await wait_all_tasks_blocked()
        waiting = [_connect_without_yielding(uds) for _ in range(3)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest_free_fd(), hard))
            assert await idle.read_to_end() == b""
            assert "Too many open files" in caplog.text
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await wait_all_tasks_blocked()
        mock_clock.jump(1)
        for client in [fresh, *waiting]:
            assert (await client.exchange(request())).body == b"ok"
            client.close()
        idle.close()


def _connect_without_yielding(uds: Path) -> RawClient:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(uds))
    return RawClient(sock, trio.SocketStream(trio.socket.from_stdlib_socket(sock)))


def _lowest_free_fd() -> int:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    return fd


class FailingOnce:
    """A listening socket whose first accept fails; error -1 is Python's own lack of memory."""

    def __init__(self, sock: socket.socket, error: int) -> None:
        self._sock, self._error = sock, error

    def accept(self) -> Any:
        if self._error:
            error, self._error = self._error, 0
            if error == -1:
                raise MemoryError
            raise OSError(error, os.strerror(error))
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize(
    "error", [errno.ECONNABORTED, errno.EPROTO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, -1]
)
async def test_a_failing_accept_is_survived(
    error: int, uds: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    original = HttpServer._accept

    async def accept(self: HttpServer, listener: Any, clients: trio.Nursery) -> None:
        failing = type(listener)(FailingOnce(listener.sock, error), listener.url, path=uds)
        await original(self, failing, clients)

    monkeypatch.setattr(HttpServer, "_accept", accept)
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        assert (await client.exchange(request())).body == b"ok"


async def test_an_exception_in_one_connection_ends_that_one(
    uds: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as innocent:
        await innocent.exchange(request())
        with monkeypatch.context() as patch:
            patch.setattr(
                "trioengine.http.h1.check_request_head",
                lambda *_: [][0],
            )
            async with await world.connect() as guilty:
                await guilty.send(request())
                assert await guilty.read_to_end() == b""
        assert "failed; the others go on" in caplog.text
        assert (await innocent.exchange(request())).body == b"ok"


# Going down --------------------------------------------------------------------------------------


async def test_draining_closes_what_is_idle_finishes_what_runs_and_still_answers_probes(
    uds: Path, mock_clock: MockClock
) -> None:
    app = DemoApp()
    with wall_clock_limit():
        async with trio.open_nursery() as nursery:
            served = Nursery(nursery, app, uds)
            server = await served.start()
            idle, busy, partial_head = [await connect(uds) for _ in range(3)]
            await idle.exchange(request())
            await busy.send(request("POST", "/wait", body=b"x"))
            await partial_head.send(b"GET /ok HT")
            await app.expect("started /ok", "ended: None", "started /wait", "waiting")

            server.begin_drain()
            server.begin_drain()  # idempotent
            assert await idle.read_to_end() == b""
            await partial_head.send(b"TP/1.1\r\nHost: x\r\n\r\n")
            response = await partial_head.read_response()
            assert (response.body, response.headers["connection"]) == (b"ok", "close")
            probe = await connect(uds)
            response = await probe.exchange(request())
            assert (response.body, response.headers["connection"]) == (b"ok", "close")
            assert await probe.read_to_end() == b""

            app.release.set()
            response = await busy.read_response()
            assert (response.body, response.headers["connection"]) == (b"waited", "close")
            assert await busy.read_to_end() == b""
            assert not served.returned.is_set()
            server.begin_shutdown()
            for client in (idle, busy, partial_head, probe):
                client.close()
        assert served.returned.is_set()


async def test_an_answer_begun_before_the_drain_ends_with_the_connection(uds: Path) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/stream", body=b"x"))
        assert b"close" not in await client.read_until(b"\r\n\r\n")
        world.server.begin_drain()
        app.feed.send_nowait(b"data: 1\n\n")
        app.feed.close()
        assert await client.read_to_end() == b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"


async def test_shutdown_stops_listening_and_returns_with_the_last_connection(uds: Path) -> None:
    app = DemoApp()
    with wall_clock_limit():
        async with trio.open_nursery() as nursery:
            served = Nursery(nursery, app, uds)
            server = await served.start()
            client = await connect(uds)
            await client.send(request("POST", "/wait", body=b"x"))
            await app.expect("started /wait", "waiting")
            server.begin_shutdown()
            server.begin_shutdown()  # idempotent
            await wait_all_tasks_blocked()
            with pytest.raises(FileNotFoundError):
                await connect(uds)
            assert not served.returned.is_set()
            app.release.set()
            assert (await client.read_response()).body == b"waited"
            await served.returned.wait()
            client.close()


STUCK: dict[str, bytes] = {
    "waiting": request("POST", "/wait", body=b"x"),
    "not reading": request("POST", "/flood", body=b"x"),
    "not reading, pipelined": request("POST", "/flood", body=b"x") + b"?",
    "answered, handler goes on": request("POST", "/linger", body=b"x"),
    "half a head": b"GET /o",
    "half a body": request("POST", "/wait", "Content-Length: 10"),
    "refused, still sending": request("POST", "/refuse", "Content-Length: 10"),
    "silent": b"",
}


@pytest.mark.parametrize("how", ["abort", "cancel"])
@pytest.mark.parametrize("stuck", STUCK.values(), ids=STUCK)
async def test_no_client_can_hold_up_the_end(
    stuck: bytes, how: str, uds: Path, mock_clock: MockClock
) -> None:
    """Nor can a clock that stands still: no timer is waited for."""
    app = DemoApp()
    with wall_clock_limit():
        async with trio.open_nursery() as nursery:
            served = Nursery(nursery, app, uds)
            server = await served.start()
            client = await connect(uds)
            await client.send(stuck)
            await wait_all_tasks_blocked()
            assert server.open_connections == 1
            if how == "abort":
                server.begin_shutdown()
                server.abort_connections()
                await served.returned.wait()
            nursery.cancel_scope.cancel()
        assert server.open_connections == 0
        if stuck.startswith((b"POST /wait HTTP/1.1", b"POST /flood")):
            assert app.heard()[-1] == "ended: shutdown"
        client.close()


async def test_abort_tells_every_owner_before_it_returns(uds: Path) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world:
        clients = [await world.connect() for _ in range(5)]
        for client in clients:
            await client.send(request("POST", "/wait", body=b"x"))
            await app.expect("started /wait", "waiting")
        world.server.abort_connections()
        assert app.heard() == ["ended: shutdown"] * 5
        for client in clients:
            client.close()


async def test_a_client_that_is_thrown_out_sees_a_reset() -> None:
    """What the kernel still holds for it is dropped, not kept until it deigns to read."""
    app = DemoApp()
    async with running(app) as world, await world.connect(receive_buffer=4096) as client:
        await client.send(request("POST", "/flood", body=b"x"))
        await app.expect("started /flood")
        world.server.abort_connections()
        with pytest.raises(trio.BrokenResourceError):
            await client.read_to_end()


async def test_nothing_is_left_open(uds: Path) -> None:
    app = DemoApp()
    before = num_fds()
    async with running(app, uds=uds) as world:
        clients = [await world.connect() for _ in range(20)]
        for client, stuck in zip(clients, list(STUCK.values()) * 3, strict=False):
            await client.send(stuck)
        await wait_all_tasks_blocked()
    for client in clients:
        client.close()
    assert num_fds() == before
