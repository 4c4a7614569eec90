"""Compiling a specification twice: first in a process that can be killed.

Theory of operation
-------------------
What a client sends can keep a compiler busy for hours, make it take all memory, or overflow its
stack, and a thread of the engine could be saved from none of that. So a child process compiles
first, under a deadline and with bounds on its memory; what it gets through, the engine compiles,
too. It is killed where it takes too long, and another takes its place for the next one. Compiling
twice costs a few milliseconds a specification, once, beside the step loop.

A child leaves by itself when the engine does: it sees the end of its standard input, in the middle
of its work as well.
"""

from __future__ import annotations

import contextlib
import logging
import select
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Final, cast

import msgspec

from trioengine.errors import InternalError, InvalidRequestError

if TYPE_CHECKING:
    import io
    from collections.abc import Sequence

    from trioengine.engine_proc.structured_output.grammar import Grammar
    from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
    from trioengine.structured import StructuredOutput

__all__ = ["TRIAL_ARGV", "Trials", "Verdict"]

MAX_SECONDS: Final = 5.0
START_SECONDS: Final = 30.0
_REAP_S: Final = 5.0

# -P: what lies in the user's working directory is not ours to import.
TRIAL_ARGV: Final = (
    sys.executable, "-P", "-m", "trioengine.engine_proc.structured_output.trial_process",
)  # fmt: skip

log = logging.getLogger(__name__)


class Verdict(msgspec.Struct, omit_defaults=True):
    """What a child says of a specification; nothing where it compiles.

    Attributes:
        refusal: Why it is refused.
        fault: What went wrong with the compiler itself.
    """

    refusal: str | None = None
    fault: str | None = None


class Trials:
    """Fulfils ``Compile`` over another that does. Safe in several threads at once."""

    def __init__(
        self,
        compile_: GuidanceCompiler,
        *,
        argv: Sequence[str] = TRIAL_ARGV,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """Start nothing yet.

        Args:
            compile_: The compiler, here and in the children.
            argv: What a child is; tests run other things.
            max_seconds: How long a child may take for one specification.
        """
        self._compile = compile_
        self._argv = argv
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False

    def __call__(self, structured: StructuredOutput, /) -> Grammar:
        """Return the grammar. See ``Compile``."""
        child = self._take()
        try:
            verdict = child.judge(structured, self._max_seconds)
        except BaseException:
            child.kill()
            raise
        self._give_back(child)
        if verdict.refusal is not None:
            raise InvalidRequestError(verdict.refusal, param=structured.param)
        if verdict.fault is not None:
            raise InternalError(verdict.fault)
        return self._compile(structured)

    def close(self) -> None:
        """Let the children go, those that are at work when they are done. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()

    def _take(self) -> _Child:
        """Return a child that lives. One that somebody has ended meanwhile is nobody's fault."""
        while True:
            with self._lock:
                if not self._idle:
                    break
                child = self._idle.pop()
            if child.lives:
                return child
            child.kill()
        return _Child(self._argv, self._compile.description())

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.kill()


class _Child:
    """One process, used by one thread at a time."""

    def __init__(self, argv: Sequence[str], description: bytes) -> None:
        # What native code says when it dies is for nobody: a client could fill a log with it.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        # Both are pipes: so they were asked for.
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("io.BufferedReader", self._process.stdout)
        self._unread = b""
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self.kill)
            try:
                self._say(description)
                self._hear(START_SECONDS)
            except (OSError, EOFError) as error:  # a TimeoutError is an OSError
                raise InternalError(f"no process to compile grammars in: {error}") from error
            unless_ready.pop_all()

    @property
    def lives(self) -> bool:
        """False where it has ended by itself, or was."""
        return self._process.poll() is None

    def judge(self, structured: StructuredOutput, max_seconds: float) -> Verdict:
        """Return what it says of a specification.

        Raises:
            InvalidRequestError: It took too long, or died of it.
        """
        param = structured.param
        try:
            self._say(msgspec.json.encode(structured))
            return msgspec.json.decode(self._hear(max_seconds), type=Verdict)
        except TimeoutError:
            reason = f"it takes more than {max_seconds:g} s to compile"
        except (OSError, EOFError):
            log.warning("a process died of compiling a grammar of kind %s", structured.kind)
            reason = "it takes too much memory or too deep a stack to compile"
        raise InvalidRequestError(f"{param} cannot be used: {reason}", param=param) from None

    def kill(self) -> None:
        """End it, whatever it is doing, and reap it."""
        process = self._process
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_REAP_S)
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what was not written yet is for nobody
                pipe.close()

    def _say(self, line: bytes) -> None:
        self._stdin.write(line + b"\n")
        self._stdin.flush()

    def _hear(self, max_seconds: float) -> bytes:
        """Return the next line.

        Raises:
            TimeoutError: There is none yet.
            EOFError: There is none to come.
        """
        descriptor = self._stdout.fileno()
        until = time.monotonic() + max_seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            data = self._stdout.read1()
            if not data:
                raise EOFError(f"it left with {self._process.poll()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line
