"""The heartbeat page: how the engine is, readable without asking it anything.

One page of shared memory, written by the engine and mapped read-only by the server. A process that
is stopped, starved or stuck in a long step cannot answer a question; it can be looked at. Times are
``time.monotonic()``, which on Linux is one clock for all processes.

A reader may see fields of two writes beside each other. Each field alone is one aligned 8-byte
store, and no judgement here depends on two of them agreeing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Heartbeat", "HeartbeatPage"]

PAGE_SIZE: Final = 4096
_STEP_NUMBER, _STEP_STARTED, _LAST_BEAT, _PHASE = 0, 8, 16, 24
_PHASES: Final = ("starting", "idle", "step")


class Heartbeat(msgspec.Struct, frozen=True):
    """One look at the page.

    Attributes:
        phase: ``starting``, ``idle`` (waiting for work) or ``step`` (a step is running).
        step: Number of the last step begun.
        step_started_s: When that step began, ``time.monotonic()``; 0.0 before the first.
        last_beat_s: When the engine last showed life, ``time.monotonic()``; 0.0 before the first.
    """

    phase: str
    step: int
    step_started_s: float
    last_beat_s: float


class HeartbeatPage:
    """The page itself. The server creates the file, the engine opens it for writing."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        """Map an existing page.

        Raises:
            OSError: There is no such file, or it may not be mapped.
        """
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._page = mmap.mmap(descriptor, PAGE_SIZE, access=access)
        finally:
            os.close(descriptor)

    @staticmethod
    def create(path: Path) -> None:
        """Make an empty page at ``path``. Raises ``OSError`` where it exists or can't be made."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, PAGE_SIZE)
        finally:
            os.close(descriptor)

    def beat(self) -> None:
        """Show life. Called by the lifeline thread once a second, also during a long step."""
        struct.pack_into("d", self._page, _LAST_BEAT, time.monotonic())

    def idle(self) -> None:
        """Say that the loop has no work."""
        struct.pack_into("q", self._page, _PHASE, 1)
        self.beat()

    def begin_step(self, number: int) -> None:
        """Say that step ``number`` begins now."""
        now = time.monotonic()
        struct.pack_into("qdd", self._page, _STEP_NUMBER, number, now, now)
        struct.pack_into("q", self._page, _PHASE, 2)

    def read(self) -> Heartbeat:
        """Look at the page."""
        step, started, beat, phase = struct.unpack_from("qddq", self._page, 0)
        return Heartbeat(_PHASES[phase], step, started, beat)

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()
