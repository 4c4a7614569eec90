"""Minutes of random clients and faults on a real model: nothing grows, all requests add up.

    python benchmarks/soak.py                         # 30 minutes with the default model
    python benchmarks/soak.py --minutes 5 --clients 48

Starts a server of its own and lets clients do what clients do: read a stream to its end, leave
while they wait or while they read, close one half, read a few bytes a second until they are thrown
out, ask for several answers, cancel by id from another connection, give a deadline that passes, and
send what is no request. After each round, when nothing runs any more, it looks at both processes
(resident memory, descriptors, threads) and at the metrics. Exits with 1 where

- resident memory of a process has grown by 2 % or more since the rounds that warmed it up (a
  quarter of them), or descriptors, threads or used blocks by any,
- the server has not counted exactly the requests that were sent, with outcomes that agree with what
  the clients saw, or has not confirmed each abort.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

import trio

from trioengine.bench.own_server import own_server

READ_BYTES = 65536
ROUND_S = 30.0
QUIET_WITHIN_S = 60.0
GROWTH = 1.02
SLOW_TIMEOUT_S = 2
CACHE_GIB = 0.25  # small, so that all of it has been written to when the rounds that warm up end
OUTCOME = re.compile(r'trioengine_requests_total\{endpoint="([^"]*)",outcome="([^"]*)"\}')
COMPLETIONS, CANCEL = "/v1/completions", "/v1/requests/<response_id>/cancel"


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


def child_of(pid: int) -> int:
    """Return the one child of a process: the engine."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if children := (task / "children").read_text().split():
            return int(children[0])
    raise RuntimeError(f"process {pid} has no engine")


