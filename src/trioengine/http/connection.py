"""Gives each HTTP request an owner that outlives its handler and its response body.

``request.owned`` is an ``ExitStack``. A handler enters what must not outlive the request
(``request.owned.enter_context(client.open_stream(...))``), and the stack is closed, synchronously,
at the first of: the client is lost, the response has ended, the handler has failed. So an abort
needs no ``await`` and waits for nobody, not even for a send that a slow client is holding up.

``request.ending`` is set when the last part of the answer is handed over. From then on the client
may go: the answer is whole. (Hypercorn says ``http.disconnect`` from inside that last send, and
stock Quart-Trio then cancels the very task that is about to close or recycle the connection: a
connection that should close never does.)

    app = QuartTrio(__name__)
    own_connections(app)

    @app.post("/v1/completions")
    async def completions() -> Response:
        request = current_request()
        body = await request.get_data()
        stream = request.owned.enter_context(open_stream(...))
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import trio
from quart import request as quart_request
from quart.asgi import ASGIHTTPConnection
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers.request import TrioBody, TrioRequest

from trioengine.http.client_connection import connection_of
from trioengine.http.inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable

    from quart_trio import QuartTrio

    from trioengine.http.client_connection import ClientConnection, LossReason
    from trioengine.http.stream_writer import ResponseWriter

__all__ = [
    "OwnedHTTPConnection",
    "OwnedRequest",
    "current_request",
    "first_field",
    "own_connections",
]


async def _nobody_to_ask() -> None:
    pass


class AskedBody(TrioBody):
    """A request body that asks for itself: ``Expect: 100-continue`` is answered when it is read."""

    ask: Callable[[], Awaitable[None]] = staticmethod(_nobody_to_ask)
    whole: bytes | None = None  # where it had arrived before the handler began

    def set_whole(self, data: bytes) -> None:
        """Be complete, with ``data``."""
        self.whole = data
        self.append(data)
        self.set_complete()

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self.ask().__await__()
        return (yield from super().__await__())

    async def __anext__(self) -> bytes:
        await self.ask()
        return await super().__anext__()


class OwnedRequest(TrioRequest):
    """A request that owns what was opened for it.

    Attributes:
        owned: Closed when the client is lost, or the request ends in any other way.
        ending: The last part of the answer was handed over (or all that it may have).
        loss: Why the client was lost before that: ``client_disconnect``, ``slow_client``,
            ``shutdown``; ``None`` if it was not. Set before ``owned`` is closed.
        connection: Our side of its connection; ``None`` under a test client.
        asgi_send: Sends an ASGI message, noting the end.
        writer: Set by ``response_writer``: the handler answers by itself.
    """

    body_class = AskedBody
    body: AskedBody
    owned: ExitStack
    ending: bool
    loss: LossReason | None
    connection: ClientConnection | None
    asgi_send: Callable[[Any], Awaitable[None]]
    writer: ResponseWriter | None

    async def read_body(self) -> bytes:
        """Return the whole body, and let go of it. A checkpoint if it has to be waited for."""
        data, self.body.whole = self.body.whole, None
        if data is None:
            data = await self.get_data(cache=False, as_text=False, parse_form_data=False)
        self.body.clear()
        return data

    def field(self, name: bytes) -> str | None:
        """Return the first value of a header field, ``None`` without one. Cheap when it is absent.

        Args:
            name: In lower case.
        """
        return first_field(self.scope["headers"], name)

    def end(self) -> None:
        """Note that the answer is whole once what is being sent has been. Idempotent."""
        if not self.ending and self.connection is not None:
            self.connection.detach()  # once: the next request may be on it already
        self.ending = True


class OwnedHTTPConnection(TrioASGIHTTPConnection):
    """One ASGI exchange: a handler, a body pump where the body is late, the request's owner."""

    async def __call__(self, receive: Any, send: Any) -> None:
        request = self._create_request_from_scope(send)
        with trio.CancelScope() as scope, request.owned:
            lose = _owner(request, scope)
            if request.connection is not None:
                request.connection.attach(lose)
                # Most bodies are there before their handler is. Then nobody need wait for what
                # comes: of the connection's end its owner is told directly.
                if _take_body(request.body, receive):
                    await self._answer(request)
                    return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, lose, request, receive)
                await self._answer(request)
                nursery.cancel_scope.cancel(reason="request has ended")

    def _create_request_from_scope(self, send: Any) -> OwnedRequest:
        request = cast("OwnedRequest", super()._create_request_from_scope(send))
        request.owned, request.ending, request.loss = ExitStack(), False, None
        request.writer = None
        request.connection = connection_of(self.scope)
        request.asgi_send = _EndNotingSend(request, send)
        if request.connection is not None:
            request.body.ask = request.connection.protocol.send_continue
        return request

    async def _pump(
        self, lose: Callable[[LossReason], None], request: OwnedRequest, receive: Any
    ) -> None:
        """Feed the body in, until the end of the connection."""
        await ASGIHTTPConnection.handle_messages(self, request, receive)
        lose("client_disconnect")

    async def _answer(self, request: OwnedRequest) -> None:
        """Run the handler, and send its response unless it has answered by itself."""
        try:
            response = await self.app.handle_request(request)
            if request.writer is None:
                await self._send_response(request.asgi_send, response)
        except BaseException:
            # Cancelled by whoever has lost the client, and has said so; else the server is ending.
            if trio.current_effective_deadline() == -math.inf:
                request.loss = request.loss or "shutdown"
            raise


