"""One line per request, once it is over: what was asked, how it ended, how long it took.

Written by the request's owner, so a request whose client left has its line too (499). Probes and
scrapes are left out, and so is everything that a client wrote in its body.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Final, Protocol

import trio

from trioengine.errors import InternalError

if TYPE_CHECKING:
    from trioengine.outputs import Usage

__all__ = ["QUIET_RULES", "AccessRecord", "Tally"]

logger = logging.getLogger(__name__)

QUIET_RULES: Final = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
CLIENT_CLOSED_REQUEST: Final = 499  # nginx's number for it; never on the wire
_MAX_PATH: Final = 200


class Tally(Protocol):
    """Counts the tokens of a request."""

    @property
    def usage(self) -> Usage:
        """What has been counted so far."""


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
        outcome: ``ok``, an error's code, or why the client was lost (``client_disconnect``, …).
        tally: Counts tokens, where tokens are made.
        started_s: ``trio.current_time()`` of arrival.
    """

    request_id: str
    method: str
    path: str
    rule: str | None
    client: str
    status: int = 0
    outcome: str = "ok"
    tally: Tally | None = None
    started_s: float = dataclasses.field(default_factory=trio.current_time)

    def close(self, *, answered: bool, loss: str | None = None) -> None:
        """Settle the outcome and write the line.

        Args:
            answered: The whole answer was handed over.
            loss: Why the client was lost before that; ``None`` if we failed.
        """
        if not answered and loss is not None:
            self.status, self.outcome = CLIENT_CLOSED_REQUEST, loss
        elif not answered:
            self.status, self.outcome = 500, InternalError.code
        if self.rule not in QUIET_RULES and logger.isEnabledFor(logging.INFO):
            fields = self.fields()
            logger.info("%s", _line(fields), extra={"fields": fields})

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
        if self.tally is not None:
            usage = self.tally.usage
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["completion_tokens"] = usage.completion_tokens
        return fields

    def line(self) -> str:
        """Return the line for people; control characters are escaped."""
        return _line(self.fields())


def _line(fields: dict[str, str | int | float]) -> str:
    line = " ".join([f"{name}={value}" for name, value in fields.items()])
    if line.isascii() and line.isprintable():
        return line
    return line.encode("ascii", "backslashreplace").decode().translate(_ESCAPES)


_ESCAPES: Final = {code: f"\\x{code:02x}" for code in [*range(32), 127]}
