"""No send waits for ever, and none is cut in half."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from helpers.raw_http import wall_clock_limit
from trioengine.http.transport import ClientStream

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 30.0
MUCH = b"x" * 3_000_000  # more than any kernel buffer


@contextmanager
def stream_pair() -> Iterator[tuple[ClientStream, socket.socket]]:
    """Return our end and the client's socket; what one sends the other has at once."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    stream = ClientStream(ours, None, slow_client_timeout_s=TIMEOUT_S)
    with theirs:
        yield stream, theirs
        stream.close()


def receive(client: socket.socket) -> bytes:
    """Return everything that has arrived."""
    data = b""
    while True:
        try:
            data += (more := client.recv(1 << 20))
        except BlockingIOError:
            return data
        if not more:
            return data


def fill(stream: ClientStream) -> int:
    """Send until the kernel takes no more; return how much it took."""
    total = 0
    while taken := stream.try_send(MUCH):
        total += taken
    return total


async def test_a_small_send_goes_at_once_and_takes_no_checkpoint() -> None:
    with stream_pair() as (stream, client), trio.testing.assert_no_checkpoints():
        await stream.send(b"hello")
        assert receive(client) == b"hello"
        await stream.send(b"")


async def test_a_busy_sender_yields_now_and_then() -> None:
    ran = False

    async def other() -> None:
        nonlocal ran
        ran = True

    with stream_pair() as (stream, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for _ in range(31):
                await stream.send(b"x")
                assert not ran
            for _ in range(33):  # two turns: the order within one is random
                await stream.send(b"x")
            assert ran
        assert receive(client) == b"x" * 64


async def test_a_large_send_waits_for_the_client_and_arrives_whole() -> None:
    received = b""
    with wall_clock_limit(), stream_pair() as (stream, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, MUCH)
            while len(received) < len(MUCH):
                await trio.lowlevel.wait_readable(client)
                received += receive(client)
    assert received == MUCH


async def test_a_client_that_takes_nothing_is_reset_after_the_timeout(
    mock_clock: MockClock,
) -> None:
    stalled: list[float] = []
    with wall_clock_limit(), stream_pair() as (stream, client):
        stream.on_stalled = lambda: stalled.append(trio.current_time())
        start_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_broken, stream)
            await wait_all_tasks_blocked()
            mock_clock.jump(TIMEOUT_S - 0.1)
            await wait_all_tasks_blocked()
            assert not stalled
            mock_clock.jump(0.2)
        assert [round(time_s - start_s, 1) for time_s in stalled] == [TIMEOUT_S + 0.1]
        assert stream.fileno() == -1
        receive(client)
        assert client.recv(1) == b""  # Unix sockets know no reset


async def _expect_broken(stream: ClientStream) -> None:
    with pytest.raises(trio.BrokenResourceError):
        await stream.send(MUCH)


async def test_a_client_that_takes_a_little_now_and_then_is_kept(mock_clock: MockClock) -> None:
    with wall_clock_limit(), stream_pair() as (stream, client):
        fill(stream)
        done = trio.Event()

        async def send() -> None:
            await stream.send(b"y" * 2**20)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            rounds = 0
            while not done.is_set():
                await wait_all_tasks_blocked()
                mock_clock.jump(TIMEOUT_S - 1)
                client.recv(2**17)
                await wait_all_tasks_blocked()
                rounds += 1
            assert rounds > 3


async def test_cancelling_does_not_cut_a_send_in_half() -> None:
    with wall_clock_limit(), stream_pair() as (stream, client):
        taken = fill(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, b"the rest")
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            await wait_all_tasks_blocked_shielded()
            data = receive(client)
        data += receive(client)
    assert data[taken:] == b"the rest"


async def wait_all_tasks_blocked_shielded() -> None:
    with trio.move_on_after(1, shield=True):
        await wait_all_tasks_blocked()


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_closing_wakes_a_send_that_waits(end: str) -> None:
    with wall_clock_limit(), stream_pair() as (stream, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_broken, stream)
            await wait_all_tasks_blocked()
            getattr(stream, end)()
        getattr(stream, end)()  # idempotent


async def test_nothing_overtakes_a_send_that_waits() -> None:
    with wall_clock_limit(), stream_pair() as (stream, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_broken, stream)
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                stream.try_send(b"x")
            with pytest.raises(trio.BusyResourceError):
                await stream.send(b"x")
            with pytest.raises(trio.BusyResourceError):
                await stream.send_rest(memoryview(b"x"))
            stream.close()


async def test_sending_to_a_client_that_has_gone_is_an_error_of_the_world() -> None:
    with stream_pair() as (stream, client):
        client.close()
        with pytest.raises(trio.BrokenResourceError):
            await stream.send(b"x")
        stream.close()
        with pytest.raises(trio.BrokenResourceError):
            stream.try_send(b"x")


async def test_finish_sending_leaves_the_other_direction_open() -> None:
    with stream_pair() as (stream, client):
        stream.finish_sending()
        assert client.recv(1) == b""
        client.send(b"still here")
        assert await stream.receive_some() == b"still here"
        await stream.aclose()
        stream.finish_sending()  # nothing to finish


async def test_repr_names_the_descriptor() -> None:
    with stream_pair() as (stream, _):
        assert f"fd={stream.fileno()}" in repr(stream)
