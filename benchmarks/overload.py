"""Ten times more requests than fit: how fast the rest is refused, and what that costs others.

    python benchmarks/overload.py                       # 8 running, 80 more clients than that
    python benchmarks/overload.py --seconds 20 --factor 10

Starts a server of its own with the default model and ``--max-queue`` of twice what runs. First as
many clients as there are places keep asking, each again when it has its answer: the tokens a second
of those are the peak. Then ten times as many do, and who is refused comes again after a short pause
whatever ``Retry-After`` says. The refusals are timed from the first byte of the request to the last
of the answer, on a connection that is open already, by a task of its own that asks at steady
intervals; the rest of the crowd is the load. Exits with 1 where the 99th percentile of a refusal is
10 ms or more, or the tokens a second have fallen by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import partial
from urllib.parse import urlsplit

import trio

from trioengine.bench.own_server import own_server

READ_BYTES = 65536
MOST_MS = 10.0
LEAST_SHARE = 0.95
PROBE_EVERY_S = 0.02
PAUSE_S = 0.5  # of a client that was refused: a tenth of what it is told
ANSWER_TOKENS = 64
OVERLOADED = b"HTTP/1.1 429 "


def question(number: int) -> bytes:
    """Return the bytes of a request on a connection that stays."""
    body = json.dumps(
        {"prompt": [300 + number % 9000] * 32, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


class Connection:
    """One kept connection, for as long as the server keeps it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stream: trio.SocketStream | None = None

    async def connect(self) -> trio.SocketStream:
        """Return the connection, a new one where the last has ended."""
        if self._stream is None:
            self._stream = await trio.open_tcp_stream("127.0.0.1", self._port)
        return self._stream

    async def exchange(self, request: bytes) -> bytes:
        """Send ``request``; return the whole answer, head included."""
        stream = await self.connect()
        await stream.send_all(request)
        answer = b""
        while not _is_whole(answer):
            data = await stream.receive_some(READ_BYTES)
            if not data:
                break
            answer += data
        if b"connection: close" in answer.partition(b"\r\n\r\n")[0].lower():
            await stream.aclose()
            self._stream = None
        return answer


def _is_whole(answer: bytes) -> bool:
    head, blank, body = answer.partition(b"\r\n\r\n")
    if not blank:
        return False
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length or 0)


class Load:
    """Clients that keep asking.

    Attributes:
        num_answered: Whole answers, each of ``ANSWER_TOKENS``.
        num_refused: 429.
        refusal_s: How long the probe's refusals took.
    """

    def __init__(self, port: int) -> None:
        self.num_answered = self.num_refused = 0
        self.refusal_s: list[float] = []
        self._port = port

    async def keep_asking(self, number: int) -> None:
        """Be one client."""
        connection = Connection(self._port)
        while True:
            answer = await connection.exchange(question(number))
            if answer.startswith(OVERLOADED):
                self.num_refused += 1
                await trio.sleep(PAUSE_S)
            else:
                self.num_answered += 1

    async def probe(self) -> None:
        """Time refusals. One that gets in is a client like the others meanwhile, in a task."""
        async with trio.open_nursery() as nursery:
            for number in range(10**9):
                nursery.start_soon(self._probe_once, number)
                await trio.sleep(PROBE_EVERY_S)

    async def _probe_once(self, number: int) -> None:
        connection = Connection(self._port)
        stream = await connection.connect()
        async with stream:
            begin_s = time.perf_counter()
            answer = await connection.exchange(question(number))
            if answer.startswith(OVERLOADED):
                self.refusal_s.append(time.perf_counter() - begin_s)
            else:
                self.num_answered += 1


async def run(port: int, num_clients: int, seconds: float, *, probe: bool) -> tuple[float, Load]:
    """Return the tokens a second over the latter three quarters of the time, and the load."""
    load = Load(port)
    async with trio.open_nursery() as nursery:
        for number in range(num_clients):
            nursery.start_soon(load.keep_asking, number)
        await trio.sleep(seconds / 4)
        if probe:
            nursery.start_soon(load.probe)
        before, begin_s = load.num_answered, trio.current_time()
        await trio.sleep(seconds * 3 / 4)
        answered = load.num_answered - before
        elapsed_s = trio.current_time() - begin_s
        nursery.cancel_scope.cancel()
    return answered * ANSWER_TOKENS / elapsed_s, load


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that so many do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--factor", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    options, flags = parser.parse_known_args()
    places = 2 * options.running
    bounds = ["--max-num-seqs", str(options.running), "--max-queue", str(places)]
    with own_server(options.model, [*bounds, "--log-level", "info", *flags]) as server:
        port = urlsplit(server.url).port
        peak, _ = trio.run(partial(run, port, places, options.seconds, probe=False))
        crowd = options.factor * places
        under, load = trio.run(partial(run, port, crowd, options.seconds, probe=True))
    half_ms, last_ms = (percentile(load.refusal_s, share) * 1e3 for share in (0.5, 0.99))
    print(server.engine)
    print(f"{places} clients, as many as there are places: {peak:.0f} tok/s")
    print(f"{crowd} clients: {under:.0f} tok/s = {under / peak:.3f} of that")
    print(
        f"{load.num_refused} of the crowd refused; {len(load.refusal_s)} timed: p50 {half_ms:.1f}"
    )
    print(f"ms, p99 {last_ms:.1f} ms, worst {max(load.refusal_s) * 1e3:.1f} ms")
    return int(last_ms >= MOST_MS or under < LEAST_SHARE * peak)


if __name__ == "__main__":
    sys.exit(main())
