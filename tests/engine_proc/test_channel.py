"""The engine's sockets: who speaks first, who is refused, and that nothing waits for a reader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import zmq

from trioengine.engine_proc.channel import EngineChannel
from trioengine.errors import ProtocolError
from trioengine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    ClientMessage,
    EngineMessage,
    Fatal,
    FrameEncoder,
    Hello,
    Progress,
    Shutdown,
    engine_frames,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_MS = 10_000


class Server:
    """The other end, bound as the real one binds."""

    def __init__(self, directory: Path) -> None:
        self.commands = f"ipc://{directory}/c"
        self.outputs = f"ipc://{directory}/o"
        self.context = zmq.Context()
        self.push = self.context.socket(zmq.PUSH)
        self.pull = self.context.socket(zmq.PULL)
        for socket, address in ((self.push, self.commands), (self.pull, self.outputs)):
            socket.set_hwm(0)
            socket.linger = 0
            socket.rcvtimeo = socket.sndtimeo = PATIENCE_MS
            socket.bind(address)
        self.encoder, self.decoder = FrameEncoder(), engine_frames()

    def send(self, *messages: ClientMessage) -> None:
        for message in messages:
            self.push.send(self.encoder.encode(message))

    def receive(self) -> EngineMessage:
        return self.decoder.decode(self.pull.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


@pytest.fixture
def channel(server: Server) -> Iterator[EngineChannel]:
    with EngineChannel(commands_address=server.commands, outputs_address=server.outputs) as channel:
        yield channel


def test_hello_goes_both_ways_then_anything(server: Server, channel: EngineChannel) -> None:
    server.send(Hello(PROTOCOL_VERSION, "secret"), Abort([1]), Shutdown())
    channel.greet("secret")
    assert server.receive() == Hello(PROTOCOL_VERSION, "secret")
    channel.wait()
    messages = channel.drain()
    while len(messages) < 2:
        channel.wait()
        messages += channel.drain()
    assert messages == [Abort([1]), Shutdown()]
    assert channel.drain() == []


def test_what_comes_after_a_wait_or_between_two_drains_is_found(
    server: Server, channel: EngineChannel
) -> None:
    server.send(Hello(PROTOCOL_VERSION, "secret"), Abort([0]))
    channel.greet("secret")
    received = found_by_draining(channel)
    for number in range(1, 100):
        assert channel.drain() == []
        server.send(Abort([number]))
        if number % 2:
            channel.wait()
            received += channel.drain()
        else:
            received += found_by_draining(channel)
        assert received[-1] == Abort([number])
    assert len(received) == 100


def found_by_draining(channel: EngineChannel) -> list[ClientMessage]:
    """Drain until something is there, as a busy engine does, which never waits."""
    end_s = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < end_s:
        if messages := channel.drain():
            return messages
    raise AssertionError("nothing came")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Hello(PROTOCOL_VERSION, "guess"), "stranger"),
        (Hello(PROTOCOL_VERSION, ""), "stranger"),
        (Hello(PROTOCOL_VERSION + 1, "secret"), "speaks version 2"),
        (Abort([1]), "Abort before Hello"),
    ],
)
def test_a_stranger_is_refused(
    server: Server, channel: EngineChannel, message: ClientMessage, complaint: str
) -> None:
    server.send(message)
    with pytest.raises(ProtocolError, match=complaint):
        channel.greet("secret")


def test_noise_is_refused(server: Server, channel: EngineChannel) -> None:
    server.push.send(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="undecodable"):
        channel.greet("secret")


def test_a_missing_frame_is_fatal(server: Server, channel: EngineChannel) -> None:
    server.send(Hello(PROTOCOL_VERSION, "secret"))
    channel.greet("secret")
    server.encoder.encode(Abort([1]))  # encoded and never sent
    server.send(Abort([2]))
    channel.wait()
    with pytest.raises(ProtocolError, match="frame 2 where 1 was due"):
        channel.drain()


def test_sending_never_waits_for_a_reader(server: Server, channel: EngineChannel) -> None:
    for number in range(5_000):
        channel.send(Progress("load", number / 5_000))
    received = [server.receive() for _ in range(5_000)]
    assert received[-1] == Progress("load", 0.9998)


def test_the_last_word_leaves_before_the_socket_closes(server: Server) -> None:
    channel = EngineChannel(commands_address=server.commands, outputs_address=server.outputs)
    for _ in range(500):
        channel.send(Progress("load", 0.5))
    channel.send(Fatal("that was it", ""))
    channel.close()
    channel.close()  # idempotent
    received = [server.receive() for _ in range(501)]
    assert received[-1] == Fatal("that was it", "")


def test_closing_does_not_wait_for_a_peer_that_never_came(tmp_path: Path) -> None:
    with EngineChannel(
        commands_address=f"ipc://{tmp_path}/none", outputs_address=f"ipc://{tmp_path}/nobody"
    ):
        pass
