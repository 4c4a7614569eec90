"""Two hundred clients that hardly read: they are thrown out by name, and cost next to no memory."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING

import pytest
import trio

from helpers.churn import descriptors, resident_bytes
from helpers.server_process import ServerProcess, wait_until
from helpers.sse_client import Stream, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.slow]

NUM_CLIENTS = 200
BYTES_PER_S = 10
TIMEOUT_S = 5.0
MOST_GROWTH_BYTES = 16 * 2**20  # 80 KiB a client; each has some 40 KiB of text to come
WORDY = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 3}
ABORTED = 'trioengine_requests_aborted_total{reason="slow_client"}'


async def read_slowly(port: int, begun: Callable[[], None]) -> None:
    """Read ten bytes a second until the connection ends.

    What the kernel has of it is still there to be read when the server has cut it off.
    """
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with sock, contextlib.suppress(OSError):
        await sock.connect(("127.0.0.1", port))
        await Stream(trio.SocketStream(sock)).send("/v1/completions", WORDY)
        assert (await sock.recv(BYTES_PER_S)).startswith(b"HTTP/1.1 2")
        begun()
        while await sock.recv(BYTES_PER_S):  # noqa: ASYNC110  # it is to be slow
            await trio.sleep(1.0)


class Watch:
    """Looks on from threads, so that the clients go on.

    Attributes:
        num_begun: Clients that have had their first bytes.
        num_heard: Events of the one who reads well.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.num_begun = self.num_heard = 0
        self._server = server
        self._peak = 0

    def begin(self) -> None:
        self.num_begun += 1

    async def read_well(self, stream: Stream) -> None:
        while await stream.read_event() is not None:
            self.num_heard += 1

    def growth_until_all_are_out(self) -> int:
        """Return the bytes that the server has grown by once all were there, at its peak."""
        pid = self._server.process.pid
        wait_until(lambda: self.num_begun == NUM_CLIENTS, what="all have begun")
        before = peak = resident_bytes(pid)

        def all_out() -> bool:
            nonlocal peak
            peak = max(peak, resident_bytes(pid))
            return self._server.metrics()[ABORTED] == NUM_CLIENTS

        wait_until(all_out, what="all were thrown out")
        return peak - before

    def hear_more(self) -> None:
        heard = self.num_heard
        wait_until(lambda: self.num_heard > heard, what="the one who reads well is served")


async def test_slow_clients_are_dropped_and_counted_and_memory_stays_flat() -> None:
    args = json.dumps({"step_time_ms": 50, "num_blocks": 120_000})
    limits = ("--max-num-seqs", "256", "--slow-client-timeout", f"{TIMEOUT_S:g}")
    with ServerProcess("--engine-args", args, *limits) as server:
        server.wait_ready()
        watch, pid = Watch(server), server.process.pid
        with_nobody = len(descriptors(pid))
        async with open_stream(server.port, WORDY) as innocent, trio.open_nursery() as clients:
            clients.start_soon(watch.read_well, innocent)
            for _ in range(NUM_CLIENTS):
                clients.start_soon(read_slowly, server.port, watch.begin)
            growth = await trio.to_thread.run_sync(watch.growth_until_all_are_out)
            assert growth < MOST_GROWTH_BYTES, f"grew by {growth >> 20} MiB"
            await trio.to_thread.run_sync(watch.hear_more)
            clients.cancel_scope.cancel()
        wait_until(lambda: len(descriptors(pid)) <= with_nobody, what="descriptors are back")
        quiet = wait_until(lambda: when_quiet(server), what="nothing runs")
        assert quiet["trioengine_kv_blocks_free"] == quiet["trioengine_kv_blocks_total"]


def when_quiet(server: ServerProcess) -> dict[str, float] | None:
    metrics = server.metrics()
    return None if metrics["trioengine_requests_running"] else metrics
