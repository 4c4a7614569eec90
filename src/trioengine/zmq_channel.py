"""The server's end of the wire to one engine incarnation: the only zmq in the server.

Theory of operation
-------------------
A PUSH for commands and a PULL for outputs, both bound to ``ipc`` paths in the incarnation's private
directory. Each socket has one owner: this object, used by one task at a time. The rules come from
what ``ZMQ_FD`` is, libzmq's command mailbox, which *any* call on the socket may drain and un-ready
although messages wait:

- receive until EAGAIN (which is only reported after the mailbox was read), and only then wait for
  the descriptor. A receiver that waits first, or takes one a wake, sleeps with mail waiting. From
  EAGAIN on the descriptor can be trusted: one EAGAIN for each wake is enough.
- with no high-water mark a send never waits, and EAGAIN on the bound PUSH has one meaning left:
  nobody is connected. Before the handshake that is normal, afterwards the peer is gone.

The engine speaks first. Its ``Hello`` must carry this incarnation's token; ours is the answer, and
the first frame of the other direction. What is sent before is kept and follows it. A connected PULL
says nothing about the PUSH (two connections), so the answer waits until somebody takes it.

zmq hides the end of a connection, so a monitor socket tells of it: libzmq reports it after every
frame of that connection has been handed over, which makes ``receive`` end exactly as a pipe does,
with everything first and ``PeerGoneError`` then. One epoll descriptor stands for both.
"""

from __future__ import annotations

import hmac
import select
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio
import zmq

from trioengine.closing import ClosedOnExit
from trioengine.errors import ConfigError, PeerGoneError, ProtocolError
from trioengine.protocol import PROTOCOL_VERSION, FrameEncoder, Hello, engine_frames

if TYPE_CHECKING:
    from trioengine.protocol import ClientMessage, EngineMessage

__all__ = ["BURST", "MAX_PATH_BYTES", "ZmqTransport"]

BURST: Final = 64  # frames between two checkpoints: a flood must not starve HTTP
MAX_PATH_BYTES: Final = 107  # sun_path is 108 bytes, one of them the final zero
_MONITORED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_MONITOR_FRAME: Final = struct.Struct("=Hi")  # event, descriptor of the connection


