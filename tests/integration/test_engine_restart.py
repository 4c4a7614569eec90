"""The engine's process dies under a server that may start it again: the port and the rest stay."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import pytest

from helpers.server_process import ServerProcess, process_lives, wait_until
from helpers.sse_client import open_stream

pytestmark = [pytest.mark.process, pytest.mark.slow]

ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
PACED = json.dumps({"step_time_ms": 5})
RESTARTS = "trioengine_engine_restarts_total"


def engine_pids(server: ServerProcess) -> list[int]:
    """Return the process ids of every engine so far."""
    words = [line.split() for line in server.lines if "engine process" in line]
    return [int(line[line.index("process") + 1]) for line in words if line[-1] == "started"]


def wait_engine(server: ServerProcess, number: int) -> int:
    """Return the process id of the engine of that number once it is ready."""
    pid = wait_until(lambda: (engine_pids(server) + [0] * number)[number - 1], what="an engine")
    server.wait_ready()
    return pid


async def test_killed_it_is_started_again_and_serves_whoever_came_meanwhile() -> None:
    with ServerProcess("--engine-restarts", "2", "--engine-args", PACED) as server:
        server.wait_ready()
        port, first = server.port, server.engine_pid
        async with open_stream(port, ENDLESS) as stream:
            await stream.read_event()
            os.kill(first, signal.SIGKILL)
            last = (await stream.read_events())[-1]
        assert last.data["error"]["code"] == "restarting"
        assert "SIGKILL" in last.data["error"]["message"]
        status, health = server.get("/health/ready")
        assert (status, health["status"]) == (503, "restarting")
        assert server.get("/health/live")[0] == 200
        body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200
        assert wait_engine(server, 2) != first
        assert not process_lives(first)
        assert (server.port, server.metrics()[RESTARTS]) == (port, 1.0)
        server.wait_line("the engine died: the engine process was killed by SIGKILL")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_poison_request_is_replayed_once_and_the_last_death_is_the_end() -> None:
    """Each engine dies of its first step; the request is in two of them and in no third."""
    arguments = ("--engine-restarts", "2", "--replay", "--death-grace", "0.2")
    with ServerProcess(*arguments, "--engine-args", '{"fail_at_step": 1}') as server:
        server.wait_ready()
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "restarting")
        wait_engine(server, 3)
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert server.wait() == 3
        assert "scripted failure of step 1" in server.last_line
        assert len(engine_pids(server)) == 3


def test_asked_to_stop_while_it_waits_it_leaves_with_0() -> None:
    with ServerProcess("--engine-restarts", "2") as server:
        server.wait_ready()
        os.kill(server.engine_pid, signal.SIGKILL)
        server.wait_status("restarting")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_a_stalled_engine_is_replaced(how: str) -> None:
    arguments = ["--engine-restarts", "1", "--on-stall", "restart"]
    if how == "hung":
        arguments += ["--stall-timeout", "0.3", "--engine-args", '{"hang_at_step": 1}']
    else:
        arguments += ["--beat-timeout", "1.5"]
    with ServerProcess(*arguments) as server:
        server.wait_ready()
        answers: list[tuple[int, Any]] = []
        if how == "stopped":
            os.kill(server.engine_pid, signal.SIGSTOP)
        client = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", {"prompt": "x"}))
        )
        client.start()
        first = server.engine_pid
        wait_engine(server, 2)
        client.join()
        status, answer = answers[0]
        assert (status, answer["error"]["code"]) == (503, "restarting")
        assert "stalled" in answer["error"]["message"]
        assert not process_lives(first)


def test_a_stalled_engine_may_be_the_end() -> None:
    arguments = ("--on-stall", "exit", "--stall-timeout", "0.3", "--death-grace", "0.2")
    with ServerProcess(*arguments, "--engine-args", '{"hang_at_step": 1}') as server:
        server.wait_ready()
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert server.wait() == 3
        assert "the engine stalled: step 1 has been running" in server.last_line


@pytest.mark.parametrize("wanted", ["exit", "restart"])
def test_a_stall_ends_a_drain(wanted: str) -> None:
    arguments = ("--on-stall", wanted, "--engine-restarts", "1", "--stall-timeout", "2")
    drain = ("--drain-timeout", "60", "--death-grace", "0.2")
    with ServerProcess(*arguments, *drain, "--engine-args", '{"hang_at_step": 1}') as server:
        server.wait_ready()
        answers: list[tuple[int, Any]] = []
        client = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", {"prompt": "x"}))
        )
        client.start()
        wait_until(lambda: server.metrics()["trioengine_requests_waiting"], what="the request")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 3
        client.join()
        status, answer = answers[0]
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert "the engine stalled: step 1 has been running" in server.last_line
