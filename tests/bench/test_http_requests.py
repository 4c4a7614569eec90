"""What is sent, and how a server is found."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from trioengine.bench.http_requests import Target, build_requests, find_target
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}, {"id": "n"}]})


@contextlib.contextmanager
def listing(
    body: str, status: int = 200, path: str = "/v1/models"
) -> Iterator[tuple[str, list[str]]]:
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization", ""))
            self.send_response(status if self.path == path else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("prefix", "suffix"), [("", ""), ("", "/"), ("", "/v1"), ("/llm", ""), ("/llm", "/v1/")]
)
def test_a_server_is_asked_for_its_model(prefix: str, suffix: str) -> None:
    with listing(MODELS, path=f"{prefix}/v1/models") as (url, keys):
        target = find_target(url + prefix + suffix)
    assert (target.model, target.path, target.is_local) == ("m", prefix, True)
    assert keys == [""]


def test_the_key_is_sent() -> None:
    with listing(MODELS) as (url, keys):
        find_target(url, "secret")
    assert keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [("{}", 401, "status 401"), ("nonsense", 200, "JSON"), ('{"data": []}', 200, "no model")],
)
def test_no_openai_server_there(body: str, status: int, message: str) -> None:
    with listing(body, status) as (url, _), pytest.raises(ConfigError, match=message):
        find_target(url)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "https://x", "http://", "http://x:y", "http:///v1"]
)
def test_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        find_target(url)


def test_requests_are_greedy_streams_of_a_fixed_length() -> None:
    target = Target(host="::1", port=81, path="/p", model="m", api_key="k")
    first, second = build_requests(target, ["One", "zwö\r\n"], 7)
    head, _, body = second.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /p/v1/completions HTTP/1.1"
    assert {"Host: [::1]:81", "Connection: close", "Authorization: Bearer k"} <= set(lines)
    assert f"Content-Length: {len(body)}" in lines
    assert json.loads(body) == {
        "model": "m",
        "prompt": "zwö\r\n",
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert json.loads(first.partition(b"\r\n\r\n")[2])["prompt"] == "One"


@pytest.mark.parametrize(("host", "local"), [("localhost", True), ("::1", True), ("a.org", False)])
def test_which_machine_it_is(host: str, local: bool) -> None:
    assert Target(host=host, port=1).is_local == local
