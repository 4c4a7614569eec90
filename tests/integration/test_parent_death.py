"""The server is killed: the engine is gone within a second, whatever it was doing, traceless."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.server_process import ServerProcess, process_lives, wait_until
from helpers.sse_client import open_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

GONE_WITHIN_S = 1.0
ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory for runtime directories, with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="te-"))
    yield path
    shutil.rmtree(path)


def serve(runtime: Path, *arguments: str, **engine_args: object) -> ServerProcess:
    return ServerProcess(
        *("--engine-args", json.dumps(engine_args), *arguments),
        env={"XDG_RUNTIME_DIR": str(runtime)},
    )


def assert_gone_without_trace(server: ServerProcess, runtime: Path) -> None:
    engine_pid = server.engine_pid
    assert len(list(runtime.iterdir())) == 1
    killed_s = time.monotonic()
    server.send_signal(signal.SIGKILL)
    wait_until(lambda: not process_lives(engine_pid), what="the engine is gone")
    assert time.monotonic() - killed_s < GONE_WITHIN_S
    wait_until(lambda: not list(runtime.iterdir()), what="its directory is gone")


def test_while_loading(runtime: Path) -> None:
    with serve(runtime, hang_on_load=True) as server:
        server.wait_line(r"load \(0%\)")
        assert_gone_without_trace(server, runtime)


def test_idle(runtime: Path) -> None:
    with serve(runtime) as server:
        server.wait_ready()
        assert_gone_without_trace(server, runtime)


async def test_in_the_middle_of_a_step(runtime: Path) -> None:
    with serve(runtime, hang_at_step=1) as server:
        server.wait_ready()
        async with open_stream(server.port, ENDLESS, read_head=False):
            wait_until(lambda: server.metrics()["trioengine_engine_step_age_seconds"] > 0)
            assert_gone_without_trace(server, runtime)


async def test_in_decode(runtime: Path) -> None:
    with serve(runtime, step_time_ms=5) as server:
        server.wait_ready()
        async with AsyncExitStack() as stack:
            for _ in range(8):
                stream = await stack.enter_async_context(open_stream(server.port, ENDLESS))
                assert await stream.read_event() is not None
            assert_gone_without_trace(server, runtime)


async def test_while_draining(runtime: Path) -> None:
    with serve(runtime, step_time_ms=5) as server:
        server.wait_ready()
        async with open_stream(server.port, ENDLESS) as stream:
            assert await stream.read_event() is not None
            server.send_signal(signal.SIGTERM)
            server.wait_status("draining")
            assert_gone_without_trace(server, runtime)


def test_what_both_left_when_both_were_killed_is_swept_by_the_next_start(runtime: Path) -> None:
    with serve(runtime) as server:
        server.wait_ready()
        engine_pid = server.engine_pid
        kill_both(server.process.pid, engine_pid)
        wait_until(lambda: not process_lives(engine_pid) and not process_lives(server.process.pid))
        (left,) = runtime.iterdir()
    with serve(runtime) as server:
        server.wait_ready()
        assert not left.exists()
        assert len(list(runtime.iterdir())) == 1
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert list(runtime.iterdir()) == []


def kill_both(*pids: int) -> None:
    """Stop both before killing them, so that neither gets to clean up after the other."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
