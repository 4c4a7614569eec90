"""The load client: ``python -m trioengine.bench.client``, a plan on stdin, a report on stdout.

A process of its own, one thread, one ``epoll``, plain sockets: it must cost far less than the
server that it shares the machine with. While it runs it only notes what came when; not even the
end of a head is looked for. Trio was refused here: its checkpoints would be most of the work.
"""

from __future__ import annotations

import gc
import select
import socket
import sys
import time
from typing import Final

import msgspec

from trioengine.bench.stream_record import StreamRecord, read_stream

__all__ = ["LoadPlan", "LoadReport", "run_plan"]

READ_BYTES: Final = 65536
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and to whom.

    Attributes:
        host: Name or address.
        port: TCP port.
        requests: Whole HTTP requests, each for a connection of its own that the server closes.
        concurrency: Requests in flight at a time.
        silence_s: Longest time without a byte from anybody, before all that is open counts as lost.
    """

    host: str
    port: int
    requests: list[bytes]
    concurrency: int
    silence_s: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        wall_s: From the first connection's begin to the last one's end.
        cpu_s: What this process spent in that time, user and system.
        records: In the order of the requests. Times count from the begin.
    """

    wall_s: float
    cpu_s: float
    records: list[StreamRecord]


class _Exchange:
    """One request and what comes back.

    Attributes:
        unsent: What is left of the request.
        arrivals: What came when.
        begin_s: When the connection was begun.
    """

    __slots__ = ("_end_s", "_error", "_socket", "_tail", "arrivals", "begin_s", "unsent")

    def __init__(self, request: bytes, family: int, address: tuple[object, ...]) -> None:
        self.begin_s = self._end_s = time.perf_counter()
        self.arrivals: list[tuple[float, bytes]] = []
        self.unsent = request
        self._error = ""
        self._tail = b""
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.connect_ex(address)  # how it went is seen when it becomes writable

    def fileno(self) -> int:
        """Descriptor of the connection."""
        return self._socket.fileno()

    def send(self) -> bool:
        """Send what the socket takes; False when that is the end."""
        try:
            self.unsent = self.unsent[self._socket.send(self.unsent) :]
        except BlockingIOError:
            return True
        except OSError as error:
            self._error = str(error)
            return False
        return True

    def receive(self) -> bool:
        """Note what has come; False at the end."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError as error:
            self._error = str(error)
            return False
        self.arrivals.append((time.perf_counter(), data))
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        return bool(data) and self._tail != LAST_CHUNK

    def close(self, error: str = "") -> None:
        """Close the connection, because of ``error`` if there is none yet."""
        self._socket.close()
        self._end_s = time.perf_counter()
        self._error = self._error or error

    def record(self, origin_s: float) -> StreamRecord:
        """Parse."""
        arrivals = [(time_s - origin_s, data) for time_s, data in self.arrivals]
        return read_stream(self.begin_s - origin_s, self._end_s - origin_s, arrivals, self._error)


class _Load:
    """A closed loop over one ``epoll``.

    Attributes:
        exchanges: Those begun so far, in the order of the plan's requests.
    """

    def __init__(self, plan: LoadPlan) -> None:
        found = socket.getaddrinfo(plan.host, plan.port, type=socket.SOCK_STREAM)
        self._family, self._address = found[0][0], found[0][4]
        self._plan = plan
        self._waiting = iter(plan.requests)
        self._open: dict[int, _Exchange] = {}
        self._poller = select.epoll()
        self.exchanges: list[_Exchange] = []

    def run(self) -> None:
        """Send everything; return when the last answer has ended."""
        with self._poller:
            for _ in range(self._plan.concurrency):
                self._start_next()
            while self._open:
                ready = self._poller.poll(self._plan.silence_s)
                if not ready:
                    self._give_up()
                for descriptor, _ in ready:
                    self._serve(descriptor)

    def _start_next(self) -> None:
        request = next(self._waiting, None)
        if request is not None:
            exchange = _Exchange(request, self._family, self._address)
            self.exchanges.append(exchange)
            self._open[exchange.fileno()] = exchange
            self._poller.register(exchange, select.EPOLLOUT)

    def _serve(self, descriptor: int) -> None:
        exchange = self._open[descriptor]
        sending = bool(exchange.unsent)
        if not (exchange.send() if sending else exchange.receive()):
            self._end(descriptor, exchange)
        elif sending and not exchange.unsent:
            self._poller.modify(descriptor, select.EPOLLIN)

    def _end(self, descriptor: int, exchange: _Exchange, error: str = "") -> None:
        del self._open[descriptor]
        exchange.close(error)
        self._start_next()

    def _give_up(self) -> None:
        self._waiting = iter(())  # who is silent to these will not answer others
        for descriptor, exchange in list(self._open.items()):
            self._end(descriptor, exchange, f"silent for {self._plan.silence_s:g} s")


def run_plan(plan: LoadPlan) -> LoadReport:
    """Send the plan's requests and return what came of each.

    Raises:
        OSError: The host's name means nothing here.
    """
    load = _Load(plan)
    gc.collect()
    gc.disable()  # nothing here is cyclic, and a collection would look like a late token
    try:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        load.run()
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    finally:
        gc.enable()
    records = [exchange.record(begin_s) for exchange in load.exchanges]
    unsent = StreamRecord(begin_s=wall_s, end_s=wall_s, error="not sent: the server was silent")
    records += [unsent] * (len(plan.requests) - len(records))
    return LoadReport(wall_s=wall_s, cpu_s=cpu_s, records=records)


def main() -> None:
    """See the module."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    sys.stdout.buffer.write(msgspec.json.encode(run_plan(plan)))


if __name__ == "__main__":
    main()
