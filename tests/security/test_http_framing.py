"""Where a request ends: nothing that two servers could read differently gets past the head.

Each attack is followed by the request that it wants to smuggle. It is refused with one answer, the
connection ends with it, and the smuggled request is never served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.demo_app import DemoApp
from helpers.raw_http import request, running
from trioengine.http.limits import Limits

if TYPE_CHECKING:
    from pathlib import Path

SMUGGLED = b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def uds(tmp_path: Path) -> Path:
    return tmp_path / "s"


def fields(*lines: bytes, body: bytes = b"") -> bytes:
    return HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


ATTACKS = {
    "length and chunks (CL.TE)": fields(
        b"Content-Length: 6", b"Transfer-Encoding: chunked", body=b"0\r\n\r\nX"
    ),
    "chunks and length (TE.CL)": fields(
        b"Transfer-Encoding: chunked", b"Content-Length: 3", body=b"1\r\nX\r\n0\r\n\r\n"
    ),
    "two lengths": fields(b"Content-Length: 0", b"Content-Length: 4", body=b"abcd"),
    "two lengths in one field": fields(b"Content-Length: 0, 4", body=b"abcd"),
    "a negative length": fields(b"Content-Length: -1"),
    "a signed length": fields(b"Content-Length: +4", body=b"abcd"),
    "a length in hex": fields(b"Content-Length: 0x4", body=b"abcd"),
    "a length with an underscore": fields(b"Content-Length: 1_0", body=b"a" * 10),
    "a length with a blank": fields(b"Content-Length: 1 0", body=b"a" * 10),
    "a length of many digits": fields(b"Content-Length: " + b"9" * 400),
    "an empty length": fields(b"Content-Length: "),
    "a length in other digits": fields("Content-Length: \uff14".encode()),
    "two codings": fields(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    "codings in one field": fields(b"Transfer-Encoding: chunked, identity"),
    "chunked twice": fields(b"Transfer-Encoding: chunked, chunked"),
    "gzip, then chunked": fields(b"Transfer-Encoding: gzip, chunked"),
    "a coding that almost is": fields(b"Transfer-Encoding: xchunked"),
    "a coding behind a vertical tab": fields(b"Transfer-Encoding: \x0bchunked"),
    "a coding in quotes": fields(b'Transfer-Encoding: "chunked"'),
    "chunks in HTTP/1.0": b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": fields(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "a blank before the name": fields(b" Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "a field without a name": fields(b": chunked"),
    "a field without a colon": fields(b"Transfer-Encoding chunked"),
    "a folded field": fields(b"Transfer-Encoding:", b" chunked", body=b"0\r\n\r\n"),
    "a field folded by a tab": fields(b"X: a", b"\tContent-Length: 4", body=b"abcd"),
    "lines that end in LF": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 1\n\nX",
    "one line that ends in LF": HEAD + b"X: y\nContent-Length: 1\r\n\r\nX",
    "a head that ends in LF": HEAD + b"Content-Length: 1\r\n\nX",
    "a CR within a field": fields(b"X: a\rContent-Length: 4", body=b"abcd"),
    "a NUL within a field": fields(b"X: a\0b"),
    "a NUL within a name": fields(b"X\0: a"),
    "a NUL within the target": b"GET /ok\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a control within the target": b"GET /o\x7fk HTTP/1.1\r\nHost: x\r\n\r\n",
    "a blank within the target": b"GET /ok /ok HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"POST /echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "two hosts": fields(b"Host: y", b"Content-Length: 0"),
    "HTTP/0.9": b"GET /ok\r\n\r\n",
    "HTTP/2 by its preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version in other letters": b"GET /ok http/1.1\r\nHost: x\r\n\r\n",
    "a version with blanks": b"GET /ok HTTP/ 1.1\r\nHost: x\r\n\r\n",
    "a chunk size with a sign": CHUNKED + b"+1\r\nX\r\n0\r\n\r\n",
    "a chunk size in hex spelling": CHUNKED + b"0x1\r\nX\r\n0\r\n\r\n",
    "a chunk size with an underscore": CHUNKED + b"1_0\r\n" + b"X" * 16 + b"\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"F" * 30 + b"\r\nX\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\nX\r\n0\r\n\r\n",
    "a chunk that is longer": CHUNKED + b"1\r\nXYZ\r\n0\r\n\r\n",
    "a chunk that ends in LF": CHUNKED + b"1\r\nX\n0\r\n\r\n",
    "a chunk size that ends in LF": CHUNKED + b"1\nX\r\n0\r\n\r\n",
    "an extension with a LF": CHUNKED + b"1;a=b\nc\r\nX\r\n0\r\n\r\n",
    "an endless extension": CHUNKED + b"1;" + b"a" * 70_000 + b"\r\nX\r\n0\r\n\r\n",
    "an endless trailer": CHUNKED + b"0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    "a trailer that is none": CHUNKED + b"0\r\nGET /ok HTTP/1.1\r\n\r\n",
    "an endless request line": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "an endless method": b"A" * 70_000 + b" /ok HTTP/1.1\r\nHost: x\r\n\r\n",
    "an endless field": fields(b"X: " + b"y" * 70_000),
    "an endless name": fields(b"X" * 70_000 + b": y"),
    "a thousand fields": fields(*[b"X: y"] * 1000),
    "a proxy's request": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a websocket": b"GET /ok HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_an_ambiguous_request_ends_its_connection(uds: Path, attack: bytes) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world:
        async with await world.connect() as client:
            await client.send(attack + SMUGGLED)
            answer = await client.read_response()
            assert 400 <= answer.status < 500
            assert answer.error["type"] == "invalid_request_error"
            assert answer.headers["connection"] == "close"
            assert await client.read_to_end() == b""
        await world.all_closed()
        assert "started /ok" not in app.heard()
        async with await world.connect() as other:
            assert (await other.exchange(SMUGGLED)).body == b"ok"


ORDINARY = {
    "the same length twice, as proxies fold it": fields(b"Content-Length: 2, 2", body=b"hi"),
    "chunks in capitals": fields(b"Transfer-Encoding: Chunked", body=b"2\r\nhi\r\n0\r\n\r\n"),
    "an extension": CHUNKED + b"2;a=b\r\nhi\r\n0\r\n\r\n",
    "a trailer": CHUNKED + b"2\r\nhi\r\n0\r\nX: y\r\n\r\n",
    "LF within a body": fields(b"Content-Length: 2", body=b"\n "),
    "no compression, and said so": fields(
        b"Content-Encoding: identity", b"Content-Length: 2", body=b"hi"
    ),
}


@pytest.mark.parametrize("ordinary", ORDINARY.values(), ids=ORDINARY)
async def test_what_is_not_ambiguous_is_served_and_the_next_one_too(
    uds: Path, ordinary: bytes
) -> None:
    async with running(DemoApp(), uds=uds) as world, await world.connect() as client:
        await client.send(ordinary + SMUGGLED)
        assert (await client.read_response()).body in (b"hi", b"\n ")
        assert (await client.read_response()).body == b"ok"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, gzip"])
async def test_a_compressed_body_is_refused_before_it_is_read(uds: Path, coding: str) -> None:
    app = DemoApp()
    async with running(app, uds=uds) as world, await world.connect() as client:
        answer = await client.exchange(
            request("POST", "/echo", f"Content-Encoding: {coding}", body=b"\x1f\x8b" + b"x" * 100)
        )
        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
        assert await client.read_to_end() == b""
        assert app.silent()
        assert world.refused == ["unsupported_encoding"]


async def test_nothing_that_follows_a_refusal_is_served(uds: Path) -> None:
    app = DemoApp()
    async with (
        running(app, uds=uds, limits=Limits(max_body_bytes=10)) as world,
        await world.connect() as client,
    ):
        await client.send(request("POST", "/echo", body=b"x" * 11) + SMUGGLED * 50)
        assert (await client.read_response()).status == 413
        assert await client.read_to_end() == b""
        assert app.silent()


async def test_a_chunk_of_2_to_the_64_is_no_empty_one(uds: Path) -> None:
    app = DemoApp()
    async with (
        running(app, uds=uds, limits=Limits(max_body_bytes=10)) as world,
        await world.connect() as client,
    ):
        await client.send(CHUNKED + b"1" + b"0" * 16 + b"\r\n\r\n0\r\n\r\n" + SMUGGLED)
        assert (await client.read_response()).status == 413
        assert await client.read_to_end() == b""
        assert "started /ok" not in app.heard()


NASTY = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\r\n",
        b" ",
        b"\t",
        b"\0",
        b":",
        b";",
        b",",
        b"\x0b",
        b"\xff",
        b"0",
        b"chunked",
    ]
)


@pytest.mark.slow
@given(data=st.data(), attack=st.sampled_from([*ATTACKS.values(), *ORDINARY.values()]))
def test_a_request_with_stray_bytes_never_serves_more_than_it_says(
    data: st.DataObject, attack: bytes
) -> None:
    """Whatever is put where into the first head: no field of it becomes a request of its own."""
    import trio

    head, blank, body = attack[:2000].partition(b"\r\n\r\n")
    at = data.draw(st.integers(0, len(head)))
    mutant = head[:at] + data.draw(NASTY) + head[at:] + blank + body

    async def say() -> None:
        app = DemoApp()
        async with running(app) as world:
            async with await world.connect() as client:
                await client.send(mutant)
                client.half_close()
                try:
                    answers = (await client.read_to_end()).count(b"HTTP/1.1 ")
                except trio.BrokenResourceError:
                    answers = 0
            await world.all_closed()
            # The body may be a request where the head has none; it is one, not more.
            assert answers <= 2
            async with await world.connect() as other:
                assert (await other.exchange(SMUGGLED)).body == b"ok"

    trio.run(say)
