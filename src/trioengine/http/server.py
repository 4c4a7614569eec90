"""Accepts connections, and ends them: an HTTP server that no client can stop or hold up.

Theory of operation. ``serve_http`` binds its own listeners, runs the app's lifespan, and gives each
connection a task whose exceptions end that connection and nothing else (under Hypercorn's ``serve``
one malformed request could end the process). Going down has two phases, both begun synchronously:

- ``begin_drain``: the app answers 503 to new work, but health probes must still be answered. So the
  listeners stay; every answer says ``Connection: close``; idle connections are closed at once.
- ``begin_shutdown``: the listeners close too. ``serve_http`` returns when the last connection has
  ended; ``abort_connections`` makes that now. So does cancelling it.

    server = await nursery.start(partial(serve_http, app, config, hooks=hooks))
    print(server.binds)
"""

from __future__ import annotations

import errno
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan

from trioengine.http.client_connection import ClientConnection
from trioengine.http.disconnects import DisconnectWatcher
from trioengine.http.h1 import ServerContext
from trioengine.http.limits import Limits
from trioengine.http.listeners import open_listeners
from trioengine.http.transport import ClientStream

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable
    from typing import Any

    import h11
    from hypercorn.typing import ASGIFramework

    from trioengine.config import ServerConfig
    from trioengine.http.client_connection import LossReason
    from trioengine.http.listeners import Listener
    from trioengine.http.turnstile import Refusal

__all__ = ["HttpServer", "ServerHooks", "serve_http"]

logger = logging.getLogger(__name__)

_ACCEPTS_PER_CHECKPOINT: Final = 64
_STARVED_S: Final = 0.1  # pause when the process has no descriptors or memory for a connection
_IDLE_WHEN_STARVED_S: Final = 1.0  # a fresh connection's request may still be on its way
_STARVED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class ServerHooks:
    """What the server tells whoever counts, and asks whoever decides. None may raise or wait.

    Attributes:
        connections: Number of open connections, on every change.
        refused: Error code of a request that was refused for what its bytes are (400, 408, 413,
            431).
        turnstile: Returns what to answer a request of this client instead of asking the app, if
            anything.
    """

    connections: Callable[[int], None] = _ignore
    refused: Callable[[str], None] = _ignore
    turnstile: Callable[[h11.Request, tuple[str, int] | None], Refusal | None] = _ignore


