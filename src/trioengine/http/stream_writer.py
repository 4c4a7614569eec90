"""Writes a streamed answer from the handler's own task, straight to the socket.

Each event of a stream would pass through Quart's generator, three dataclasses and h11: 71 µs of CPU
for a chunk whose ``send`` takes 10. Here the head and the end go through h11, so that its state
stays true and the connection can be kept alive; the chunks between, whose framing is two lines, are
written as they come. (Under TLS each of them waits, since there nothing can be written otherwise;
without a connection of ours, as under a test client, they are ASGI messages.)

    writer = response_writer(request)
    await writer.start(200, {"Content-Type": "text/event-stream; charset=utf-8"})
    await writer.write(event)          # waits while the client is behind: at most one chunk pends
    await writer.end(DONE)
    return writer.response             # for Quart; nothing of it is sent

Returning without ``end`` cuts the connection: the client can tell a broken stream from a whole one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio
from quart_trio.wrappers import TrioResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioengine.http.connection import OwnedRequest

__all__ = ["ResponseWriter", "response_writer"]

_WRITES_PER_CHECKPOINT: Final = 32


def response_writer(request: OwnedRequest) -> ResponseWriter:
    """Return the writer of the answer to ``request``; from now on its handler answers by itself.

    Raises:
        RuntimeError: It has one already.
    """
    if request.writer is not None:
        raise RuntimeError("this request has a writer already")
    request.writer = ResponseWriter(request)
    return request.writer


class ResponseWriter:
    """The answer to one request, in the order ``start``, ``write``…, ``end``. One task's.

    A write raises ``trio.Cancelled`` when the client is gone: the request was cancelled then.

    Attributes:
        response: What the handler returns to Quart.
        started: The head has gone out: from here on an error can only be part of the stream.
    """

    def __init__(self, request: OwnedRequest) -> None:
        self.response = TrioResponse(b"")
        self.started = False
        self._request = request
        self._connection = request.connection
        self._chunked = request.http_version != "1.0"
        self._silent = request.method == "HEAD"
        self._pending: bytes | memoryview = b""
        self._writes = 0

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head. The body is chunked; for an HTTP/1.0 client it ends with the connection.

        Args:
            status: HTTP status.
            headers: Without ``Content-Length`` and ``Transfer-Encoding``.
        """
        self.started = True
        fields = [
            (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
        ]
        await self._request.asgi_send(
            {"type": "http.response.start", "status": status, "headers": fields}
        )

    async def write(self, chunk: bytes) -> None:
        """Send ``chunk``, waiting for the client if need be. A checkpoint if it waits.

        Raises:
            trio.BrokenResourceError: The client is gone and the request survived it.
        """
        if not self.write_nowait(chunk):
            await self.flush()
        self._writes += 1
        if self._writes % _WRITES_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()  # a fast client must not starve the others

    def write_nowait(self, chunk: bytes) -> bool:
        """Hand ``chunk`` over; False if part of it has to wait for ``flush``. Never a checkpoint.

        Raises:
            trio.WouldBlock: A chunk is waiting already; nothing was taken of this one.
        """
        if self._pending:
            raise trio.WouldBlock
        if self._silent or not chunk:
            return True
        if self._connection is None:
            self._pending = chunk
            return False
        data = self._framed(chunk)
        try:
            sent = self._connection.stream.try_send(data)
        except trio.BrokenResourceError:
            sent = 0  # flush will notice
        self._pending = memoryview(data)[sent:] if sent < len(data) else b""
        return not self._pending

    def _framed(self, chunk: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk

    async def flush(self) -> None:
        """Wait until the chunk that is waiting has gone. A checkpoint if there is one.

        Raises:
            trio.BrokenResourceError: As ``write``.
        """
        pending, self._pending = self._pending, b""
        if not pending:
            return
        if self._connection is None:
            await self._request.asgi_send(
                {"type": "http.response.body", "body": bytes(pending), "more_body": True}
            )
            return
        try:
            await self._connection.stream.send_rest(memoryview(pending))
        except trio.BrokenResourceError:
            self._connection.lost("client_disconnect")
            await trio.lowlevel.checkpoint()  # noqa: ASYNC120 - a cancel may take its place
            raise

    async def end(self, last: bytes = b"", *, close: bool = False) -> None:
        """Send ``last`` and the end of the body.

        Args:
            last: A last chunk. The client may go once it has it: that is no disconnect.
            close: Close the connection afterwards, whatever the head said.

        Raises:
            trio.BrokenResourceError: The client had gone before.
        """
        await self.flush()
        self._request.end()
        if close and self._connection is not None:
            self._connection.protocol.closing = True
        if self._connection is not None and last and not self._silent:
            self._connection.stream.hold(self._framed(last))  # leaves with the end of the body
        else:
            await self.write(last)
        await self._request.asgi_send(
            {"type": "http.response.body", "body": b"", "more_body": False}
        )
