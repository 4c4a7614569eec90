"""Refuses what there is no place for, before the app begins to make a request of it.

Under overload nearly every request is refused, on the cores that the engine computes with. Through
the framework (routing, a request object, an error handler, a response object) a refusal takes twice
the CPU that it takes here. Nothing is decided here that the app would decide otherwise: whatever is
not plainly a request for text, with its key, to a ready server that is full, goes on to the app.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trioengine.errors import AuthenticationError
from trioengine.http.access_log import AccessRecord
from trioengine.http.connection import first_field
from trioengine.http.errors import error_response
from trioengine.http.request_id import HEADER as REQUEST_ID
from trioengine.http.request_id import request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trioengine.client.engine_client import EngineClient
    from trioengine.http.auth import KeyCheck
    from trioengine.http.cors import Cors

__all__ = ["Turnstile"]

_GENERATING: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class Turnstile:
    """Stands before the app of one server."""

    def __init__(
        self,
        client: EngineClient,
        keys: KeyCheck,
        cors: Cors,
        finished: Callable[[AccessRecord], None],
    ) -> None:
        """Remember what decides; ``finished`` is given the record of each request refused."""
        self._client = client
        self._keys = keys
        self._cors = cors
        self._finished = finished

    async def refuse(self, scope: Any, send: Callable[[Any], Awaitable[None]]) -> bool:
        """Answer 429 if the request of this ASGI ``scope`` gets that; else False, and nothing."""
        error = self._client.admission.refusal()
        if error is None or not self._concerns(scope):
            return False
        answer, record = error_response(error), _record(scope)
        record.status, record.outcome = answer.status, answer.code
        origin = first_field(scope["headers"], b"origin")
        headers = {**answer.headers, REQUEST_ID: record.request_id, **self._cors.headers(origin)}
        answered = False
        try:
            await _send(answer.status, headers, answer.body, send)
            answered = True
        finally:
            record.close(answered=answered, loss="shutdown")  # nothing else cancels it
            self._finished(record)
        return True

    def _concerns(self, scope: Any) -> bool:
        """Whether the app would ask this request for nothing but a place."""
        model = self._client.model
        return (
            scope["path"] in _GENERATING
            and scope["method"] == "POST"
            and self._client.status.refusal() is None
            and model is not None
            and model.embedding is None
            and self._opens(scope["headers"])
        )

    def _opens(self, headers: list[tuple[bytes, bytes]]) -> bool:
        offered = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        try:
            self._keys.check(offered)
        except AuthenticationError:
            return False
        return True


def _record(scope: Any) -> AccessRecord:
    return AccessRecord(
        request_id(first_field(scope["headers"], b"x-request-id")),
        scope["method"],
        scope["path"],
        scope["path"],
        (scope.get("client") or ("<local>",))[0],
    )


async def _send(
    status: int, headers: dict[str, str], body: bytes, send: Callable[[Any], Awaitable[None]]
) -> None:
    fields = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    content = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": fields + content})
    await send({"type": "http.response.body", "body": body, "more_body": False})
