"""Who comes to the server of ``soak.py``, what they do to it, and what they are sure to have seen.

Clients do what clients do; operators kill the engine, stop it for a moment, put it to sleep and
wake it up. Whoever reads an answer to its end is sure how its request ended: as the answer says.
Whoever leaves before is not, but of that one, too, it is known that it was there.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    import random

READ_BYTES = 65536
CUT = "cut"  # an answer without an end, which nobody may get who stays
COMPLETIONS, CANCEL = "/v1/completions", "/v1/requests/<response_id>/cancel"
SLEEP, WAKE_UP = "/sleep", "/wake_up"
ERROR_CODE = re.compile(rb'"code": ?"(\w+)"')
ANSWER_ID = re.compile(rb'"id":"([^"]+)"')


def post(path: str, body: bytes, *fields: str) -> bytes:
    """Return the bytes of a request that ends its connection."""
    head = [f"POST {path} HTTP/1.1", "Host: soak", "Connection: close", *fields]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def verdict(answer: bytes) -> str:
    """Return how a request ended, by its answer: ``ok``, an error's code, or ``CUT``."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    whole = len(body) == int(length[1]) if length else body.endswith(b"\r\n0\r\n\r\n")
    if not whole:
        return CUT
    if head.startswith(b"HTTP/1.1 200 ") and (length or b"data: [DONE]\n\n" in body):
        return "ok"
    codes = ERROR_CODE.findall(body)
    return codes[-1].decode() if codes else CUT


class Ledger:
    """What was asked, and what came of it.

    Attributes:
        sent: Whole requests, by the endpoint they were for.
        seen: Those of them whose end is sure, by endpoint and outcome.
    """

    def __init__(self, port: int) -> None:
        self.sent: collections.Counter[str] = collections.Counter()
        self.seen: collections.Counter[tuple[str, str]] = collections.Counter()
        self._port = port

    async def ask(self, endpoint: str, question: bytes) -> trio.SocketStream:
        """Send a request over a connection of its own."""
        connection = await trio.open_tcp_stream("127.0.0.1", self._port)
        return await self.ask_over(connection, endpoint, question)

    async def ask_over(
        self, connection: trio.SocketStream, endpoint: str, question: bytes
    ) -> trio.SocketStream:
        """Send a request."""
        await connection.send_all(question)
        self.sent[endpoint] += 1
        return connection

    async def read(self, connection: trio.SocketStream, answer: bytes = b"") -> bytes:
        """Return ``answer`` and all that follows it."""
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await connection.receive_some(READ_BYTES):
                answer += data
        return answer

    def note(self, endpoint: str, answer: bytes) -> str:
        """Take note of an answer that was read to its end; return its verdict."""
        outcome = verdict(answer)
        self.seen[endpoint, outcome] += 1
        return outcome

    async def exchange(self, endpoint: str, question: bytes) -> str:
        """Ask, read to the end, and return what is sure now."""
        async with await self.ask(endpoint, question) as connection:
            answer = await self.read(connection)
        return self.note(endpoint, answer)

    async def connect_narrowly(self) -> trio.SocketStream:
        """Connect as one for whom the kernel keeps next to nothing."""
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await sock.connect(("127.0.0.1", self._port))
        return trio.SocketStream(sock)


