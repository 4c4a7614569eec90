"""Starting: how soon it answers, and how it fails."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.server_process import ServerProcess, process_lives, wait_until
from helpers.tiny_native import save_tiny_native

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

CRASHED_WITHIN_S = 5.0


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for a socket in it."""
    path = Path(tempfile.mkdtemp(prefix="te-"))
    yield path
    shutil.rmtree(path)


def test_it_answers_while_it_loads_and_tells_how_far_it_is() -> None:
    args = json.dumps({"load_time_ms": 800})
    with ServerProcess("--engine-args", args) as server:

        def loading() -> bool:
            status, body = server.get("/health")
            return status == 503 and body.get("phase") == "load" and body["progress"] > 0

        wait_until(loading, what="loading is told")
        assert server.get("/health/live")[0] == 200
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "starting")
        server.wait_ready()
        assert server.get("/v1/models")[1]["data"][0]["simulated"] is True
        assert server.post("/v1/completions", {"prompt": "x"})[0] == 200


def test_the_childs_own_error_is_the_last_line() -> None:
    began_s = time.monotonic()
    with ServerProcess("--engine-args", '{"fail_on_load": "no such weights"}') as server:
        assert server.wait() == 4
        assert server.last_line == "trioengine: RuntimeError: no such weights"
        assert time.monotonic() - began_s < CRASHED_WITHIN_S


def test_a_child_that_says_nothing_is_told_by_its_exit_status() -> None:
    with ServerProcess("--engine-args", '{"exit_on_load": 9}') as server:
        assert server.wait() == 4
        assert "exited with status 9" in server.last_line


def test_a_start_that_takes_too_long_is_given_up() -> None:
    args = ("--engine-args", '{"hang_on_load": true}', "--start-timeout", "0.5")
    with ServerProcess(*args) as server:
        engine_pid = server.engine_pid
        assert server.wait() == 4
        assert server.last_line == "trioengine: the engine was not ready within 0.5 s"
        assert not process_lives(engine_pid)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess(port=port) as server:
            assert server.wait() == 2
            assert server.last_line.startswith(
                f"trioengine: cannot listen on 127.0.0.1 port {port}"
            )


def test_a_model_that_is_not_there() -> None:
    with ServerProcess("/does/not/exist", engine="torch") as server:
        assert server.wait() == 2
        assert server.last_line.startswith("trioengine: model '/does/not/exist' not found")


def test_a_bad_flag() -> None:
    with ServerProcess("--max-queue", "none") as server:
        assert server.wait() == 2
        assert server.last_line == "trioengine: --max-queue: must be a whole number, got 'none'"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--engine-args", '{"nope": 1}'), "unknown field `nope`"),
        (("--max-num-seqs", "4000"), "max_num_batched_tokens (2048) must be at least max_num_seqs"),
    ],
)
def test_what_only_the_engine_can_refuse(arguments: tuple[str, str], cause: str) -> None:
    with ServerProcess(*arguments) as server:
        assert server.wait() == 2
        assert cause in server.last_line
        assert "Traceback" not in server.text()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (
            ("--kv-cache-memory", "100000"),
            r"--kv-cache-memory 100000 GiB exceeds the free memory, ",
        ),
        (("--kv-cache-memory", "0.00001"), r"one sequence of 512 tokens needs 0\.00 GiB of KV"),
    ],
)
def test_a_cache_that_does_not_fit(tmp_path: Path, arguments: tuple[str, str], cause: str) -> None:
    pytest.importorskip("trioengine.engine_proc.native_runner._native")
    model = save_tiny_native(tmp_path / "tiny")
    with ServerProcess(str(model), *arguments, engine="native") as server:
        assert server.wait() == 2
        assert re.search(cause, server.last_line)


def test_the_port_is_free_again_at_once_after_a_kill() -> None:
    with ServerProcess() as first:
        port = first.wait_ready().port
        first.send_signal(signal.SIGKILL)
        first.wait()
        with ServerProcess(port=port) as second:
            second.wait_ready()
            assert second.port == port


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def test_a_log_that_nobody_reads_holds_nothing_up(short_dir: Path) -> None:
    """Standard error is a pipe that is never read: after 64 KiB a write to it would block."""
    uds = short_dir / "http"
    command = [sys.executable, "-m", "trioengine", "serve", "--engine", "sim", "--uds", str(uds)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            wait_until(
                lambda: uds.exists() and status_of(uds, "/health") == 200, what="it is ready"
            )
            statuses = {status_of(uds, "/" + "x" * 1000) for _ in range(200)}
            assert statuses == {404}
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def status_of(uds: Path, path: str) -> int:
    connection = UnixConnection(uds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()
