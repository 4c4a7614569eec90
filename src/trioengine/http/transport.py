"""One client's bytes: a socket, plain or under TLS, whose every send has a bound.

What Hypercorn's own driver lacks, and why it matters (each seen): its ``send_all`` is shielded from
cancellation without a deadline, so a client that stops reading could hang the server's stop for
ever; and it takes a lock, a shield and three checkpoints for each chunk of a stream, which costs
three times the ``send`` itself.

Sending here first simply tries: the kernel nearly always has room. Only when it has none does the
task wait, shielded (half an HTTP chunk would garble all that follows) and slice by slice, each with
a deadline. A client that takes no slice in that time is cut off with a reset, which also frees what
the kernel holds for it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

__all__ = ["ClientStream"]

SLICE_BYTES: Final = 2**14  # one TLS record; also what must move within the slow-client timeout
MAX_RECV_BYTES: Final = 2**16
CLOSE_S: Final = 2.0  # for TLS's farewell
_CALLS_PER_CHECKPOINT: Final = 32
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


class ClientStream:
    """The bytes of one accepted connection. Owns ``sock``.

    Attributes:
        peer: Address of the client as ``accept`` gave it; ``None`` on a Unix socket.
        name: Our own address on this connection; ``None`` on a Unix socket.
        secure: TLS.
        on_stalled: Called when a slice waited too long, before the connection is reset.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: tuple[str, int] | None,
        *,
        slow_client_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Take ``sock`` over.

        Args:
            sock: Connected stream socket.
            peer: Address of the client, if it has one.
            slow_client_timeout_s: How long a slice may wait for the client.
            tls: Speak TLS, as the server.
        """
        self.peer = peer
        self.name = _own_address(sock)
        self.secure = tls is not None
        self._sock = sock
        self._tls: trio.SSLStream[trio.SocketStream] | None = None
        if tls is None:
            sock.setblocking(False)
        else:
            plain = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
            self._tls = trio.SSLStream(plain, tls, server_side=True)
        self._slow_client_timeout_s = slow_client_timeout_s
        self.on_stalled: Callable[[], None] = _nobody_to_tell
        self._waiting = False
        self._held = b""
        self._sends = self._receives = 0

    def __repr__(self) -> str:
        return f"<ClientStream fd={self._sock.fileno()} peer={self.peer}>"

    def fileno(self) -> int:
        """The socket's descriptor, -1 when closed."""
        return self._sock.fileno()

    async def do_handshake(self) -> None:
        """Shake hands where this is TLS.

        Raises:
            trio.BrokenResourceError: The client does not speak TLS, or has gone.
        """
        if self._tls is not None:
            await self._tls.do_handshake()

    async def receive_some(self) -> bytes:
        """Return what has arrived, at least a byte; ``b""`` at the end.

        A checkpoint when it has to wait, and every 32nd time.

        Raises:
            trio.BrokenResourceError: The connection was reset.
            trio.ClosedResourceError: We have closed it.
        """
        if self._tls is not None:
            return bytes(await self._tls.receive_some(MAX_RECV_BYTES))
        self._receives += 1
        if self._receives % _CALLS_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()  # who floods us must not starve the others
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while (data := self._try_receive()) is None:
            await trio.lowlevel.wait_readable(self._sock)
        return data

    def _try_receive(self) -> bytes | None:
        try:
            return self._sock.recv(MAX_RECV_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            if self._sock.fileno() == -1:
                raise trio.ClosedResourceError("connection closed on our side") from error
            raise trio.BrokenResourceError(f"connection broken: {error}") from error

    def try_send(self, data: bytes) -> int:
        """Hand to the kernel what it takes at once, and return how many bytes that was.

        0 also under TLS, where nothing can be sent without waiting.

        Raises:
            trio.BrokenResourceError: The connection is gone.
            trio.BusyResourceError: Another task waits in ``send``; this would overtake it.
        """
        if self._waiting:
            raise trio.BusyResourceError("another task is sending on this connection")
        if self.secure or not data:
            return 0
        return self._send_some(data)

    def hold(self, data: bytes) -> None:
        """Let ``data`` leave together with what ``send`` is given next, which must follow soon."""
        self._held += data

    async def send(self, data: bytes) -> None:
        """Send all of ``data``, after what was held, waiting for the client within bounds.

        A checkpoint when it has to wait, and every 32nd time; always after the bytes have gone, so
        that a cancellation does not leave half a message.

        Raises:
            trio.BrokenResourceError: The connection is gone, or was cut for being too slow.
            trio.BusyResourceError: Another task is sending.
        """
        if self._held:
            data, self._held = self._held + data, b""
        sent = self.try_send(data)
        if sent < len(data):
            await self.send_rest(memoryview(data)[sent:])
        self._sends += 1
        if self._sends % _CALLS_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()

    async def send_rest(self, data: memoryview) -> None:
        """Send what ``try_send`` has left. Raises as ``send`` does."""
        if self._waiting:
            raise trio.BusyResourceError("another task is sending on this connection")
        self._waiting = True
        try:
            for start in range(0, len(data), SLICE_BYTES):
                await self._send_slice(data[start : start + SLICE_BYTES])
        except trio.ClosedResourceError as error:
            raise trio.BrokenResourceError("connection closed on our side") from error
        finally:
            self._waiting = False

    async def _send_slice(self, piece: memoryview) -> None:
        with trio.move_on_after(self._slow_client_timeout_s, shield=True) as scope:
            await self._send_all(piece)
        if scope.cancelled_caught:
            self.on_stalled()
            self.reset()
            raise trio.BrokenResourceError(
                f"client took nothing for {self._slow_client_timeout_s:g} s"
            )

    async def _send_all(self, piece: memoryview) -> None:
        if self._tls is not None:
            await self._tls.send_all(piece)
            return
        while piece:
            if self._sock.fileno() == -1:
                raise trio.ClosedResourceError("connection closed on our side")
            await trio.lowlevel.wait_writable(self._sock)
            piece = piece[self._send_some(piece) :]

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError(f"connection broken: {error}") from error

    def finish_sending(self) -> None:
        """Tell the client that nothing follows; what it still sends can be received."""
        with contextlib.suppress(OSError):  # it has gone, or we have closed
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close at once; the kernel still delivers what it holds. Wakes who waits. Idempotent."""
        if self._sock.fileno() != -1:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    def reset(self) -> None:
        """Close at once and drop what the kernel holds: the client sees a reset. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    async def aclose(self) -> None:
        """Close in order: under TLS the client is told first, within ``CLOSE_S``."""
        if self._tls is not None and self._sock.fileno() != -1:
            with (
                trio.move_on_after(CLOSE_S, shield=True),
                contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
            ):
                await self._tls.aclose()
        self.close()


def _nobody_to_tell() -> None:
    pass


def _own_address(sock: socket.socket) -> tuple[str, int] | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = sock.getsockname()[:2]
    return host, port
