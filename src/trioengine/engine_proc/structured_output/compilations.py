"""Compiling beside the step loop: a few threads, a cache.

Theory of operation
-------------------
``request`` answers at once where the grammar is known; otherwise the request waits, and whoever
asks for the same specification waits for the same compilation. What came of it is picked up by
``settled``, between two steps; ``on_settled`` tells a loop that sleeps. How long one may take is
the compiler's business (``trials``); should it fail in that, those who wait are told. Failures are
not cached.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from typing import TYPE_CHECKING, Final

from trioengine.errors import InternalError, InvalidRequestError, TrioEngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.engine_proc.structured_output.grammar import Compile, Grammar
    from trioengine.structured import StructuredOutput

__all__ = ["Compilations", "Settled"]

MAX_SECONDS: Final = 60.0
MAX_THREADS: Final = 2
MAX_CACHED: Final = 256
_STACK_BYTES: Final = 64 * 2**20  # schemas nest; of what is not touched nothing is used

log = logging.getLogger(__name__)

Settled = tuple[int, "Grammar | TrioEngineError"]


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    structured: StructuredOutput
    waiting: set[int]
    over: bool = False


class Compilations:
    """All of one engine. Called from the loop's thread only, but for what the threads report."""

    def __init__(
        self,
        compile_: Compile,
        *,
        start: Callable[[Callable[[], None]], None] | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """Begin with nothing.

        Args:
            compile_: Does the work.
            start: Runs a function, in a thread of its own unless said otherwise.
            max_seconds: How long one compilation may take.
        """
        self.on_settled: Callable[[], None] = lambda: None
        self._compile = compile_
        self._start = start or _in_thread
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[StructuredOutput, Grammar] = collections.OrderedDict()
        self._jobs: dict[StructuredOutput, _Job] = {}
        self._queue: collections.deque[_Job] = collections.deque()
        self._num_running = 0
        self._settled: list[Settled] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a grammar."""
        with self._lock:
            return sum(len(job.waiting) for job in self._jobs.values())

    @property
    def has_settled(self) -> bool:
        """True where ``settled`` has something to return."""
        return bool(self._settled)

    def request(self, request_id: int, structured: StructuredOutput) -> Grammar | None:
        """Return the grammar, or ``None`` where ``settled`` will have it."""
        with self._lock:
            grammar = self._cache.get(structured)
            if grammar is not None:
                self._cache.move_to_end(structured)
                return grammar
            job = self._jobs.get(structured)
            if job is not None:
                job.waiting.add(request_id)
                return None
            job = self._jobs[structured] = _Job(structured, {request_id})
            self._queue.append(job)
        self._start_next()
        return None

    def withdraw(self, request_id: int) -> None:
        """Forget a request that waits, and its compilation if nobody else does and it waits too."""
        with self._lock:
            self._settled = [entry for entry in self._settled if entry[0] != request_id]
            for job in list(self._jobs.values()):
                job.waiting.discard(request_id)
                if not job.waiting and job in self._queue:
                    self._queue.remove(job)
                    del self._jobs[job.structured]

    def settled(self) -> list[Settled]:
        """Return what has come of the compilations since the last call."""
        with self._lock:
            settled, self._settled = self._settled, []
        return settled

    def close(self) -> None:
        """Let go of what the compiler holds. Idempotent."""
        self._compile.close()

    def _start_next(self) -> None:
        with self._lock:
            if not self._queue or self._num_running >= MAX_THREADS:
                return
            self._num_running += 1
            job = self._queue.popleft()
        timer = threading.Timer(self._max_seconds, self._expire, (job,))
        timer.daemon = True
        timer.start()
        self._start(lambda: self._run(job, timer))

    def _run(self, job: _Job, timer: threading.Timer) -> None:
        outcome: Grammar | TrioEngineError
        try:
            outcome = self._compile(job.structured)
        except TrioEngineError as error:
            outcome = error
        except Exception as error:  # contained: those who wait for it are told
            log.exception("compiling a grammar failed")
            outcome = InternalError(f"compiling a grammar failed: {error}")
        timer.cancel()
        self._finish(job, outcome)

    def _expire(self, job: _Job) -> None:
        param = job.structured.param
        reason = f"{param} cannot be used: it takes more than {self._max_seconds:g} s to compile"
        self._finish(job, InvalidRequestError(reason, param=param))

    def _finish(self, job: _Job, outcome: Grammar | TrioEngineError) -> None:
        with self._lock:
            if not isinstance(outcome, TrioEngineError):
                self._cache[job.structured] = outcome
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
            if job.over:
                return
            job.over = True
            self._num_running -= 1
            del self._jobs[job.structured]
            self._settled += [(request_id, outcome) for request_id in sorted(job.waiting)]
        self.on_settled()
        self._start_next()


def _in_thread(work: Callable[[], None]) -> None:
    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=work, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
