"""Sees a client leave while its request is in flight, whatever is unread before the end.

While a request is being computed nobody may read the connection: a pipelined second request (or one
stray byte) sits in the buffer, and behind it a FIN that no ``recv`` will ever reach. The kernel
knows it all the same: ``EPOLLRDHUP`` is reported for the socket's *state*, not for its next byte.
Trio has no such wait, but an epoll set is itself a file descriptor that becomes readable. So all
connections in flight share one set, and one task waits for it. Nothing is polled.

A half-close (``shutdown(SHUT_WR)``) sets the same state, and is taken for a disconnect on purpose:
from a client that has merely gone it cannot be told apart, and no HTTP client of note half-closes
while it waits for an answer. The set sees the TCP or Unix socket; the end of a TLS session that is
not followed by a FIN is seen by the reader alone.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, NoReturn

import trio

from trioengine.closing import ClosedOnExit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DisconnectWatcher"]


class DisconnectWatcher(ClosedOnExit):
    """An epoll set of sockets and whom to tell when their peer has gone.

    A context manager: it must outlive the connections that use it, and its task.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    def close(self) -> None:
        """Watch nothing any more."""
        self._epoll.close()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from ``run``, when the peer of socket ``fd`` has gone.

        It is called also where that was so before. ``unwatch`` before ``fd`` is closed.
        """
        self._epoll.register(fd, select.EPOLLRDHUP)  # HUP and ERR are always reported
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``. No-op if it is not watched (any more)."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    async def run(self) -> NoReturn:
        """Deliver, until cancelled. ``callback`` must neither raise nor wait."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for fd, _ in self._epoll.poll(0):
                callback = self._callbacks.get(fd)
                if callback is not None:  # not unwatched by a callback of this very round
                    self.unwatch(fd)
                    callback()
