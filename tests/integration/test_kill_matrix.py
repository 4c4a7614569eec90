"""Either process is terminated, killed or stopped in any phase: what each party sees, and by when.

The table in ``docs/kill-matrix.md`` is what these tests observed: a row that is observed otherwise
is a failure. To write the rows anew::

    TRIOENGINE_WRITE_DOCS=1 python -m pytest tests/integration/test_kill_matrix.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.server_process import ServerProcess, process_lives, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

TABLE = Path(__file__).parents[2] / "docs" / "kill-matrix.md"
WRITING = os.environ.get("TRIOENGINE_WRITE_DOCS") == "1"
PARTIES = ("engine", "server")
SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
PHASES = ("starting", "idle", "prefill", "decode", "draining", "restarting")

DRAIN_S, GRACE_S, BEAT_S, START_S = 1.5, 0.5, 1.5, 6.0
LOOK_S = 5.0  # longer than each of these, with what comes after it
# What the design promises, and what a machine that runs six servers and their probes may add to it.
NEWS_S, ORPHAN_S, AT_ONCE_S, STOP_S = 0.1, 1.0, 1.0, 5.0
SLACK_S = 1.0
BOUNDS = {
    "--drain-timeout": DRAIN_S,
    "--death-grace": GRACE_S,
    "--beat-timeout": BEAT_S,
    "--stall-timeout": 600.0,
}
SCRIPTS: dict[str, dict[str, object]] = {
    "starting": {"hang_on_load": True},
    "idle": {},
    "prefill": {"slow_step": 1, "slow_step_ms": 60_000},
    "decode": {"step_time_ms": 10},
    "draining": {"step_time_ms": 10},
}
ERROR_CODE = re.compile(rb'"code": ?"(\w+)"')


class Row(NamedTuple):
    """What was seen: by the request's client, by a probe, by who started the server; the engine."""

    client: str
    health: str
    server: str
    engine: str


class Client:
    """One request on a connection of its own, read by a thread."""

    def __init__(self, port: int, *, stream: bool) -> None:
        self.data = b""
        self.told_s = 0.0  # when something came last, or the end
        self.ended = threading.Event()
        self.sock = socket.create_connection(("127.0.0.1", port))
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        self.sock.sendall(head.encode() + payload)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.sock.recv(65536):
                self.data += data
                self.told_s = time.monotonic()
        self.ended.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.sock.close()

    def saw(self) -> str:
        """Say what it has had of an end."""
        if not self.data.startswith(b"HTTP/1.1 200 "):
            status = self.data[9:12].decode()
            codes = ERROR_CODE.findall(self.data)
            if codes:
                return f"{status} `{codes[0].decode()}`"
            return "connection cut" if self.ended.is_set() else "waits"
        if codes := ERROR_CODE.findall(self.data[self.data.rfind(b"data: ") :]):
            return f"error event `{codes[0].decode()}`"
        return "connection cut" if self.ended.is_set() else "stream stays open"


def look_at_health(port: int) -> str:
    """Return what a probe with a second's patience is told."""
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(("127.0.0.1", port))
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b""
            while data := probe.recv(65536):
                answer += data
        except TimeoutError:
            return "silent"
        except OSError:
            return "refused"
    found = re.search(rb'"status": ?"(\w+)"', answer)
    return f"{answer[9:12].decode()} `{found[1].decode()}`" if found else "refused"


