"""The engine's two sockets: commands in by PULL, everything else out by PUSH.

Both connect to addresses that the server has bound. The engine speaks first; until the server has
answered with the same version and token, nothing else is read or said. With no high-water mark and
a connected pipe, sending never blocks: memory is bounded by the server's admission.
"""

from __future__ import annotations

import os
import select
from hmac import compare_digest
from typing import TYPE_CHECKING, Final

import zmq

from trioengine.closing import ClosedOnExit
from trioengine.errors import ProtocolError
from trioengine.protocol import PROTOCOL_VERSION, FrameEncoder, Hello, client_frames

if TYPE_CHECKING:
    from trioengine.protocol import ClientMessage, EngineMessage

__all__ = ["LAST_WORDS_LINGER_MS", "EngineChannel"]

LAST_WORDS_LINGER_MS: Final = 1000


class EngineChannel(ClosedOnExit):
    """Owns its zmq context and sockets; a context manager."""

    def __init__(self, *, commands_address: str, outputs_address: str) -> None:
        """Connect; the peer need not be there yet.

        Raises:
            zmq.ZMQError: An address is malformed.
        """
        self._context = zmq.Context()
        self._pull = self._open(zmq.PULL, commands_address)
        self._push = self._open(zmq.PUSH, outputs_address)
        self._encoder = FrameEncoder()
        self._decoder = client_frames()
        # Never closed: a thread may wake us when the loop is over already.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._drained = False  # the last that happened to the PULL was EAGAIN
        self._news = select.poll()
        self._news.register(self._pull.FD, select.POLLIN)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def _open(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.connect(address)
        return socket

    def greet(self, token: str) -> None:
        """Say Hello and wait for the server's.

        The wait has no bound of its own: the server's death ends it through the lifeline.

        Raises:
            ProtocolError: Another version, another token, or something else than Hello.
        """
        self.send(Hello(PROTOCOL_VERSION, token))
        message = self._decoder.decode(self._pull.recv())
        if not isinstance(message, Hello):
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the server speaks version {message.version}, this engine {PROTOCOL_VERSION}"
            )
        if not compare_digest(message.token.encode(), token.encode()):
            raise ProtocolError("the server's token is not ours: a stranger on the socket")

    def drain(self) -> list[ClientMessage]:
        """Return what has arrived, in order, without waiting.

        Between two steps the caches are cold, and another EAGAIN from libzmq costs as much as a
        whole plan. Once it has said so, its descriptor is unready until something comes.

        Raises:
            ProtocolError: A frame is missing, doubled or no frame of ours.
        """
        messages: list[ClientMessage] = []
        if self._drained and not self._news.poll(0):
            return messages
        self._drained = False
        try:
            while True:
                messages.append(self._decoder.decode(self._pull.recv(zmq.NOBLOCK)))
        except zmq.Again:
            self._drained = True
            return messages

    def wait(self) -> None:
        """Wait until something has arrived, or somebody wakes us."""
        self._drained = False  # looking at the socket takes the descriptor's readiness away
        if self._wake_fd in dict(self._poller.poll()):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """End ``wait``, from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def send(self, message: EngineMessage) -> None:
        """Send without ever waiting for the server."""
        self._send_frame(self._encoder.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        self._push.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close both sockets; what was said last gets up to a second to leave. Idempotent."""
        self._pull.close()
        self._push.close(linger=LAST_WORDS_LINGER_MS)
        self._context.term()