def _take_body(body: AskedBody, receive: Any) -> bool:
    """Take the whole body from ``receive`` if it is there."""
    pieces = receive.take_body() if isinstance(receive, Inbox) else None
    if pieces is None:
        return False
    body.set_whole(b"".join(pieces))
    return True


def _owner(request: OwnedRequest, scope: trio.CancelScope) -> Callable[[LossReason], None]:
    """Return what to call when the client of ``request`` is lost."""

    def lose(reason: LossReason) -> None:
        if request.ending:
            return
        request.loss = request.loss or reason
        scope.cancel(reason=reason)  # first, so that it happens whatever follows
        request.owned.close()

    return lose


class _EndNotingSend:
    """An ASGI ``send`` that notes, before it goes out, the part that makes the answer whole.

    With a ``Content-Length`` that is the part with the last byte: the client may close before the
    empty message that follows it.
    """

    def __init__(self, request: OwnedRequest, send: Callable[[Any], Awaitable[None]]) -> None:
        self._request, self._send = request, send
        self._left: int | None = None

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            length = headers.get(b"content-length", headers.get(b"Content-Length"))
            self._left = None if length is None else int(length)
        elif message["type"] == "http.response.body":
            if self._left is not None:
                self._left -= len(message["body"])
            if not message["more_body"] or self._left == 0:
                self._request.end()
        await self._send(message)


def first_field(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Return the first value among ASGI ``headers`` of the field ``name`` (in lower case)."""
    for each, value in headers:
        if each == name:
            return value.decode("latin-1")
    return None


def own_connections(app: QuartTrio) -> None:
    """Make every request of ``app`` an ``OwnedRequest``, with our own bounds instead of Quart's.

    Quart would cut every response after 60 s and refuse bodies by its own limits; the connection
    has better ones (``trioengine.http.limits``).
    """
    app.asgi_http_class = OwnedHTTPConnection
    app.request_class = OwnedRequest
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = None
    app.config["MAX_CONTENT_LENGTH"] = None


def current_request() -> OwnedRequest:
    """Return the request that the calling handler serves.

    Raises:
        RuntimeError: No request is being handled, or ``own_connections`` was not called.
    """
    request = quart_request._get_current_object()  # type: ignore[attr-defined]
    if not isinstance(request, OwnedRequest):
        raise RuntimeError("this app's requests have no owner; call own_connections(app)")
    return request
