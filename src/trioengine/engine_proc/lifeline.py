"""The lifeline: standard input is line 1 with the configuration, then a pipe whose end is our end.

Theory of operation
-------------------
The server holds the other end and never writes to it again. However the server dies, the kernel
closes it, and a thread here sees end of file: it removes the runtime directory and leaves by
``os._exit``, also while the main thread loads a model or sits in a long step (kernels release the
GIL). The same thread beats on the heartbeat page once a second.

``PR_SET_PDEATHSIG`` is no substitute: it follows the thread that forked, not the process.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from trioengine.heartbeat import HeartbeatPage

__all__ = ["ORPHANED_EXIT_CODE", "Lifeline", "read_config_line"]

BEAT_S: Final = 1.0
ORPHANED_EXIT_CODE: Final = 1
_READ_BYTES: Final = 1 << 16


def read_config_line(descriptor: int) -> bytes:
    """Return line 1 of ``descriptor``, without its newline.

    What may follow in the same read is dropped: after line 1 only the end of file means anything.

    Raises:
        EOFError: The parent is gone before it said a whole line.
    """
    line = b""
    while b"\n" not in line:
        piece = os.read(descriptor, _READ_BYTES)
        if not piece:
            raise EOFError("standard input ended before a line of configuration")
        line += piece
    return line.partition(b"\n")[0]


class Lifeline:
    """Watches the pipe and beats, in a daemon thread of its own, until the process ends."""

    def __init__(self, descriptor: int, page: HeartbeatPage, runtime_dir: str) -> None:
        self._descriptor = descriptor
        self._page = page
        self._runtime_dir = runtime_dir

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> NoReturn:
        try:
            self._beat_until_the_end()
        finally:  # an error too: with nobody watching, this process could outlive its server
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
            os._exit(ORPHANED_EXIT_CODE)

    def _beat_until_the_end(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        while True:
            self._page.beat()
            if poller.poll(BEAT_S * 1000) and not os.read(self._descriptor, _READ_BYTES):
                return
