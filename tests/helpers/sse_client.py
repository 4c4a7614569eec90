"""A small streaming HTTP client on Trio and h11, that tells when each event arrived."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import h11
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Event", "Stream", "open_stream"]

COMPLETIONS = "/v1/completions"


class Event(NamedTuple):
    """One server-sent event: its JSON (``None`` for ``[DONE]``), and when it was read."""

    data: Any
    at_s: float  # time.monotonic()


class Stream:
    """One request on a connection of its own.

    Attributes:
        socket: The connection.
        status: HTTP status, once ``read_head`` has returned.
    """

    def __init__(self, socket: trio.SocketStream) -> None:
        self.socket = socket
        self.status = 0
        self._http = h11.Connection(h11.CLIENT)
        self._buffer = b""
        self._ended = False

    async def send(self, path: str, body: object) -> None:
        """Send a POST."""
        payload = json.dumps(body).encode()
        headers = {
            "Host": "test",
            "Content-Type": "application/json",
            "Content-Length": str(len(payload)),
        }
        request = h11.Request(method="POST", target=path, headers=list(headers.items()))
        data = self._http.send(request) or b""
        data += self._http.send(h11.Data(data=payload)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        await self.socket.send_all(data)

    async def read_head(self) -> int:
        """Wait for the response's head; return its status."""
        event = await self._next()
        if not isinstance(event, h11.Response):
            raise ConnectionError(f"no response: {event!r}")
        self.status = event.status_code
        return self.status

    async def read_event(self) -> Event | None:
        """Return the next event, ``None`` from the response's end on; comments are skipped."""
        while not self._ended:
            while b"\n\n" in self._buffer:
                block, _, self._buffer = self._buffer.partition(b"\n\n")
                if block.startswith(b"data: "):
                    text = block[6:]
                    return Event(None if text == b"[DONE]" else json.loads(text), time.monotonic())
            event = await self._next()
            if isinstance(event, h11.Data):
                self._buffer += event.data
            else:
                self._ended = True
        return None

    async def read_events(self) -> list[Event]:
        """Return all events to the end of the response."""
        events = []
        while (event := await self.read_event()) is not None:
            events.append(event)
        return events

    async def read_json(self) -> Any:
        """Return the body of a response that is no stream."""
        body = b""
        while isinstance(event := await self._next(), h11.Data):
            body += event.data
        return json.loads(body)

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self.socket.receive_some(65536))
        return event  # type: ignore[return-value]  # NEED_DATA is excluded above


@asynccontextmanager
async def open_stream(
    port: int, body: object, *, path: str = COMPLETIONS, read_head: bool = True
) -> AsyncIterator[Stream]:
    """Send ``body``, wait for the head, and close the connection when the block ends."""
    socket = await trio.open_tcp_stream("127.0.0.1", port)
    try:
        stream = Stream(socket)
        await stream.send(path, body)
        if read_head:
            await stream.read_head()
        yield stream
    finally:
        socket.socket.close()  # at once, as a client does that crashed
