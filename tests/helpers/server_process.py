"""A real `trioengine serve` for tests: port 0, waited for by its own words, cleaned up by pid.

Everything here is synchronous and polls conditions, with a deadline and never a fixed sleep. From
an async test, run it in a thread (``trio.to_thread.run_sync``) or simply inline: a test that owns a
real process has nothing better to do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

__all__ = ["ServerProcess", "process_lives", "wait_until"]

PATIENCE_S = 30.0  # a bound for a loaded machine, not an expectation
POLL_S = 0.005

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T | None], *, timeout_s: float = PATIENCE_S, what: str = ""
) -> T:
    """Return the first truthy value of ``condition``; fail with ``what`` when that takes too long.

    A connection error counts as "not yet".
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ConnectionError, TimeoutError):
            if value := condition():
                return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}")
        time.sleep(POLL_S)


def process_lives(pid: int) -> bool:
    """True while ``pid`` runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # a test may have stopped it
    wait_until(lambda: not process_lives(pid), what=f"engine {pid} is gone")


class ServerProcess:
    """``trioengine serve`` with the simulated engine, as a context manager.

    >>> with ServerProcess("--max-num-seqs", "8") as server:
    ...     server.wait_ready()
    ...     server.get("/health")

    Attributes:
        process: The server; its standard error is read by a thread into ``lines``.
        lines: What it has said so far.
    """

    def __init__(
        self,
        *arguments: str,
        engine: str | None = "sim",
        port: int | None = 0,
        env: Mapping[str, str] | None = None,
        command: Iterable[str] = (sys.executable, "-m", "trioengine", "serve"),
    ) -> None:
        flags = [*arguments]
        flags += [] if engine is None else ["--engine", engine]
        flags += [] if port is None else ["--port", str(port)]
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *flags],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()

    # What it says ---------------------------------------------------------------------------

    def wait_line(self, pattern: str, *, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Return the match of the first line, past or future, in which ``pattern`` is found."""
        deadline_s = time.monotonic() + timeout_s
        seen = 0
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    if match := re.search(pattern, line):
                        return match
                seen = len(self.lines)
                left_s = deadline_s - time.monotonic()
                if self._ended or not self._changed.wait(max(0.0, left_s)):
                    raise AssertionError(f"never said {pattern!r}:\n" + "\n".join(self.lines))

    @property
    def last_line(self) -> str:
        """The last line on stderr; complete once ``wait`` has returned."""
        return self.lines[-1] if self.lines else ""

    @property
    def port(self) -> int:
        """The port it listens on; waits for it."""
        return int(self.wait_line(r"listening on https?://[^ ]*:(\d+)").group(1))

    @property
    def engine_pid(self) -> int:
        """Process id of the engine; waits for it."""
        return int(self.wait_line(r"engine process (\d+) started").group(1))

    def engine_pids(self) -> list[int]:
        """Process ids of all its engines so far, the latest last."""
        return [int(pid) for pid in re.findall(r"engine process (\d+) started", self.text())]

    # What it answers ------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = PATIENCE_S
    ) -> tuple[int, bytes]:
        """Make one request on a connection of its own; return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        """Return the status and the decoded JSON of a GET."""
        status, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Return the status and the decoded JSON of a POST."""
        status, answer = self.request("POST", path, body)
        return status, json.loads(answer)

    def metrics(self) -> dict[str, float]:
        """Return every sample of ``/metrics`` by its full name, labels included."""
        _, body = self.request("GET", "/metrics")
        samples = (line.rpartition(" ") for line in body.decode().splitlines())
        return {name: float(value) for name, _, value in samples if name[:1] not in "#"}

    def wait_ready(self, *, timeout_s: float = PATIENCE_S) -> Self:
        """Wait until ``/health/ready`` is 200.

        The first time it waits for the server's own word: to be asked 200 times a second is what a
        server that starts on a busy machine needs least.
        """
        self.wait_line("ready after", timeout_s=timeout_s)
        wait_until(
            lambda: self._alive() and self.get("/health/ready")[0] == 200,
            timeout_s=timeout_s,
            what="ready",
        )
        return self

    def wait_status(self, status: str, *, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until ``/health`` names ``status``; return its body."""

        def body() -> dict[str, Any] | None:
            answer: dict[str, Any] = self.get("/health")[1]
            return answer if answer["status"] == status else None

        return wait_until(body, timeout_s=timeout_s, what=f"/health says {status}")

    # How it ends ----------------------------------------------------------------------------

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end, and for all that it said; return the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        engine_pids = self.engine_pids()
        if self.process.poll() is None:
            self.process.kill()  # its engine follows through the lifeline
            self.process.wait()
        for pid in engine_pids:
            _wait_for_end(pid)
        self._reader.join(PATIENCE_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        if error is not None:
            print(self.text())  # noqa: T201  # pytest shows it with the failure

    def text(self) -> str:
        """Everything said so far."""
        return "\n".join(self.lines)

    def _alive(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"ended with {self.process.returncode}:\n{self.text()}")
        return True

    def _read_stderr(self) -> None:
        if self.process.stderr is not None:
            for line in self.process.stderr:
                with self._changed:
                    self.lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