class Observation:
    """One cell being watched: the last status, and the ends that there are. Seconds are from here.

    Attributes:
        health: The last status that says something.
        before: What a probe was told before anything was done.
        health_s: When it was asked for first.
        exit_s: When the server had ended.
        engine_s: When the engine had.
    """

    def __init__(self, server: ServerProcess, port: int, engine_pid: int, look_s: float) -> None:
        self.before = look_at_health(port)
        self.began_s = time.monotonic()
        self._look_s = look_s
        self.health = "refused"
        self.health_s = 0.0
        self.exit_s: float | None = None
        self.engine_s: float | None = None
        self._server, self._port = server, port
        self._engine = os.pidfd_open(engine_pid)
        self._watcher = threading.Thread(target=self._watch_engine, daemon=True)
        self._watcher.start()

    def _watch_engine(self) -> None:
        ended, _, _ = select.select([self._engine], [], [], self._look_s + SLACK_S + ORPHAN_S)
        self.engine_s = self.since() if ended else None
        os.close(self._engine)

    def wait_for_engine(self) -> None:
        """Wait until the engine has ended, or should have."""
        self._watcher.join()

    def since(self) -> float:
        return time.monotonic() - self.began_s

    def watch(self) -> None:
        """Look until the server has ended, or for as long as any of its bounds takes."""
        while (asked_s := self.since()) < self._look_s:
            if self._server.process.poll() is not None:
                self.exit_s = self.since()
                return
            status = look_at_health(self._port)
            if status not in ("refused", "503 `stopped`", self.health):  # the last words of some
                self.health, self.health_s = status, asked_s
            time.sleep(0.02)


def bring_into(phase: str, server: ServerProcess, mark: Path) -> Client | None:
    """Wait until the server is in ``phase``; return the client whose request is in it."""
    if phase == "starting":
        server.wait_line(r"load \(0%\)")
        return None
    server.wait_ready()
    if phase == "idle":
        return None
    if phase == "restarting":
        mark.touch()
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: not mark.exists(), what="the next engine hangs")
        client = Client(server.port, stream=False)
        wait_until(lambda: server.metrics()["trioengine_requests_waiting"] > 0)
        return client
    client = Client(server.port, stream=phase != "prefill")
    if phase == "prefill":
        wait_until(lambda: server.metrics()["trioengine_engine_step_age_seconds"] > 0)
        return client
    wait_until(lambda: b"data: " in client.data, what="it decodes")
    if phase == "draining":
        server.send_signal(signal.SIGTERM)
        server.wait_status("draining")
    return client


def observe(party: str, number: signal.Signals, phase: str, mark: Path) -> Row:
    """Do it, for real."""
    starts = phase in ("starting", "restarting")
    start_s = START_S if starts else 60.0
    look_s = START_S + 6.0 if starts else {"draining": DRAIN_S + 7.0}.get(phase, LOOK_S)
    bounds = BOUNDS | {"--start-timeout": start_s}
    flags = [word for name, bound in bounds.items() for word in (name, f"{bound:g}")]
    script = SCRIPTS.get(phase, {"hang_on_load": str(mark)})
    if phase == "restarting":
        flags += ["--engine-restarts", "1"]
    with (
        ServerProcess("--engine-args", json.dumps(script), *flags) as server,
        ExitStack() as stack,
    ):
        port = server.port
        client = bring_into(phase, server, mark)
        engine_pid = server.engine_pids()[-1]
        stack.callback(client.close if client else int)
        pid = engine_pid if party == "engine" else server.process.pid
        seen = Observation(server, port, engine_pid, look_s)
        os.kill(pid, number)
        seen.watch()
        engine = engine_words(engine_pid, ended=seen.exit_s is not None)
        row = Row(
            client_words(client),
            health_words(party, phase, seen),
            server_words(server, seen),
            engine,
        )
        if seen.exit_s is not None:
            seen.wait_for_engine()
            check_times(party, number, phase, row, seen)
            check_news(client, row, seen)
        if number is signal.SIGSTOP and seen.exit_s is None:
            os.kill(pid, signal.SIGCONT)
            row = row._replace(server=f"lives; after SIGCONT {after(server, phase)}")
        return row


def client_words(client: Client | None) -> str:
    return "—" if client is None else client.saw()


def health_words(party: str, phase: str, seen: Observation) -> str:
    """Say what the last probe was told, unless it is chance whether one came in time."""
    at_once = party == "server" and phase in ("starting", "idle", "draining", "restarting")
    # Without a grace it is chance whether a probe sees the death, or anything, before the end.
    by_chance = ("503 `dead`", "refused") if seen.exit_s is not None else ()
    if party == "engine" and phase == "starting" and seen.health in by_chance:
        return seen.before
    return "refused" if at_once and seen.exit_s is not None else seen.health


