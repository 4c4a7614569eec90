"""Ten times more requests than the server can answer: how fast the rest is refused, at what cost.

    python benchmarks/overload.py                       # 8 running, 8 waiting
    python benchmarks/overload.py --seconds 40 --factor 30

Starts a server of its own with the default model and ``--max-queue`` of twice what runs. First as
many clients as there are places keep asking, each again when it has its answer: their answers a
second are the peak. Then requests arrive by themselves, ``--factor`` times as many a second as
those, at random (a Poisson process), whether or not earlier ones have been answered; each on a
connection that is open already and that nobody else uses meanwhile. Every refusal is timed, from
the first byte of the request to the last of the answer. Exits with 1 where their 99th percentile is
10 ms or more, or the tokens a second have fallen by more than 5 %. (Tokens are the server's own
count: answers end eight at a time, and a phase has too few of them to tell 5 % by.)
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import random
import re
import sys
from urllib.parse import urlsplit

import trio

from trioengine.bench.own_server import own_server

READ_BYTES = 65536
MOST_MS = 10.0
LEAST_SHARE = 0.95
ANSWER_TOKENS = 64
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
GENERATED = re.compile(rb"^trioengine_generation_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)
OVERLOADED = b"HTTP/1.1 429 "
SEED = 20261202


def question(number: int) -> bytes:
    """Return the bytes of a request on a connection that stays."""
    body = json.dumps(
        {"prompt": [300 + number % 40_000] * 32, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


async def exchange(stream: trio.SocketStream, request: bytes) -> bytes:
    """Send ``request``; return the whole answer, head included."""
    await stream.send_all(request)
    answer = bytearray()
    while not _is_whole(answer):
        data = await stream.receive_some(READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection that was to stay")
        answer += data
    return bytes(answer)


def _is_whole(answer: bytearray) -> bool:
    head, blank, body = answer.partition(b"\r\n\r\n")
    if not blank:
        return False
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length)


@dataclasses.dataclass
class Tally:
    """What became of requests.

    Attributes:
        num_answered: Whole answers.
        refusal_s: How long each 429 took.
    """

    num_answered: int = 0
    refusal_s: list[float] = dataclasses.field(default_factory=list)

    def count(self, answer: bytes, elapsed_s: float) -> None:
        """Count one. Raises ``ConnectionError`` for what is neither an answer nor a refusal."""
        if answer.startswith(OVERLOADED):
            self.refusal_s.append(elapsed_s)
        elif answer.startswith(b"HTTP/1.1 200 "):
            self.num_answered += 1
        else:
            raise ConnectionError(answer.partition(b"\r\n")[0].decode("latin-1"))


class Crowd:
    """Clients of one server, and the connections that are free."""

    def __init__(self, port: int) -> None:
        self.tally = Tally()
        self._port, self._num_asked = port, 0
        self._free: collections.deque[trio.SocketStream] = collections.deque()

    async def ask(self) -> None:
        """Ask once, something that nobody has asked before: no prefix cache shall answer."""
        stream = self._free.popleft() if self._free else await self._connect()
        self._num_asked += 1
        request, begin_s = question(self._num_asked), trio.current_time()
        answer = await exchange(stream, request)
        self.tally.count(answer, trio.current_time() - begin_s)
        self._free.append(stream)

    async def generated(self) -> float:
        """Return how many tokens the server has generated so far."""
        stream = await self._connect()
        async with stream:
            found = GENERATED.search(await exchange(stream, SCRAPE))
        if found is None:
            raise ConnectionError("the server counts no tokens")
        return float(found[1])

    async def keep_asking(self) -> None:
        """Ask, and again when there is an answer, without end."""
        while True:
            await self.ask()

    async def arrive(self, rate: float) -> None:
        """Ask ``rate`` times a second on average, without end."""
        gaps, due_s = random.Random(SEED), trio.current_time()
        async with trio.open_nursery() as nursery:
            while True:
                due_s += gaps.expovariate(rate)
                await trio.sleep_until(due_s)
                nursery.start_soon(self.ask)

    async def _connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self._port)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one phase: tokens a second, arrivals a second, each refusal's time."""

    tokens: float
    arrivals: float
    refusal_s: list[float]


async def watch(crowd: Crowd, seconds: float, *, clients: int = 0, rate: float = 0.0) -> Outcome:
    """Return what came of ``clients`` that keep asking, or of arrivals at ``rate`` a second.

    The first quarter of the time is not counted.
    """
    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(crowd.keep_asking)
        if rate:
            nursery.start_soon(crowd.arrive, rate)
        await trio.sleep(seconds / 4)
        crowd.tally, begin_s, before = Tally(), trio.current_time(), await crowd.generated()
        await trio.sleep(seconds * 3 / 4)
        tally, elapsed_s = crowd.tally, trio.current_time() - begin_s
        tokens = await crowd.generated() - before
        nursery.cancel_scope.cancel()
    arrived = tally.num_answered + len(tally.refusal_s)
    return Outcome(tokens / elapsed_s, arrived / elapsed_s, tally.refusal_s)


def percentile_ms(seconds: list[float], share: float) -> float:
    """Return the smallest value that so many do not exceed, in ms; infinite of nothing."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1] * 1e3 if seconds else math.inf


def verdict(peak: Outcome, under: Outcome) -> int:
    """Print what was measured and whether it is enough; return the exit code."""
    share, last_ms = under.tokens / peak.tokens, percentile_ms(under.refusal_s, 0.99)
    met = {True: "met", False: "MISSED"}
    times = under.arrivals * ANSWER_TOKENS / peak.tokens
    print(f"peak: {peak.tokens:.0f} tok/s")
    print(f"overload: {under.arrivals:.0f} requests/s, {times:.1f} times what can be answered")
    print(f"tokens: {share:.3f} of the peak (at least {LEAST_SHARE}: {met[share >= LEAST_SHARE]})")
    print(
        f"refusals: {len(under.refusal_s)}, p50 {percentile_ms(under.refusal_s, 0.5):.1f} ms, "
        f"p99 {last_ms:.1f} ms (below {MOST_MS:.0f}: {met[last_ms < MOST_MS]}), "
        f"worst {percentile_ms(under.refusal_s, 1.0):.1f} ms"
    )
    return int(last_ms >= MOST_MS or share < LEAST_SHARE)


async def measure(port: int, places: int, factor: float, seconds: float) -> tuple[Outcome, Outcome]:
    """Return the peak, and what ``factor`` times as many requests made of it."""
    crowd = Crowd(port)
    peak = await watch(crowd, seconds, clients=places)
    return peak, await watch(crowd, seconds, rate=factor * peak.tokens / ANSWER_TOKENS)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two phases")
    options, flags = parser.parse_known_args()
    places = 2 * options.running
    bounds = ["--max-num-seqs", str(options.running), "--max-queue", str(places)]
    with own_server(options.model, [*bounds, "--log-level", "info", *flags]) as server:
        port = urlsplit(server.url).port or 0
        peak, under = trio.run(measure, port, places, options.factor, options.seconds)
    print(server.engine)
    return verdict(peak, under)


if __name__ == "__main__":
    sys.exit(main())
