"""A full server's refusal before the app: it says what the app would have said, and only then."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from helpers.api_world import CHAT, COMPLETION, World, body_for, open_world
from helpers.demo_app import DemoApp
from helpers.embedding_engine import LengthEmbedder, open_embedding_world
from helpers.raw_http import RawResponse, RunningServer, request, running
from trioengine.http.limits import Limits
from trioengine.http.transport import ClientStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

RESPONSES = "/v1/responses"
KEY = "Authorization: Bearer k"


class FullWorld:
    """A world with one place, which is taken, behind a real socket.

    Attributes:
        seen: An entry for each request that the framework saw.
    """

    def __init__(self, world: World, server: RunningServer) -> None:
        self.world = world
        self.server = server
        self.seen: list[str] = []
        world.app.before_request_funcs[None].insert(0, lambda: self.seen.append("one"))

    async def ask(self, path: str, *headers: str, method: str = "POST") -> RawResponse:
        """Ask on a connection of its own, with a body that is no JSON."""
        async with await self.server.connect() as client:
            return await client.exchange(request(method, path, *headers, body=b"{"))


@asynccontextmanager
async def full_world(tmp_path: Path, **config: Any) -> AsyncIterator[FullWorld]:
    async with open_world(max_queue_sequences=1, **config) as world:
        first = world.start("POST", CHAT, body_for(CHAT), headers={"Authorization": "Bearer k"})
        await world.settle()
        assert world.client.admission.full
        turnstile = world.app.turnstile.refusal
        async with running(world.app, uds=tmp_path / "s", turnstile=turnstile) as server:
            yield FullWorld(world, server)
        if not first.finished.is_set():
            first.disconnect()


def without_id(answer: RawResponse) -> RawResponse:
    varying = ("x-request-id", "date")
    headers = {name: value for name, value in answer.headers.items() if name not in varying}
    return answer._replace(headers=headers)


@pytest.mark.parametrize("path", [COMPLETION, CHAT, RESPONSES])
async def test_it_says_what_the_app_would_have_said(
    path: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    config = {"allowed_origins": ("https://a.example",), "api_keys": ("k", "j")}
    async with full_world(tmp_path, **config) as full:
        asked = (KEY, "Origin: https://a.example")
        refused = await full.ask(path, *asked)
        assert not full.seen
        by_the_app = await full.ask(path + "/", *asked)
        assert len(full.seen) == 1
        assert without_id(refused) == without_id(by_the_app)
        assert refused.status == 429
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert len(refused.headers["x-request-id"]) == 32
        assert full.world.counted("requests", path, "overloaded") == 2
        assert full.world.counted("requests_rejected", "overloaded") == 2


async def test_the_clients_id_is_echoed_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "trioengine.http.access_log")
    async with full_world(tmp_path) as full:
        refused = await full.ask(CHAT, "X-Request-Id: mine")
        assert refused.headers["x-request-id"] == "mine"
        (line,) = [record.getMessage() for record in caplog.records]
        assert line == (
            f"method=POST path={CHAT} status=429 outcome=overloaded duration_ms=0.0 "
            "client=<local> request_id=mine"
        )


async def test_a_refusal_that_the_server_cuts_short_is_counted_too(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(self: ClientStream, data: bytes) -> None:
        full.server.server.abort_connections()
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(ClientStream, "send", leave)
    async with full_world(tmp_path) as full, await full.server.connect() as client:
        await client.send(request("POST", CHAT, body=b"{"))
        await full.world.settle()
        await full.server.all_closed()
        assert full.world.counted("requests", CHAT, "shutdown") == 1


async def test_a_prefix_that_a_proxy_leaves_on_is_taken_off(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with full_world(tmp_path, root_path="/llm") as full:
        assert (await full.ask("/llm" + CHAT)).status == 429
        assert not full.seen


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", CHAT, (), 401),
        ("POST", CHAT, ("Authorization: Bearer wrong",), 401),
        ("GET", CHAT, (KEY,), 405),
        ("HEAD", CHAT, (KEY,), 405),
        ("OPTIONS", CHAT, (KEY,), 405),
        ("POST", "/v1/nothing", (KEY,), 404),
        ("GET", "/v1/models", (KEY,), 200),
        ("GET", "/health/live", (), 200),
        ("POST", "/detokenize", (KEY,), 429),
    ],
)
async def test_the_rest_goes_on_to_the_app(
    method: str,
    path: str,
    headers: tuple[str, ...],
    status: int,
    tmp_path: Path,
    autojump_clock: MockClock,
) -> None:
    async with full_world(tmp_path, api_keys=("k",)) as full:
        assert (await full.ask(path, *headers, method=method)).status == status
        assert len(full.seen) == 1


async def test_a_state_comes_before_a_full_queue(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with full_world(tmp_path) as full:
        full.world.client.status.mark_draining()
        refused = await full.ask(CHAT)
        assert (refused.status, refused.error["code"]) == (503, "draining")


async def test_a_model_for_embeddings_says_so_first(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_embedding_world(LengthEmbedder()) as world:
        with world.client.admission.reserve():
            world.client.admission.capacity = 1
            turnstile = world.app.turnstile.refusal
            async with (
                running(world.app, uds=tmp_path / "s", turnstile=turnstile) as server,
                await server.connect() as client,
            ):
                refused = await client.exchange(request("POST", CHAT, body=b"{"))
                assert (refused.status, refused.error["param"]) == (400, "model")


async def test_a_place_that_is_free_again_is_taken(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with full_world(tmp_path) as full:
        assert (await full.ask(CHAT)).status == 429
        await full.world.run_until_idle()
        assert (await full.ask(CHAT)).status == 400  # the body is read now


# On a connection that stays ----------------------------------------------------------------------


async def test_who_was_refused_may_ask_again_on_the_same_connection(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with full_world(tmp_path) as full, await full.server.connect() as client:
        ask = request("POST", CHAT, body=b"{")
        assert [(await client.exchange(ask)).status for _ in range(3)] == [429, 429, 429]
        await client.send(ask + request("GET", "/v1/models") + ask)  # all at once
        assert [(await client.read_response()).status for _ in range(3)] == [429, 200, 429]
        assert len(full.seen) == 1


async def test_a_body_in_chunks_with_trailers_is_refused_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with full_world(tmp_path) as full, await full.server.connect() as client:
        head = request("POST", CHAT, "Transfer-Encoding: chunked")
        refused = await client.exchange(head + b"1\r\n{\r\n0\r\nX-Sum: 1\r\n\r\n")
        assert (refused.status, "connection" in refused.headers) == (429, False)
        assert (await client.exchange(request("GET", "/v1/models"))).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        ("Content-Length: 100000",),
        ("Transfer-Encoding: chunked",),
        ("Content-Length: 9", "Expect: 100-continue"),
    ],
)
async def test_a_body_that_is_not_there_yet_is_neither_waited_nor_asked_for(
    fields: tuple[str, ...], tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with full_world(tmp_path) as full, await full.server.connect() as client:
        await client.send(request("POST", CHAT, *fields))
        answer = await client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nconnection: close\r\n" in answer
        assert full.world.counted("requests", CHAT, "overloaded") == 1


async def test_a_malformed_body_is_called_that_and_ends_the_connection(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with full_world(tmp_path) as full, await full.server.connect() as client:
        head = request("POST", CHAT, "Transfer-Encoding: chunked")
        refused = await client.exchange(head + b"zz\r\n")
        assert (refused.status, refused.error["code"]) == (400, "malformed_http")
        assert full.server.refused == ["malformed_http"]
        assert full.world.counted("requests", CHAT, "overloaded") == 0


async def test_a_refused_client_is_idle_from_then_on(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    ask = request("POST", CHAT, body=b"{")
    async with full_world(tmp_path) as full, await full.server.connect() as client:
        for _ in range(2):
            await trio.sleep(Limits.keep_alive_s - 1)
            assert (await client.exchange(ask)).status == 429
        answered_s = trio.current_time()
        assert await client.read_to_end() == b""
        assert trio.current_time() == pytest.approx(answered_s + Limits.keep_alive_s)


async def test_an_answer_with_a_length_leaves_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[bytes] = []
    send = ClientStream.try_send

    def note(self: ClientStream, data: bytes) -> int:
        if data:
            pieces.append(data)
        return send(self, data)

    monkeypatch.setattr(ClientStream, "try_send", note)
    async with running(DemoApp(), uds=tmp_path / "s") as world, await world.connect() as client:
        assert (await client.exchange(request("POST", "/echo", body=b"hi"))).body == b"hi"
        (whole,) = pieces
        assert whole.endswith(b"\r\n\r\nhi")
        head = await client.exchange(request("HEAD", "/ok"))
        assert (head.status, head.body) == (200, b"")
