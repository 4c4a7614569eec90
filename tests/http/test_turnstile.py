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
from helpers.raw_http import request, running
from trioengine.http.transport import ClientStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

    from helpers.asgi_client import Call

RESPONSES = "/v1/responses"
KEY = {"Authorization": "Bearer k"}


@asynccontextmanager
async def full_world(**config: Any) -> AsyncIterator[World]:
    """A world with one place, which is taken."""
    async with open_world(max_queue_sequences=1, **config) as world:
        first = world.start("POST", CHAT, body_for(CHAT), headers=KEY)
        await world.settle()
        assert world.client.admission.full
        yield world
        if not first.finished.is_set():
            first.disconnect()


def count_app_requests(world: World) -> list[str]:
    """Return the list to which each path is added that the framework sees."""
    seen: list[str] = []
    world.app.before_request_funcs[None].insert(0, lambda: seen.append("one"))
    return seen


def without_id(call: Call) -> tuple[int, dict[str, str], bytes]:
    headers = {name: value for name, value in call.headers.items() if name != "x-request-id"}
    return call.status, headers, call.body


@pytest.mark.parametrize("path", [COMPLETION, CHAT, RESPONSES])
async def test_it_says_what_the_app_would_have_said(path: str, autojump_clock: MockClock) -> None:
    async with full_world(allowed_origins=("https://a.example",), api_keys=("k", "j")) as world:
        asked = {**KEY, "Origin": "https://a.example"}
        seen = count_app_requests(world)
        refused = await world.api.post(path, b"{", headers=asked)
        assert not seen
        by_the_app = await world.api.post(path + "/", b"{", headers=asked)
        assert len(seen) == 1
        assert without_id(refused) == without_id(by_the_app)
        assert refused.status == 429
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert len(refused.headers["x-request-id"]) == 32
        assert world.counted("requests", path, "overloaded") == 2
        assert world.counted("requests_rejected", "overloaded") == 2


async def test_the_clients_id_is_echoed_and_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "trioengine.http.access_log")
    async with full_world() as world:
        refused = await world.api.post(CHAT, b"{", headers={"X-Request-Id": "mine"})
        assert refused.headers["x-request-id"] == "mine"
        (line,) = [record.getMessage() for record in caplog.records]
        assert line == (
            f"method=POST path={CHAT} status=429 outcome=overloaded duration_ms=0.0 "
            "client=127.0.0.1 request_id=mine"
        )


async def test_a_refusal_that_the_server_cuts_short_is_counted_too(
    autojump_clock: MockClock,
) -> None:
    async with full_world() as world:
        call = world.api.open_call("POST", CHAT)
        with trio.CancelScope() as scope:
            scope.cancel()
            await call.run()
        assert call.status == 0
        assert world.counted("requests", CHAT, "shutdown") == 1


async def test_a_prefix_that_a_proxy_leaves_on_is_taken_off(autojump_clock: MockClock) -> None:
    async with full_world(root_path="/llm") as world:
        seen = count_app_requests(world)
        assert (await world.api.post("/llm" + CHAT, b"{")).status == 429
        assert not seen


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", CHAT, {}, 401),
        ("POST", CHAT, {"Authorization": "Bearer wrong"}, 401),
        ("GET", CHAT, KEY, 405),
        ("HEAD", CHAT, KEY, 405),
        ("OPTIONS", CHAT, KEY, 405),
        ("POST", "/v1/nothing", KEY, 404),
        ("GET", "/v1/models", KEY, 200),
        ("GET", "/health/live", {}, 200),
        ("POST", "/detokenize", KEY, 429),
    ],
)
async def test_the_rest_goes_on_to_the_app(
    method: str, path: str, headers: dict[str, str], status: int, autojump_clock: MockClock
) -> None:
    async with full_world(api_keys=("k",)) as world:
        seen = count_app_requests(world)
        assert (await world.api.call(method, path, b"{", headers=headers).run()).status == status
        assert len(seen) == 1


async def test_a_state_comes_before_a_full_queue(autojump_clock: MockClock) -> None:
    async with full_world() as world:
        world.client.status.mark_draining()
        refused = await world.api.post(CHAT, b"{")
        assert (refused.status, refused.error["code"]) == (503, "draining")


async def test_a_model_for_embeddings_says_so_first(autojump_clock: MockClock) -> None:
    async with open_embedding_world(LengthEmbedder()) as world:
        with world.client.admission.reserve():
            world.client.admission.capacity = 1
            refused = await world.api.post(CHAT, b"{")
            assert (refused.status, refused.error["param"]) == (400, "model")


async def test_a_place_that_is_free_again_is_taken(autojump_clock: MockClock) -> None:
    async with full_world() as world:
        assert (await world.api.post(CHAT, body_for(CHAT, max_tokens=1))).status == 429
        await world.run_until_idle()
        second = world.start("POST", CHAT, body_for(CHAT, max_tokens=1))
        await world.run_until_idle()
        assert second.status == 200


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
