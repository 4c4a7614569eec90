"""One HTTP request as the routes see it: its id, its record for the log, its time limit.

Begun before anything can refuse it, ended by its owner: also a request whose client has left, or
that failed in a way nobody foresaw, is logged and counted.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final, Self

from trioengine.errors import InvalidRequestError
from trioengine.http.access_log import AccessRecord
from trioengine.http.request_id import HEADER as REQUEST_ID
from trioengine.http.request_id import request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.http.connection import OwnedRequest

__all__ = ["Exchange"]

TIMEOUT_HEADER: Final = "X-Request-Timeout"
_KEY: Final = "trioengine.exchange"


@dataclasses.dataclass(slots=True)
class Exchange:
    """A request and what its answer carries.

    Attributes:
        record: For the access log.
        headers: Header fields of any answer to it.
        timeout_header: What the client said in ``X-Request-Timeout``.
        key: Name of its API key, where there are several.
    """

    record: AccessRecord
    headers: dict[str, str]
    timeout_header: str | None
    key: str = ""

    @classmethod
    def begin(cls, request: OwnedRequest, finished: Callable[[AccessRecord], None]) -> Self:
        """Return the exchange of ``request``; ``finished`` is called once, when it is over."""
        rid = request_id(request.field(b"x-request-id"))
        rule = request.url_rule.rule if request.url_rule is not None else None
        record = AccessRecord(rid, request.method, request.path, rule, request.remote_addr or "-")
        exchange = cls(record, {REQUEST_ID: rid}, request.field(b"x-request-timeout"))
        request.scope[_KEY] = exchange  # type: ignore[typeddict-unknown-key]

        def finish() -> None:
            record.close(answered=request.ending, loss=request.loss)
            finished(record)

        request.owned.callback(finish)
        return exchange

    @classmethod
    def of(cls, request: OwnedRequest) -> Self:
        """Return the exchange that was begun for ``request``."""
        exchange: Self = request.scope[_KEY]  # type: ignore[typeddict-item]
        return exchange

    def deadline_s(self, *limits_s: float | None) -> float | None:
        """Return when the request must be over, in ``trio.current_time()``; ``None`` for never.

        The shortest of the client's (header and body) and the server's limit counts, from arrival.

        Raises:
            InvalidRequestError: The header is no positive number of seconds.
        """
        given = [limit for limit in (self._header_s(), *limits_s) if limit is not None]
        return self.record.started_s + min(given) if given else None

    def _header_s(self) -> float | None:
        if self.timeout_header is None:
            return None
        try:
            seconds = float(self.timeout_header.replace("_", " "))  # "1_0" is Python, not HTTP
        except ValueError:
            seconds = math.nan
        if not 0.0 < seconds < math.inf:
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} must be a positive number of seconds.", param=TIMEOUT_HEADER
            )
        return seconds
