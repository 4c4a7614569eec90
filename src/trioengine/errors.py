"""Every exception that trioengine raises on purpose, typed by whose fault it is.

Each class knows its face on HTTP: ``http_status``, the OpenAI ``error_type`` and a stable
machine-readable ``code``. Nothing outside ``http/`` builds an error body, and nothing inside it
invents a status: it asks the exception.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AuthenticationError",
    "CancelledByUserError",
    "ConfigError",
    "DeadlineExceededError",
    "EngineDeadError",
    "EngineStartError",
    "InternalError",
    "InvalidRequestError",
    "OverloadedError",
    "PeerGoneError",
    "ProtocolError",
    "QueueTimeoutError",
    "TrioEngineError",
    "UnavailableError",
]


class TrioEngineError(Exception):
    """Root of everything we raise on purpose. Subclasses know their HTTP face."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal_error"
    code: str = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class InternalError(TrioEngineError):
    """Our fault: a request failed for a reason that is neither the client's nor a shutdown's."""


class ProtocolError(TrioEngineError):
    """The two processes disagree (a gap, a stranger, an illegal transition). Fatal and loud."""


class PeerGoneError(TrioEngineError):
    """Nobody is at the other end of the wire. Inside the server only: a sensor of engine death."""


class ConfigError(TrioEngineError):
    """A flag, file, environment variable or model name is unusable. Exit code 2."""


class InvalidRequestError(TrioEngineError):
    """The client's fault. ``param`` names the offending field, ``None`` if there is no one field.

    ``http_status`` may be narrowed per instance (404, 405, 408, 409, 413, 415, 431).
    """

    http_status: int = 400  # type: ignore[misc]  # narrowed per instance on purpose
    error_type = "invalid_request_error"
    code = "invalid_value"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        http_status: int | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.param = param
        if http_status is not None:
            self.http_status = http_status


class AuthenticationError(TrioEngineError):
    """Missing or wrong API key."""

    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class CancelledByUserError(TrioEngineError):
    """The request was ended through the cancel endpoint."""

    http_status = 409
    error_type = "cancelled_error"
    code = "cancelled"


class OverloadedError(TrioEngineError):
    """Admission refused before anything reached the engine: a retry is safe.

    ``retry_after_s`` becomes the ``Retry-After`` header.
    """

    http_status = 429
    error_type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(TrioEngineError):
    """The server cannot take requests now; ``code`` is the state's name (starting, draining, …).

    ``retry_after_s`` is set where the server will come back.
    """

    http_status = 503
    error_type = "unavailable_error"
    code = "unavailable"

    def __init__(
        self, message: str, *, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class EngineDeadError(UnavailableError):
    """The engine is gone. Fatal to the supervisor's nursery, 503 to every client. Exit code 3."""

    code = "engine_dead"


class EngineStartError(UnavailableError):
    """The engine failed to start, or was not ready in time. Exit code 4."""

    code = "engine_dead"


class DeadlineExceededError(TrioEngineError):
    """The request's total deadline passed (queue, prefill and decode counted alike)."""

    http_status = 504
    error_type = "timeout_error"
    code = "deadline_exceeded"


class QueueTimeoutError(TrioEngineError):
    """The request waited longer than ``--max-queue-time`` for a place in the engine."""

    http_status = 504
    error_type = "timeout_error"
    code = "queue_timeout"
