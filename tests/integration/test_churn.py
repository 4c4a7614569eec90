"""Clients that leave in any phase, and ten thousand that stay: nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from helpers.churn import descriptors, have_compiler, leave_early, total
from helpers.server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

HELPERS = Path(__file__).parents[1] / "helpers"
QUIET_WITHIN_S = 1.0
OTHER_DESCRIPTORS = 8  # the probe's connection, and what a thread opens in passing


async def test_500_streams_that_close_at_random_leave_nothing_behind() -> None:
    args = json.dumps({"step_time_ms": 2})
    with ServerProcess("--engine-args", args, "--max-num-seqs", "32") as server:
        server.wait_ready()
        pid, rng = server.process.pid, random.Random(20)
        baseline = len(descriptors(pid))
        async with trio.open_nursery() as nursery:
            for _ in range(500):
                nursery.start_soon(leave_early, server.port, random.Random(rng.random()))

        def quiet() -> dict[str, float] | None:
            metrics = server.metrics()
            busy = metrics["trioengine_requests_running"] + metrics["trioengine_requests_waiting"]
            return None if busy else metrics

        metrics = wait_until(quiet, timeout_s=QUIET_WITHIN_S, what="nothing runs or waits")
        assert metrics["trioengine_kv_blocks_free"] == metrics["trioengine_kv_blocks_total"]
        aborted = total(metrics, "trioengine_requests_aborted_total")
        assert aborted == metrics['trioengine_requests_aborted_total{reason="client_disconnect"}']
        assert aborted > 100  # phases were really hit
        assert metrics["trioengine_abort_latency_seconds_count"] == aborted
        wait_until(lambda: len(descriptors(pid)) <= baseline, what="descriptors are at baseline")
        assert server.post("/v1/completions", {"prompt": "x"})[0] == 200


def test_10_000_streams_at_once_are_all_exact_over_a_constant_number_of_sockets() -> None:
    """The engine stands still until all of them are there, so that they really are at once."""
    args = json.dumps({"tokens_from": "seed"})
    bounds = ("--max-queue", "10000", "--max-queue-time", "600", "--beat-timeout", "600")
    with ServerProcess("--max-num-seqs", "256", "--engine-args", args, *bounds) as server:
        server.wait_ready()
        have_compiler(server)
        engine_pid, pid = server.engine_pid, server.process.pid
        engine_before, before = descriptors(engine_pid), len(descriptors(pid))
        command = [sys.executable, str(HELPERS / "load_client.py"), str(server.port), "10000", "10"]
        environ = {**os.environ, "PYTHONPATH": str(HELPERS.parent)}
        os.kill(engine_pid, signal.SIGSTOP)
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as client:
            try:
                wait_until(
                    lambda: server.metrics()["trioengine_requests_waiting"] == 10_000,
                    timeout_s=120,
                    what="all wait in the queue",
                )
                assert descriptors(engine_pid) == engine_before
                assert len(descriptors(pid)) <= before + 10_000 + OTHER_DESCRIPTORS
                os.kill(engine_pid, signal.SIGCONT)
                output, _ = client.communicate(timeout=240)
            finally:
                client.kill()
        assert json.loads(output) == {"outcomes": {"exact": 10_000}, "num_texts": 1}
        wait_until(lambda: len(descriptors(pid)) <= before, what="descriptors are at baseline")
        assert descriptors(engine_pid) == engine_before
