"""``POST /v1/requests/{id}/cancel``: end a request from another connection, confirmed.

The id is the one that the answer carries, in every chunk of a stream. It is found only under the
API key that made it: to any other key there is no such request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import trio
from quart import Blueprint, Response

from trioengine.errors import UnavailableError
from trioengine.http.connection import current_request
from trioengine.http.exchange import Exchange

if TYPE_CHECKING:
    from trioengine.client.engine_client import EngineClient
    from trioengine.client.request_stream import RequestStream
    from trioengine.http.front import Front

__all__ = ["Cancellation", "cancel_routes"]

PATIENCE_S: Final = 30.0  # for an engine in the middle of a long step


class Cancellation(msgspec.Struct, kw_only=True):
    """Answer of the route: the engine holds nothing of the request any more.

    ``seconds``: from the call to the engine's confirmation.
    """

    id: str
    object: str = "request.cancellation"
    status: str = "cancelled"
    seconds: float


def cancel_routes(front: Front) -> Blueprint:
    """Return the route."""
    routes = Blueprint("cancel", __name__)

    @routes.post("/v1/requests/<response_id>/cancel")
    async def cancel(response_id: str) -> Response:
        stream = front.open_requests.find(Exchange.of(current_request()).key, response_id)
        seconds = await _cancel(stream, front.client)
        body = msgspec.json.encode(Cancellation(id=response_id, seconds=round(seconds, 6)))
        return Response(body, content_type="application/json")

    return routes


async def _cancel(stream: RequestStream, client: EngineClient) -> float:
    """End a request; return the seconds until the engine had confirmed.

    Raises:
        UnavailableError: The engine has died meanwhile, or it does not answer.
    """
    began_s = trio.current_time()
    stream.close("cancelled")
    with trio.move_on_after(PATIENCE_S):
        await stream.ended.wait()
    if not stream.ended.is_set():
        raise UnavailableError("the engine has not confirmed the cancellation yet", code="stalled")
    if client.status.dead.is_set():
        raise client.status.refusal() or UnavailableError("the engine is dead", code="engine_dead")
    return trio.current_time() - began_s
