"""From an admitted request to its answer, whole or streamed: the one place where that is written.

The order of the checks is a contract: key and route (``app``), state, slot, body, values, charge.
Slot and stream belong to the request's owner, so whatever ends the request releases and aborts
them.

Whether a failure has a status or is an event of the stream depends on one thing: whether the head
has gone out. It goes out when the engine has accepted the request, or after 15 s of waiting, since
a proxy would cut a connection that shows no life.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio
from quart import Response

from trioengine.http import sse
from trioengine.http.connection import current_request
from trioengine.http.detailed import collection_of, narration_of
from trioengine.http.errors import typed_error
from trioengine.http.exchange import Exchange
from trioengine.http.front import fingerprint
from trioengine.http.stream_writer import response_writer

if TYPE_CHECKING:
    from trioengine.client.engine_client import RequestStream
    from trioengine.http.connection import OwnedRequest
    from trioengine.http.convert import Job
    from trioengine.http.front import Front
    from trioengine.http.narrate import Collection, Deltas, Narration
    from trioengine.http.replies import Replies
    from trioengine.http.stream_writer import ResponseWriter

__all__ = ["Endpoint", "close_stream", "generate"]


class Endpoint(Protocol):
    """What the generating endpoints do differently."""

    async def read(self, front: Front, data: bytes) -> Job:
        """Return the job that this body asks for.

        Raises:
            InvalidRequestError: It asks for nothing that can be done.
        """

    def replies(self, job: Job, system_fingerprint: str) -> Replies:
        """Return the way to write its answer."""


async def generate(front: Front, endpoint: Endpoint) -> Response:
    """Answer the current request.

    Raises:
        TrioEngineError: It is refused, or it failed before the head of an answer went out.
    """
    request = current_request()
    exchange = Exchange.of(request)
    front.refuse_unless_ready()
    front.refuse_unless_generating()
    slot = request.owned.enter_context(front.client.admission.reserve())
    job = await endpoint.read(front, await request.read_body())
    deadline_s = exchange.deadline_s(job.timeout_s, front.config.request_timeout_s)
    await trio.lowlevel.checkpoint_if_cancelled()  # the client may have left in the meantime
    # From here to the callback nothing may wait: a request that is with the engine is owned.
    stream = front.client.open_stream(
        job.sequences,
        slot=slot,
        key=exchange.key,
        priority=job.priority,
        deadline_s=deadline_s,
    )
    request.owned.callback(close_stream, stream, request)
    replies = endpoint.replies(job, fingerprint(front.model))
    request.owned.callback(front.open_requests.add(exchange.key, replies.head.id, stream))
    if job.stream:
        return await _stream(request, exchange, stream, narration_of(job, replies))
    return await _whole(exchange, stream, collection_of(job), replies)


def close_stream(stream: RequestStream, request: OwnedRequest) -> None:
    """End what the engine still owes a request that is over, for the reason it is over."""
    stream.close(request.loss or "client_disconnect")


async def _whole(
    exchange: Exchange, stream: RequestStream, collection: Collection, replies: Replies
) -> Response:
    exchange.record.tally = collection.tally
    collection.add(await stream.receive_whole())
    body = replies.whole(collection.choices(), collection.tally.usage)
    return Response(body, content_type="application/json")


async def _stream(
    request: OwnedRequest, exchange: Exchange, stream: RequestStream, narration: Narration
) -> Response:
    exchange.record.tally = narration.tally
    first = await _first(stream)  # a failure up to here has a status
    writer = response_writer(request)
    head = {"Content-Type": sse.CONTENT_TYPE, **sse.HEADERS, **exchange.headers}
    await writer.start(200, head)
    try:
        events = sse.PING if first is None else narration.tell(first)
        await _Telling(writer, stream, narration).run(events)
    except trio.BrokenResourceError:
        pass  # the client's end, not ours: the owner knows
    except Exception as error:
        failure = typed_error(error)
        exchange.record.outcome = failure.code
        await writer.end(narration.failure(failure), close=True)
    return writer.response


async def _first(stream: RequestStream) -> Deltas | None:
    """Wait for the engine to take the request on; ``None`` if that is too long for silence.

    One sequence is on when the engine has accepted it. Of many, some may wait long for a place
    while others speak already: then the first word counts, and is returned.
    """
    with trio.move_on_after(sse.HEARTBEAT_S):
        if len(stream.sequences) > 1:
            return await stream.receive()
        await stream.wait_accepted()
        return []
    return None


class _Telling:
    """Writes a request's events as they come. One write a wake, whatever has gathered by then.

    A cancel scope costs as much as all else that is done for a chunk. So one scope bounds the
    silence over many chunks: its deadline is the earliest that a ping may be due, and is looked at
    again when it has passed. What may wait for the client, and must not be cut, is outside of it.
    """

    def __init__(self, writer: ResponseWriter, stream: RequestStream, narration: Narration) -> None:
        self._writer = writer
        self._stream = stream
        self._narration = narration
        self._written_s = trio.current_time()

    async def run(self, events: bytes) -> None:
        """Write ``events`` and all that follow."""
        while not self._stream.finished:
            self._put(events)
            await self._writer.flush()
            events = await self._pass_on()
        await self._writer.end(events + self._narration.closing())

    async def _pass_on(self) -> bytes:
        """Pass events on while the client keeps up; return what to write next.

        That is the last of them, a ping, or nothing where the client has to be waited for.
        """
        with trio.CancelScope(deadline=self._written_s + sse.HEARTBEAT_S):
            while True:
                events = self._narration.tell(await self._stream.receive())
                if self._stream.finished:
                    return events
                if not self._put(events):
                    return b""
        silent_s = trio.current_time() - self._written_s
        return sse.PING if silent_s >= sse.HEARTBEAT_S else b""

    def _put(self, events: bytes) -> bool:
        """Write without waiting; False where a part has to wait for ``flush``."""
        if not events:
            return True
        self._written_s = trio.current_time()
        return self._writer.write_nowait(events)
