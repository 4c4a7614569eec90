"""The wire over real zmq sockets: nothing lost, doubled or stuck, and an end that is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import trio
import zmq

from helpers.zmq_peer import TOKEN, Peer, addresses, open_peer, open_transport
from helpers.zmq_peer import directory as directory
from trioengine.errors import ConfigError, PeerGoneError, ProtocolError
from trioengine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Call,
    Fatal,
    FrameEncoder,
    Hello,
    Progress,
    client_frames,
)
from trioengine.zmq_channel import MAX_PATH_BYTES, ZmqTransport

if TYPE_CHECKING:
    from pathlib import Path

    from trioengine.protocol import ClientMessage, EngineMessage


async def read_on(transport: ZmqTransport, received: list[EngineMessage]) -> None:
    while True:
        received += await transport.receive()


# The handshake ------------------------------------------------------------------------------------


async def test_engine_speaks_first_and_what_was_sent_before_follows_our_hello(
    directory: Path,
) -> None:
    with trio.fail_after(5), open_transport(directory) as transport:
        transport.send(Call(1, "early"))
        with open_peer(directory) as peer:
            peer.greet()
            peer.send(Progress("load", 0.5))
            assert await transport.receive() == [Progress("load", 0.5)]
            transport.send(Abort([7]))
            received: list[ClientMessage] = []
            while len(received) < 3:
                received += await peer.receive()
    assert received == [Hello(PROTOCOL_VERSION, TOKEN), Call(1, "early"), Abort([7])]


async def test_handshake_survives_being_cancelled_while_nobody_takes_our_hello(
    directory: Path,
) -> None:
    """Hello has come over one connection, the other one does not exist yet."""
    with trio.fail_after(5), open_transport(directory) as transport:
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.connect(addresses(directory)["outputs_address"])
        encoder = FrameEncoder()
        push.send(encoder.encode(Hello(PROTOCOL_VERSION, TOKEN)))
        while transport._greeting is None:
            with trio.move_on_after(0.001):
                await transport.receive()
        assert not transport._greeted
        transport.send(Abort([1]))  # is kept
        pull = context.socket(zmq.PULL)
        pull.connect(addresses(directory)["commands_address"])
        push.send(encoder.encode(Progress("load", 1.0)))
        assert await transport.receive() == [Progress("load", 1.0)]
        decoder = client_frames()
        first, second = (decoder.decode(pull.recv()) for _ in range(2))
        push.close(0)
        pull.close(0)
        context.term()
    assert (first, second) == (Hello(PROTOCOL_VERSION, TOKEN), Abort([1]))


@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        (Hello(PROTOCOL_VERSION, "another token"), "stranger"),
        (Hello(PROTOCOL_VERSION, "ein Wörtchen"), "stranger"),
        (Hello(PROTOCOL_VERSION + 1, TOKEN), "version"),
        (Fatal("no model", ""), "Fatal before Hello"),
    ],
)
async def test_stranger_is_refused(directory: Path, first: EngineMessage, complaint: str) -> None:
    with trio.fail_after(5), open_transport(directory) as transport, open_peer(directory) as peer:
        peer.send(first)
        with pytest.raises(ProtocolError, match=complaint):
            await transport.receive()


@pytest.mark.parametrize("times", [0, 2])
async def test_frame_missing_or_doubled_is_loud(directory: Path, times: int) -> None:
    with trio.fail_after(5), open_transport(directory) as transport, open_peer(directory) as peer:
        peer.greet()
        frame = peer._encoder.encode(Progress("load", 0.0))
        for _ in range(times):
            peer.push.send(frame)
        peer.send(Progress("load", 0.1))
        with pytest.raises(ProtocolError, match="was due"):
            await read_on(transport, [])


# The end ------------------------------------------------------------------------------------------


async def test_everything_arrives_before_the_news_that_the_peer_is_gone(directory: Path) -> None:
    with trio.fail_after(5), open_transport(directory) as transport:
        peer = Peer(directory)
        peer.greet()
        peer.send(*(Progress("load", float(i)) for i in range(1000)))
        received = await transport.receive()
        peer.close()
        with pytest.raises(PeerGoneError):
            await read_on(transport, received)
        assert received == [Progress("load", float(i)) for i in range(1000)]
        with pytest.raises(PeerGoneError):
            await transport.receive()  # again and again
        with pytest.raises(PeerGoneError):
            transport.send(Abort([1]))


async def test_nothing_is_sent_once_the_engine_s_end_is_closed(directory: Path) -> None:
    """Also while its other connection still takes what nobody will read."""
    with trio.fail_after(5), open_transport(directory) as transport, open_peer(directory) as peer:
        peer.greet()
        peer.send(Progress("load", 0.0))
        await transport.receive()
        transport.send(Abort([1]))
        peer.push.close(linger=0)
        with pytest.raises(PeerGoneError):
            await read_on(transport, [])
        with pytest.raises(PeerGoneError):
            transport.send(Abort([2]))


CHILD = """
import os, signal, sys, zmq
from trioengine.engine_proc.channel import EngineChannel
from trioengine.protocol import Progress
channel = EngineChannel(commands_address=sys.argv[1], outputs_address=sys.argv[2])
channel.greet(sys.argv[3])
for i in range(3000):
    channel.send(Progress("load", float(i)))
channel.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def start_child(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, *addresses(directory).values(), TOKEN])


@pytest.mark.process
@pytest.mark.slow
async def test_last_delta_of_a_killed_process_arrives(directory: Path) -> None:
    """The kill is asked for once the first frames are here; the rest is with the kernel or us."""
    with trio.fail_after(20), open_transport(directory) as transport:
        child = start_child(directory)
        try:
            received: list[EngineMessage] = []
            while len(received) < 3000:
                received += await transport.receive()
            transport.send(Abort([1]))
            with pytest.raises(PeerGoneError):
                await transport.receive()
            assert await trio.to_thread.run_sync(child.wait) == -signal.SIGKILL
            with pytest.raises(PeerGoneError):
                transport.send(Abort([2]))
        finally:
            child.kill()
            child.wait()


async def test_close_wakes_the_receiver_and_leaves_nothing_behind(directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    transport = open_transport(directory)

    async def receive() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await transport.receive()

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            transport.close()
    transport.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# Addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc://relative", "ipc://@abstract"])
async def test_only_ipc_paths(directory: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="ipc"):
        ZmqTransport(**addresses(directory) | {"outputs_address": address}, token=TOKEN)


async def test_path_that_does_not_fit_a_socket_address(directory: Path) -> None:
    deep = directory / ("x" * (MAX_PATH_BYTES - len(str(directory)) - len("/outputs")))
    deep.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="longer"):
        open_transport(deep)  # "outputs" just fits, "commands" does not


async def test_directory_must_be_there(directory: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        open_transport(directory / "missing")


async def test_directory_must_be_private(directory: Path) -> None:
    os.chmod(directory, 0o750)
    with pytest.raises(ConfigError, match="others"):
        open_transport(directory)


async def test_address_that_is_taken_by_something_else(directory: Path) -> None:
    (directory / "outputs").mkdir()
    with pytest.raises(ConfigError, match="bind"):
        open_transport(directory)
