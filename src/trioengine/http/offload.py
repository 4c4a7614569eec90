"""Where text becomes tokens: short text at once, long text in a thread, so that nobody waits.

A thread hop costs more than encoding a paragraph does; encoding a book would hold up every stream.
How to run work in a thread is injected: under a mock clock it must not leave the Trio thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["INLINE_CHARS", "InlineOffload", "Offload", "ThreadOffload"]

INLINE_CHARS: Final = 4096  # about 1 ms of encoding, and less of rendering
MAX_THREADS: Final = 2

Result = TypeVar("Result")


class Offload(Protocol):
    """Runs synchronous work on text."""

    async def __call__(self, work: Callable[[], Result], *, num_chars: int) -> Result:
        """Return ``work()``, which takes time by the number of characters it reads."""


class InlineOffload:
    """Runs everything at once: for tests under a mock clock."""

    async def __call__(self, work: Callable[[], Result], *, num_chars: int) -> Result:
        del num_chars
        return work()


class ThreadOffload:
    """Runs long work in one of a few threads. ``work`` must be safe beside others of its kind."""

    def __init__(self, *, inline_chars: int = INLINE_CHARS, max_threads: int = MAX_THREADS) -> None:
        self._inline_chars = inline_chars
        self._limiter = trio.CapacityLimiter(max_threads)

    async def __call__(self, work: Callable[[], Result], *, num_chars: int) -> Result:
        """Return ``work()``. A client that leaves meanwhile is not waited for: the thread ends."""
        if num_chars <= self._inline_chars:
            return work()
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
