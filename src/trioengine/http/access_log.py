"""One line per request, once it is over: what was asked, how it ended, how long it took.

Written by the request's owner, so a request whose client left has its line too (499). Probes and
scrapes are left out, and so is everything that a client wrote in its body.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from trioengine.outputs import Usage

__all__ = ["CLIENT_DISCONNECT", "QUIET_RULES", "AccessRecord"]

logger = logging.getLogger(__name__)

QUIET_RULES: Final = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
CLIENT_DISCONNECT: Final = "client_disconnect"
CLIENT_CLOSED_REQUEST: Final = 499  # nginx's number for it; never on the wire
_MAX_PATH: Final = 200


@dataclasses.dataclass(slots=True)
class AccessRecord:
    """What is known of one request so far.

    Attributes:
        request_id: As echoed to the client.
        method: HTTP method.
        path: As asked for, without the query.
        rule: The route, ``None`` where there is none.
        client: The peer's address.
        status: Of the answer; 0 until there is one.
        outcome: ``ok``, an error's code, or ``client_disconnect``.
        usage: Tokens, where tokens were made.
        started_s: ``trio.current_time()`` of arrival.
    """

    request_id: str
    method: str
    path: str
    rule: str | None
    client: str
    status: int = 0
    outcome: str = "ok"
    usage: Usage | None = None
    started_s: float = dataclasses.field(default_factory=trio.current_time)

    def close(self, *, answered: bool) -> None:
        """Settle the outcome and write the line. ``answered``: the whole answer was handed over."""
        if not answered:
            self.status, self.outcome = CLIENT_CLOSED_REQUEST, CLIENT_DISCONNECT
        if self.rule not in QUIET_RULES:
            logger.info("%s", self.line(), extra={"fields": self.fields()})

    def fields(self) -> dict[str, str | int | float]:
        """Return the line's content under names."""
        fields: dict[str, str | int | float] = {
            "method": self.method,
            "path": self.path[:_MAX_PATH],
            "status": self.status,
            "outcome": self.outcome,
            "duration_ms": round((trio.current_time() - self.started_s) * 1000, 1),
            "client": self.client,
            "request_id": self.request_id,
        }
        if self.usage is not None:
            fields["prompt_tokens"] = self.usage.prompt_tokens
            fields["completion_tokens"] = self.usage.completion_tokens
        return fields

    def line(self) -> str:
        """Return the line for people; control characters are escaped."""
        words = [f"{name}={value}" for name, value in self.fields().items()]
        return " ".join(words).encode("ascii", "backslashreplace").decode().translate(_ESCAPES)


_ESCAPES: Final = {code: f"\\x{code:02x}" for code in [*range(32), 127]}
