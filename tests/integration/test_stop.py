"""Asked to stop: what runs is finished, what hangs is cut, and the end is bounded."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
import trio

from helpers.server_process import ServerProcess, process_lives, wait_until
from helpers.sse_client import Event, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.slow]

MARGIN_S = 5.0  # beyond the drain
AT_ONCE_S = 1.5
PACED = ("--engine-args", json.dumps({"step_time_ms": 5}))
ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def timed_wait(server: ServerProcess, act: Callable[[], None]) -> tuple[int, float]:
    """Do ``act``; return the exit code and how long the end took."""
    began_s = time.monotonic()
    act()
    code = server.wait()
    return code, time.monotonic() - began_s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_with_nothing_to_do_it_stops_at_once(number: signal.Signals) -> None:
    with ServerProcess() as server:
        server.wait_ready()
        code, took_s = timed_wait(server, lambda: server.send_signal(number))
        assert code == 0
        assert took_s < AT_ONCE_S
        assert not process_lives(server.engine_pid)


async def test_live_streams_are_finished_and_new_requests_refused() -> None:
    body = ENDLESS | {"max_tokens": 60}
    texts: list[list[Event]] = []

    async def follow() -> None:
        async with open_stream(server.port, body) as stream:
            events = [await stream.read_event()]
            started.append(True)
            texts.append([event for event in events if event] + await stream.read_events())

    def refused_while_draining() -> None:
        wait_until(lambda: len(started) == 20, what="20 streams run")
        server.send_signal(signal.SIGTERM)
        server.wait_status("draining")
        assert server.get("/health/live")[0] == 200
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "draining")

    started: list[bool] = []
    with ServerProcess("--engine-args", json.dumps({"step_time_ms": 20})) as server:
        server.wait_ready()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(follow)
            await trio.to_thread.run_sync(refused_while_draining)
        assert [events[-1].data for events in texts] == [None] * 20  # [DONE]
        assert server.wait() == 0


async def test_what_outlives_the_drain_is_aborted_with_an_error() -> None:
    with ServerProcess(*PACED, "--drain-timeout", "0.3") as server:
        server.wait_ready()
        async with open_stream(server.port, ENDLESS) as stream:
            await stream.read_event()
            began_s = time.monotonic()
            server.send_signal(signal.SIGTERM)
            last = (await stream.read_events())[-1]
        assert last.data["error"]["code"] == "draining"
        code = await trio.to_thread.run_sync(server.wait)
        assert code == 0
        assert time.monotonic() - began_s < 0.3 + MARGIN_S


async def test_a_client_that_never_reads_cannot_hold_the_stop() -> None:
    with ServerProcess("--drain-timeout", "0.3") as server:  # as fast as it can
        server.wait_ready()
        async with open_stream(server.port, ENDLESS | {"n": 16}, read_head=False) as stream:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wait_until(lambda: server.metrics()["trioengine_deltas_merged_total"] > 100)
            code, took_s = timed_wait(server, lambda: server.send_signal(signal.SIGTERM))
        assert code == 0
        assert took_s < 0.3 + MARGIN_S
        assert not process_lives(server.engine_pid)


def test_idle_connections_do_not_hold_the_stop() -> None:
    with ServerProcess() as server:
        server.wait_ready()
        connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(10)]
        for connection in connections:
            connection.request("GET", "/health")
            connection.getresponse().read()
        code, took_s = timed_wait(server, lambda: server.send_signal(signal.SIGTERM))
        for connection in connections:
            connection.close()
        assert code == 0
        assert took_s < AT_ONCE_S


async def test_a_second_signal_leaves_at_once() -> None:
    with ServerProcess(*PACED) as server:
        server.wait_ready()
        async with open_stream(server.port, ENDLESS) as stream:
            await stream.read_event()
            server.send_signal(signal.SIGTERM)
            server.wait_status("draining")
            code, took_s = timed_wait(server, lambda: server.send_signal(signal.SIGTERM))
        assert code == 0
        assert took_s < AT_ONCE_S
        assert not process_lives(server.engine_pid)


def test_while_starting_it_stops_at_once_with_0() -> None:
    with ServerProcess("--engine-args", '{"hang_on_load": true}') as server:
        server.wait_line(r"load \(0%\)")
        code, took_s = timed_wait(server, lambda: server.send_signal(signal.SIGTERM))
        assert code == 0
        assert took_s < AT_ONCE_S
        assert not process_lives(server.engine_pid)


def test_a_stopped_engine_cannot_hold_the_stop() -> None:
    with ServerProcess("--drain-timeout", "0.3") as server:
        server.wait_ready()
        os.kill(server.engine_pid, signal.SIGSTOP)
        code, took_s = timed_wait(server, lambda: server.send_signal(signal.SIGTERM))
        assert code == 0
        assert took_s < 0.3 + MARGIN_S
        assert not process_lives(server.engine_pid)
