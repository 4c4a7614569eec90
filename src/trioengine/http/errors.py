"""An exception's face on HTTP: status, headers and OpenAI's error object. Pure.

The exception knows its status, type and code (``trioengine.errors``); this module only writes them
down. Whatever went wrong, the body is valid JSON of one shape, also where the framework or h11
refused the request before a route saw it.
"""

from __future__ import annotations

import logging
import math
from typing import Final, NamedTuple

import msgspec
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from trioengine.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    TrioEngineError,
    UnavailableError,
)

__all__ = [
    "ErrorEnvelope",
    "ErrorObject",
    "ErrorResponse",
    "error_body",
    "error_response",
    "typed_error",
]

logger = logging.getLogger(__name__)

# Faults that the framework finds before a handler runs: status -> (code, sentence).
_FRAMEWORK_FAULTS: Final = {
    404: ("not_found", "There is nothing at this path."),
    405: ("method_not_allowed", "This path does not answer to this method."),
    408: ("request_timeout", "The request's body did not arrive in time."),
    413: ("payload_too_large", "The request's body is larger than this server accepts."),
    431: ("headers_too_large", "The request's header fields are larger than this server accepts."),
}


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong. ``code`` is for programs, ``message`` for people."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every answer that is no success."""

    error: ErrorObject


_encode = msgspec.json.Encoder().encode


class ErrorResponse(NamedTuple):
    """What to answer: status, header fields beyond the content's own, and the JSON body.

    ``code`` is the error's own, for logs and counters.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    code: str


def error_body(error: TrioEngineError) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}}``, for a body or an SSE event."""
    param = error.param if isinstance(error, InvalidRequestError) else None
    # A message may quote what a client sent; a lone surrogate in it must not break the answer.
    message = error.message.encode("utf-8", "replace").decode("utf-8")
    return _encode(ErrorEnvelope(ErrorObject(message, error.error_type, param, error.code)))


def error_response(error: Exception) -> ErrorResponse:
    """Return the whole answer to ``error``, which may be of any class."""
    known = typed_error(error)
    headers = _headers(known, error)
    return ErrorResponse(known.http_status, headers, error_body(known), known.code)


def typed_error(error: BaseException) -> TrioEngineError:
    """Return ``error`` as one of ours: itself, its translation, or (logged) an internal error.

    What a client is told about an unexpected exception is nothing but that there was one.
    """
    if isinstance(error, TrioEngineError):
        if error.http_status == 500:
            logger.error("a request failed: %s", error.message, exc_info=error)
        return error
    if isinstance(error, HTTPException):
        return _from_framework(error)
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return typed_error(error.exceptions[0])
    logger.error("unexpected error while handling a request", exc_info=error)
    return InternalError("The server hit an unexpected error while handling this request.")


def _from_framework(error: HTTPException) -> TrioEngineError:
    status = error.code or 500
    if status >= 500:
        return InternalError("The server hit an unexpected error while handling this request.")
    code, sentence = _FRAMEWORK_FAULTS.get(status, ("invalid_value", "The request is malformed."))
    return InvalidRequestError(
        sentence, code=code, http_status=status if status in _FRAMEWORK_FAULTS else 400
    )


def _headers(error: TrioEngineError, original: Exception) -> dict[str, str]:
    headers: dict[str, str] = {}
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, OverloadedError | UnavailableError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, UnavailableError) and error.code == "draining":
        headers["Connection"] = "close"  # the next request must find another server
    if isinstance(original, MethodNotAllowed) and original.valid_methods:
        headers["Allow"] = ", ".join(sorted(original.valid_methods))
    return headers
