"""HTTP/1.1 as Hypercorn and h11 speak it, minus what let one client hurt others.

h11 is the parser and the state machine, Hypercorn's ``H11Protocol`` and ``HTTPStream`` turn its
events into ASGI messages. What differs here from Hypercorn 0.18, whose internals this relies on
(hence its pin to a minor version):

- No HTTP/2 and no websockets by any door (preface, ``Upgrade``): both could end the process, and
  HTTP/2 has no back-pressure.
- Lines without CR and folded fields, which h11 would take, are refused.
- A body has a size, whether announced or not; ``Connection: close`` is said when a request was
  answered before its end, and while the server drains.
- ``100 Continue`` is sent when the handler asks for the body, not before: a refused client need
  not send it.
- What is refused here gets OpenAI's error object like everything else; so does, without an app,
  what a full server has no place for (``turnstile``).
- A reader that waits behind a pipelined request is woken however the request before it ends.
"""

from __future__ import annotations

import enum
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import h11
import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.trio.worker_context import WorkerContext

from trioengine.http.asgi_stream import OneShapeStream, content_fields
from trioengine.http.errors import error_response
from trioengine.http.request_head import (
    body_too_large,
    check_raw_head,
    check_request_head,
    malformed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hypercorn.events import Event
    from hypercorn.protocol.events import Event as StreamEvent

    from trioengine.errors import TrioEngineError
    from trioengine.http.limits import Limits
    from trioengine.http.turnstile import Refusal

__all__ = ["Http1Protocol", "Phase", "ServerContext"]

_BLANK: Final = b"\r\n"  # may precede a request line (RFC 9112, section 2.2)


class Phase(enum.Enum):
    """What a connection waits for from its client."""

    IDLE = "a request"
    HEAD = "the rest of a head"
    BODY = "the rest of a body"
    BUSY = "nothing: an answer is due"


class ServerContext(WorkerContext):
    """What all connections of one server share.

    Attributes:
        limits: Bounds of a connection.
        draining: Answers say ``Connection: close`` and mean it.
        on_refused: Told the error code of each request that was refused for what its bytes are.
        turnstile: Asked about each request, with its client's address, before the app is.
    """

    def __init__(
        self,
        limits: Limits,
        on_refused: Callable[[str], None],
        turnstile: Callable[[h11.Request, tuple[str, int] | None], Refusal | None],
    ) -> None:
        super().__init__(max_requests=None)
        self.limits = limits
        self.draining = False
        self.on_refused = on_refused
        self.turnstile = turnstile


class Http1Protocol(H11Protocol):
    """One connection's HTTP/1.1, from ``RawData`` to ASGI and back.

    Attributes:
        closing: The connection ends after the answer under way.
        body_bytes: Received of the current request's body.
    """

    context: ServerContext
    connection: h11.Connection

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.closing = False
        self.body_bytes = 0
        self._head_only = False
        self._held = b""  # a head that waits for its body
        self._turn = trio.Event()  # set when the answer before a pipelined request has ended
        self._input_over = False  # nothing more is parsed
        self._refusal: Refusal | None = None  # of the request whose end has not been seen
        self._refused = False  # our own answer has taken the place of the app's
        self._talked_on = False  # something came after the last request

    @property
    def phase(self) -> Phase:
        """What the client owes us now."""
        state = self.connection.their_state
        if state is h11.IDLE:
            return Phase.HEAD if self.connection.trailing_data[0] else Phase.IDLE
        if state is h11.SEND_BODY and not self.connection.they_are_waiting_for_100_continue:
            return Phase.BODY
        return Phase.BUSY

    @property
    def has_unread_input(self) -> bool:
        """True if the client may still be sending: closing now could cost it our answer."""
        settled = self.connection.their_state in (h11.IDLE, h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return not settled or self._talked_on or bool(self.connection.trailing_data[0])

    @property
    def _is_early(self) -> bool:
        """True before the end of a body: what answers now must also end the connection."""
        return self.connection.their_state is h11.SEND_BODY

    # Reading -------------------------------------------------------------------------------------

    async def handle(self, event: Event) -> None:
        """Take what was received, or ``Closed``: nothing more will be."""
        if isinstance(event, RawData):
            data = event.data
            if self.connection.their_state is h11.MUST_CLOSE:
                # Behind what was to be its last request (RFC 9112, section 9.6): h11 would end the
                # answer under way for it, as happens to who pipelines into a server that drains.
                self._talked_on = True
                return
            if self.phase is Phase.IDLE:
                data = data.lstrip(_BLANK)
            if data:  # to h11, nothing means the end
                self.connection.receive_data(data)
                await self._handle_events()
        elif isinstance(event, Closed):
            self.end_input()
            await self._close_stream()  # tells the app, unless it has ended

    def end_input(self) -> None:
        """Parse nothing more; end with the answer under way. Wakes a reader that waits its turn."""
        self.closing = self._input_over = True
        self._turn.set()

    async def _handle_events(self) -> None:
        """Take all that h11 can make of its input.

        What the app is told is queued, so h11 has seen the end of a body that is there before the
        app runs: one that answers without reading it need not cost the client its connection.
        """
        while not self._input_over:
            if self.connection.their_state is h11.IDLE:
                error = check_raw_head(self.connection.trailing_data[0])
                if error is not None:
                    await self.refuse(error)
                    return
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as broken:
                await self.refuse(malformed(str(broken), http_status=broken.error_status_hint))
                return
            if isinstance(event, h11.Request):
                await self._on_request(event)
            elif isinstance(event, h11.Data):
                await self._on_data(event)
            elif self._refusal is not None:  # the end of its request, or of what is there of it
                await self._turn_away(self._refusal)
            elif isinstance(event, h11.EndOfMessage):
                await self._tell_app(EndBody(stream_id=STREAM_ID))
            elif event is h11.PAUSED:
                await self._wait_for_turn()
            else:
                return  # NEED_DATA; the end of input never gets here

    async def _on_request(self, request: h11.Request) -> None:
        self.body_bytes, self._head_only = 0, request.method == b"HEAD"
        error = check_request_head(request, self.context.limits)
        if error is not None:
            await self.refuse(error)
            return
        await self.send(Updated(idle=False))
        self._refusal = self.context.turnstile(request, self.client)
        if self._refusal is None:
            await self._create_stream(request)

    async def _on_data(self, data: h11.Data) -> None:
        self.body_bytes += len(data.data)
        if self.body_bytes > self.context.limits.max_body_bytes:
            await self.refuse(body_too_large(self.context.limits))
        else:
            await self._tell_app(Body(stream_id=STREAM_ID, data=bytes(data.data)))

    async def _tell_app(self, event: StreamEvent) -> None:
        if self.stream is not None:
            await self.stream.handle(event)

    async def _wait_for_turn(self) -> None:
        # The client is ahead of us: a second request, or a stray byte, waits behind an answer.
        self._turn = trio.Event()
        await self._turn.wait()

    async def _create_stream(self, request: h11.Request) -> None:
        self.stream = OneShapeStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(_asgi_request(request, self.connection_state))

    # Answering -----------------------------------------------------------------------------------

    async def refuse(self, error: TrioEngineError) -> None:
        """Answer ``error`` unless an answer has begun, and end the connection."""
        if self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refused = self.closing = True
            self.context.on_refused(error.code)
            answer = error_response(error)
            await self._answer(answer.status, (), answer.body)
        await self.send(Closed())

    async def _turn_away(self, refusal: Refusal) -> None:
        """Answer instead of an app. What is left of the body is not waited for."""
        self._refusal = None
        self.closing = self.closing or self.context.draining or self._is_early
        with refusal.sending():
            await self._answer(refusal.status, refusal.fields, refusal.body)
        await self._maybe_recycle()

    async def _answer(
        self, status: int, fields: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Send a whole answer in one piece."""
        headers = [*fields, *content_fields(body), *self.config.response_headers("h11")]
        if self.closing:
            headers.append((b"connection", b"close"))
        events: list[h11.Event] = [h11.Response(status_code=status, headers=headers)]
        if not self._head_only:
            events.append(h11.Data(data=body))
        events.append(h11.EndOfMessage())
        sent = [self.connection.send(event) or b"" for event in events]
        await self.send(RawData(data=b"".join(sent)))

    async def send_continue(self) -> None:
        """Ask for the body, if the client waits to be asked (``Expect: 100-continue``)."""
        if self.connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def stream_send(self, event: StreamEvent) -> None:
        """Send what the app answers, unless that was done for it."""
        if self._refused:
            return
        if isinstance(event, Response):
            await self._send_head(event)
        else:
            await super().stream_send(event)

    async def _send_head(self, event: Response) -> None:
        self.closing = self.closing or self.context.draining or self._is_early
        headers = list(chain(event.headers, self.config.response_headers("h11")))
        if self.closing and not any(name.lower() == b"connection" for name, _ in headers):
            headers.append((b"connection", b"close"))
        await self._send_h11_event(h11.Response(headers=headers, status_code=event.status_code))

    async def _send_h11_event(self, event: h11.Event) -> None:
        # A head that announces a body's length has the body right behind it: both leave in one
        # segment, which spares a system call here, and the client a wake.
        try:
            data = self._held + (self.connection.send(event) or b"")
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response) and b"content-length" in dict(event.headers):
            self._held = data
        else:
            self._held = b""
            await self.send(RawData(data=data))

    async def _maybe_recycle(self) -> None:
        states = (self.connection.our_state, self.connection.their_state)
        await self._close_stream()
        if self.closing or self.context.draining or states != (h11.DONE, h11.DONE):
            await self.send(Closed())
        else:
            self._start_next_cycle()
            await self.send(Updated(idle=True))
            self._turn.set()

    def _start_next_cycle(self) -> None:
        ahead = self.connection.trailing_data[0]
        if not ahead:
            self.connection.start_next_cycle()
            return
        # h11 has no way to skip a blank line, which some clients send after a body; left in, it
        # would be answered with a 400 that belongs to no request.
        self.connection = h11.Connection(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )
        if rest := ahead.lstrip(_BLANK):
            self.connection.receive_data(rest)


def _asgi_request(request: h11.Request, state: Any) -> Any:
    return Request(
        stream_id=STREAM_ID,
        headers=list(request.headers),
        http_version=request.http_version.decode(),
        method=request.method.decode("ascii").upper(),
        raw_path=request.target,
        state=state,
    )
