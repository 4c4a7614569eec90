from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from helpers.api_world import CHAT, COMPLETION, World, body_for, open_world
from trioengine.client.engine_client import EngineClient
from trioengine.config import ServerConfig
from trioengine.errors import ConfigError
from trioengine.http.app import create_app
from trioengine.http.auth import OPEN_RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

KEY = {"Authorization": "Bearer secret"}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


def routes(world: World) -> Iterator[tuple[str, frozenset[str]]]:
    """Each rule of the app with its methods, variables filled in."""
    for rule in world.app.url_map.iter_rules():
        yield re.sub(r"<[^>]+>", "x", rule.rule), frozenset(rule.methods or ())


async def test_the_route_table(autojump_clock: MockClock) -> None:
    async with open_world(enable_admin=True) as world:
        assert {path: methods - {"HEAD"} for path, methods in routes(world)} == {
            "/v1/completions": {"POST"},
            "/v1/chat/completions": {"POST"},
            "/v1/responses": {"POST"},
            "/v1/embeddings": {"POST"},
            "/tokenize": {"POST"},
            "/detokenize": {"POST"},
            "/v1/models": {"GET"},
            "/v1/models/x": {"GET"},
            "/v1/requests/x/cancel": {"POST"},
            "/health": {"GET"},
            "/health/live": {"GET"},
            "/health/ready": {"GET"},
            "/metrics": {"GET"},
            "/version": {"GET"},
            "/openapi.json": {"GET"},
            "/docs": {"GET"},
            "/start_profile": {"POST"},
            "/stop_profile": {"POST"},
            "/reset_prefix_cache": {"POST"},
            "/sleep": {"POST"},
            "/wake_up": {"POST"},
            "/is_sleeping": {"GET"},
        }


# Keys ---------------------------------------------------------------------------------------------


async def test_every_route_but_health_asks_for_a_key(autojump_clock: MockClock) -> None:
    async with open_world(enable_admin=True, api_keys=("secret", "other")) as world:
        paths = [path for path, _ in routes(world)]
        paths += ["/", "/nope", "/v1", "/health/x", "/health/../v1/models", "/static/x"]
        for path in paths:
            for method in METHODS:
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}):
                    call = await world.api.call(method, path, headers=headers).run()
                    if path in OPEN_RULES and method in ("GET", "HEAD"):
                        assert call.status == 200
                        continue
                    assert call.status == 401, (method, path)
                    assert call.error["code"] == "invalid_api_key"
                    assert call.error["type"] == "authentication_error"
                    assert call.headers["www-authenticate"] == "Bearer"


async def test_each_key_opens(autojump_clock: MockClock) -> None:
    async with open_world(api_keys=("secret", "other")) as world:
        for key in ("secret", "other"):
            call = await world.api.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert call.status == 200
        twice = [("Authorization", "Bearer secret"), ("Authorization", "Bearer secret")]
        assert (await world.api.get("/v1/models", headers=twice)).status == 401


async def test_an_empty_key_is_refused_at_the_start(autojump_clock: MockClock) -> None:
    with pytest.raises(ConfigError):
        create_app(EngineClient(), lambda: pytest.fail("asked"), ServerConfig(api_keys=("",)))


# Paths and methods --------------------------------------------------------------------------------


