"""The watcher sees every way of leaving, also behind bytes that nobody reads."""

from __future__ import annotations

import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers.raw_http import wall_clock_limit
from trioengine.http.disconnects import DisconnectWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Pair = tuple[socket.socket, socket.socket]


@contextmanager
def unix_pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@contextmanager
def tcp_pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def close(sock: socket.socket) -> None:
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Heard:
    """Counts calls and lets a test wait for the first."""

    def __init__(self) -> None:
        self.times = 0
        self.event = trio.Event()

    def __call__(self) -> None:
        self.times += 1
        self.event.set()


@pytest.mark.parametrize("unread", [b"", b"x", b"x" * 5000], ids=["nothing", "a byte", "much"])
@pytest.mark.parametrize("leave", [close, half_close, reset])
@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
async def test_a_peer_that_leaves_is_seen_once(
    pair: Callable[[], Iterator[Pair]], leave: Callable[[socket.socket], None], unread: bytes
) -> None:
    heard = Heard()
    with wall_clock_limit(), pair() as (ours, theirs), DisconnectWatcher() as watcher:  # type: ignore[attr-defined]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            watcher.watch(ours.fileno(), heard)
            theirs.sendall(unread)
            await wait_all_tasks_blocked()
            assert heard.times == 0  # unread bytes are no disconnect
            leave(theirs)
            await heard.event.wait()
            await wait_all_tasks_blocked()  # never returns while run() is spinning
            assert heard.times == 1
            nursery.cancel_scope.cancel()


async def test_a_peer_that_had_left_before_is_seen_too() -> None:
    heard = Heard()
    with wall_clock_limit(), unix_pair() as (ours, theirs), DisconnectWatcher() as watcher:
        theirs.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            watcher.watch(ours.fileno(), heard)
            await heard.event.wait()
            nursery.cancel_scope.cancel()


async def test_unwatched_sockets_are_forgotten() -> None:
    first, second = Heard(), Heard()
    with wall_clock_limit(), unix_pair() as (ours, theirs), DisconnectWatcher() as watcher:
        watcher.watch(ours.fileno(), first)
        watcher.unwatch(ours.fileno())
        watcher.unwatch(ours.fileno())  # idempotent
        watcher.watch(ours.fileno(), second)  # the next request on the same connection
        theirs.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            await second.event.wait()
            nursery.cancel_scope.cancel()
    assert first.times == 0


async def test_a_callback_may_unwatch_what_the_same_round_would_report() -> None:
    heard: list[int] = []
    with (
        wall_clock_limit(),
        unix_pair() as (a, a_peer),
        unix_pair() as (b, b_peer),
        DisconnectWatcher() as watcher,
    ):
        for sock in (a, b):
            fd = sock.fileno()
            other = b.fileno() if sock is a else a.fileno()

            def callback(fd: int = fd, other: int = other) -> None:
                heard.append(fd)
                watcher.unwatch(other)

            watcher.watch(fd, callback)
        a_peer.close()
        b_peer.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert len(heard) == 1
