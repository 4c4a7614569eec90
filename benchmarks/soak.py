"""Minutes of random clients and faults on a real model: nothing grows, all requests add up.

    python benchmarks/soak.py                         # 30 minutes with the default model
    python benchmarks/soak.py --minutes 5 --clients 48

Starts a server of its own, which may start its engine again, and lets clients do what clients do:
read a stream to its end, leave while they wait or while they read, close one half, read a few bytes
a second until they are thrown out, ask for several answers, cancel by id from another connection,
give a deadline that passes, and send what is no request. Meanwhile the engine is killed (SIGKILL),
stopped and continued, put to sleep and woken up over HTTP.

The rounds come in cycles: one for each kind of fault, one with all of them at once, and two calm
ones, at the end of which both processes are looked at (resident memory, descriptors, threads). An
engine is as old at the end of one cycle as at the end of another, so these can be compared although
none outlives its cycle. After each round, when nothing runs any more, the metrics must agree with
the clients. Exits with 1, and says which check failed with which numbers, where

- the server has not counted exactly the requests that were sent, by endpoint, with the outcomes
  that those saw who stayed; the others may have no outcome but those of one who leaves,
- a request was aborted, and that was neither confirmed nor ended by its engine's death,
- an engine was started again that nobody had killed, or was not that somebody had,
- a block is not free when nothing runs,
- resident memory of a process has grown by 2 % or more since it was warm (a quarter of the cycles),
  or descriptors or threads by any.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

import trio
from soak_visitors import CUT, Clients, Ledger, Operators, engine_of, is_alive

from trioengine.bench.own_server import own_server

CYCLE = ("kill", "sleep", "halt", "mixed", "calm", "calm")
ROUND_S = 20.0
QUIET_WITHIN_S = 120.0  # the longest wait before a dead engine is started again, and more
GROWTH = 1.02
SLOW_TIMEOUT_S = 2
CACHE_GIB = 0.25  # small, so that all of it has been written to when the rounds that warm up end
ENDLESS = 10_000  # restarts
LINES = 60
OUTCOME = re.compile(r'trioengine_requests_total\{endpoint="([^"]*)",outcome="([^"]*)"\}')
ABORTED = "trioengine_requests_aborted_total"
# Of who left, or may have been thrown out, before it knew.
UNSEEN = {
    *("client_disconnect", "slow_client", "ok"),
    *("restarting", "sleeping", "stalled", "queue_timeout"),
}
NEVER = (CUT, "internal_error", "engine_dead", "overloaded", "draining")


class Footprint(NamedTuple):
    """What a process holds on to."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Look at a process."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        counts = [len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task")]
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), *counts)

    def __str__(self) -> str:
        mib = self.resident_bytes / 2**20
        return f"{mib:.1f} MiB, {self.descriptors} descriptors, {self.threads} threads"


class Look(NamedTuple):
    """Both processes at the end of a calm round."""

    server: Footprint
    engine: Footprint
    engine_pid: int

    @classmethod
    async def at(cls, server_pid: int) -> Look:
        """Look when idle worker threads have gone, which takes them 10 s."""
        await trio.sleep(11)
        pid = engine_of(server_pid)
        return cls(Footprint.of(server_pid), Footprint.of(pid), pid)


def metrics_of(url: str) -> dict[str, float]:
    """Return every sample of ``/metrics``."""
    with urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


async def quiet(url: str) -> dict[str, float]:
    """Wait until the engine is ready and nothing runs, nobody connected but us; return the metrics.

    Raises:
        RuntimeError: It does not become so.
    """
    now: dict[str, float] = {}
    wanted = {
        "trioengine_requests_running": 0,
        "trioengine_requests_waiting": 0,
        "trioengine_open_connections": 1,
        'trioengine_engine_state{state="ready"}': 1,
    }
    with trio.move_on_after(QUIET_WITHIN_S):
        while True:
            now = await trio.to_thread.run_sync(metrics_of, url)
            if all(now.get(name) == value for name, value in wanted.items()):
                return now
            await trio.sleep(0.2)
    found = {name: now.get(name) for name in wanted}
    states = [name for name, value in now.items() if "engine_state{" in name and value]
    raise RuntimeError(f"not quiet after {QUIET_WITHIN_S:g} s: {found}, {states}; want {wanted}")


