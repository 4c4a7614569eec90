"""Chunks written past h11 make the same stream, and leave a connection that can be used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from helpers.demo_app import DemoApp
from helpers.raw_http import request, running, wall_clock_limit, with_tls
from trioengine.http.connection import current_request
from trioengine.http.limits import Limits
from trioengine.http.stream_writer import response_writer

if TYPE_CHECKING:
    from pathlib import Path

    from quart import Response


def where(kind: str, tmp_path: Path) -> dict[str, Any]:
    """Return ``running``'s arguments for a kind of listener."""
    if kind == "unix":
        return {"uds": tmp_path / "s"}
    if kind == "tls":
        return with_tls()
    return {}


every_kind = pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])


@every_kind
async def test_a_stream_arrives_chunk_by_chunk_and_the_connection_lives_on(
    kind: str, tmp_path: Path
) -> None:
    async with running(app := DemoApp(), **where(kind, tmp_path)) as world:
        async with await world.connect() as client:
            for _ in range(3):
                app.feed, app.chunks = trio.open_memory_channel[bytes](10)
                await client.send(request("POST", "/stream", body=b"x"))
                head = await client.read_until(b"\r\n\r\n")
                assert b"Transfer-Encoding: chunked" in head
                for index in range(3):
                    event = b"data: %d\n\n" % index
                    await app.feed.send(event)
                    assert await client.read_until(b"\n\n\r\n") == b"9\r\n" + event + b"\r\n"
                app.feed.close()
                assert await client.read_until(b"0\r\n\r\n") == b"0\r\n\r\n"
                assert (await client.exchange(request())).body == b"ok"
        assert world.connections[:1] == [1]


@pytest.mark.slow
@every_kind
async def test_a_flood_arrives_whole_however_slowly_it_is_read(kind: str, tmp_path: Path) -> None:
    pieces = [bytes([index]) * 50_000 for index in range(20)]
    async with (
        running(app := DemoApp(), **where(kind, tmp_path)) as world,
        await world.connect(receive_buffer=4096) as client,
    ):
        await client.send(request("POST", "/stream", body=b"x"))
        for piece in pieces:
            app.feed.send_nowait(piece)
        app.feed.close()
        assert (await client.read_response()).body == b"".join(pieces)
        assert (await client.exchange(request())).body == b"ok"


@every_kind
async def test_what_waits_for_a_client_that_does_not_read_is_bounded(
    kind: str, tmp_path: Path
) -> None:
    """The writer stops taking chunks: nothing piles up in the process."""
    async with running(app := DemoApp(), **where(kind, tmp_path)) as world:
        async with await world.connect(receive_buffer=4096) as client:
            await client.send(request("POST", "/stream", body=b"x"))
            await client.read_until(b"\r\n\r\n")
            for _ in range(1000):
                app.feed.send_nowait(b"x" * 65536)
            await wait_all_tasks_blocked(0.01)
            taken = 1000 - app.chunks.statistics().current_buffer_used
            assert taken * 65536 < 8 * 2**20
        await app.expect("started /stream", "ended: client_disconnect")


async def test_http_1_0_gets_the_bare_body_and_the_end_of_the_connection() -> None:
    async with running(app := DemoApp()) as world, await world.connect() as client:
        await client.send(request("POST", "/stream", body=b"x", version="1.0"))
        app.feed.send_nowait(b"data: 1\n\n")
        app.feed.close()
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body == b"data: 1\n\n"


async def test_head_gets_no_chunks() -> None:
    app = DemoApp()
    app.add_url_rule("/head", "head", app.view_functions["/stream"], methods=["HEAD"])
    app.feed.send_nowait(b"data: 1\n\n")
    app.feed.close()
    async with running(app) as world, await world.connect() as client:
        response = await client.exchange(request("HEAD", "/head"))
        assert (response.status, response.body) == (200, b"")
        assert (await client.exchange(request())).body == b"ok"


async def test_last_words_can_close_the_connection() -> None:
    async with running(app := DemoApp()) as world, await world.connect() as client:
        await client.send(request("POST", "/last-words", body=b"x"))
        assert (await client.read_response()).body == b"data: error\n\n"
        assert await client.read_to_end() == b""
        await app.expect("started /last-words", "ended: None")


