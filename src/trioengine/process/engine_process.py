"""The engine process as the server's nursery sees it: its output, its end, and how to end it."""

from __future__ import annotations

import collections
import os
import signal
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.process.spawn import SpawnedEngine

__all__ = ["EngineProcess", "OutputTail", "describe_exit"]

LAST_WORDS_S: Final = 0.04  # for output still in the pipe; a grandchild may hold it open for ever
LIFELINE_S: Final = 1.0  # from cutting the lifeline to SIGKILL
KILL_S: Final = 5.0  # from SIGKILL to giving up: only a process stuck in the kernel takes longer
READ_BYTES: Final = 1 << 16


class OutputTail:
    """The last lines of an endless output, each of bounded length."""

    def __init__(self, *, max_lines: int = 20, max_line_bytes: int = 500) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=max_lines)
        self._max_line_bytes = max_line_bytes
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next piece, cut anywhere."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._lines.extend(line[-self._max_line_bytes :] for line in lines if line.strip())
        self._rest = rest[-self._max_line_bytes :]

    def lines(self) -> list[str]:
        """Return the lines, oldest first, an unfinished one included; blank ones are left out."""
        kept = [*self._lines, self._rest] if self._rest.strip() else list(self._lines)
        return [line.decode(errors="replace").strip() for line in kept]


def describe_exit(returncode: int) -> str:
    """Say in words how a process ended, as ``subprocess`` reports it (negative: a signal)."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-returncode}"


class EngineProcess:
    """Watches one spawned engine.

    Attributes:
        pid: Its process id.
        exited: Set once the process has ended and its last words were read.
        tail: The last lines that it wrote.
    """

    def __init__(self, spawned: SpawnedEngine, pass_through: Callable[[bytes], None]) -> None:
        """Watch ``spawned``; what it writes also goes to ``pass_through``, which never waits."""
        self.pid = spawned.process.pid
        self.exited = trio.Event()
        self.tail = OutputTail()
        self._spawned = spawned
        self._pass_through = pass_through
        self._output: int | None = spawned.output_descriptor
        self._output_ended = trio.Event()

    async def watch(self) -> None:
        """Pump the output until the process has ended and said its last words, then return."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump)
            await self._wait_for_end()
            with trio.move_on_after(LAST_WORDS_S):
                await self._output_ended.wait()
            nursery.cancel_scope.cancel(reason="the engine process has ended")
            self.exited.set()

    def cause(self) -> str:
        """Say how it ended, with its last line; to be asked after ``exited``."""
        ending = f"the engine process {describe_exit(self._returncode())}"
        lines = self.tail.lines()
        return f"{ending}; its last words: {lines[-1]}" if lines else ending

    async def stop(self, grace_s: float) -> None:
        """Wait for it to leave by itself, cut its lifeline, kill it: the first that works.

        ``watch`` must be running. Takes at most ``grace_s`` + 6 s; asking the engine to leave is
        the caller's business.
        """
        for patience_s, harsher in (
            (grace_s, self._spawned.cut_lifeline),
            (LIFELINE_S, self._spawned.process.kill),
        ):
            with trio.move_on_after(patience_s):
                await self.exited.wait()
                return
            harsher()
        with trio.move_on_after(KILL_S):
            await self.exited.wait()

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended. Works on a stopped process, too."""
        self._spawned.process.kill()

    def close(self) -> None:
        """Kill it if it still lives, reap it, remove its directory, close our ends. Idempotent."""
        self._spawned.discard()
        if self._output is not None:
            trio.lowlevel.notify_closing(self._output)
            os.close(self._output)
            self._output = None

    def _returncode(self) -> int:
        returncode = self._spawned.process.poll()
        return 0 if returncode is None else returncode

    async def _wait_for_end(self) -> None:
        descriptor = os.pidfd_open(self.pid)
        try:
            while self._spawned.process.poll() is None:
                await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)

    async def _pump(self) -> None:
        while data := await self._read():
            self.tail.feed(data)
            self._pass_through(data)
        self._output_ended.set()

    async def _read(self) -> bytes:
        """Return the next output, ``b""`` at its end."""
        while self._output is not None:
            await trio.lowlevel.checkpoint()  # a flood must not starve HTTP
            try:
                return os.read(self._output, READ_BYTES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._output)
        return b""
