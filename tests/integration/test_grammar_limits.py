"""A schema without end: refused in time, and nobody works on it any more."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.server_process import ServerProcess, process_lives, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

ENDLESS = {"allOf": [{"pattern": f"a{i}.*b"} for i in range(100)]}
MODULE = b"trial_process"


def tried(schema: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "a", "max_tokens": 50, "response_format": shape}


def trial_processes(root: int) -> list[int]:
    """Return the ids of the processes under ``root`` in which grammars are compiled."""
    found, parents = [], {root}
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents:
                parents.add(int(path.name))
                if MODULE in path.joinpath("cmdline").read_bytes():
                    found.append(int(path.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def test_a_compilation_without_end_ends() -> None:
    with ServerProcess() as server:
        server.wait_ready()
        assert server.post("/v1/completions", tried({"enum": [1]}))[0] == 200
        [before] = trial_processes(server.process.pid)
        begun = time.monotonic()
        status, answer = server.post("/v1/completions", tried(ENDLESS))
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert "5 s" in answer["error"]["message"]
        assert 4.5 < time.monotonic() - begun < 30
        assert before not in trial_processes(server.process.pid)
        assert server.post("/v1/completions", tried({"enum": [2]}))[0] == 200
        metrics = server.metrics()
        assert metrics["trioengine_requests_running"] == 0


def test_it_does_not_outlive_a_server_that_is_killed() -> None:
    with ServerProcess() as server:
        server.wait_ready()
        assert server.post("/v1/completions", tried({"enum": [1]}))[0] == 200
        [child] = trial_processes(server.process.pid)
        before = cpu_ticks(child)
        asking = threading.Thread(target=ask_in_vain, args=(server,))
        asking.start()
        wait_until(lambda: cpu_ticks(child) > before + 5 or None, what="the child is at work")
        server.send_signal(signal.SIGKILL)
        wait_until(lambda: not process_lives(child), what="the child is gone")
        asking.join()


@pytest.mark.parametrize("when", ["idle", "starting", "working"])
def test_it_does_not_outlive_an_engine_that_is_killed(when: str) -> None:
    with ServerProcess("--death-grace", "0.2") as server:
        server.wait_ready()
        if when != "starting":
            assert server.post("/v1/completions", tried({"enum": [1]}))[0] == 200
        asking = threading.Thread(target=ask_in_vain, args=(server,))
        if when != "idle":
            asking.start()
        [child] = wait_until(lambda: trial_processes(server.process.pid), what="a process")
        if when == "working":
            before = cpu_ticks(child)
            wait_until(lambda: cpu_ticks(child) > before + 5 or None, what="the child is at work")
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: not process_lives(child), what="the child is gone", timeout_s=2.0)
        assert server.wait() == 3
        if when != "idle":
            asking.join()


def test_the_first_shape_finds_everything_ready() -> None:
    with ServerProcess() as server:
        server.wait_ready()
        [child] = wait_until(lambda: trial_processes(server.process.pid), what="a process")
        assert server.post("/v1/completions", tried({"enum": [1]}))[0] == 200
        assert trial_processes(server.process.pid) == [child]


def ask_in_vain(server: ServerProcess) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.post("/v1/completions", tried(ENDLESS))


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
