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
import dataclasses
import itertools
import json
import math
import random
import re
import select
import socket
import sys
import time
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trioengine.bench.own_server import own_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READ_BYTES = 65536
MOST_MS = 10.0
LEAST_SHARE = 0.95
ANSWER_TOKENS = 64
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


class Exchange:
    """One connection, and the request that is under way on it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.answer = b""
        self.begun_s = 0.0

    def ask(self, request: bytes) -> None:
        """Begin. A request is small enough to leave at once."""
        self.answer, self.begun_s = b"", time.perf_counter()
        self.socket.send(request)

    def is_over(self) -> bool:
        """Take what has arrived; whether the answer is whole.

        Raises:
            ConnectionError: The server closed a connection that was to stay.
        """
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection that was to stay")
        self.answer += data
        head, blank, body = self.answer.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return bool(blank) and len(body) >= int(length)


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
    """Clients of one server: one thread on ``epoll``, since the engine wants the same cores."""

    def __init__(self, port: int) -> None:
        self.tally = Tally()
        self._port, self._num_asked = port, 0
        self._poll = select.epoll()
        self._busy: dict[int, Exchange] = {}
        self._free: list[Exchange] = []

    def ask(self) -> None:
        """Ask something that nobody has asked before: no prefix cache shall answer."""
        exchange = self._free.pop() if self._free else self._connect()
        self._busy[exchange.socket.fileno()] = exchange
        self._num_asked += 1
        exchange.ask(question(self._num_asked))

    def wait(self, until_s: float) -> int:
        """Take what arrives until then, or until an answer is whole; return how many are."""
        ready = self._poll.poll(max(until_s - time.perf_counter(), 0.0))
        over = [self._busy[number] for number, _ in ready if self._busy[number].is_over()]
        for exchange in over:
            self.tally.count(exchange.answer, time.perf_counter() - exchange.begun_s)
            self._free.append(self._busy.pop(exchange.socket.fileno()))
        return len(over)

    def generated(self) -> float:
        """Return how many tokens the server has generated so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
            found = GENERATED.search(answer.read())
        if found is None:
            raise ConnectionError("the server counts no tokens")
        return float(found[1])

    def _connect(self) -> Exchange:
        exchange = Exchange(self._port)
        self._poll.register(exchange.socket.fileno(), select.EPOLLIN)
        return exchange


def keep_asking(crowd: Crowd, seconds: float) -> None:
    """Ask again for each answer, so long."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for _ in range(crowd.wait(end_s)):
            crowd.ask()


def arrive(crowd: Crowd, seconds: float, gaps: Iterator[float]) -> None:
    """Ask after each of the ``gaps`` (s), so long, whatever has been answered."""
    due_s = time.perf_counter()
    end_s = due_s + seconds
    while due_s < end_s:
        crowd.wait(due_s)
        while due_s <= time.perf_counter():
            crowd.ask()
            due_s += next(gaps)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one phase: tokens a second, arrivals a second, each refusal's time."""

    tokens: float
    arrivals: float
    refusal_s: list[float]


def watch(crowd: Crowd, seconds: float, load: Callable[[Crowd, float], None]) -> Outcome:
    """Return what came of ``load``. The first quarter of the time is not counted."""
    load(crowd, seconds / 4)
    tally, before, begin_s = Tally(), crowd.generated(), time.perf_counter()
    crowd.tally = tally
    load(crowd, seconds * 3 / 4)
    elapsed_s = time.perf_counter() - begin_s
    tokens = crowd.generated() - before
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


def measure(port: int, places: int, factor: float, seconds: float) -> tuple[Outcome, Outcome]:
    """Return the peak, and what ``factor`` times as many requests made of it."""
    crowd, random_gaps = Crowd(port), random.Random(SEED)
    for _ in range(places):
        crowd.ask()
    peak = watch(crowd, seconds, keep_asking)
    rate = factor * peak.tokens / ANSWER_TOKENS
    gaps = (random_gaps.expovariate(rate) for _ in itertools.count())
    return peak, watch(crowd, seconds, lambda crowd, time_s: arrive(crowd, time_s, gaps))


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
        peak, under = measure(port, places, options.factor, options.seconds)
    print(server.engine)
    return verdict(peak, under)


if __name__ == "__main__":
    sys.exit(main())
