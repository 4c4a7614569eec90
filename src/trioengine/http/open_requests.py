"""Requests that are being answered, for whoever wants to end one from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.client.request_stream import RequestStream

__all__ = ["OpenRequests"]


class OpenRequests:
    """Requests that are being answered, by their key and the id that their answer carries."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], RequestStream] = {}

    def add(self, key: str, response_id: str, stream: RequestStream) -> Callable[[], None]:
        """Make a request findable; return what makes it forgotten."""
        place = key, response_id
        self._streams[place] = stream
        return lambda: self._forget(place)

    def find(self, key: str, response_id: str) -> RequestStream:
        """Return the stream of a request that has not ended.

        Raises:
            InvalidRequestError: 404: there is none of this id, for this key.
        """
        stream = self._streams.get((key, response_id))
        if stream is None or not stream.num_live:
            raise InvalidRequestError(
                f"There is no request {response_id[:100]!r} to cancel: it has ended, or it never "
                "was.",
                param="id",
                code="request_not_found",
                http_status=404,
            )
        return stream

    def _forget(self, place: tuple[str, str]) -> None:
        del self._streams[place]
