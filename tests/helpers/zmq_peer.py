"""The engine's end of the wire, on the test's own event loop."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import zmq

from trioengine.protocol import PROTOCOL_VERSION, FrameEncoder, Hello, client_frames
from trioengine.zmq_channel import BURST, ZmqTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trioengine.protocol import ClientMessage, EngineMessage

__all__ = ["TOKEN", "Peer", "addresses", "directory", "open_peer", "open_transport"]


TOKEN = "the token"


class Peer:
    """The engine's end, on the test's own event loop."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self.push = self._connect(zmq.PUSH, addresses(directory)["outputs_address"])
        self.pull = self._connect(zmq.PULL, addresses(directory)["commands_address"])
        self._encoder = FrameEncoder()
        self._decoder = client_frames()

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.connect(address)
        return socket

    def send(self, *messages: EngineMessage) -> None:
        for message in messages:
            self.push.send(self._encoder.encode(message), zmq.NOBLOCK)

    def greet(self) -> None:
        self.send(Hello(PROTOCOL_VERSION, TOKEN))

    async def receive(self) -> list[ClientMessage]:
        messages: list[ClientMessage] = []
        while True:
            try:
                while len(messages) < BURST:
                    messages.append(self._decoder.decode(self.pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                pass
            if messages:
                return messages
            await trio.lowlevel.wait_readable(self.pull.FD)

    def close(self, linger_ms: int = 1000) -> None:
        self.push.close(linger=linger_ms)
        self.pull.close(linger=0)
        self._context.term()


def addresses(directory: Path) -> dict[str, str]:
    return {
        "commands_address": f"ipc://{directory}/commands",
        "outputs_address": f"ipc://{directory}/outputs",
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    private = tmp_path / "run"
    private.mkdir(mode=0o700)
    return private


@contextmanager
def open_peer(directory: Path) -> Iterator[Peer]:
    peer = Peer(directory)
    try:
        yield peer
    finally:
        peer.close(0)


def open_transport(directory: Path, token: str = TOKEN) -> ZmqTransport:
    return ZmqTransport(**addresses(directory), token=token)
