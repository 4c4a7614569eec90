"""Refuses what there is no place for, before the app begins to make a request of it.

Under overload nearly every request is refused, on the cores that the engine computes with. Through
the framework (a task, routing, a request object, an error handler, a response object) a refusal
takes three times the CPU that it takes here. Nothing is decided here that the app would decide
otherwise: whatever is not plainly a request for text, with its key, to a ready server that is full,
goes on to the app.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from trioengine.errors import AuthenticationError
from trioengine.http.access_log import AccessRecord
from trioengine.http.connection import first_field
from trioengine.http.errors import error_response
from trioengine.http.request_id import HEADER as REQUEST_ID
from trioengine.http.request_id import request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import h11

    from trioengine.client.engine_client import EngineClient
    from trioengine.http.auth import KeyCheck
    from trioengine.http.cors import Cors

__all__ = ["Refusal", "Turnstile"]

_GENERATING: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """What a request is answered instead of being let in.

    Attributes:
        status: HTTP status.
        fields: Header fields beyond the content's own.
        body: JSON.
        record: For the log.
        finished: Given the record when it is over.
    """

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes
    record: AccessRecord
    finished: Callable[[AccessRecord], None]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Settle the record by how the block ends, in which the answer is sent."""
        answered = False
        try:
            yield
            answered = True
        finally:
            self.record.close(answered=answered, loss="shutdown")  # nothing else cancels it
            self.finished(self.record)


class Turnstile:
    """Stands before the app of one server."""

    def __init__(
        self,
        client: EngineClient,
        keys: KeyCheck,
        cors: Cors,
        finished: Callable[[AccessRecord], None],
        *,
        prefixes: Iterable[str] = ("",),
    ) -> None:
        """Remember what decides.

        Args:
            client: The engine, and its queue.
            keys: Which keys open.
            cors: What a browser is told.
            finished: Given the record of each request refused.
            prefixes: What may stand before a path.
        """
        self._client = client
        self._keys = keys
        self._cors = cors
        self._finished = finished
        self._paths = {
            (prefix + path).encode(): path for prefix in prefixes for path in _GENERATING
        }

    def refusal(self, request: h11.Request, peer: tuple[str, int] | None) -> Refusal | None:
        """Return the 429 of a ``request`` from ``peer`` if it gets that; else ``None``."""
        error = self._client.admission.refusal()
        path = self._paths.get(request.target)
        if error is None or path is None or not self._concerns(request):
            return None
        answer = error_response(error)
        offered = first_field(request.headers, b"x-request-id")
        host = peer[0] if peer else "<local>"
        record = AccessRecord(request_id(offered), "POST", path, path, host)
        record.status, record.outcome = answer.status, answer.code
        origin = first_field(request.headers, b"origin")
        headers = {**answer.headers, REQUEST_ID: record.request_id, **self._cors.headers(origin)}
        fields = [(name.lower().encode(), each.encode("latin-1")) for name, each in headers.items()]
        return Refusal(answer.status, fields, answer.body, record, self._finished)

    def _concerns(self, request: h11.Request) -> bool:
        """Whether the app would ask this request for nothing but a place."""
        model = self._client.model
        return (
            request.method == b"POST"
            and self._client.status.refusal() is None
            and model is not None
            and model.embedding is None
            and self._opens(request.headers)
        )

    def _opens(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        offered = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        try:
            self._keys.check(offered)
        except AuthenticationError:
            return False
        return True
