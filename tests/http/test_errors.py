from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from werkzeug.exceptions import (
    BadRequest,
    ImATeapot,
    InternalServerError,
    MethodNotAllowed,
    NotFound,
    RequestEntityTooLarge,
    RequestTimeout,
)

from trioengine.errors import (
    AuthenticationError,
    CancelledByUserError,
    DeadlineExceededError,
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    QueueTimeoutError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.http.errors import error_body, error_response, typed_error

# The table of the contract: exception, status, type, code.
ROWS = [
    (InvalidRequestError("m", param="top_p"), 400, "invalid_request_error", "invalid_value"),
    (AuthenticationError("m"), 401, "authentication_error", "invalid_api_key"),
    (
        InvalidRequestError("m", code="model_not_found", http_status=404),
        404,
        "invalid_request_error",
        "model_not_found",
    ),
    (NotFound(), 404, "invalid_request_error", "not_found"),
    (MethodNotAllowed(["GET"]), 405, "invalid_request_error", "method_not_allowed"),
    (RequestTimeout(), 408, "invalid_request_error", "request_timeout"),
    (CancelledByUserError("m"), 409, "cancelled_error", "cancelled"),
    (RequestEntityTooLarge(), 413, "invalid_request_error", "payload_too_large"),
    (OverloadedError("m"), 429, "overloaded_error", "overloaded"),
    (InternalError("m"), 500, "internal_error", "internal_error"),
    (ProtocolError("m"), 500, "internal_error", "internal_error"),
    (ZeroDivisionError("secret"), 500, "internal_error", "internal_error"),
    (InternalServerError("secret"), 500, "internal_error", "internal_error"),
    (EngineDeadError("m"), 503, "unavailable_error", "engine_dead"),
    (UnavailableError("m", code="starting"), 503, "unavailable_error", "starting"),
    (UnavailableError("m", code="restarting"), 503, "unavailable_error", "restarting"),
    (UnavailableError("m", code="stalled"), 503, "unavailable_error", "stalled"),
    (UnavailableError("m", code="draining"), 503, "unavailable_error", "draining"),
    (UnavailableError("m", code="sleeping"), 503, "unavailable_error", "sleeping"),
    (DeadlineExceededError("m"), 504, "timeout_error", "deadline_exceeded"),
    (QueueTimeoutError("m"), 504, "timeout_error", "queue_timeout"),
    (BadRequest(), 400, "invalid_request_error", "invalid_value"),
    (ImATeapot(), 400, "invalid_request_error", "invalid_value"),
]


@pytest.mark.parametrize(("error", "status", "error_type", "code"), ROWS)
def test_every_error_has_its_status_type_and_code(
    error: Exception, status: int, error_type: str, code: str
) -> None:
    answer = error_response(error)
    body = msgspec.json.decode(answer.body)["error"]
    assert answer.status == status
    assert (body["type"], body["code"]) == (error_type, code)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]


def test_param_is_named() -> None:
    body = msgspec.json.decode(error_body(InvalidRequestError("m", param="messages[0].role")))
    assert body["error"]["param"] == "messages[0].role"


def test_an_unexpected_exception_is_logged_and_tells_the_client_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = error_response(ZeroDivisionError("secret"))
    assert b"secret" not in answer.body
    assert "secret" in caplog.text


@pytest.mark.parametrize("message", ['a "quote"', "a\nb", "\ud800", "é😀", "\x00"])
def test_any_message_makes_valid_json(message: str) -> None:
    body = error_body(InternalError(message))
    assert msgspec.json.decode(body)["error"]["message"].isprintable() or message in {
        "a\nb",
        "\x00",
    }


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (OverloadedError("m", retry_after_s=1.2), {"Retry-After": "2"}),
        (OverloadedError("m", retry_after_s=0.0), {"Retry-After": "1"}),
        (UnavailableError("m", code="starting", retry_after_s=5.0), {"Retry-After": "5"}),
        (EngineDeadError("m"), {}),
        (AuthenticationError("m"), {"WWW-Authenticate": "Bearer"}),
        (UnavailableError("m", code="draining"), {"Connection": "close"}),
        (MethodNotAllowed(["POST", "GET"]), {"Allow": "GET, POST"}),
        (InvalidRequestError("m"), {}),
    ],
)
def test_headers(error: Exception, headers: dict[str, str]) -> None:
    assert error_response(error).headers == headers


def test_a_group_of_one_is_its_member() -> None:
    inner = OverloadedError("m")
    assert typed_error(ExceptionGroup("g", [inner])) is inner


def test_what_is_expected_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for error in (OverloadedError("m"), EngineDeadError("m"), NotFound()):
            error_response(error)
    assert not caplog.records


def test_an_internal_error_of_ours_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    failure: TrioEngineError = ProtocolError("frame 3 where 2 was due")
    body: dict[str, Any] = msgspec.json.decode(error_response(failure).body)
    assert "frame 3" in caplog.text
    assert body["error"]["code"] == "internal_error"