class Clients:
    """Everybody who comes for text."""

    def __init__(self, ledger: Ledger, fate: random.Random) -> None:
        self._ledger, self._fate = ledger, fate
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
            await self._fate.choice(self._visits)()

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

    async def read_all(self) -> None:
        """Be an honest client."""
        await self._ledger.exchange(COMPLETIONS, self.question())

    async def leave(self) -> None:
        """Go at some moment, unless the answer comes first."""
        question = self.question(max_tokens=400)
        async with await self._ledger.ask(COMPLETIONS, question) as connection:
            with trio.move_on_after(self._fate.expovariate(4)):
                self._ledger.note(COMPLETIONS, await self._ledger.read(connection))

    async def half_close(self) -> None:
        """Say that nothing more will be said, which is taken for leaving."""
        question = self.question(max_tokens=400)
        async with await self._ledger.ask(COMPLETIONS, question) as connection:
            await trio.sleep(self._fate.random() * 0.2)
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.send_eof()
            await self._ledger.read(connection)

    async def read_slowly(self) -> None:
        """Read next to nothing for a while, or until thrown out."""
        question = self.question(max_tokens=400, stream=True, logprobs=4)
        async with await self._ledger.connect_narrowly() as connection:
            await self._ledger.ask_over(connection, COMPLETIONS, question)
            with contextlib.suppress(trio.BrokenResourceError):
                for _ in range(self._fate.randrange(1, 40)):
                    if not await connection.receive_some(10):
                        break
                    await trio.sleep(0.1)

    async def cancel(self) -> None:
        """End a stream from another connection."""
        question = self.question(max_tokens=400, stream=True)
        confirmed, answer = "", b""
        async with await self._ledger.ask(COMPLETIONS, question) as connection:
            while not (found := ANSWER_ID.search(answer)):
                if not (data := await connection.receive_some(READ_BYTES)):
                    break
                answer += data
            if found:
                path = f"/v1/requests/{found[1].decode()}/cancel"
                confirmed = await self._ledger.exchange(CANCEL, post(path, b""))
            answer = await self._ledger.read(connection, answer)
        outcome = self._ledger.note(COMPLETIONS, answer)
        if confirmed == "ok" and outcome != "cancelled":
            self._ledger.seen[COMPLETIONS, f"{outcome} though its cancel was confirmed"] += 1

    async def give_deadline(self) -> None:
        """Want it sooner than it can be."""
        question = self.question(max_tokens=400, timeout=0.05, stream=False)
        await self._ledger.exchange(COMPLETIONS, question)

    async def talk_nonsense(self) -> None:
        """Send what cannot be answered."""
        nonsense = (
            self.question(temperature=-1),
            self.question(prompt=None),
            post(COMPLETIONS, b'{"prompt": "x'),
            post(COMPLETIONS, b"\xff" * 2000),
        )
        await self._ledger.exchange(COMPLETIONS, self._fate.choice(nonsense))


class Operators:
    """Those who do something to the engine.

    Attributes:
        kills: Engines that were killed, each of which has to be started again.
        doubtful: Those of them that may have been asked to leave just before: no death then.
        naps: Orders to sleep.
    """

    def __init__(self, server_pid: int, ledger: Ledger, fate: random.Random) -> None:
        self.kills = self.doubtful = self.naps = 0
        self._server_pid, self._ledger, self._fate = server_pid, ledger, fate

    async def work(self, kind: str, duration_s: float) -> None:
        """Do what belongs to a round of this kind, within its time; all is well afterwards."""
        async with trio.open_nursery() as nursery:
            if kind in ("kill", "mixed"):
                rests = kind == "mixed" and self._fate.random() < 0.5
                nursery.start_soon(self._kill, duration_s, kind == "mixed", rests)
            if kind in ("sleep", "mixed"):
                nursery.start_soon(self._put_to_sleep, duration_s)
            if kind in ("halt", "mixed"):
                nursery.start_soon(self._halt, duration_s)

    async def _kill(self, duration_s: float, doubtful: bool, rests: bool) -> None:
        await trio.sleep(self._fate.uniform(0.05, 0.9) * duration_s)
        if rests:
            return
        with contextlib.suppress(ProcessLookupError):
            pid = engine_of(self._server_pid)
            os.kill(pid, signal.SIGKILL)
            self.kills += 1
            self.doubtful += doubtful
            while is_alive(pid):  # noqa: ASYNC110 - a process sets no event
                await trio.sleep(0.005)

    async def _halt(self, duration_s: float) -> None:
        """Stop the engine, mostly for a moment, now and then for long enough to be noticed."""
        await trio.sleep(self._fate.random() * 0.5 * duration_s)
        with contextlib.suppress(ProcessLookupError):
            pid = engine_of(self._server_pid)
            os.kill(pid, signal.SIGSTOP)
            try:
                await trio.sleep(self._fate.choice((0.1, 1.0, 7.0)))
            finally:
                os.kill(pid, signal.SIGCONT)

    async def _put_to_sleep(self, duration_s: float) -> None:
        """Two naps. What runs may take long to end, or is given too little time."""
        for _ in range(2):
            await trio.sleep(self._fate.random() * 0.4 * duration_s)
            self.naps += 1
            path = f"{SLEEP}?timeout={self._fate.choice((0.1, 15, 15))}"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._ledger.exchange, SLEEP, post(path, b""))
                await trio.sleep(self._fate.choice((0.5, 4.0)))
                await self._ledger.exchange(WAKE_UP, post(WAKE_UP, b""))


def engine_of(pid: int) -> int:
    """Return the process of a server's engine. Raises ``ProcessLookupError`` if it has none."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"trioengine.engine_proc" in command and is_alive(int(child)):
                    return int(child)
    raise ProcessLookupError(f"process {pid} has no engine")


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
