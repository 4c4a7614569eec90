"""Try many histories of a whole server, on every core, and say how long it took.

    python tests/soak_histories.py [COUNT] [--shards N] [--seed S]

Each shard is a process with a seed of its own, so a run can be repeated. A history that ends in any
other way than it may is shrunk and shown, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from hypothesis import HealthCheck, given, seed, settings

from helpers.server_history import run_history
from helpers.server_operations import Operation, Setup, histories, setups

REPORT_EVERY = 5_000


def main() -> int:
    """Run the shards, or, as one of them, its part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", nargs="?", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        run_shard(options.count, options.seed)
        return 0
    began_s = time.monotonic()
    shards = [
        subprocess.Popen(
            [sys.executable, __file__, str(count), "--seed", str(options.seed + index), "--alone"]
        )
        for index, count in enumerate(divide(options.count, options.shards))
    ]
    failed = sum(shard.wait() != 0 for shard in shards)
    seconds = time.monotonic() - began_s
    verdict = f"{failed} shards found a violation" if failed else "no violation"
    say(
        f"{options.count:,} histories in {seconds:.0f} s "
        f"({options.count / seconds:.0f} a second, {options.shards} processes): {verdict}"
    )
    return 1 if failed else 0


def divide(count: int, parts: int) -> list[int]:
    """Return ``parts`` numbers that add up to ``count``, alike to one."""
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


def run_shard(count: int, first_seed: int) -> None:
    """Try ``count`` histories; raises what Hypothesis does where one fails."""
    tried = 0
    began_s = time.monotonic()

    @seed(first_seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(histories, setups)
    def any_history_ends_clean(history: list[Operation], setup: Setup) -> None:
        nonlocal tried
        run_history(history, setup)
        tried += 1
        if tried % REPORT_EVERY == 0:
            say(f"seed {first_seed}: {tried:,} after {time.monotonic() - began_s:.0f} s")

    any_history_ends_clean()


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