def server_words(server: ServerProcess, seen: Observation) -> str:
    if seen.exit_s is None:
        return "lives"
    code = server.wait()
    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def engine_words(pid: int, *, ended: bool) -> str:
    if ended:
        wait_until(
            lambda: not process_lives(pid), timeout_s=ORPHAN_S + SLACK_S, what="engine is gone"
        )
    return "lives" if process_lives(pid) else "gone"


def after(server: ServerProcess, phase: str) -> str:
    """Say how it goes on once what was stopped has been continued."""
    if phase in ("starting", "draining", "restarting"):
        return f"exit {server.wait()}"  # its bound passed meanwhile
    server.wait_status("ready")
    return "ready"


def check_times(
    party: str, number: signal.Signals, phase: str, row: Row, seen: Observation
) -> None:
    """Hold the ends to the bounds that the table gives, and to the time that it grants."""
    least_s, most_s = 0.0, AT_ONCE_S
    if party == "engine" and number is signal.SIGKILL:
        if phase != "starting":
            least_s = most_s = GRACE_S  # whatever else was going on
    elif party == "engine":
        # A start that is not ready in time, or a drain; both began before.
        most_s = DRAIN_S + STOP_S if phase == "draining" else START_S + GRACE_S
    elif number is signal.SIGTERM and phase in ("prefill", "decode"):
        least_s, most_s = DRAIN_S, DRAIN_S + STOP_S
    exit_s = seen.exit_s or 0.0
    where = f"{party} {number.name} {phase}: {row} after {exit_s:.2f} s"
    assert least_s <= exit_s < most_s + SLACK_S, f"{where}, not {least_s:g} to {most_s:g} s"
    assert seen.engine_s is not None
    assert seen.engine_s - exit_s < ORPHAN_S + SLACK_S, f"{where}, its engine {seen.engine_s:.2f} s"


def check_news(client: Client | None, row: Row, seen: Observation) -> None:
    """Client and probe are told of a death when it has happened, not when the server ends."""
    if seen.engine_s is None or seen.exit_s is None or seen.engine_s > seen.exit_s:
        return
    if client is not None and "engine_dead" in row.client:
        told_s = client.told_s - seen.began_s
        assert told_s < seen.engine_s + NEWS_S + SLACK_S, f"{row}: the client after {told_s:.2f} s"
    if seen.health == "503 `dead`":
        late_s = seen.health_s - seen.engine_s
        assert late_s < NEWS_S + SLACK_S, f"{row}: /health {late_s:.2f} s after the death"


def line_of(party: str, number: signal.Signals, phase: str, row: Row) -> str:
    return f"{prefix_of(party, number, phase)} {' | '.join(row)} |"


def prefix_of(party: str, number: signal.Signals, phase: str) -> str:
    return f"| {party} | {number.name} | {phase} |"


def documented(prefix: str) -> str:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith(prefix)]
    return lines[0] if len(lines) == 1 else f"{len(lines)} rows"


def write_down(prefix: str, line: str) -> None:
    lines = TABLE.read_text().splitlines()
    places = [index for index, old in enumerate(lines) if old.startswith(prefix)]
    if places:
        lines[places[0]] = line
    else:
        rows = [index for index, old in enumerate(lines) if old.startswith("|")]
        lines.insert(rows[-1] + 1, line)
    TABLE.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("party", PARTIES)
def test_everybody_sees_what_the_table_says(
    party: str, number: signal.Signals, tmp_path: Path
) -> None:
    mark = tmp_path / "the next engine hangs"
    with ThreadPoolExecutor(len(PHASES)) as threads:
        rows = list(threads.map(lambda phase: observe(party, number, phase, mark), PHASES))
    lines = {
        prefix_of(party, number, phase): line_of(party, number, phase, row)
        for phase, row in zip(PHASES, rows, strict=True)
    }
    if WRITING:
        for prefix, line in lines.items():
            write_down(prefix, line)
    assert [documented(prefix) for prefix in lines] == list(lines.values())
