"""The load client on real sockets, against a server that does what a script says."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from trioengine.bench.client import LoadPlan, LoadReport, run_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 20.0
REQUEST = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%s\r\n" % (len(data), data) for data in (EVENT, b"data: [DONE]\n\n", b"")
)


class Server:
    """Reads a request of five bytes, then lets ``answer`` do with the connection what it likes."""

    def __init__(self, answer: Callable[[Server, socket.socket, bytes], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1]
        self.bodies: list[bytes] = []
        self.most = self.open = 0
        self.changed = threading.Condition()
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(PATIENCE_S)
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            received = b""
            while not (received.startswith(REQUEST) and len(received) == len(REQUEST) + 5):
                received += connection.recv(7)
            with self.changed:
                self.bodies.append(received[-5:])
                self.open += 1
                self.most = max(self.most, self.open)
                self.changed.notify_all()
            with contextlib.suppress(ConnectionError):
                self._answer(self, connection, received[-5:])

    def leave(self) -> None:
        with self.changed:
            self.open -= 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._acceptor, *self._threads):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def serving(answer: Callable[[Server, socket.socket, bytes], None]) -> Iterator[Server]:
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()


def plan(port: int, num: int, concurrency: int, silence_s: float = PATIENCE_S) -> LoadPlan:
    requests = [REQUEST + b"%05d" % number for number in range(num)]
    return LoadPlan(
        host="127.0.0.1",
        port=port,
        requests=requests,
        concurrency=concurrency,
        silence_s=silence_s,
    )


def answer_whole(server: Server, connection: socket.socket, body: bytes) -> None:
    del body
    server.leave()
    connection.sendall(ANSWER)
    connection.recv(1)  # stays open: the client must see the end by itself


def test_every_request_is_sent_once_and_counted() -> None:
    with serving(answer_whole) as server:
        report = run_plan(plan(server.port, 9, 2))
        assert sorted(server.bodies) == [b"%05d" % number for number in range(9)]
    assert [record.ok for record in report.records] == [True] * 9
    assert report.wall_s >= max(record.end_s for record in report.records) > 0
    assert report.cpu_s >= 0
    for record in report.records:
        assert 0 <= record.begin_s <= record.text_times_s[0] <= record.end_s


def test_as_many_are_open_as_there_are_clients_and_never_more() -> None:
    def wait_for_three(server: Server, connection: socket.socket, body: bytes) -> None:
        with server.changed:  # the last ones find nobody to wait for
            server.changed.wait_for(lambda: server.open >= 3 or len(server.bodies) >= 10, 20)
        answer_whole(server, connection, body)

    with serving(wait_for_three) as server:
        report = run_plan(plan(server.port, 12, 3))
        assert server.most == 3
    assert all(record.ok for record in report.records)


def test_records_keep_the_order_of_the_requests() -> None:
    def refuse_some(server: Server, connection: socket.socket, body: bytes) -> None:
        server.leave()
        connection.sendall(ANSWER if int(body) % 2 else b"HTTP/1.1 429 No\r\n\r\nbusy")

    with serving(refuse_some) as server:
        report = run_plan(plan(server.port, 8, 4))
    assert [record.status for record in report.records] == [429, 200] * 4
    assert report.records[0].complaint == "status 429: busy"


def test_bytes_one_by_one_make_one_record() -> None:
    def trickle(server: Server, connection: socket.socket, body: bytes) -> None:
        del body
        server.leave()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(ANSWER)):
            connection.sendall(ANSWER[index : index + 1])
        connection.recv(1)

    with serving(trickle) as server:
        (record,) = run_plan(plan(server.port, 1, 1)).records
    assert record.ok


def test_a_connection_that_breaks_is_a_failure_and_the_next_goes_on() -> None:
    def break_first(server: Server, connection: socket.socket, body: bytes) -> None:
        if body == b"00000":
            connection.sendall(ANSWER[:-20])
            server.leave()
        else:
            answer_whole(server, connection, body)

    with serving(break_first) as server:
        first, second = run_plan(plan(server.port, 2, 1)).records
    assert first.complaint == "the stream ended without [DONE]"
    assert second.ok


def test_a_server_that_says_nothing_is_given_up() -> None:
    def say_nothing(server: Server, connection: socket.socket, body: bytes) -> None:
        del server, body
        connection.recv(1)

    with serving(say_nothing) as server:
        report = run_plan(plan(server.port, 5, 2, silence_s=0.05))
    complaints = [record.complaint for record in report.records]
    assert complaints[:2] == ["status 0: silent for 0.05 s"] * 2
    assert complaints[2:] == ["status 0: not sent: the server was silent"] * 3


def test_nobody_there_fails_every_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    report = run_plan(plan(port, 3, 2))
    assert ["refused" in record.complaint for record in report.records] == [True] * 3


@pytest.mark.process
def test_as_a_process_it_takes_a_plan_and_gives_a_report() -> None:
    with serving(answer_whole) as server:
        done = subprocess.run(
            [sys.executable, "-m", "trioengine.bench.client"],
            input=msgspec.json.encode(plan(server.port, 4, 2)),
            capture_output=True,
            timeout=60,
        )
    report = msgspec.json.decode(done.stdout, type=LoadReport)
    assert [record.ok for record in report.records] == [True] * 4
    assert done.stderr == b""


@pytest.mark.process
def test_it_imports_nothing_that_costs() -> None:
    script = (
        "import sys, trioengine.bench.client\n"
        "dear = ('trio', 'asyncio', 'numpy', 'torch', 'tokenizers')\n"
        "print([name for name in dear if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.stdout == b"[]\n"
