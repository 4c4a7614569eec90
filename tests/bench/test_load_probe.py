"""Who uses the processors, from files that look like the kernel's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from trioengine.bench.load_probe import TICK_S, CpuMark, machine_load, process_cpu_s

if TYPE_CHECKING:
    from pathlib import Path


def process(proc: Path, pid: int, user: int, system: int, children: str = "") -> None:
    (proc / str(pid) / "task" / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "task" / str(pid) / "children").write_text(children)
    fields = " ".join(["S", *["0"] * 10, str(user), str(system), "7", "7"])
    (proc / str(pid) / "stat").write_text(f"{pid} (a ) name) {fields}\n")


def test_a_process_counts_with_its_descendants(tmp_path: Path) -> None:
    process(tmp_path, 10, 100, 20, "11 12 ")
    process(tmp_path, 11, 3, 0, "13 ")
    process(tmp_path, 12, 0, 4)
    process(tmp_path, 13, 1000, 0)
    assert process_cpu_s(10, tmp_path) == pytest.approx(1127 * TICK_S)
    assert process_cpu_s(99, tmp_path) == 0.0


def test_this_process_has_used_some() -> None:
    assert 0 < process_cpu_s(os.getpid()) < 1e6


def test_busy_is_all_but_idle(tmp_path: Path) -> None:
    def write(*ticks: int) -> None:
        (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1\n")

    write(10, 1, 5, 1000, 100, 0, 1, 2, 8, 0)
    mark = CpuMark(tmp_path)
    write(20, 2, 8, 9000, 900, 1, 3, 6, 18, 0)  # guest time, the ninth, is within user's
    assert mark.busy_s() == pytest.approx((10 + 1 + 3 + 1 + 2 + 4) * TICK_S)
    assert mark.busy_cpus() > 0


def test_the_load_of_this_machine() -> None:
    load = machine_load(watch_s=0.0)
    assert load.load_1min >= 0
    assert load.busy_cpus >= 0
