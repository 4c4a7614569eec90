"""A real server that is short of descriptors or of disk: it says so and goes on."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.server_process import ServerProcess, wait_until
from helpers.sse_client import open_stream

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.slow]

FEW = 60
ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
QUESTION = b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n"


def limited(num_files: int) -> tuple[str, ...]:
    """Return the command of a server that may open so many files."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({num_files}, {num_files}));"
        "from trioengine.cli import main; raise SystemExit(main())"
    )
    return sys.executable, "-c", code, "serve"


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


async def test_more_clients_than_descriptors_wait_and_nobody_who_is_in_suffers() -> None:
    paced = ("--engine-args", '{"step_time_ms": 5}')
    with ServerProcess("--max-queue", "500", *paced, command=limited(FEW)) as server:
        server.wait_line(f"only {FEW} files may be open at once, too few for a queue of 500")
        server.wait_ready()
        async with open_stream(server.port, ENDLESS) as served:
            clients = [connect(server.port) for _ in range(2 * FEW)]  # the backlog takes them all
            server.wait_line("cannot accept connections.*Too many open files")
            for _ in range(20):
                assert await served.read_event() is not None
            for client in clients:
                client.close()
            wait_until(lambda: server.get("/health/ready")[0] == 200, what="it serves again")
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3})[0] == 200
            assert await served.read_event() is not None
        errors = [line for line in server.lines if " ERROR " in line]
        assert len(errors) <= 10  # said, not shouted


def test_a_soft_limit_is_raised_to_the_hard_one() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ServerProcess(command=("sh", "-c", 'ulimit -Sn 100; exec "$@"', "sh", sys.executable,
                                "-m", "trioengine", "serve")) as server:  # fmt: skip
        server.wait_ready()
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == [str(hard), str(hard)]


def uds_server(path: Path, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "trioengine", "serve", "--engine", "sim", "--uds", str(path)],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )


def answered(path: Path, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(request)
        return client.recv(65536)


def is_ready(path: Path) -> Callable[[], bool]:
    return lambda: path.exists() and answered(path, QUESTION).startswith(b"HTTP/1.1 200 ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_log_on_a_full_disk_costs_the_log_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with uds_server(path, full) as server:
            try:
                wait_until(is_ready(path), what="ready")
                for _ in range(5):
                    assert answered(path, b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
                server.terminate()
                assert server.wait(20) == 0
            finally:
                server.kill()
    finally:
        os.close(full)
