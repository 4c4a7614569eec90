"""May this request be served at all? Asked when its head is complete, before the app sees it. Pure.

Everything here is the client's fault and answered with a 4xx. Some have a 5xx of their own in HTTP
(501 unknown transfer coding, 505 version), but OpenAI clients retry every 5xx, and these would fail
for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    import h11

    from trioengine.http.limits import Limits

__all__ = [
    "body_too_large",
    "check_raw_head",
    "check_request_head",
    "malformed",
    "too_slow",
]

_TARGET_STARTS: Final = (b"/", b"http://", b"https://")


def check_request_head(request: h11.Request, limits: Limits) -> InvalidRequestError | None:
    """Return why ``request`` is refused, ``None`` if it may pass."""
    headers = dict(request.headers)
    return (
        _check_version(request)
        or _check_size(request, limits)
        or _check_target(request)
        or _check_framing(request, headers)
        or _check_upgrade(request, headers)
        or _check_encoding(headers)
        or _check_length(headers, limits)
    )


def check_raw_head(data: bytes) -> InvalidRequestError | None:
    """Return why the head that ``data`` begins with, as yet unparsed, is refused.

    Lines that end in a bare LF and fields folded over several lines are what servers in a chain
    read differently (RFC 9112, sections 2.2 and 5.2). h11 takes both; no client of note sends
    either. ``data`` may end within the head, or go on behind it.
    """
    head = data.partition(b"\r\n\r\n")[0]
    if head.count(b"\n") != head.count(b"\r\n"):
        return malformed("a line ends without CR")
    if b"\n " in head or b"\n\t" in head:
        return malformed("a header field is folded over several lines")
    return None


def malformed(reason: str, *, http_status: int = 400) -> InvalidRequestError:
    """This is no HTTP/1.1; ``http_status`` 431 when a head outgrew its limit, else 400."""
    if http_status == 431:
        return InvalidRequestError(
            "The request's head is too large.", code="headers_too_large", http_status=431
        )
    return InvalidRequestError(f"Malformed HTTP request: {reason}.", code="malformed_http")


def too_slow(what: str) -> InvalidRequestError:
    """The head or the body did not arrive in time."""
    return InvalidRequestError(
        f"The request's {what} did not arrive in time.", code="request_timeout", http_status=408
    )


def body_too_large(limits: Limits) -> InvalidRequestError:
    """The body is longer than ``max_body_bytes``, announced or arrived."""
    return InvalidRequestError(
        f"The request's body is larger than this server accepts ({limits.max_body_bytes} bytes).",
        code="payload_too_large",
        http_status=413,
    )


def _check_version(request: h11.Request) -> InvalidRequestError | None:
    # h11 reads the preface of HTTP/2 ("PRI * HTTP/2.0") as a request of that version.
    if request.http_version in (b"1.1", b"1.0"):
        return None
    return InvalidRequestError(
        "This server speaks HTTP/1.1 only; put a proxy in front for HTTP/2.",
        code="http_version_not_supported",
    )


def _check_size(request: h11.Request, limits: Limits) -> InvalidRequestError | None:
    size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
    if size <= limits.max_head_bytes and len(request.headers) <= limits.max_head_fields:
        return None
    return malformed("", http_status=431)


def _check_target(request: h11.Request) -> InvalidRequestError | None:
    if request.method == b"CONNECT":
        return InvalidRequestError(
            "This server is no proxy.", code="method_not_allowed", http_status=405
        )
    if request.target.startswith(_TARGET_STARTS) or request.target == b"*":
        return None
    return malformed("the target is no path")


def _check_framing(request: h11.Request, headers: dict[bytes, bytes]) -> InvalidRequestError | None:
    # Where two of a chain of servers disagree on a body's end, one client can slip a request into
    # another's connection (RFC 9112, sections 6.1 and 11.2). So what is ambiguous is refused; h11
    # has refused differing lengths and unknown codings by itself.
    if b"transfer-encoding" not in headers:
        return None
    if b"content-length" in headers:
        return malformed("both Content-Length and Transfer-Encoding")
    if request.http_version == b"1.0":
        return malformed("Transfer-Encoding in HTTP/1.0")
    return None


def _check_upgrade(request: h11.Request, headers: dict[bytes, bytes]) -> InvalidRequestError | None:
    # Other upgrades (h2c) are not taken: the request is answered as what it is in HTTP/1.1. After
    # a websocket's head the client may send frames at once, which no HTTP parser should see.
    if request.method == b"GET" and headers.get(b"upgrade", b"").strip().lower() == b"websocket":
        return InvalidRequestError(
            "This server has no websockets; use server-sent events (stream: true).",
            code="websocket_not_supported",
        )
    return None


def _check_encoding(headers: dict[bytes, bytes]) -> InvalidRequestError | None:
    # A few kilobytes of gzip are gigabytes of JSON. Undecoded it would be a puzzling "bad JSON".
    if headers.get(b"content-encoding", b"identity").strip().lower() in (b"identity", b""):
        return None
    return InvalidRequestError(
        "This server takes request bodies without Content-Encoding only.",
        code="unsupported_encoding",
        http_status=415,
    )


def _check_length(headers: dict[bytes, bytes], limits: Limits) -> InvalidRequestError | None:
    if int(headers.get(b"content-length", b"0")) > limits.max_body_bytes:
        return body_too_large(limits)
    return None
