"""A ``trioengine serve`` of our own to be measured: started, waited for, stopped."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, Final

from trioengine.errors import EngineStartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["OwnServer", "own_server"]

COMMAND: Final = (sys.executable, "-P", "-m", "trioengine", "serve")
KEPT_VARIABLES: Final = frozenset({"TRIOENGINE_CACHE_DIR"})
KEPT_LINES: Final = 50
STOP_S: Final = 10.0
LISTENING: Final = re.compile(r"listening on (http://\S+)")
READY: Final = re.compile(r"ready after .* s: (.*)")


class OwnServer:
    """A server that is ready.

    Attributes:
        url: Where it listens.
        pid: Its process; the engine is a child of it.
        engine: What it says of its engine and model.
    """

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        """Wait until it is ready, or has given up: it bounds its start by itself.

        Raises:
            EngineStartError: It has ended; its own last sentence.
        """
        self.pid = process.pid
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.url = self.engine = ""
        for line in output:
            self._lines.append(line.rstrip())
            if found := LISTENING.search(line):
                self.url = found[1]
            if found := READY.search(line):
                self.engine = found[1]
                return
        code = process.wait()
        raise EngineStartError(self.last_line or f"the server ended with exit code {code}")

    def read_on(self, output: IO[str], on_line: Callable[[str], object] | None = None) -> None:
        """Keep the last lines of what it says, so that its pipe never fills."""
        for line in output:
            self._lines.append(line.rstrip())
            if on_line is not None:
                on_line(self._lines[-1])

    @property
    def last_line(self) -> str:
        """The last thing that it said."""
        return self._lines[-1].removeprefix("trioengine: ") if self._lines else ""


@contextlib.contextmanager
def own_server(
    model: str | None,
    flags: Sequence[str],
    command: Sequence[str] = COMMAND,
    on_line: Callable[[str], object] | None = None,
) -> Iterator[OwnServer]:
    """Start a server on a free port of this machine; stop it at the end of the block.

    What the environment says about options does not reach it: a benchmark measures what its own
    command line says.

    Args:
        model: As for ``trioengine serve``.
        flags: The same.
        command: What to run; tests run other things.
        on_line: Is given every line that it says once it is ready, in a thread.

    Raises:
        EngineStartError: It was never ready.
    """
    arguments = [*command, *([] if model is None else [model]), *flags]
    with subprocess.Popen(
        [*arguments, "--host", "127.0.0.1", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(),
    ) as process:
        if process.stderr is None:
            raise RuntimeError("the server was to have a pipe")
        try:
            server = OwnServer(process, process.stderr)
            reader = threading.Thread(
                target=server.read_on, args=(process.stderr, on_line), daemon=True
            )
            reader.start()
            try:
                yield server
            finally:
                _stop(process)
                reader.join(STOP_S)
        finally:
            process.kill()  # where it has ended already, this does nothing


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or not name.startswith("TRIOENGINE_")
    }
