"""Watching and ending an engine process; small scripts stand in for the engine."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from trioengine.config import EngineOptions
from trioengine.process.engine_process import EngineProcess, OutputTail, describe_exit
from trioengine.process.spawn import spawn_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.process

# The script gets its configuration as a line, as an engine does, and says when it is there.
PROLOGUE = "import os, signal, sys, time; line = sys.stdin.readline(); "


class Output:
    """What passed through, and a way to wait for a word in it."""

    def __init__(self) -> None:
        self.text = ""
        self._changed = trio.Event()

    def take(self, data: bytes) -> None:
        self.text += data.decode()
        self._changed.set()

    async def until(self, word: str) -> None:
        while word not in self.text:
            self._changed = trio.Event()
            await self._changed.wait()


def assert_no_trace(directory: Path, pid: int | None = None) -> None:
    assert list(directory.iterdir()) == []
    assert pid is None or not Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def engine(script: str, tmp_path: Path) -> AsyncIterator[tuple[EngineProcess, Output]]:
    output = Output()
    spawned = spawn_engine(
        EngineOptions(backend="sim"),
        model_dir=None,
        model_name="m",
        argv=(sys.executable, "-S", "-E", "-u", "-c", PROLOGUE + script),
        base_dir=tmp_path,
    )
    process = EngineProcess(spawned, output.take)
    try:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.watch)
                yield process, output
                nursery.cancel_scope.cancel()
    finally:
        process.close()
    assert_no_trace(tmp_path, process.pid)


async def test_output_passes_through_and_its_last_line_is_the_cause(tmp_path: Path) -> None:
    script = "print('loading'); print('RuntimeError: no such model', file=sys.stderr); sys.exit(7)"
    async with engine(script, tmp_path) as (process, output):
        await process.exited.wait()
        assert output.text == "loading\nRuntimeError: no such model\n"
        assert process.tail.lines() == ["loading", "RuntimeError: no such model"]
        assert process.cause() == (
            "the engine process exited with status 7; its last words: RuntimeError: no such model"
        )


async def test_a_signal_is_named(tmp_path: Path) -> None:
    async with engine("time.sleep(60)", tmp_path) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        await process.exited.wait()
        assert process.cause() == "the engine process was killed by SIGKILL"


async def test_it_learns_its_configuration_from_line_one(tmp_path: Path) -> None:
    async with engine("print(line)", tmp_path) as (process, output):
        await process.exited.wait()
        assert f'"commands_address":"ipc://{tmp_path}/' in output.text


async def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_news(tmp_path: Path) -> None:
    script = (
        "import subprocess;"
        "p = subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL); print(p.pid); os._exit(1)"
    )
    async with engine(script, tmp_path) as (process, output):
        await process.exited.wait()
        os.kill(int(output.text), signal.SIGKILL)


async def test_stop_waits_for_a_process_that_leaves_by_itself(tmp_path: Path) -> None:
    script = "print('up'); sys.stdin.read(); print('cut')"
    async with engine(script, tmp_path) as (process, output):
        await output.until("up")
        await process.stop(grace_s=0.0)
        assert "cut" in output.text
        assert process.cause().startswith("the engine process exited with status 0")


async def test_stop_kills_what_ignores_its_lifeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioengine.process.engine_process.LIFELINE_S", 0.01)
    async with engine("print('up'); time.sleep(60)", tmp_path) as (process, output):
        await output.until("up")
        await process.stop(grace_s=0.0)
        assert process.cause() == "the engine process was killed by SIGKILL; its last words: up"


async def test_the_terminals_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    async with engine("print(os.getpgid(0))", tmp_path) as (process, output):
        await process.exited.wait()
        assert int(output.text) == process.pid


def test_writing_never_blocks_when_nobody_reads(tmp_path: Path) -> None:
    """The pipe is full and its reader stands still: the write fails at once instead of waiting."""
    script = (
        "n = 0\n"
        "try:\n"
        "    while True: n += os.write(1, b'x' * 4096)\n"
        "except BlockingIOError: os._exit(42)\n"
    )
    spawned = spawn_engine(
        EngineOptions(backend="sim"),
        model_dir=None,
        model_name="m",
        argv=(sys.executable, "-S", "-E", "-c", PROLOGUE + "\n" + script),
        base_dir=tmp_path,
    )
    try:
        assert spawned.process.wait(timeout=20) == 42
    finally:
        spawned.discard()
        os.close(spawned.output_descriptor)


async def test_an_engine_that_cannot_be_started_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spawn_engine(
            EngineOptions(),
            model_dir=None,
            model_name="m",
            argv=("/does/not/exist",),
            base_dir=tmp_path,
        )
    assert_no_trace(tmp_path)


def test_the_tail_is_bounded_and_indifferent_to_where_output_is_cut() -> None:
    text = b"".join(b"line %d\n\n" % number for number in range(100)) + b"x" * 5000
    whole, cut = (
        OutputTail(max_lines=5, max_line_bytes=10),
        OutputTail(max_lines=5, max_line_bytes=10),
    )
    whole.feed(text)
    for byte in text:
        cut.feed(bytes([byte]))
    expected = [f"line {number}" for number in range(95, 100)] + ["x" * 10]
    assert whole.lines() == cut.lines() == expected


def test_exits_in_words() -> None:
    assert describe_exit(0) == "exited with status 0"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-50) == "was killed by signal 50"
