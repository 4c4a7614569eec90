"""How long after a client has gone the engine has let go of its request.

    python benchmarks/disconnects.py                       # 2,000 clients beside 16 streams
    python benchmarks/disconnects.py --clients 500 --streams 63

Starts a server of its own with the default model and keeps the streams running. One client after
the other asks for a long answer, at random as a stream or whole, waits a random time, and closes
its connection at random by FIN or RST: while it waits, in prefill, or while it decodes. Measured is
from that close to the server's word that the engine has confirmed the abort, which is a line of its
log, so both ends are seen from outside. A step is a gap between the tokens of the running streams;
those that prefill somebody's prompt besides are the long ones, which is why its 99th percentile is
what a 99th percentile is set against. Exits with 1 where that is exceeded by more than 20 ms.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import socket
import struct
import sys
from functools import partial
from urllib.parse import urlsplit

import trio
from beside_streams import READ_BYTES, request, stream

from trioengine.bench.own_server import own_server

ALLOWED_MS = 20.0  # beyond one step
PATIENCE_S = 5.0
SURELY_READ_S = 0.05
CONFIRMED = "abort confirmed"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close sends RST


class Confirmations:
    """Wakes the task that waits when the server says that an abort is confirmed."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._lot = trio.Event()

    def on_line(self, line: str) -> None:
        """Look at a line of the log, in any thread."""
        if CONFIRMED in line:
            self._token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        self._lot.set()

    async def next(self) -> None:
        """Wait for one; each is for the one client that closes."""
        with trio.fail_after(PATIENCE_S):
            await self._lot.wait()
        self._lot = trio.Event()


async def leave_once(
    port: int, number: int, fate: random.Random, confirmations: Confirmations
) -> float:
    """Ask, wait, close; return the seconds until the engine had confirmed."""
    question = request([500 + number % 9000] * fate.choice((16, 64, 256)), 4000)
    if fate.random() < 1 / 3:
        question = question.replace(b'"stream": true', b'"stream":false')
    connection = await trio.open_tcp_stream("127.0.0.1", port)
    await connection.send_all(question)
    sent_s = trio.current_time()
    with trio.move_on_after(fate.uniform(0.005, 0.15)):
        while await connection.receive_some(READ_BYTES):
            pass
    # A reset takes along what the server has not read yet, so that it may never see the request.
    if trio.current_time() - sent_s > SURELY_READ_S and fate.random() < 1 / 2:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    begin_s = trio.current_time()
    connection.socket.close()
    await confirmations.next()
    return trio.current_time() - begin_s


async def measure(
    num_streams: int, num_clients: int, model: str | None, flags: list[str]
) -> tuple[str, list[float], list[float]]:
    """Return the engine's name, the streams' steps and every client's wait, in seconds."""
    confirmations = Confirmations()
    fate = random.Random(0)
    streams: list[list[float]] = [[] for _ in range(num_streams)]
    waits: list[float] = []
    with own_server(model, flags, on_line=confirmations.on_line) as server:
        port = urlsplit(server.url).port
        async with trio.open_nursery() as nursery:
            for index, times in enumerate(streams):
                nursery.start_soon(keep_streaming, port, 300 + index, times)
            while not all(streams):  # noqa: ASYNC110  # plain lists are cheapest where it counts
                await trio.sleep(0.05)
            for number in range(num_clients):
                wait_s = await leave_once(port, number, fate, confirmations)
                waits.append(wait_s)
            nursery.cancel_scope.cancel()
    gaps = [later - before for times in streams for before, later in itertools.pairwise(times)]
    return server.engine, gaps, waits


async def keep_streaming(port: int, token: int, times: list[float]) -> None:
    """Ask for one long answer after the other."""
    while True:
        await stream(port, request([token] * 32, 500), times)


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that so many do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> int:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--clients", type=int, default=2000)
    arguments = parser.parse_args()
    flags = ["--log-level", "debug", "--max-num-seqs", str(arguments.streams + 1)]
    engine, steps, waits = trio.run(
        partial(measure, arguments.streams, arguments.clients, arguments.model, flags)
    )
    (half_ms, last_ms), (step_ms, long_step_ms) = (
        (percentile(values, 0.5) * 1e3, percentile(values, 0.99) * 1e3) for values in (waits, steps)
    )
    print(engine)
    print(f"{len(waits)} clients left beside {arguments.streams} streams; confirmed after")
    print(f"p50 {half_ms:.1f} ms, p99 {last_ms:.1f} ms, worst {max(waits) * 1e3:.1f} ms")
    print(f"steps of p50 {step_ms:.1f} ms, p99 {long_step_ms:.1f} ms")
    return int(last_ms > long_step_ms + ALLOWED_MS)


if __name__ == "__main__":
    sys.exit(main())