class Accounts:
    """What the metrics say has to agree with what is known."""

    def __init__(self, before: dict[str, float], now: dict[str, float]) -> None:
        self.wrong: list[str] = []
        self._before, self._now = before, now

    def _rise(self, name: str) -> int:
        return round(self._now.get(name, 0.0) - self._before.get(name, 0.0))

    def _check(self, what: str, got: float, wanted: float) -> None:
        if got != wanted:
            self.wrong.append(f"{what}: the metrics say {got:g}, but it is {wanted:g}")

    def check_requests(self, ledger: Ledger) -> None:
        """Each request has one outcome, and it is the one that its client saw."""
        counted: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for name in self._now:
            if found := OUTCOME.fullmatch(name):
                counted[found[1]][found[2]] += self._rise(name)
        for endpoint, sent in ledger.sent.items():
            self._check(f"requests for {endpoint}", counted[endpoint].total(), sent)
            seen = {outcome: n for (each, outcome), n in ledger.seen.items() if each == endpoint}
            for outcome in sorted(seen.keys() | counted[endpoint].keys()):
                self._check_outcome(endpoint, outcome, counted[endpoint][outcome], seen)

    def _check_outcome(self, endpoint: str, outcome: str, got: int, seen: dict[str, int]) -> None:
        sure = seen.get(outcome, 0)
        what = f"{endpoint} {outcome!r}"
        if outcome in NEVER and (got or sure):
            self.wrong.append(f"{what}: {sure} saw it and the metrics say {got}, but none may")
        elif got < sure:
            self.wrong.append(f"{what}: {sure} saw it, but the metrics say {got}")
        elif outcome not in UNSEEN:
            self._check(what, got, sure)

    def check_aborts(self) -> None:
        """Each abort was confirmed, or its engine died first."""
        aborted = sum(self._rise(name) for name in self._now if name.startswith(ABORTED))
        confirmed = self._rise("trioengine_abort_latency_seconds_count")
        lost = self._rise("trioengine_aborts_unconfirmed_total")
        what = f"aborts confirmed ({confirmed}) or ended by a death ({lost})"
        self._check(what, confirmed + lost, aborted)

    def check_engine(self, operators: Operators) -> None:
        """It was started again as often as it was killed, and all its blocks are free."""
        restarts = self._rise("trioengine_engine_restarts_total")
        if not operators.kills - operators.doubtful <= restarts <= operators.kills:
            kills = f"{operators.kills} kills, {operators.doubtful} perhaps of one that was leaving"
            self.wrong.append(f"restarts: the metrics say {restarts}, but there were {kills}")
        self._check(
            "free blocks",
            self._now["trioengine_kv_blocks_free"],
            self._now["trioengine_kv_blocks_total"],
        )
        self._check("values that made no sense", self._rise("trioengine_metrics_errors_total"), 0)


async def soak(url: str, pid: int, options: argparse.Namespace) -> list[str]:
    """Let them come, cycle by cycle; return what is wrong."""
    fate = random.Random(options.seed)
    ledger = Ledger(urlsplit(url).port or 0)
    clients, operators = Clients(ledger, fate), Operators(pid, ledger, fate)
    begin, end_s = await quiet(url), time.monotonic() + options.minutes * 60
    looks: list[Look] = []
    while time.monotonic() < end_s:
        for kind in CYCLE:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(clients.crowd, options.clients, ROUND_S)
                nursery.start_soon(operators.work, kind, ROUND_S)
            now = await quiet(url)
            accounts = Accounts(begin, now)
            accounts.check_requests(ledger)
            accounts.check_aborts()
            accounts.check_engine(operators)
            num_sent = sum(ledger.sent.values())
            print(f"{num_sent:7d} requests, {operators.kills} kills, {operators.naps} naps: {kind}")
            if accounts.wrong:
                return [f"after a {kind} round: {each}" for each in accounts.wrong]
        looks.append(await Look.at(pid))
        print(f"server {looks[-1].server}; engine {looks[-1].engine}")
    report(ledger, now)
    return growth(looks)


def report(ledger: Ledger, now: dict[str, float]) -> None:
    """Say what there was."""
    print(f"sent {dict(ledger.sent)}")
    print({f"{endpoint} {outcome}": n for (endpoint, outcome), n in sorted(ledger.seen.items())})
    wanted = (ABORTED, "trioengine_abort_latency_seconds_count", "trioengine_aborts_unconfirmed")
    print({name: value for name, value in now.items() if name.startswith(wanted)})


def growth(looks: list[Look]) -> list[str]:
    """Return who holds more than when it was warm."""
    warm, last = looks[len(looks) // 4], looks[-1]
    if warm is last:
        print("one cycle only: too short to say whether anything grows")
    wrong = []
    for name, first, now in (
        ("server", warm.server, last.server),
        ("engine", warm.engine, last.engine),
    ):
        grown = now.resident_bytes / first.resident_bytes
        print(f"{name}: resident memory x {grown:.4f} since it was warm")
        if grown >= GROWTH or now.descriptors > first.descriptors or now.threads > first.threads:
            wrong.append(f"the {name} holds {now} (x {grown:.4f}), but {first} when it was warm")
    return wrong


def main() -> int:
    """Soak, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    bounds = ["--slow-client-timeout", str(SLOW_TIMEOUT_S), "--kv-cache-memory", str(CACHE_GIB)]
    faults = ["--enable-admin", "--engine-restarts", str(ENDLESS)]
    lines: collections.deque[str] = collections.deque(maxlen=LINES)
    with own_server(options.model, [*bounds, *faults, *flags], on_line=lines.append) as server:
        print(server.engine)
        try:
            wrong = trio.run(partial(soak, server.url, server.pid, options))
            last_engine = engine_of(server.pid)
        except Exception as error:  # it fails as clearly as a check does
            traceback.print_exc()
            wrong, last_engine = [f"the soak broke off: {error!r}"], 0
    if last_engine and is_alive(last_engine):
        wrong.append(f"engine {last_engine} has outlived its server")
    if wrong:
        print("the server's last lines:", *lines, sep="\n  ")
    for line in wrong:
        print(f"WRONG: {line}")
    print("FAILED" if wrong else "PASSED")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