async def test_any_other_method_is_a_405_in_the_one_shape(autojump_clock: MockClock) -> None:
    async with open_world(enable_admin=True) as world:
        for path, allowed in routes(world):
            for method in set(METHODS) - allowed:
                call = await world.api.call(method, path).run()
                assert (call.status, call.error["code"]) == (405, "method_not_allowed")
                assert set(call.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize(
    "path",
    ["/", "/nope", "/v1", "/v1//models", "/V1/models", "/start_profile", "/static/a",
     "/v1/models/a/b\x00é", " "],
)  # fmt: skip
async def test_any_other_path_is_a_404_in_the_one_shape(
    path: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = await world.api.get(path)
        assert call.status == 404
        assert call.error["code"] in {"not_found", "model_not_found"}
        assert call.error["type"] == "invalid_request_error"


async def test_a_slash_at_the_end_is_no_obstacle(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        assert (await world.api.get("/v1/models/")).status == 200


@pytest.mark.parametrize("root_path", ["/llm", "/llm/", "llm", "/a/b"])
async def test_a_root_path_may_be_there_or_not(root_path: str, autojump_clock: MockClock) -> None:
    async with open_world(root_path=root_path) as world:
        prefix = "/" + root_path.strip("/")
        assert (await world.api.get("/v1/models")).status == 200
        assert (await world.api.get(f"{prefix}/v1/models")).status == 200
        assert (await world.api.get(f"{prefix}x/v1/models")).status == 404
        assert (await world.api.get(prefix)).status == 404


async def test_a_root_path_opens_no_door(autojump_clock: MockClock) -> None:
    async with open_world(root_path="/health", api_keys=("k",)) as world:
        assert (await world.api.get("/health/v1/models")).status == 401
        assert (await world.api.get("/health/health")).status == 200


async def test_an_unexpected_exception_is_a_500_in_the_one_shape(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world() as world:
        monkeypatch.setattr("trioengine.http.models._cards", lambda *_: 1 / 0)
        call = await world.api.get("/v1/models")
        assert (call.status, call.error["code"]) == (500, "internal_error")
        assert b"division" not in call.body
        assert "ZeroDivisionError" in caplog.text
        assert world.counted("requests", "/v1/models", "internal_error") == 1


# Ids, browsers, logs, counters --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_the_request_id_is_echoed_on_every_answer(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        headers = {"X-Request-Id": "abc-1"}
        body = body_for(CHAT, max_tokens=1, stream=stream)
        for call in (
            await world.api.post(CHAT, body, headers=headers),
            await world.api.get("/nope", headers=headers),
            await world.api.get("/health", headers=headers),
        ):
            assert call.headers["x-request-id"] == "abc-1"
        forged = await world.api.post(CHAT, body, headers={"X-Request-Id": "a b"})
        assert re.fullmatch("[0-9a-f]{32}", forged.headers["x-request-id"])


async def test_two_requests_may_share_an_id(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        headers = {"X-Request-Id": "same"}
        first = world.start("POST", CHAT, body_for(CHAT, stream=True), headers=headers)
        await world.turn(2)
        first.disconnect()
        second = world.start("POST", CHAT, body_for(CHAT, max_tokens=5), headers=headers)
        await world.run_until_idle()
        assert second.json["usage"]["completion_tokens"] == 5


async def test_browsers(autojump_clock: MockClock) -> None:
    origin = {"Origin": "https://a.example"}
    asking = origin | {"Access-Control-Request-Method": "POST"}
    async with open_world(
        running=True, allowed_origins=("https://a.example",), api_keys=("secret",)
    ) as world:
        preflight = await world.api.call("OPTIONS", CHAT, headers=asking).run()
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        for stream in (True, False):
            body = body_for(CHAT, max_tokens=1, stream=stream)
            call = await world.api.post(CHAT, body, headers=origin | KEY)
            assert call.headers["access-control-allow-origin"] == "https://a.example"
        refused = await world.api.post(CHAT, {}, headers=origin)
        assert refused.status == 401
        assert "access-control-allow-origin" in refused.headers
        other = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
        stranger = await world.api.call("OPTIONS", CHAT, headers=other).run()
        assert stranger.status == 401
        assert "access-control-allow-origin" not in stranger.headers


async def test_one_line_for_each_request_and_none_for_probes(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_world(running=True, api_keys=("secret",)) as world:
        await world.api.post(CHAT, body_for(CHAT, "my diary", max_tokens=3), headers=KEY)
        await world.api.post(COMPLETION, b"{", headers=KEY)
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            await world.api.get(path, headers=KEY)
    lines = [r.getMessage() for r in caplog.records if r.name == "trioengine.http.access_log"]
    assert len(lines) == 2
    assert "status=200 outcome=ok" in lines[0]
    assert "completion_tokens=3" in lines[0]
    assert "status=400 outcome=invalid_value" in lines[1]
    assert "my diary" not in caplog.text
    assert "secret" not in caplog.text


async def test_requests_are_counted_by_route_and_outcome(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        await world.api.post(CHAT, body_for(CHAT, max_tokens=1))
        await world.api.post(CHAT, body_for(CHAT, max_tokens=1, stream=True))
        await world.api.post(CHAT, body_for(CHAT, top_p=9.0))
        await world.api.get("/what/ever/a/client/makes/up")
        await world.api.get("/v1/models/whatever")
        assert world.counted("requests", CHAT, "ok") == 2
        assert world.counted("requests", CHAT, "invalid_value") == 1
        assert world.counted("requests", "other", "not_found") == 1
        assert world.counted("requests", "/v1/models/<path:model_id>", "model_not_found") == 1
        assert world.counted("requests_rejected", "invalid_value") == 1
        assert world.counted("requests_rejected", "ok") == 0


# Bodies -------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = body_for(CHAT, max_tokens=1)


@pytest.mark.parametrize(
    "content_type",
    [None, "application/json", "application/json; charset=utf-8", "text/plain", "nonsense",
     "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)  # fmt: skip
async def test_any_content_type_will_do(
    content_type: str | None, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        headers = {} if content_type is None else {"Content-Type": content_type}
        data = json.dumps(GOOD).encode()
        call = await world.api.post(CHAT, data, headers=headers)
        assert call.status == 200


async def test_a_body_may_come_in_pieces(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        call = world.api.open_call("POST", CHAT)
        data = json.dumps(GOOD).encode()
        for start in range(0, len(data), 7):
            call.send_body(data[start : start + 7], more=True)
        call.send_body(b"")
        assert (await call.run()).status == 200
