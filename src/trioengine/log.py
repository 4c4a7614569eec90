"""Logging on one stream: text or JSON lines on stderr, never waited for, never flooding.

Everything that this process says goes through one ``LineSink``, the engine's captured output
included: a thread of its own writes, so that a stderr that nobody reads (a full pipe, a stopped
terminal) costs lines and never the event loop. Prompts and completions are not logged.
"""

from __future__ import annotations

import collections
import logging
import os
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LineSink", "RateLimit", "configure", "sink"]

MAX_PENDING_BYTES: Final = 1 << 20
GATHER_S: Final = 0.1  # a line waits so long for others at most: each wake costs the event loop
RATE_WINDOW_S: Final = 60.0
RATE_LIMIT_RECORDS: Final = 10
MAX_KINDS: Final = 1000
ERASE_LINE: Final = b"\r\x1b[K"


class LineSink:
    """Writes bytes to a descriptor from its own thread; drops what does not fit, and counts it."""

    def __init__(self, descriptor: int = 2, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._descriptor = descriptor
        self._max_pending_bytes = max_pending_bytes
        self._chunks: collections.deque[bytes] = collections.deque()
        self._pending_bytes = 0
        self._dropped = 0
        self._closed = False
        self._hurry = threading.Event()  # somebody waits until all is written
        self._status_shown = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def show_status(self, line: str) -> None:
        """Draw ``line`` (empty: nothing) where the cursor is; the next write takes its place."""
        self.write(line.encode(), is_status=True)

    def write(self, data: bytes, *, is_status: bool = False) -> None:
        """Queue ``data``, or drop it where the reader is too far behind. Never waits."""
        with self._changed:
            if self._status_shown:
                data = ERASE_LINE + data
            self._status_shown = is_status and data not in (b"", ERASE_LINE)
            if self._closed or self._pending_bytes + len(data) > self._max_pending_bytes:
                self._dropped += 1
                return
            is_first = not self._chunks  # else the thread knows already that there is something
            if self._dropped:
                note = f"trioengine: {self._dropped} writes to the log were dropped\n".encode()
                self._queue(note)
                self._dropped = 0
            self._queue(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            if is_first:
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is written; False if that took too long."""
        with self._changed:
            self._hurry.set()
            try:
                return self._changed.wait_for(lambda: self._pending_bytes == 0, timeout_s)
            finally:
                self._hurry.clear()

    def close(self, timeout_s: float) -> None:
        """Flush, then end the thread. What is written afterwards is dropped."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._hurry.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _queue(self, data: bytes) -> None:
        self._chunks.append(data)
        self._pending_bytes += len(data)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._closed)
                if not self._chunks:
                    return
                gathered = b"".join(self._chunks)
                self._chunks.clear()
            self._write_all(gathered)
            with self._changed:
                self._pending_bytes -= len(gathered)
                self._changed.notify_all()
            self._hurry.wait(GATHER_S)

    def _write_all(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody made the shared descriptor non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # nobody will ever read it: there is nowhere left to say so
                return


class RateLimit(logging.Filter):
    """Lets through ``limit`` warnings and errors of one kind a window, then counts the rest.

    A kind is the logger, the level and the message before its arguments are filled in.
    """

    def __init__(
        self,
        limit: int = RATE_LIMIT_RECORDS,
        window_s: float = RATE_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        kind = (record.name, record.levelno, str(record.msg))
        started, seen = self._kinds.get(kind, (now, 0))
        if now - started >= self._window_s:
            hidden, started, seen = max(0, seen - self._limit), now, 0
            if hidden:
                record.msg = f"{record.msg} (and {hidden} more like this before)"
        if len(self._kinds) > MAX_KINDS:
            self._kinds.clear()  # somebody formats before logging: every message is a kind
        self._kinds[kind] = (started, seen + 1)
        return seen < self._limit


class _SinkHandler(logging.Handler):
    def __init__(self, target: LineSink) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._target.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:  # a bad log call must not take the request with it
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Spells each second once: formatting a time is much of what a line costs."""

    def __init__(self, fmt: str | None = None, datefmt: str | None = None) -> None:
        super().__init__(fmt, datefmt)
        self._second = -1
        self._spelled = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if (second := int(record.created)) != self._second:
            self._second, self._spelled = second, super().formatTime(record, datefmt)
        return self._spelled


class _JsonFormatter(_Formatter):
    """One object a line; ``extra={"fields": {…}}`` of a log call adds what a machine looks for."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


TEXT_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"

_sink: LineSink | None = None


def sink() -> LineSink:
    """Return the sink on stderr of this process; made on first use.

    A program that was started without one has long given its number to something else.
    """
    global _sink  # one process has one stderr
    if _sink is None:
        _sink = LineSink(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY))
    return _sink


def configure(style: Literal["text", "json"], level: str, target: LineSink | None = None) -> None:
    """Send the log to ``target`` (stderr), replacing the root logger's handlers.

    Foreign loggers speak from WARNING on; ours, ``trioengine.*``, from ``level`` on.
    """
    handler = _SinkHandler(target or sink())
    handler.setFormatter(
        _JsonFormatter() if style == "json" else _Formatter(TEXT_FORMAT, "%H:%M:%S")
    )
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("trioengine").setLevel(level.upper())
    logging.captureWarnings(capture=True)
