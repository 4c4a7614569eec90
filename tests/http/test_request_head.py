"""Which requests are refused before the app sees them."""

from __future__ import annotations

import h11
import pytest

from trioengine.http.limits import Limits
from trioengine.http.request_head import body_too_large, check_request_head, malformed, too_slow

LIMITS = Limits(max_body_bytes=100, max_head_bytes=1000, max_head_fields=10)
HOST = ("Host", "test")


def head(
    *headers: tuple[str, str], method: str = "POST", target: str = "/v1", version: str = "1.1"
) -> h11.Request:
    return h11.Request(method=method, target=target, headers=[*headers], http_version=version)


@pytest.mark.parametrize(
    "request_head",
    [
        head(HOST),
        head(HOST, ("Content-Length", "100")),
        head(HOST, ("Transfer-Encoding", "chunked")),
        head(version="1.0"),
        head(HOST, target="http://test/v1"),
        head(HOST, target="*", method="OPTIONS"),
        head(HOST, ("Upgrade", "h2c"), ("HTTP2-Settings", "")),
        head(HOST, ("Upgrade", "websocket")),  # not a GET, so no handshake of one
        head(HOST, *[("X", "y")] * 9),
    ],
    ids=repr,
)
def test_ordinary_requests_pass(request_head: h11.Request) -> None:
    assert check_request_head(request_head, LIMITS) is None


@pytest.mark.parametrize(
    ("request_head", "status", "code"),
    [
        (head(method="PRI", target="*", version="2.0"), 400, "http_version_not_supported"),
        (head(HOST, version="1.7"), 400, "http_version_not_supported"),
        (head(HOST, version="0.9"), 400, "http_version_not_supported"),
        (head(HOST, target="test:80", method="CONNECT"), 405, "method_not_allowed"),
        (head(HOST, target="?a"), 400, "malformed_http"),
        (head(HOST, target="ftp://x"), 400, "malformed_http"),
        (
            head(HOST, ("Content-Length", "4"), ("Transfer-Encoding", "chunked")),
            400,
            "malformed_http",
        ),
        (head(("Transfer-Encoding", "chunked"), version="1.0"), 400, "malformed_http"),
        (head(HOST, ("Upgrade", "WebSocket"), method="GET"), 400, "websocket_not_supported"),
        (head(HOST, ("Content-Length", "101")), 413, "payload_too_large"),
        (head(HOST, ("X", "y" * 1000)), 431, "headers_too_large"),
        (head(HOST, target="/" + "x" * 1000), 431, "headers_too_large"),
        (head(HOST, *[("X", "y")] * 10), 431, "headers_too_large"),
    ],
    ids=repr,
)
def test_what_is_refused(request_head: h11.Request, status: int, code: str) -> None:
    error = check_request_head(request_head, LIMITS)
    assert error is not None
    assert (error.http_status, error.code) == (status, code)
    assert error.error_type == "invalid_request_error"


def test_faults_found_elsewhere_have_their_status() -> None:
    assert malformed("x").http_status == 400
    assert malformed("x", http_status=501).http_status == 400  # clients retry every 5xx
    assert malformed("x", http_status=431).http_status == 431
    assert too_slow("body").http_status == 408
    assert body_too_large(LIMITS).http_status == 413
