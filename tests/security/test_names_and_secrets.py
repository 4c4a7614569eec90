"""Names are compared and never opened; keys open and are never shown."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from helpers.api_world import CHAT, COMPLETION, body_for, open_world
from helpers.server_process import ServerProcess
from trioengine.engine_proc.stop_strings import StopScanner
from trioengine.http.auth import KeyCheck

if TYPE_CHECKING:
    from trio.testing import MockClock

SECRET = "sk-very-secret-0123456789"
OTHER = "sk-another-secret-987654"

PATHS_IN_NAMES = (
    "../../../../etc/passwd",
    "..\\..\\windows\\win.ini",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:1/x",
    "%2e%2e%2fetc%2fpasswd",
    "....//....//etc/passwd",
    "~/.ssh/id_rsa",
    "sim/../sim",
    "sim\0/etc/passwd",
    "./sim",
    "sim ",
    "SIM/",
    "x" * 5000,
    "\ud800",
)


@pytest.mark.parametrize("name", PATHS_IN_NAMES, ids=lambda name: repr(name)[:30])
@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/v1/responses"])
async def test_a_model_s_name_in_a_body_opens_nothing(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    body = {"input": "x"} if path == "/v1/responses" else body_for(path)
    async with open_world(running=True) as world:
        monkeypatch.setattr(Path, "open", _nothing_is_opened)
        answer = await world.api.post(path, {**body, "model": name})
        monkeypatch.undo()
        assert answer.status in (400, 404)
        assert answer.error["code"] in ("model_not_found", "invalid_value")
        assert "root:" not in answer.body.decode()


def _nothing_is_opened(*_: object, **__: object) -> None:
    raise AssertionError("a name was opened")


@pytest.mark.parametrize("name", PATHS_IN_NAMES[:-1], ids=lambda name: repr(name)[:30])
@pytest.mark.parametrize("where", ["/v1/models/{}", "/v1/requests/{}/cancel", "/docs/{}", "/{}"])
async def test_a_name_in_a_path_opens_nothing(
    where: str, name: str, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        ask = world.api.post if "cancel" in where else world.api.get
        for spelled in (quote(name, safe=""), quote(name)):
            answer = await ask(where.format(spelled))
            assert answer.status in (400, 404, 405, 308)
            assert "root:" not in answer.body.decode()


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "http://169.254.169.254/latest", "data:image/png;base64,AAAA"]
)
async def test_nothing_is_fetched_for_a_message(url: str, autojump_clock: MockClock) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    async with open_world(running=True) as world:
        answer = await world.api.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"


async def test_no_key_is_in_log_metrics_or_answers(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_world(running=True, api_keys=(SECRET, OTHER)) as world:
        shown = []
        for key in (SECRET, OTHER, "sk-wrong-guess", SECRET[:-1]):
            headers = {"Authorization": f"Bearer {key}"}
            for path in (COMPLETION, CHAT):
                answer = await world.api.post(path, body_for(path, max_tokens=2), headers=headers)
                assert answer.status == (200 if key in (SECRET, OTHER) else 401)
                shown.append(answer.body.decode() + str(answer.headers))
        headers = {"Authorization": f"Bearer {SECRET}"}
        for path in ("/metrics", "/health", "/version", "/openapi.json", "/v1/models"):
            answer = await world.api.get(path, headers=headers)
            shown += [answer.body.decode()]
        said = "\n".join([*shown, caplog.text])
        for key in (SECRET, OTHER, "sk-wrong-guess"):
            assert key not in said


@pytest.mark.process
@pytest.mark.slow
def test_a_key_is_in_no_command_line_and_not_in_the_log(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{SECRET} 2\n")
    keys.chmod(0o600)
    environ = {"TRIOENGINE_API_KEY": OTHER}
    with ServerProcess("--api-key-file", str(keys), "--log-level", "debug", env=environ) as server:
        server.wait_ready()
        assert server.request("GET", "/metrics")[0] == 401
        assert server.post("/v1/completions", {"prompt": "x"})[0] == 401
        for pid in (server.process.pid, server.engine_pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert SECRET not in command
            assert OTHER not in command
        engine = Path(f"/proc/{server.engine_pid}/environ").read_bytes()
        assert SECRET.encode() not in engine
        assert OTHER.encode() not in engine
    assert SECRET not in server.text()
    assert OTHER not in server.text()


def test_every_key_is_compared_whole_whatever_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("trioengine.http.auth.hmac.compare_digest", compare)
    check = KeyCheck([SECRET, OTHER])
    check.check([f"Bearer {SECRET}"])
    assert len(compared) == 2  # also after a match
    assert {len(digest) for pair in compared for digest in pair} == {32}  # whatever their length


@pytest.mark.parametrize("stop", ["a" * 255 + "b", "ab" * 128, "a" * 256])
def test_stop_strings_take_the_same_time_for_any_text(stop: str) -> None:
    """No text makes the search fall back: a character is looked at once."""
    text, begin_s = "a" * 200_000, time.perf_counter()
    scanner = StopScanner((stop, stop[1:], "a" * 200 + "c", stop[:-1] + "d"))
    for start in range(0, len(text), 7):
        scanner.feed(text[start : start + 7], armed=True)
    assert time.perf_counter() - begin_s < 5.0
