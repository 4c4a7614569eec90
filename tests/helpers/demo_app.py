"""The smallest app that shows what a connection does to its handlers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio
from quart import Response
from quart_trio import QuartTrio

from trioengine.http.connection import current_request, own_connections
from trioengine.http.stream_writer import response_writer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trioengine.http.connection import OwnedRequest

    Handler = Callable[["DemoApp", OwnedRequest], Awaitable[Response]]

__all__ = ["DemoApp"]

EVENT_STREAM = {"Content-Type": "text/event-stream"}


class DemoApp(QuartTrio):
    """Routes that wait, stream, refuse and fail, and say so.

    Attributes:
        release: Set it, and what waits goes on.
        feed: What ``/stream`` and ``/generate`` send next, until it is closed.
    """

    def __init__(self) -> None:
        super().__init__("demo")
        own_connections(self)
        self.release = trio.Event()
        self.feed, self.chunks = trio.open_memory_channel[bytes](1000)
        self._said, self._heard = trio.open_memory_channel[str](math.inf)
        for path, handler in ROUTES.items():
            view = self._view(path, handler)
            self.add_url_rule(path, path, view, methods=["GET", "POST"])

    def _view(self, path: str, handler: Handler) -> Callable[[], Awaitable[Response]]:
        async def view() -> Response:
            request = current_request()
            self.say(f"started {path}")
            request.owned.callback(lambda: self.say(f"ended: {request.loss}"))
            return await handler(self, request)

        return view

    def say(self, event: str) -> None:
        self._said.send_nowait(event)

    async def expect(self, *events: str) -> None:
        """Wait for these events, which must be the next ones.

        ``started PATH`` when a handler runs, ``read N`` when it has a body of N bytes, ``ended:
        REASON`` when the request's owner lets go (``None``: not for loss of the client).
        """
        for event in events:
            assert await self._heard.receive() == event

    def heard(self) -> list[str]:
        """Return the events that nobody has waited for."""
        count = self._heard.statistics().current_buffer_used
        return [self._heard.receive_nowait() for _ in range(count)]

    def silent(self) -> bool:
        """True if nothing has happened that was not expected."""
        return not self.heard()


async def _ok(app: DemoApp, request: OwnedRequest) -> Response:
    return Response("ok")


async def _echo(app: DemoApp, request: OwnedRequest) -> Response:
    body = await request.get_data()
    app.say(f"read {len(body)}")
    return Response(body)


async def _wait(app: DemoApp, request: OwnedRequest) -> Response:
    """Compute for long: the phase in which nothing is read and nothing is written."""
    await request.get_data()
    app.say("waiting")
    await app.release.wait()
    return Response("waited")


async def _wait_unread(app: DemoApp, request: OwnedRequest) -> Response:
    await app.release.wait()
    return Response("waited")


async def _refuse(app: DemoApp, request: OwnedRequest) -> Response:
    return Response("no", status=429)


async def _boom(app: DemoApp, request: OwnedRequest) -> Response:
    raise ZeroDivisionError("boom")


async def _stream(app: DemoApp, request: OwnedRequest) -> Response:
    writer = response_writer(request)
    await writer.start(200, EVENT_STREAM)
    async for chunk in app.chunks:
        await writer.write(chunk)
    await writer.end()
    return writer.response


async def _last_words(app: DemoApp, request: OwnedRequest) -> Response:
    writer = response_writer(request)
    await writer.start(200, EVENT_STREAM)
    await writer.end(b"data: error\n\n", close=True)
    return writer.response


async def _broken_stream(app: DemoApp, request: OwnedRequest) -> Response:
    writer = response_writer(request)
    await writer.start(200, EVENT_STREAM)
    await writer.write(b"data: half\n\n")
    return writer.response


async def _linger(app: DemoApp, request: OwnedRequest) -> Response:
    """Answer, and then find no end."""
    writer = response_writer(request)
    await writer.start(200, EVENT_STREAM)
    await writer.end()
    app.say("answered")
    await app.release.wait()
    return writer.response


async def _flood(app: DemoApp, request: OwnedRequest) -> Response:
    writer = response_writer(request)
    await writer.start(200, EVENT_STREAM)
    while True:
        await writer.write(b"x" * 65536)


async def _generate(app: DemoApp, request: OwnedRequest) -> Response:
    """A stream as Quart does it, through the ordinary ASGI path."""

    async def body() -> AsyncIterator[bytes]:
        async for chunk in app.chunks:
            yield chunk

    return Response(body(), headers=EVENT_STREAM)


async def _broken_generator(app: DemoApp, request: OwnedRequest) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"half"
        raise ZeroDivisionError("boom")

    return Response(body(), headers=EVENT_STREAM)


ROUTES: dict[str, Handler] = {
    "/ok": _ok,
    "/echo": _echo,
    "/wait": _wait,
    "/wait-unread": _wait_unread,
    "/refuse": _refuse,
    "/boom": _boom,
    "/stream": _stream,
    "/last-words": _last_words,
    "/broken-stream": _broken_stream,
    "/linger": _linger,
    "/flood": _flood,
    "/generate": _generate,
    "/broken-generator": _broken_generator,
}