def metrics_of(url: str) -> dict[str, float]:
    """Return every sample of ``/metrics``."""
    with urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def post(path: str, body: bytes, *fields: str) -> bytes:
    """Return the bytes of a request that ends its connection."""
    head = [f"POST {path} HTTP/1.1", "Host: soak", "Connection: close", *fields]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Clients:
    """Everybody who comes, and what they saw.

    Attributes:
        sent: Whole requests, by the endpoint they were for.
        seen: Ends that a client can be sure of: ``ok``, ``400``, ``504``, ``cancelled``.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.sent: collections.Counter[str] = collections.Counter()
        self.seen: collections.Counter[str] = collections.Counter()
        self._port = port
        self._fate = random.Random(seed)
        self._visits = (
            *(self.read_all, self.read_all, self.leave, self.leave, self.half_close),
            *(self.read_slowly, self.cancel, self.give_deadline, self.talk_nonsense),
        )

    async def crowd(self, num_clients: int, duration_s: float) -> None:
        """Keep so many clients coming for so long; return when the last has gone."""
        async with trio.open_nursery() as nursery:
            for _ in range(num_clients):
                nursery.start_soon(self._come_again, trio.current_time() + duration_s)

    async def _come_again(self, until_s: float) -> None:
        while trio.current_time() < until_s:
            await trio.sleep(self._fate.random() * 0.2)
            with contextlib.suppress(trio.BrokenResourceError):
                await self._fate.choice(self._visits)()

    # Visits --------------------------------------------------------------------------------------

    def question(self, **fields: object) -> bytes:
        """Return the bytes of some request for text."""
        fate = self._fate
        body = {
            "prompt": [fate.randrange(300, 9000) for _ in range(fate.choice((4, 30, 200)))],
            "max_tokens": fate.randrange(1, 60),
            "temperature": fate.choice((0.0, 0.8)),
            "n": fate.choice((1, 1, 1, 3)),
            "stream": fate.random() < 0.7,
            **({"logprobs": 2} if fate.random() < 0.1 else {}),
            **fields,
        }
        return post(COMPLETIONS, json.dumps(body).encode())

    async def _ask(self, question: bytes) -> trio.SocketStream:
        connection = await trio.open_tcp_stream("127.0.0.1", self._port)
        await connection.send_all(question)
        self.sent[COMPLETIONS] += 1
        return connection

    async def _read(self, connection: trio.SocketStream) -> bytes:
        answer = b""
        while data := await connection.receive_some(READ_BYTES):
            answer += data
        return answer

    async def read_all(self) -> None:
        """Be an honest client."""
        async with await self._ask(self.question()) as connection:
            answer = await self._read(connection)
        whole = answer.endswith((b"data: [DONE]\n\n\r\n0\r\n\r\n", b"}"))
        self.seen["ok" if answer.startswith(b"HTTP/1.1 200 ") and whole else "odd"] += 1

    async def leave(self) -> None:
        """Go at some moment."""
        async with await self._ask(self.question(max_tokens=400)) as connection:
            with trio.move_on_after(self._fate.expovariate(4)):
                await self._read(connection)

    async def half_close(self) -> None:
        """Say that nothing more will be said, which is taken for leaving."""
        async with await self._ask(self.question(max_tokens=400)) as connection:
            await trio.sleep(self._fate.random() * 0.2)
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.send_eof()
                await self._read(connection)

    async def read_slowly(self) -> None:
        """Read next to nothing for a while, or until thrown out."""
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await sock.connect(("127.0.0.1", self._port))
        async with trio.SocketStream(sock) as connection:
            await connection.send_all(self.question(max_tokens=400, stream=True, logprobs=4))
            self.sent[COMPLETIONS] += 1
            for _ in range(self._fate.randrange(1, 40)):
                if not await connection.receive_some(10):
                    break
                await trio.sleep(0.1)

    async def cancel(self) -> None:
        """End a stream from another connection."""
        async with await self._ask(self.question(max_tokens=400, stream=True)) as connection:
            answer = b""
            while not (found := re.search(rb'"id":"([^"]+)"', answer)):
                if not (data := await connection.receive_some(READ_BYTES)):
                    return
                answer += data
            path = f"/v1/requests/{found[1].decode()}/cancel"
            async with await trio.open_tcp_stream("127.0.0.1", self._port) as other:
                await other.send_all(post(path, b""))
                self.sent[CANCEL] += 1
                confirmed = (await self._read(other)).startswith(b"HTTP/1.1 200 ")
            answer += await self._read(connection)
        if confirmed:
            self.seen["cancelled" if b'"cancelled"' in answer else "odd"] += 1

    async def give_deadline(self) -> None:
        """Want it sooner than it can be."""
        question = self.question(max_tokens=400, timeout=0.05, stream=False)
        async with await self._ask(question) as connection:
            answer = await self._read(connection)
        self.seen["504" if answer.startswith(b"HTTP/1.1 504 ") else "other"] += 1

    async def talk_nonsense(self) -> None:
        """Send what cannot be answered."""
        nonsense = (
            self.question(temperature=-1),
            self.question(prompt=None),
            post(COMPLETIONS, b'{"prompt": "x'),
            post(COMPLETIONS, b"\xff" * 2000),
        )
        async with await self._ask(self._fate.choice(nonsense)) as connection:
            answer = await self._read(connection)
        self.seen["400" if answer.startswith(b"HTTP/1.1 400 ") else "odd"] += 1


def accounts(clients: Clients, before: dict[str, float], now: dict[str, float]) -> list[str]:
    """Return what does not add up between the clients and the metrics."""
    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, value in now.items():
        if found := OUTCOME.fullmatch(name):
            counted[found[1], found[2]] += round(value - before.get(name, 0.0))
    wrong = []

    def check(what: str, got: float, wanted: float, *, least: bool = False) -> None:
        if got < wanted if least else got != wanted:
            wrong.append(f"{what}: {got:g}, but {wanted:g} {'at least' if least else 'exactly'}")

    for endpoint, sent in clients.sent.items():
        total = sum(n for (each, _), n in counted.items() if each == endpoint)
        check(f"requests for {endpoint}", total, sent)
    check("odd answers", clients.seen["odd"], 0)
    check("answered in full", counted[COMPLETIONS, "ok"], clients.seen["ok"], least=True)
    check("deadlines", counted[COMPLETIONS, "deadline_exceeded"], clients.seen["504"])
    check("cancels", counted[COMPLETIONS, "cancelled"], clients.seen["cancelled"])
    aborted = sum(v for k, v in now.items() if k.startswith("trioengine_requests_aborted_total"))
    check("confirmed aborts", now["trioengine_abort_latency_seconds_count"], aborted)
    free = now["trioengine_kv_blocks_free"]
    check("free blocks", free, now["trioengine_kv_blocks_total"])
    check("failing metrics", now["trioengine_metrics_errors_total"], 0)
    return wrong


async def quiet(url: str) -> dict[str, float]:
    """Wait until nothing runs and nobody is connected but us; return the metrics."""
    with trio.fail_after(QUIET_WITHIN_S):
        while True:
            now = await trio.to_thread.run_sync(metrics_of, url)
            busy = now["trioengine_requests_running"] + now["trioengine_requests_waiting"]
            if not busy and now["trioengine_open_connections"] <= 1:
                return now
            await trio.sleep(0.2)


async def settled(pids: tuple[int, int]) -> tuple[Footprint, ...]:
    """Look at both processes when idle worker threads have gone, which takes them 10 s."""
    await trio.sleep(11)
    return tuple(Footprint.of(pid) for pid in pids)


async def soak(url: str, pids: tuple[int, int], options: argparse.Namespace) -> list[str]:
    """Let them come, round by round; return what is wrong."""
    clients = Clients(urlsplit(url).port or 0, options.seed)
    begin, end_s = await quiet(url), time.monotonic() + options.minutes * 60
    looks: list[tuple[Footprint, ...]] = []
    while time.monotonic() < end_s:
        await clients.crowd(options.clients, ROUND_S)
        now = await quiet(url)
        looks.append(await settled(pids))
        shown = [f"{look.resident_bytes / 2**20:.1f} MiB {look[1:]}" for look in looks[-1]]
        print(f"{sum(clients.sent.values()):6d} requests; server {shown[0]}, engine {shown[1]}")
        if wrong := accounts(clients, begin, now):
            return wrong
    print(f"sent {dict(clients.sent)}, seen {dict(clients.seen)}")
    reasons = "trioengine_requests_aborted_total"
    print({name: value for name, value in now.items() if name.startswith(reasons)})
    return growth(looks)


def growth(looks: list[tuple[Footprint, ...]]) -> list[str]:
    """Return who holds more than when it was warm."""
    wrong = []
    for name, first, last in zip(
        ("server", "engine"), looks[len(looks) // 4], looks[-1], strict=True
    ):
        grown = last.resident_bytes / first.resident_bytes
        print(f"{name}: resident memory x {grown:.4f} since it was warm")
        if grown >= GROWTH or last.descriptors > first.descriptors or last.threads > first.threads:
            wrong.append(f"the {name} holds {last}, {first} when it was warm")
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
    flags = [*bounds, *flags]
    with own_server(options.model, flags) as server:
        print(server.engine)
        pids = (server.pid, child_of(server.pid))
        try:
            wrong = trio.run(partial(soak, server.url, pids, options))
        finally:
            print(f"the server's last line: {server.last_line}")
    for line in wrong:
        print(f"WRONG: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
