"""Ten times more requests than the server can answer: how fast the rest is refused, at what cost.

    python benchmarks/overload.py                       # 8 running, 8 waiting
    python benchmarks/overload.py --rounds 10 --factor 30

Starts a server of its own with the default model and ``--max-queue`` of twice what runs. Two phases
take turns, since a machine's speed moves by more within a minute than what is looked for. In one as
many clients as there are places keep asking, each again when it has its answer: that is the peak.
In the other requests arrive by themselves, ``--factor`` times as many a second as can be answered,
at random (a Poisson process), whether or not earlier ones have been answered; each on a connection
that is open already and that nobody else uses meanwhile. Every refusal is timed, from the first
byte of the request to the last of the answer. Exits with 1 where their 99th percentile is 10 ms or
more, or the tokens a second of all rounds have fallen by more than 5 %. (Tokens are the server's
own count: answers end eight at a time, and a phase has too few of them to tell 5 % by.) A round
that comes before the others is not counted: a machine that was idle changes its speed in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import re
import select
import socket
import sys
import time
import urllib.request
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trioengine.bench.own_server import own_server

if TYPE_CHECKING:
    from collections.abc import Callable

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
        patience_s = None if until_s == math.inf else max(until_s - time.perf_counter(), 0.0)
        ready = [number for number, _ in self._poll.poll(patience_s)]
        self._drop_closed({number for number in ready if number not in self._busy})
        busy = [self._busy[number] for number in ready if number in self._busy]
        over = [exchange for exchange in busy if exchange.is_over()]
        for exchange in over:
            self.tally.count(exchange.answer, time.perf_counter() - exchange.begun_s)
            self._free.append(self._busy.pop(exchange.socket.fileno()))
        return len(over)

    def _drop_closed(self, numbers: set[int]) -> None:
        """Forget connections that nobody used for so long that the server has closed them."""
        for exchange in [each for each in self._free if each.socket.fileno() in numbers]:
            self._free.remove(exchange)
            self._poll.unregister(exchange.socket.fileno())
            exchange.socket.close()

    def settle(self, places: int) -> None:
        """Wait until so few are busy, and let so many be."""
        while len(self._busy) > places:
            self.wait(math.inf)
        while len(self._busy) < places:
            self.ask()

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


def arrive(crowd: Crowd, seconds: float, *, rate: float, chance: random.Random) -> None:
    """Ask ``rate`` times a second on average, so long, whatever has been answered."""
    due_s = time.perf_counter()
    end_s = due_s + seconds
    while due_s < end_s:
        crowd.wait(due_s)
        while due_s <= time.perf_counter():
            crowd.ask()
            due_s += chance.expovariate(rate)


@dataclasses.dataclass
class Outcome:
    """Of all turns of one phase.

    Attributes:
        seconds: That were counted.
        tokens: Generated in them.
        num_arrived: Requests.
        refusal_s: How long each refusal took.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    num_arrived: int = 0
    refusal_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def watch(self, crowd: Crowd, seconds: float, load: Callable[[Crowd, float], None]) -> None:
        """Add what comes of ``load``. The first quarter of the time is not counted."""
        load(crowd, seconds / 4)
        tally, before, begin_s = Tally(), crowd.generated(), time.perf_counter()
        crowd.tally = tally
        load(crowd, seconds * 3 / 4)
        self.seconds += time.perf_counter() - begin_s
        self.tokens += crowd.generated() - before
        self.num_arrived += tally.num_answered + len(tally.refusal_s)
        self.refusal_s += tally.refusal_s


def percentile_ms(seconds: list[float], share: float) -> float:
    """Return the smallest value that so many do not exceed, in ms; infinite of nothing."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1] * 1e3 if seconds else math.inf


def verdict(peak: Outcome, under: Outcome) -> int:
    """Print what was measured and whether it is enough; return the exit code."""
    share, last_ms = under.rate / peak.rate, percentile_ms(under.refusal_s, 0.99)
    met = {True: "met", False: "MISSED"}
    arrivals = under.num_arrived / under.seconds
    times = arrivals * ANSWER_TOKENS / peak.rate
    print(f"peak: {peak.rate:.0f} tok/s")
    print(f"overload: {arrivals:.0f} requests/s, {times:.1f} times what can be answered")
    print(f"tokens: {share:.3f} of the peak (at least {LEAST_SHARE}: {met[share >= LEAST_SHARE]})")
    print(
        f"refusals: {len(under.refusal_s)}, p50 {percentile_ms(under.refusal_s, 0.5):.1f} ms, "
        f"p99 {last_ms:.1f} ms (below {MOST_MS:.0f}: {met[last_ms < MOST_MS]}), "
        f"worst {percentile_ms(under.refusal_s, 1.0):.1f} ms"
    )
    return int(last_ms >= MOST_MS or share < LEAST_SHARE)


def measure(port: int, options: argparse.Namespace) -> tuple[Outcome, Outcome]:
    """Return the peak, and what ``--factor`` times as many requests made of it."""
    crowd, chance = Crowd(port), random.Random(SEED)

    def play(peak: Outcome, under: Outcome) -> None:
        crowd.settle(2 * options.running)
        peak.watch(crowd, options.seconds, keep_asking)
        rate = options.factor * peak.rate / ANSWER_TOKENS
        under.watch(crowd, options.seconds, partial(arrive, rate=rate, chance=chance))

    play(Outcome(), Outcome())
    peak, under = Outcome(), Outcome()
    for number in range(1, options.rounds + 1):
        play(peak, under)
        print(f"round {number}: {under.rate / peak.rate:.3f} of the peak so far", flush=True)
    return peak, under


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each of the two phases")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each turn")
    options, flags = parser.parse_known_args()
    bounds = ["--max-num-seqs", str(options.running), "--max-queue", str(2 * options.running)]
    with own_server(options.model, [*bounds, "--log-level", "info", *flags]) as server:
        peak, under = measure(urlsplit(server.url).port or 0, options)
    print(server.engine)
    return verdict(peak, under)


if __name__ == "__main__":
    sys.exit(main())
