"""Started as no shell would start it, and told to stop at the wrong moment."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from helpers.server_process import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

SERVE = (sys.executable, "-m", "trioengine", "serve", "--engine", "sim")
ENDED_S = 30.0


def status_line(uds: Path) -> bytes:
    """Return the first line of the answer to ``GET /health/ready``."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(uds))
        connection.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.makefile("rb").readline()


@pytest.mark.parametrize("closed", ["2>&-", "0<&-", "1>&-", "0<&- 1>&- 2>&-"])
def test_it_serves_without_its_standard_streams(tmp_path: Path, closed: str) -> None:
    uds = tmp_path / "s"
    shell = ("sh", "-c", f'exec "$@" {closed}', "sh")
    process = subprocess.Popen(
        [*shell, *SERVE, "--uds", str(uds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ready() -> bool:
        assert process.poll() is None, f"ended with {process.returncode}"
        with contextlib.suppress(FileNotFoundError):
            return b" 200 " in status_line(uds)
        return False

    try:
        wait_until(ready, what="ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDED_S) == 0
    finally:
        process.kill()  # its engine follows
        process.wait()


def test_a_signal_that_comes_after_the_end_changes_nothing() -> None:
    """The interpreter would die of one while it cleans up, whatever the exit code was to be."""
    late_signals = (
        "import os, signal, sys, trioengine.cli as cli\n"
        "cli._run = lambda *_: (4, '')\n"
        "code = cli.main(['serve', '--engine', 'sim', '--port', '0'])\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    assert signal.getsignal(number) is signal.SIG_IGN, number\n"
        "    os.kill(os.getpid(), number)\n"
        "sys.exit(code)\n"
    )
    assert run(late_signals).returncode == 4


def test_asked_to_stop_as_soon_as_it_can_hear() -> None:
    """Reading options and importing them takes longer than a nervous supervisor may wait."""
    early_signal = (
        "import os, signal, sys, trioengine.cli as cli\n"
        "parser = cli._parser\n"
        "cli._parser = lambda: (os.kill(os.getpid(), signal.SIGTERM), parser())[1]\n"
        "sys.exit(cli.main(['serve', '--engine', 'sim', '--port', '0']))\n"
    )
    done = run(early_signal)
    assert (done.returncode, done.stderr) == (0, b"")


def run(program: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=ENDED_S)
