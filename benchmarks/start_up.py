"""How long a server takes from the start of its process to 200 on its health check.

    python benchmarks/start_up.py                     # the default model and engine, five starts
    python benchmarks/start_up.py --engine torch

The checkpoint has been fetched and converted before, and its files are in the page cache: a first
start that is not counted sees to both.
"""

from __future__ import annotations

import argparse
import http.client
import re
import signal
import statistics
import subprocess
import sys
import time

COMMAND = (sys.executable, "-P", "-m", "trioengine", "serve", "--port", "0")
POLL_S = 0.005


def start_s(flags: list[str]) -> float:
    """Start a server, wait until it is healthy, stop it; return how long the start took."""
    begin_s = time.perf_counter()
    with subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True) as process:
        try:
            port = listening_port(process)
            while not is_healthy(port):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with exit code {process.returncode}")
                time.sleep(POLL_S)
            return time.perf_counter() - begin_s
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def listening_port(process: subprocess.Popen[str]) -> int:
    """Return the port that the server says it listens on."""
    for line in process.stderr or ():
        if found := re.search(r"listening on http://\S+:(\d+)", line):
            return int(found[1])
    raise SystemExit(f"the server ended with exit code {process.wait()}")


def is_healthy(port: int) -> bool:
    """Say whether ``/health`` is 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=5)
    arguments, flags = parser.parse_known_args()
    start_s(flags)
    times = [start_s(flags) for _ in range(arguments.starts)]
    print(f"ready after {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})")


if __name__ == "__main__":
    main()
