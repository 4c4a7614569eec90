"""A client that says exactly the bytes it is told, on a real socket, and a server to say them to.

Real sockets, because what is tested is what the kernel does with them; Unix sockets where the clock
is a ``MockClock``, because there a write, a close or a half-close has reached the other side when
the call returns. Nothing here sleeps: tests wait for bytes, for the end, or for the app's events.
"""

from __future__ import annotations

import dataclasses
import socket
import ssl
import struct
import threading
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from trioengine.config import ServerConfig
from trioengine.http.server import HttpServer, ServerHooks, serve_http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from trioengine.http.limits import Limits
    from trioengine.http.turnstile import Refusal

__all__ = [
    "TLS",
    "RawClient",
    "RawResponse",
    "RunningServer",
    "request",
    "running",
    "wall_clock_limit",
    "with_tls",
]

TLS = Path(__file__).parent / "tls"
PATIENCE_S = 20.0  # a bound for a loaded machine, not an expectation


def with_tls() -> dict[str, Any]:
    """Return the arguments of ``running`` for a server, and clients, that speak TLS."""
    cert = str(TLS / "cert.pem")
    return {
        "client_tls": ssl.create_default_context(cafile=cert),
        "ssl_certfile": cert,
        "ssl_keyfile": str(TLS / "key.pem"),
    }


def request(
    method: str = "GET",
    path: str = "/ok",
    *headers: str,
    body: bytes | None = None,
    version: str = "1.1",
) -> bytes:
    """Return the bytes of a request; ``Content-Length`` is added where there is a body."""
    lines = [f"{method} {path} HTTP/{version}", "Host: test", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class RawResponse(NamedTuple):
    """A whole response, as h11 understood it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails unless the body is one."""
        (key, value), *rest = msgspec.json.decode(self.body).items()
        assert (key, rest) == ("error", [])
        assert set(value) == {"message", "type", "param", "code"}
        error: dict[str, Any] = value
        return error


class RawClient:
    """One connection to the server. Closed by ``async with``, or by hand in some ruder way."""

    def __init__(self, sock: socket.socket, stream: trio.abc.Stream) -> None:
        self.sock = sock
        self.stream = stream
        self._ahead = b""  # received after the end of the last response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive(self) -> bytes:
        """Return some bytes; ``b""`` at the end."""
        return bytes(await self.stream.receive_some(65536))

    async def read_until(self, end: bytes) -> bytes:
        """Return everything up to and including ``end``; fails at the end of the connection."""
        data, self._ahead = self._ahead, b""
        while end not in data:
            more = await self.receive()
            assert more, f"connection ended after {data!r}"
            data += more
        return data

    async def read_to_end(self) -> bytes:
        """Return everything until the server closes in order; raises where it resets."""
        data, self._ahead = self._ahead, b""
        while more := await self.receive():
            data += more
        return data

    async def read_response(self, *, method: str = "GET") -> RawResponse:
        """Return the next response (of a request of ``method``), past any 1xx."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("Host", "test")]))
        parser.send(h11.EndOfMessage())
        if self._ahead:
            parser.receive_data(self._ahead)
        head: h11.Response | None = None
        body = b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await self.receive())
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise AssertionError("connection closed before a response")
        assert head is not None
        self._ahead = parser.trailing_data[0]
        return RawResponse(
            head.status_code,
            {name.decode(): value.decode() for name, value in head.headers},
            body,
        )

    async def exchange(self, data: bytes) -> RawResponse:
        """Send a request and return its response."""
        await self.send(data)
        return await self.read_response(method=data.split(b" ", 1)[0].decode())

    def half_close(self) -> None:
        """Send FIN, go on reading."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close; idempotent. The kernel sends FIN, or RST if something was left unread."""
        trio.lowlevel.notify_closing(self.sock)
        self.sock.close()

    def reset(self) -> None:
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()


@dataclasses.dataclass
class RunningServer:
    """A server under test and what its hooks have said.

    Attributes:
        server: The server.
        connections: Every number of open connections it reported.
        refused: Codes of the requests that it refused by itself.
        changed: Wakes who waits for the number of connections to change.
        tls: What clients use, if it speaks TLS.
    """

    server: HttpServer
    connections: list[int]
    refused: list[str]
    changed: trio.lowlevel.ParkingLot
    tls: ssl.SSLContext | None = None

    async def connect(self, *, receive_buffer: int | None = None) -> RawClient:
        """Open a connection to the first address, with TLS if the server speaks it."""
        url = self.server.binds[0]
        if url.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX)
            address: Any = url.removeprefix("unix:")
        else:
            parts = urlsplit(url)
            sock = socket.socket(socket.AF_INET6 if "[" in url else socket.AF_INET)
            address = (parts.hostname, parts.port)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        trio_sock = trio.socket.from_stdlib_socket(sock)
        await trio_sock.connect(address)
        stream: trio.abc.Stream = trio.SocketStream(trio_sock)
        if self.tls is not None:
            stream = trio.SSLStream(stream, self.tls, server_hostname="localhost")
        return RawClient(sock, stream)

    async def all_closed(self) -> None:
        """Wait until the server has no connection left."""
        while self.server.open_connections:
            await self.changed.park()


@contextmanager
def wall_clock_limit(seconds: float = PATIENCE_S) -> Iterator[None]:
    """Fail a block that hangs, also where the clock is a ``MockClock``."""
    token = trio.lowlevel.current_trio_token()
    with trio.CancelScope() as scope:
        timer = threading.Timer(seconds, token.run_sync_soon, (scope.cancel,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
    assert not scope.cancelled_caught, f"hung for {seconds:g} s"


@asynccontextmanager
async def running(
    app: Any,
    *,
    uds: Path | None = None,
    limits: Limits | None = None,
    client_tls: ssl.SSLContext | None = None,
    turnstile: Callable[[h11.Request, tuple[str, int] | None], Refusal | None] | None = None,
    **config: Any,
) -> AsyncIterator[RunningServer]:
    """Serve ``app`` for the block on a free port (or ``uds``); it is torn down by cancellation."""
    changed = trio.lowlevel.ParkingLot()
    connections: list[int] = []
    refused: list[str] = []

    def count(number: int) -> None:
        connections.append(number)
        changed.unpark_all()

    hooks = ServerHooks(connections=count, refused=refused.append)
    if turnstile is not None:
        hooks = dataclasses.replace(hooks, turnstile=turnstile)
    server_config = ServerConfig(port=0, uds=None if uds is None else str(uds), **config)
    with wall_clock_limit():
        async with trio.open_nursery() as nursery:
            server = await nursery.start(
                partial(serve_http, app, server_config, hooks=hooks, limits=limits)
            )
            yield RunningServer(server, connections, refused, changed, client_tls)
            nursery.cancel_scope.cancel()
