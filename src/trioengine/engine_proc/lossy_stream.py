"""Standard output and error of the engine: written at once or dropped, never waited for.

The server reads them through one pipe. If it is stopped the pipe fills up, and an engine that
waited there would stand still with everybody's tokens.
"""

from __future__ import annotations

import io
import os
import sys

__all__ = ["LossyStream", "make_standard_streams_lossy"]


class LossyStream(io.TextIOBase):
    """A text stream over a descriptor; what does not fit right now is lost."""

    def __init__(self, descriptor: int) -> None:
        """Make the descriptor non-blocking; it stays the caller's to close.

        Raises:
            OSError: It is not open.
        """
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        """Write as much as fits; the return value does not say how much that was."""
        data = text.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except (BlockingIOError, BrokenPipeError):
            pass  # nobody reads: losing a line is better than losing a step
        return len(text)


def make_standard_streams_lossy() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = LossyStream(1)
    sys.stderr = LossyStream(2)