async def test_a_client_that_takes_nothing_is_thrown_out_with_its_reason(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    app = DemoApp()
    async with running(app, uds=tmp_path / "s") as world, await world.connect() as client:
        await client.send(request("POST", "/flood", body=b"x"))
        await app.expect("started /flood")
        await wait_all_tasks_blocked()
        mock_clock.jump(Limits().slow_client_timeout_s + 0.1)
        await app.expect("ended: slow_client")
        await world.all_closed()


async def test_a_stream_under_another_server_goes_through_asgi() -> None:
    app = DemoApp()
    app.feed.send_nowait(b"data: 1\n\n")
    app.feed.close()
    response = await app.test_client().post("/stream", data=b"x")
    assert response.headers["content-type"] == "text/event-stream"
    assert await response.get_data() == b"data: 1\n\n"


async def test_write_nowait_says_when_to_flush_and_takes_nothing_meanwhile() -> None:
    app = DemoApp()
    sent = 0

    @app.post("/nowait")
    async def nowait() -> Response:
        nonlocal sent
        writer = response_writer(current_request())
        with pytest.raises(RuntimeError, match="writer already"):
            response_writer(current_request())
        await writer.start(200, {})
        while writer.write_nowait(b"x" * 10_000):
            sent += 1
        sent += 1
        with pytest.raises(trio.WouldBlock):
            writer.write_nowait(b"not taken")
        app.say("full")
        await writer.flush()
        await writer.end()
        return writer.response

    async with running(app) as world, await world.connect(receive_buffer=4096) as client:
        await client.send(request("POST", "/nowait", body=b""))
        await app.expect("full")
        assert (await client.read_response()).body == b"x" * 10_000 * sent


async def test_writing_to_a_client_that_is_gone_ends_in_cancellation() -> None:
    """Also where the write is the first to notice."""
    app = DemoApp()

    @app.post("/notice")
    async def notice() -> Response:
        request_ = current_request()
        writer = response_writer(request_)
        await writer.start(200, {})
        connection = request_.connection
        assert connection is not None
        connection.stream.close()  # stands for a reset that nobody has seen yet
        try:
            await writer.write(b"x")
        except trio.Cancelled:
            app.say(f"cancelled: {request_.loss}")
            raise
        return writer.response

    async with running(app) as world, await world.connect() as client:
        await client.send(request("POST", "/notice", body=b""))
        await app.expect("cancelled: client_disconnect")


async def test_the_last_words_are_sent_when_the_client_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clients close when they have read ``[DONE]``, before the end of the body."""
    app = DemoApp()
    sent: list[tuple[bytes, bool]] = []

    @app.post("/done")
    async def done() -> Response:
        request_ = current_request()
        assert request_.connection is not None
        stream = request_.connection.stream
        original = stream.try_send

        def try_send(data: bytes) -> int:
            sent.append((data, request_.ending))
            return original(data)

        monkeypatch.setattr(stream, "try_send", try_send)
        writer = response_writer(request_)
        await writer.start(200, {})
        await writer.write(b"1")
        await writer.end(b"[DONE]")
        return writer.response

    async with running(app, uds=tmp_path / "s") as world, await world.connect() as client:
        assert (await client.exchange(request("POST", "/done", body=b""))).body == b"1[DONE]"
    # In one piece with the end of the body, so that nothing is left to be said to who has gone.
    assert sent[1:] == [(b"1\r\n1\r\n", False), (b"6\r\n[DONE]\r\n0\r\n\r\n", True)]


async def test_a_fast_client_does_not_starve_the_others(tmp_path: Path) -> None:
    app = DemoApp()

    @app.post("/fast")
    async def fast() -> Response:
        writer = response_writer(current_request())
        await writer.start(200, {})
        ran = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_set, ran)
            for _ in range(64):
                await writer.write(b"x")
            app.say(f"others ran: {ran.is_set()}")
        await writer.end()
        return writer.response

    async with running(app, uds=tmp_path / "s") as world, await world.connect() as client:
        await client.exchange(request("POST", "/fast", body=b""))
        await app.expect("others ran: True")


async def _set(event: trio.Event) -> None:
    event.set()


@pytest.mark.slow
@given(chunks=st.lists(st.binary(max_size=300), max_size=20))
def test_any_chunks_make_one_body(chunks: list[bytes]) -> None:
    async def check() -> None:
        app = DemoApp()
        for chunk in chunks:
            app.feed.send_nowait(chunk)
        app.feed.close()
        async with running(app) as world, await world.connect() as client:
            await client.send(request("POST", "/stream", body=b"x"))
            assert (await client.read_response()).body == b"".join(chunks)
            assert (await client.exchange(request())).body == b"ok"

    async def bounded() -> None:
        with wall_clock_limit():
            await check()

    trio.run(bounded)
