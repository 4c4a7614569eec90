"""Minutes of random clients on the real native engine: nothing grows, the metrics add up."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import TYPE_CHECKING, Final

import pytest
import trio

from helpers.churn import descriptors, leave_early, resident_bytes, threads, total
from helpers.server_process import ServerProcess, wait_until
from helpers.tiny_native import save_tiny_native

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.soak, pytest.mark.process]

SOAK_S: Final = float(os.environ.get("TRIOENGINE_SOAK_SECONDS", "600"))
WARM_UP_S: Final = SOAK_S / 2  # allocators keep what the fullest moments so far have needed
CLIENTS: Final = int(os.environ.get("TRIOENGINE_SOAK_CLIENTS", "24"))
PAUSE_S: Final = 0.2
GROWTH: Final = 1.02
QUIET_WITHIN_S: Final = 5.0
CACHE_GIB: Final = "0.0004"  # 800 tokens: not enough for all, so that most have to wait


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a process holds on to while nothing runs."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Look at a process."""
        return cls(resident_bytes(pid), len(descriptors(pid)), threads(pid))


def settled(pid: int, before: Footprint) -> Footprint:
    """Wait until connections are closed and idle worker threads (after 10 s) gone; look again."""

    def look() -> Footprint | None:
        now = Footprint.of(pid)
        back = now.threads <= before.threads and now.descriptors <= before.descriptors
        return now if back else None

    return wait_until(look, what=f"process {pid} has {before} again")


def quiet_metrics(server: ServerProcess) -> dict[str, float]:
    """Wait until nothing runs; return the metrics."""

    def quiet() -> dict[str, float] | None:
        metrics = server.metrics()
        busy = metrics["trioengine_requests_running"] + metrics["trioengine_requests_waiting"]
        return None if busy else metrics

    return wait_until(quiet, timeout_s=QUIET_WITHIN_S, what="nothing runs or waits")


async def crowd(port: int, seed: int, duration_s: float) -> int:
    """Keep ``CLIENTS`` clients coming and leaving for so long; return how many there were."""
    visits = 0
    end_s = trio.current_time() + duration_s

    async def visit_again_and_again(rng: random.Random) -> None:
        nonlocal visits
        while trio.current_time() < end_s:
            visits += 1
            await leave_early(port, rng, within_s=PAUSE_S)

    async with trio.open_nursery() as nursery:
        for index in range(CLIENTS):
            nursery.start_soon(visit_again_and_again, random.Random(seed + index))
    return visits


@pytest.mark.parametrize("steps", ["1", "4"])
async def test_minutes_of_random_clients_leave_nothing_behind(tmp_path: Path, steps: str) -> None:
    pytest.importorskip("trioengine.engine_proc.native_runner._native")
    model = save_tiny_native(tmp_path / "tiny", max_positions=512)
    flags = ("--kv-cache-memory", CACHE_GIB, "--max-num-seqs", "16", "--threads", "2")
    with ServerProcess(
        str(model), *flags, "--num-scheduler-steps", steps, engine="native"
    ) as server:
        server.wait_ready()
        pids = (server.process.pid, server.engine_pid)
        visits = await crowd(server.port, seed=1, duration_s=WARM_UP_S / 2)
        quiet_metrics(server)
        before = [Footprint.of(pid) for pid in pids]
        visits += await crowd(server.port, seed=2, duration_s=(SOAK_S - WARM_UP_S) / 2)
        metrics = quiet_metrics(server)
        ours = {name: value for name, value in metrics.items() if "/v1/completions" in name}
        assert total(ours, "trioengine_requests_total") == visits
        assert metrics["trioengine_kv_blocks_free"] == metrics["trioengine_kv_blocks_total"]
        aborted = total(metrics, "trioengine_requests_aborted_total")
        assert metrics["trioengine_abort_latency_seconds_count"] == aborted
        assert metrics["trioengine_metrics_errors_total"] == 0
        after = [settled(pid, held) for pid, held in zip(pids, before, strict=True)]
        print(f"{visits} visits, {before} then {after}")  # noqa: T201  # for -s
    for held, later in zip(before, after, strict=True):
        assert later.resident_bytes <= held.resident_bytes * GROWTH
