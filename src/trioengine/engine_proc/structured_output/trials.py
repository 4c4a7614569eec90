"""Compiling a specification twice: first in a process that can be killed.

Theory of operation
-------------------
What a client sends can keep a compiler busy for hours, make it take all memory, or overflow its
stack, and a thread of the engine could be saved from none of that. So a child process compiles
first, under a deadline and with bounds on its memory; what it gets through, the engine compiles,
too. It is killed where it takes too long, and another takes its place for the next one. Compiling
twice costs a few milliseconds a specification, once, beside the step loop.

To start a child takes 0.3 s, to read the vocabulary in this process 0.2 s: both happen at once, and
before the first request comes where ``start_ahead`` was called. So do those that replace a child
that was killed. What somebody ends from outside, while it starts or later, is nobody's fault: a new
child tries again, once.

A child leaves by itself when the engine does: it sees the end of its standard input, in the middle
of its work as well.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Final, cast

import msgspec

from trioengine.errors import InternalError, InvalidRequestError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Sequence

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
        self._changed = threading.Condition()
        self._idle: list[_Child] = []
        self._timer: threading.Timer | None = None  # until it begins to start a child ahead
        self._starting_ahead = self._keeps_one = self._closed = False

    def __call__(self, structured: StructuredOutput, /) -> Grammar:
        """Return the grammar. See ``Compile``."""
        try:
            verdict = self._judge(structured)
        except _KilledError:
            verdict = self._judge_again(structured)
        if verdict.refusal is not None:
            raise InvalidRequestError(verdict.refusal, param=structured.param)
        if verdict.fault is not None:
            raise InternalError(verdict.fault)
        return self._compile(structured)

    def start_ahead(self, after_s: float) -> None:
        """Have what a first specification would wait for ready in ``after_s``, from now on."""
        with self._changed:
            self._keeps_one = True
            self._prepare_in(after_s)

    def close(self) -> None:
        """Let the children go, those that are at work when they are done. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for child in idle:
            child.kill()

    def _judge(self, structured: StructuredOutput) -> Verdict:
        """Return what a child says; one that cannot say it is killed."""
        child = self._take()
        try:
            verdict = child.judge(structured, self._max_seconds)
        except BaseException:
            child.kill()
            with self._changed:
                if self._keeps_one and not self._idle:
                    self._prepare_in(0.0)
            raise
        self._give_back(child)
        return verdict

    def _judge_again(self, structured: StructuredOutput) -> Verdict:
        try:
            return self._judge(structured)
        except _KilledError:  # twice: not by chance, perhaps for the memory that it took
            raise _dead_of(structured) from None

    def _prepare_in(self, seconds: float) -> None:
        """See to it that a child is idle then. With the lock held."""
        if self._timer is None and not self._closed:
            self._timer = threading.Timer(seconds, self._prepare)
            self._timer.daemon = True
            self._timer.start()

    def _prepare(self) -> None:
        """Start a child unless one is idle."""
        with self._changed:
            self._timer = None
            if self._idle or self._closed:
                return
            self._starting_ahead = True
        try:
            self._give_back(self._start())
        except Exception as error:  # contained: who needs a child tries again, and is told
            log.warning("nothing to compile grammars with could be started ahead: %s", error)
        finally:
            with self._changed:
                self._starting_ahead = False
                self._changed.notify_all()

    def _take(self) -> _Child:
        """Return a child that lives: an idle one, the one that is being started, or a new one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._idle or not self._starting_ahead)
                if not self._idle:
                    break
                child = self._idle.pop()
            if child.lives:
                return child
            child.kill()
        return self._start()

    def _give_back(self, child: _Child) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(child)
                return
        child.kill()

    def _start(self) -> _Child:
        """Return a new child, and have read the vocabulary here meanwhile.

        Raises:
            InternalError: Two could not be started, or one takes too long.
        """
        description = self._compile.description()
        try:
            try:
                return _Child(self._argv, description, self._compile.warm_up)
            except (BrokenPipeError, EOFError) as error:
                log.warning("a process to compile grammars in ended while it started: %s", error)
                return _Child(self._argv, description, self._compile.warm_up)
        except (OSError, EOFError) as error:  # a TimeoutError is an OSError
            raise InternalError(f"no process to compile grammars in: {error}") from error


class _KilledError(Exception):
    """A child was ended from outside: what it worked on is not to blame, as far as we know."""


def _dead_of(structured: StructuredOutput) -> InvalidRequestError:
    log.warning("a process died of compiling a grammar of kind %s", structured.kind)
    param = structured.param
    reason = "it takes too much memory or too deep a stack to compile"
    return InvalidRequestError(f"{param} cannot be used: {reason}", param=param)


class _Child:
    """One process, used by one thread at a time."""

    def __init__(
        self, argv: Sequence[str], description: bytes, meanwhile: Callable[[], None]
    ) -> None:
        """Start one, do something else ``meanwhile``, and return when it is ready.

        Raises:
            OSError: It could not be started, or takes too long.
            EOFError: It has ended.
        """
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
            self._say(description)
            meanwhile()
            self._hear(START_SECONDS)
            unless_ready.pop_all()

    @property
    def lives(self) -> bool:
        """False where it has ended by itself, or was."""
        return self._process.poll() is None

    def judge(self, structured: StructuredOutput, max_seconds: float) -> Verdict:
        """Return what it says of a specification.

        Raises:
            InvalidRequestError: It took too long, or died of it.
            _KilledError: It was ended by somebody else.
        """
        try:
            self._say(msgspec.json.encode(structured))
            return msgspec.json.decode(self._hear(max_seconds), type=Verdict)
        except TimeoutError:
            param = structured.param
            reason = f"{param} cannot be used: it takes more than {max_seconds:g} s to compile"
            raise InvalidRequestError(reason, param=param) from None
        except (OSError, EOFError):
            # Its own bounds on memory and stack end it by other signals.
            if self._ending() == -signal.SIGKILL:
                raise _KilledError from None
            raise _dead_of(structured) from None

    def kill(self) -> None:
        """End it, whatever it is doing, and reap it."""
        process = self._process
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_REAP_S)
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what was not written yet is for nobody
                pipe.close()

    def _ending(self) -> int | None:
        """Return how it ended, ``None`` where it lives on without its pipes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=_REAP_S)
        return None

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
