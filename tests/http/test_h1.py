"""HTTP/1.1 on the wire: what is kept alive, what is refused, and that every error has one shape."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from helpers.demo_app import DemoApp
from helpers.raw_http import RawClient, request, running
from trioengine.http.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture
def uds(tmp_path: Path) -> Path:
    return tmp_path / "s"


async def test_one_connection_serves_many_requests(uds: Path) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        for index in range(50):
            body = b"x" * index
            response = await client.exchange(request("POST", "/echo", body=body))
            assert (response.status, response.body) == (200, body)
            assert "connection" not in response.headers
    assert world.connections == [1, 0]


async def test_pipelined_requests_are_answered_in_order(uds: Path) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        bodies = [b"one", b"", b"three"]
        await client.send(b"".join(request("POST", "/echo", body=body) for body in bodies))
        assert [(await client.read_response()).body for _ in bodies] == bodies


@pytest.mark.parametrize("cut", range(1, 100, 7))
async def test_it_does_not_matter_how_bytes_are_cut(uds: Path, cut: int) -> None:
    data = request("POST", "/echo", CHUNKED) + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        for start in range(0, len(data), cut):
            await client.send(data[start : start + cut])
            await trio.testing.wait_all_tasks_blocked()
        assert (await client.read_response()).body == b"abcde"


async def test_blank_lines_between_requests_are_skipped(uds: Path) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(b"\r\n\r\n" + request("POST", "/echo", body=b"1") + b"\r\n")
        assert (await client.read_response()).body == b"1"
        await client.send(b"\r\n")
        assert (await client.exchange(request())).body == b"ok"
        assert not world.refused


async def test_a_blank_line_between_pipelined_requests_is_skipped(uds: Path) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(request() + b"\r\n" + request("POST", "/echo", body=b"2"))
        assert (await client.read_response()).body == b"ok"
        assert (await client.read_response()).body == b"2"


async def test_head_has_the_headers_of_get_and_no_body(uds: Path) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        response = await client.exchange(request("HEAD"))
        assert (response.status, response.headers["content-length"], response.body) == (
            200,
            "2",
            b"",
        )
        assert (await client.exchange(request())).body == b"ok"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"garbage\r\n\r\n", 400, "malformed_http"),
        (b"\x16\x03\x01\x00\xff" + b"\0" * 200, 400, "malformed_http"),  # TLS to a plain port
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_http"),  # no Host
        (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "http_version_not_supported"),
        (request("POST", "/echo", "Content-Length: 1", "Content-Length: 2"), 400, "malformed_http"),
        (request("POST", "/echo", "Content-Length: -1"), 400, "malformed_http"),
        (request("POST", "/echo", f"Content-Length: {10**23}"), 400, "malformed_http"),
        (request("POST", "/echo", "Transfer-Encoding: gzip"), 400, "malformed_http"),
        (request("POST", "/echo", CHUNKED) + b"ZZ\r\n", 400, "malformed_http"),
        (request("POST", "/echo", CHUNKED) + b"1\r\nabc\r\n", 400, "malformed_http"),
        (request("POST", "/echo", CHUNKED, "Content-Length: 3"), 400, "malformed_http"),
        (b"A" * 40_000, 431, "headers_too_large"),
        (request("GET", "/ok", "X: " + "y" * 40_000), 431, "headers_too_large"),
        (request("GET", "/ok", *["X: y"] * 200), 431, "headers_too_large"),
        (request("CONNECT", "host:80"), 405, "method_not_allowed"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_what_is_no_request_is_refused_in_our_shape(
    uds: Path, data: bytes, status: int, code: str
) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(data)
        response = await client.read_response()
        assert (response.status, response.error["code"]) == (status, code)
        assert response.error["type"] == "invalid_request_error"
        assert response.headers["connection"] == "close"
        assert await client.read_to_end() == b""
        assert world.refused == [code]
        async with await world.connect() as other:
            assert (await other.exchange(request())).status == 200


async def test_a_refused_head_request_gets_no_body(uds: Path) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        response = await client.exchange(request("HEAD", "?"))
        assert (response.status, response.body) == (400, b"")
        assert await client.read_to_end() == b""


async def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(uds: Path) -> None:
    app = DemoApp()
    async with running(app, uds=uds, limits=Limits(max_body_bytes=10)) as world:
        async with await world.connect() as client:
            response = await client.exchange(request("POST", "/echo", "Content-Length: 11"))
            assert (response.status, response.error["code"]) == (413, "payload_too_large")
        async with await world.connect() as client:
            assert (await client.exchange(request("POST", "/echo", body=b"x" * 10))).status == 200
        await app.expect("started /echo", "read 10", "ended: None")


async def test_a_body_that_turns_out_too_large_is_refused(uds: Path) -> None:
    app = DemoApp()
    async with (
        running(app, uds=uds, limits=Limits(max_body_bytes=10)) as world,
        await world.connect() as client,
    ):
        await client.send(request("POST", "/echo", CHUNKED) + b"8\r\n12345678\r\n")
        await app.expect("started /echo")
        await client.send(b"8\r\n12345678\r\n")
        response = await client.read_response()
        assert (response.status, response.error["code"]) == (413, "payload_too_large")
        await app.expect("ended: client_disconnect")
        assert await client.read_to_end() == b""


async def test_expect_continue_is_answered_when_the_handler_asks(uds: Path) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/echo", "Content-Length: 2", "Expect: 100-continue"))
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
        await client.send(b"hi")
        assert (await client.read_response()).body == b"hi"
        assert (await client.exchange(request())).body == b"ok"


async def test_expect_continue_is_not_answered_when_the_handler_refuses(uds: Path) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        await client.send(request("POST", "/refuse", "Content-Length: 2", "Expect: 100-continue"))
        assert (await client.read_until(b"\r\n")).startswith(b"HTTP/1.1 429 ")


@pytest.mark.parametrize("path", ["/boom", "/wait-unread"])
async def test_a_handler_that_fails_is_a_500_or_a_cut_never_the_end(uds: Path, path: str) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world:
        async with await world.connect() as client:
            response = await client.exchange(request("POST", "/boom", body=b"x"))
            assert response.status == 500
        async with await world.connect() as client:
            assert (await client.exchange(request())).status == 200


async def test_an_app_that_fails_before_it_answers_is_a_500_in_our_shape(
    uds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async with running(app, uds=uds) as world:
        for method in ("GET", "HEAD"):
            async with await world.connect() as client:
                response = await client.exchange(request(method))
                assert response.status == 500
                assert response.headers["connection"] == "close"
                if method == "GET":
                    assert response.error["code"] == "internal_error"
                assert await client.read_to_end() == b""
    assert "the others go on" not in caplog.text


async def test_an_app_that_answers_after_we_did_is_not_heard(uds: Path) -> None:
    late, done = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError
        await late.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late", "more_body": False})
        done.set()

    async with (
        running(app, uds=uds, limits=Limits(max_body_bytes=1)) as world,
        await world.connect() as client,
    ):
        await client.send(request("POST", "/", CHUNKED) + b"8\r\n12345678\r\n")
        assert (await client.read_response()).status == 413
        late.set()
        await done.wait()  # nothing was raised
        assert await client.read_to_end() == b""


async def test_a_stream_that_fails_is_cut_without_its_terminator(uds: Path) -> None:
    async with running(DemoApp(), uds=uds) as world:
        for path in ("/broken-stream", "/broken-generator"):
            async with await world.connect() as client:
                await client.send(request("POST", path, body=b"x"))
                data = await client.read_to_end()
                assert b"half" in data
                assert not data.endswith(b"0\r\n\r\n")


PIECES = st.binary(max_size=20) | st.sampled_from(
    [
        b"GET /ok HTTP/1.1\r\nHost: x\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\n",
        b"POST /refuse HTTP/1.1\r\nHost: x\r\n",
        b"POST /stream HTTP/1.0\r\n",
        b"HEAD /boom HTTP/1.1\r\nHost: x\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"Connection: close\r\n",
        b"Content-Length: 5\r\n",
        b"Expect: 100-continue\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Upgrade: h2c\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"hello",
        b"\r\n",
        b"\r\n\r\n",
    ]
)


@pytest.mark.slow
@given(
    pieces=st.lists(PIECES, max_size=12),
    leave=st.sampled_from([RawClient.close, RawClient.half_close, RawClient.reset]),
)
def test_whatever_a_client_says_it_hurts_nobody(
    pieces: list[bytes], leave: Callable[[RawClient], None]
) -> None:
    logged: list[logging.LogRecord] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    async def say_it() -> None:
        async with running(DemoApp()) as world:
            async with await world.connect() as client:
                with contextlib.suppress(trio.BrokenResourceError):
                    for piece in pieces:
                        await client.send(piece)
                        await trio.testing.wait_all_tasks_blocked()
                with contextlib.suppress(OSError):  # the server has closed first
                    leave(client)
                await world.all_closed()
            async with await world.connect() as other:
                assert (await other.exchange(request())).body == b"ok"

    logger, handler = logging.getLogger("trioengine.http.server"), Listen()
    logger.addHandler(handler)
    try:
        trio.run(say_it)
    finally:
        logger.removeHandler(handler)
    assert not logged
