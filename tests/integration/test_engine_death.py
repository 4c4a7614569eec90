"""The engine's process is killed or stopped: who hears of it, when, and what the server does."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from helpers.server_process import ServerProcess, process_lives, wait_until
from helpers.sse_client import Event, Stream, open_stream

pytestmark = [pytest.mark.process, pytest.mark.slow]

NUM_STREAMS = 8
TOLD_WITHIN_S = 0.1
ATTEMPTS = 3  # to meet a bound in milliseconds on a machine that may be busy with something else
ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
LONG_STEP = json.dumps({"slow_step": 1, "slow_step_ms": 60_000})
PACED = json.dumps({"step_time_ms": 5})


def kill(pid: int) -> float:
    """SIGKILL ``pid``; return when it had ended, ``time.monotonic()``."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process_lives(pid))
    return time.monotonic()


def assert_dead_of_sigkill(server: ServerProcess) -> None:
    assert "SIGKILL" in server.wait_status("dead")["reason"]
    assert server.get("/health")[0] == 503
    assert server.get("/health/live")[0] == 503
    assert "trioengine_engine_state" in server.request("GET", "/metrics")[1].decode()
    status, answer = server.post("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "engine_dead")


def assert_left_with_3(server: ServerProcess) -> None:
    assert server.wait() == 3
    assert "SIGKILL" in server.last_line
    assert server.last_line.startswith("trioengine: ")


async def last_event(stream: Stream) -> Event:
    """Return how a request ended: the last event of its stream, or the body of its refusal."""
    if await stream.read_head() == 200:
        return (await stream.read_events())[-1]
    body = await stream.read_json()
    return Event(body, time.monotonic())


async def killed_under_streams(engine_args: str, running: str) -> list[Event]:
    """Kill the engine under 8 streams once ``running`` is seen; return their errors."""
    errors: list[Event] = []

    async def follow(stream: Stream) -> None:
        errors.append(await last_event(stream))

    def kill_when_running() -> float:
        wait_until(lambda: server.metrics()[running] >= NUM_STREAMS, what=running)
        return kill(server.engine_pid)

    with ServerProcess("--death-grace", "1", "--engine-args", engine_args) as server:
        server.wait_ready()
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            for _ in range(NUM_STREAMS):
                opening = open_stream(server.port, ENDLESS, read_head=False)
                nursery.start_soon(follow, await stack.enter_async_context(opening))
            ended_s = await trio.to_thread.run_sync(kill_when_running)
            await trio.to_thread.run_sync(assert_dead_of_sigkill, server)
        await trio.to_thread.run_sync(assert_left_with_3, server)
    return [Event(error.data, error.at_s - ended_s) for error in errors]


@pytest.mark.parametrize(
    ("engine_args", "running"),
    [(PACED, "trioengine_requests_running"), (LONG_STEP, "trioengine_requests_waiting")],
    ids=["decode", "prefill"],
)
async def test_every_stream_hears_of_it_within_100_ms(engine_args: str, running: str) -> None:
    for attempt in range(ATTEMPTS):
        errors = await killed_under_streams(engine_args, running)
        assert len(errors) == NUM_STREAMS
        for error in errors:
            assert error.data["error"]["code"] == "engine_dead"
            assert error.data["error"]["type"] == "unavailable_error"
            assert "SIGKILL" in error.data["error"]["message"]
        latest_s = max(error.at_s for error in errors)
        if latest_s < TOLD_WITHIN_S:
            break
        assert attempt < ATTEMPTS - 1, f"the last stream heard of it after {latest_s:.3f} s"


def test_a_request_that_is_no_stream_gets_503() -> None:
    with ServerProcess("--death-grace", "0.2", "--engine-args", LONG_STEP) as server:
        server.wait_ready()
        answers: list[tuple[int, Any]] = []
        body = {"prompt": "x", "max_tokens": 5}
        client = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", body))
        )
        client.start()
        wait_until(lambda: server.metrics()["trioengine_requests_waiting"] == 1)
        kill(server.engine_pid)
        client.join()
        status, answer = answers[0]
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert "SIGKILL" in answer["error"]["message"]
        assert_left_with_3(server)


def test_idle() -> None:
    with ServerProcess("--death-grace", "1") as server:
        server.wait_ready()
        kill(server.engine_pid)
        assert_dead_of_sigkill(server)
        assert_left_with_3(server)


def test_while_starting_it_leaves_at_once_with_4() -> None:
    with ServerProcess("--engine-args", '{"hang_on_load": true}') as server:
        server.wait_line(r"load \(0%\)")
        assert server.get("/health")[1]["status"] == "starting"
        ended_s = kill(server.engine_pid)
        assert server.wait() == 4
        assert time.monotonic() - ended_s < 2.0
        assert "SIGKILL" in server.last_line


async def test_while_draining_it_leaves_with_3() -> None:
    with ServerProcess("--death-grace", "0.2", "--engine-args", PACED) as server:
        server.wait_ready()
        async with open_stream(server.port, ENDLESS) as stream:
            await stream.read_event()
            server.send_signal(signal.SIGTERM)
            await trio.to_thread.run_sync(server.wait_status, "draining")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, kill, server.engine_pid)
                last = (await stream.read_events())[-1]
        assert last.data["error"]["code"] == "engine_dead"
        await trio.to_thread.run_sync(assert_left_with_3, server)


def test_a_step_that_raises_is_told_in_its_own_words() -> None:
    with ServerProcess("--death-grace", "0.2", "--engine-args", '{"fail_at_step": 1}') as server:
        server.wait_ready()
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert status == 503
        assert "scripted failure of step 1" in answer["error"]["message"]
        assert server.wait() == 3
        assert "scripted failure of step 1" in server.last_line


def test_an_exit_that_nobody_asked_for_is_a_death() -> None:
    with ServerProcess("--death-grace", "0.2", "--engine-args", '{"exit_at_step": 1}') as server:
        server.wait_ready()
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert status == 503
        assert "exited with status 70" in answer["error"]["message"]
        assert server.wait() == 3


async def test_stopped_it_is_stalled_and_continued_it_is_ready_again() -> None:
    with ServerProcess("--beat-timeout", "1.5", "--engine-args", PACED) as server:
        server.wait_ready()
        async with open_stream(server.port, ENDLESS) as stream:
            await stream.read_event()
            os.kill(server.engine_pid, signal.SIGSTOP)
            body = server.wait_status("stalled")
            assert "no sign of life" in body["reason"]
            assert server.get("/health/live")[0] == 503
            assert server.post("/v1/completions", {"prompt": "x"})[0] == 503
            os.kill(server.engine_pid, signal.SIGCONT)
            server.wait_status("ready")
            assert (await stream.read_event()) is not None
        assert server.post("/v1/completions", {"prompt": "x"})[0] == 200


def test_a_step_that_takes_too_long_is_a_stall_and_no_death() -> None:
    args = json.dumps({"slow_step": 1, "slow_step_ms": 1500})
    with ServerProcess("--stall-timeout", "0.3", "--engine-args", args) as server:
        server.wait_ready()
        answers: list[int] = []
        client = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", {"prompt": "x"})[0])
        )
        client.start()
        assert "step 1 has been running" in server.wait_status("stalled")["reason"]
        client.join()
        assert answers == [200]
        server.wait_status("ready")