class ZmqTransport(ClosedOnExit):
    """Fulfils ``Transport`` for one incarnation. A context manager; must be used in a Trio run."""

    def __init__(self, *, commands_address: str, outputs_address: str, token: str) -> None:
        """Bind both sockets.

        Args:
            commands_address: ``ipc://`` address that the engine's PULL connects to.
            outputs_address: ``ipc://`` address that the engine's PUSH connects to.
            token: What only this incarnation's engine knows.

        Raises:
            ConfigError: An address is no ``ipc`` path, too long, in a directory that others may
                enter, or can't be bound.
        """
        _check_address(commands_address)
        _check_address(outputs_address)
        self._token = token
        self._encoder = FrameEncoder()
        self._decoder = engine_frames()
        self._greeting: bytes | None = None  # our Hello, while the engine has not taken it
        self._greeted = False
        self._kept: list[ClientMessage] = []  # sent before the handshake
        self._peers: set[int] = set()  # connections of the PULL
        self._ended = False  # there was one, and there is none any more
        self._quiet = False  # PULL and monitor have both been read until EAGAIN
        self._since_checkpoint = 0
        self._context = zmq.Context(io_threads=1)
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        self._monitor = self._pull.get_monitor_socket(_MONITORED)
        self._push_descriptor: int = self._push.FD
        self._wakeups = select.epoll()
        self._wakeups.register(self._pull.FD, select.EPOLLIN)
        self._wakeups.register(self._monitor.FD, select.EPOLLIN)
        try:
            _bind(self._push, commands_address)
            _bind(self._pull, outputs_address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind a socket in the runtime directory: {error}") from error

    # Out ------------------------------------------------------------------------------------

    def send(self, message: ClientMessage) -> None:
        """Send without waiting; before the handshake, keep for after it.

        Raises:
            PeerGoneError: Nobody is connected any more.
        """
        if not self._greeted:
            self._kept.append(message)
        elif self._ended or not self._try_send(self._encoder.encode(message)):
            # Its other connection may take a moment longer to close: what goes there is lost.
            raise PeerGoneError("nobody is at the engine's end of the wire")

    def _try_send(self, frame: bytes) -> bool:
        try:
            self._push.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # In -------------------------------------------------------------------------------------

    async def receive(self) -> list[EngineMessage]:
        """Return what has come, at most 64 messages, waiting for the first.

        For one task at a time. Cancelling it loses nothing: there is no checkpoint between taking
        a frame and returning it.

        Raises:
            PeerGoneError: The engine is gone, and everything it had sent has been received.
            ProtocolError: A gap, a frame that is none of ours, or a stranger.
        """
        if not self._greeted:
            await self._greet()
        if self._since_checkpoint >= BURST:
            self._since_checkpoint = 0
            await trio.lowlevel.checkpoint()
        frames = await self._receive_frames(BURST - self._since_checkpoint)
        self._since_checkpoint += len(frames)
        return [self._decoder.decode(frame) for frame in frames]

    async def _receive_frames(self, most: int) -> list[bytes]:
        """Return between 1 and ``most`` frames."""
        while True:
            if self._quiet and not self._ended:
                self._since_checkpoint = 0
                await trio.lowlevel.wait_readable(self._wakeups)
            if frames := self._drain(most):
                return frames
            if self._ended:
                raise PeerGoneError("the engine has closed its end of the wire")
            self._note_connections()
            self._quiet = True

    def _drain(self, most: int) -> list[bytes]:
        """Receive up to ``most`` frames; fewer means EAGAIN, so that waiting is safe."""
        frames: list[bytes] = []
        try:
            while len(frames) < most:
                frames.append(self._pull.recv(zmq.NOBLOCK))
        except zmq.Again:
            return frames
        self._quiet = False
        return frames

    def _note_connections(self) -> None:
        """Read the monitor until EAGAIN."""
        try:
            while True:
                frame, _address = self._monitor.recv_multipart(zmq.NOBLOCK)
                event, connection = _MONITOR_FRAME.unpack(frame)
                if event == zmq.EVENT_ACCEPTED:
                    self._peers.add(connection)
                else:
                    self._peers.discard(connection)
                    self._ended = not self._peers
        except zmq.Again:
            pass

    # The handshake --------------------------------------------------------------------------

    async def _greet(self) -> None:
        """Receive the engine's Hello, answer it, and send what was kept. Resumes if cancelled."""
        if self._greeting is None:
            frames = await self._receive_frames(1)
            self._check_hello(self._decoder.decode(frames[0]))
            self._greeting = self._encoder.encode(Hello(PROTOCOL_VERSION, self._token))
        while not self._try_send(self._greeting):
            await trio.lowlevel.wait_readable(self._push_descriptor)
        self._greeted = True
        kept, self._kept = self._kept, []
        for message in kept:
            self.send(message)

    def _check_hello(self, message: EngineMessage) -> None:
        if not isinstance(message, Hello):
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the engine speaks version {message.version}, this server {PROTOCOL_VERSION}"
            )
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            raise ProtocolError("the token is not this incarnation's: a stranger on the socket")

    # The end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close everything. Idempotent. ``receive`` raises ``trio.ClosedResourceError``."""
        if self._wakeups.closed:
            return
        trio.lowlevel.notify_closing(self._wakeups)
        trio.lowlevel.notify_closing(self._push_descriptor)
        self._wakeups.close()
        self._pull.disable_monitor()
        self._monitor.close(linger=0)
        self._pull.close(linger=0)
        self._push.close(linger=0)
        self._context.term()


def _check_address(address: str) -> None:
    path = address.removeprefix("ipc://")
    if path == address or not path.startswith("/"):
        raise ConfigError(f"{address!r} is not the absolute path of an ipc socket")
    if len(path.encode()) > MAX_PATH_BYTES:
        raise ConfigError(f"the socket path is longer than {MAX_PATH_BYTES} bytes: {path}")
    directory = Path(path).parent
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise ConfigError(f"no directory for sockets: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"others may enter the directory of the sockets: {directory}")


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    socket.set_hwm(0)
    socket.linger = 0
    socket.bind(address)
