"""A client of a few dozen lines on a Unix socket, that never waits: it is told when to read.

Writing, closing and half-closing have reached the server's socket when the call returns, and what
the server has sent is there to be read: so histories of clients are deterministic, without tasks.
"""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Answer", "SocketVisitor", "post", "read_answer"]

_ID: Final = re.compile(rb'"id":"((?:chat)?cmpl-[0-9a-f]+)"')
MAX_READ: Final = 2**16


def post(path: str, body: object) -> bytes:
    """Return the bytes of a request with a JSON body."""
    data = msgspec.json.encode(body)
    return b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        len(data),
        data,
    )


class SocketVisitor:
    """One connection. Nothing here waits or raises, whatever the server does.

    Attributes:
        received: All that was read since ``begin``.
        end: How the server has ended the connection, ``None`` while it has not; ``refused`` where
            there never was one.
    """

    def __init__(self, path: Path) -> None:
        self.received = b""
        self.end: Literal["eof", "reset", "refused"] | None = None
        self.closed = False
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.setblocking(False)
        try:
            self._sock.connect(str(path))
        except OSError:
            self.end = "refused"

    def send(self, data: bytes) -> None:
        """Send what fits; small requests do."""
        with contextlib.suppress(OSError):  # it has gone; reading tells how
            self._sock.send(data)

    def read(self, most: int = MAX_READ) -> None:
        """Read what there is, up to ``most`` bytes."""
        while self.end is None and not self.closed and most > 0:
            try:
                data = self._sock.recv(min(most, MAX_READ))
            except BlockingIOError:
                return
            except OSError:
                self.end = "reset"
                return
            self.received += data
            most -= len(data)
            if not data:
                self.end = "eof"

    @property
    def response_id(self) -> str | None:
        """The id of the answer, once it was read."""
        found = _ID.search(self.received)
        return found and found.group(1).decode()

    def half_close(self) -> None:
        """Send nothing more."""
        with contextlib.suppress(OSError):  # it has gone already
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave. Idempotent."""
        self.closed = True
        self._sock.close()


@dataclass(frozen=True)
class Answer:
    """What was read of an answer.

    Attributes:
        status: HTTP status.
        body: Decoded.
        complete: It was read to its end.
        rest: What follows it.
    """

    status: int
    body: bytes
    complete: bool
    rest: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[bytes]:
        """Data of the events of a stream that are complete."""
        blocks = self.body.split(b"\n\n")[:-1]
        return [block[6:] for block in blocks if block.startswith(b"data: ")]


def read_answer(data: bytes) -> Answer | None:
    """Return the first answer in ``data``, past any 1xx; ``None`` without a whole head."""
    while True:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            return None
        status = int(head[9:12])
        if status >= 200:
            break
        data = rest
    fields = head.lower()
    found = re.search(rb"\r\ncontent-length: (\d+)", fields)
    if found is not None:
        length = int(found.group(1))
        return Answer(status, rest[:length], len(rest) >= length, rest[length:])
    assert b"\r\ntransfer-encoding: chunked" in fields, head
    return _read_chunks(status, rest)


def _read_chunks(status: int, data: bytes) -> Answer:
    body = b""
    while True:
        size, end, rest = data.partition(b"\r\n")
        if not end:
            return Answer(status, body, False, b"")
        length = int(size, 16)
        if length == 0:
            return Answer(status, body, rest[:2] == b"\r\n", rest[2:])
        body += rest[:length]
        data = rest[length + 2 :]
        if len(rest) < length + 2:
            return Answer(status, body, False, b"")