async def serve_http(
    app: ASGIFramework,
    config: ServerConfig,
    *,
    hooks: ServerHooks | None = None,
    limits: Limits | None = None,
    task_status: trio.TaskStatus[HttpServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` until ``begin_shutdown`` of the ``HttpServer`` given to ``task_status``.

    Args:
        app: An ASGI app; a ``QuartTrio`` must have been given to ``own_connections``.
        config: Where to listen, TLS, limits.
        hooks: Whom to tell.
        limits: Bounds of a connection instead of those in ``config``.
        task_status: Started when connections are accepted.

    Raises:
        ConfigError: It cannot listen there (before it has started).
    """
    server = HttpServer(app, config, hooks or ServerHooks(), limits or Limits.from_config(config))
    await server.serve(config, task_status=task_status)


class HttpServer:
    """A running server: its addresses, its connections, its end.

    Attributes:
        binds: Where it listens, for people: ``http://127.0.0.1:8000``, ``unix:/path``.
    """

    def __init__(
        self, app: ASGIFramework, config: ServerConfig, hooks: ServerHooks, limits: Limits
    ) -> None:
        self.binds: tuple[str, ...] = ()
        self._app = ASGIWrapper(app)
        self._hooks = hooks
        self._limits = limits
        self._hypercorn = _hypercorn_config(config, limits)
        self._context = ServerContext(limits, hooks.refused, hooks.turnstile)
        self._make_stream = _stream_maker(config)
        self._watcher = DisconnectWatcher()
        self._accepting = trio.CancelScope()
        self._connections: set[ClientConnection] = set()
        self._ended = trio.lowlevel.ParkingLot()
        self._starved = False

    @property
    def open_connections(self) -> int:
        """Connections accepted and not yet closed."""
        return len(self._connections)

    # Going down ----------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Close what is idle and keep no connection alive; go on listening. Idempotent."""
        self._context.draining = True
        self._close_idle()

    def begin_shutdown(self) -> None:
        """Stop listening; ``serve_http`` returns when the last connection has ended. Idempotent."""
        self._accepting.cancel(reason="server shuts down")
        self.begin_drain()

    def abort_connections(self, reason: LossReason = "shutdown") -> None:
        """End all connections now, telling the owners of requests in flight. Synchronous."""
        for connection in tuple(self._connections):
            connection.abort(reason)

    def _close_idle(self, for_s: float = 0.0) -> None:
        for connection in tuple(self._connections):
            connection.close_if_idle(for_s)

    # Serving -------------------------------------------------------------------------------------

    async def serve(
        self, config: ServerConfig, *, task_status: trio.TaskStatus[HttpServer]
    ) -> None:
        """As ``serve_http``, once."""
        listeners = await open_listeners(config)
        try:
            async with self._lifespan():
                self.binds = tuple(listener.url for listener in listeners)
                with self._watcher:
                    await self._serve(listeners, task_status)
        finally:
            for listener in listeners:
                listener.close()

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        lifespan = Lifespan(self._app, self._hypercorn, {})
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            yield
            await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()

    async def _serve(
        self, listeners: list[Listener], task_status: trio.TaskStatus[HttpServer]
    ) -> None:
        async with trio.open_nursery() as background, trio.open_nursery() as clients:
            background.start_soon(self._watcher.run)
            try:
                with self._accepting:
                    async with trio.open_nursery() as acceptors:
                        for listener in listeners:
                            acceptors.start_soon(self._accept, listener, clients)
                        task_status.started(self)
                for listener in listeners:
                    listener.close()
                while self._connections:
                    await self._ended.park()
            finally:
                self.abort_connections()  # nobody is left, unless we are cancelled
            background.cancel_scope.cancel(reason="server has shut down")

    async def _accept(self, listener: Listener, clients: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener.sock)
            for _ in range(_ACCEPTS_PER_CHECKPOINT):
                try:
                    sock, address = listener.sock.accept()
                except BlockingIOError:
                    break
                except (OSError, MemoryError) as error:
                    await self._on_accept_error(error)
                    break
                clients.start_soon(self._serve_client, sock, address, listener)

    async def _on_accept_error(self, error: OSError | MemoryError) -> None:
        if isinstance(error, OSError) and error.errno not in _STARVED:
            logger.debug("a connection was gone before it was accepted: %s", error)
            return
        if not self._starved:
            logger.error("cannot accept connections: %r; idle ones are closed", error)
        self._starved = True
        self._close_idle(_IDLE_WHEN_STARVED_S)
        await trio.sleep(_STARVED_S)

    async def _serve_client(self, sock: socket.socket, address: Any, listener: Listener) -> None:
        """Serve one connection. Whatever goes wrong in it, it is the only one that ends."""
        try:
            await self._serve_connection(sock, address, listener)
        except* Exception:
            logger.exception("the connection from %s failed; the others go on", address or "a peer")
        finally:
            sock.close()

    async def _serve_connection(
        self, sock: socket.socket, address: Any, listener: Listener
    ) -> None:
        stream = self._make_stream(
            sock,
            address[:2] if listener.path is None else None,
            slow_client_timeout_s=self._limits.slow_client_timeout_s,
            tls=listener.tls,
        )
        connection = ClientConnection(
            self._app, self._hypercorn, self._context, self._watcher, stream
        )
        self._starved = False
        self._connections.add(connection)
        self._hooks.connections(len(self._connections))
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._hooks.connections(len(self._connections))
            self._ended.unpark_all()


def _stream_maker(config: ServerConfig) -> Callable[..., ClientStream]:
    """Return what makes a client's stream; one that refuses to write where a fault plan says so."""
    if config.engine.fault_plan is None:
        return ClientStream
    from trioengine.http.faults import stream_maker

    return stream_maker(config.engine.fault_plan)


class _Hypercorn(Config):
    """Hypercorn's configuration; the date in every head is written once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._dated: list[tuple[bytes, bytes]] = []

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        if (now := int(time.time())) != self._second:
            self._second, self._dated = now, super().response_headers(protocol)
        return self._dated


def _hypercorn_config(config: ServerConfig, limits: Limits) -> Config:
    """Return Hypercorn's part, with everything of its own that would bound a client turned off."""
    hypercorn = _Hypercorn()
    hypercorn.root_path = config.root_path
    hypercorn.accesslog = None  # 34 µs a request; the app writes one line of its own
    hypercorn.errorlog = logger
    hypercorn.include_server_header = False
    hypercorn.h11_max_incomplete_size = limits.max_head_bytes
    return hypercorn
