"""One exchange between an HTTP/1.1 connection and the app: Hypercorn's, with our last word.

Relies on internals of Hypercorn 0.18 as ``h1.py`` does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio
from hypercorn.protocol.events import Body, EndBody, Response
from hypercorn.protocol.h11 import STREAM_ID
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream

from trioengine.errors import InternalError, UnavailableError
from trioengine.http.errors import error_body

if TYPE_CHECKING:
    from trioengine.errors import TrioEngineError
    from trioengine.http.h1 import ServerContext

__all__ = ["OneShapeStream", "content_fields"]


class OneShapeStream(HTTPStream):
    """An ASGI exchange whose last-resort 500 has a body like every other error."""

    context: ServerContext

    async def _send_error_response(self, status_code: int) -> None:
        # Also sent, to nobody, when the app was cancelled because its client had gone. So nothing
        # is logged here; an app that failed was logged by Hypercorn.
        # A server that leaves at once cancels its apps, too: that is not a failure, but a goodbye.
        leaving = self.context.draining or trio.current_effective_deadline() == -math.inf
        error = _goodbye() if leaving else _failure()
        body = error_body(error)
        headers = [*content_fields(body), (b"connection", b"close")]
        head = Response(stream_id=STREAM_ID, headers=headers, status_code=error.http_status)
        await self.send(head)
        if self.scope["method"] != "HEAD":
            await self.send(Body(stream_id=STREAM_ID, data=body))
        await self.send(EndBody(stream_id=STREAM_ID))
        self.state = ASGIHTTPState.CLOSED


def content_fields(body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the header fields that describe a JSON body."""
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


def _failure() -> TrioEngineError:
    return InternalError("The server failed to handle this request.")


def _goodbye() -> TrioEngineError:
    return UnavailableError("the server is shutting down", code="draining")
