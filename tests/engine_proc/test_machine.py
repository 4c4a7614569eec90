from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from trioengine.engine_proc import machine

if TYPE_CHECKING:
    from pathlib import Path

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    directory = tmp_path / "proc"
    directory.mkdir()
    (directory / "meminfo").write_text(MEMINFO)
    return directory


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    directory = tmp_path / "cgroup"
    directory.mkdir()
    return directory


def limit_memory(cgroup: Path, limit: str, current: int, inactive: int) -> None:
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{current}\n")
    (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_memory_without_a_control_group_is_the_machines(proc: Path, cgroup: Path) -> None:
    assert machine.available_memory_bytes(proc, cgroup) == 8000 * 1024


def test_memory_of_an_unlimited_group_is_the_machines(proc: Path, cgroup: Path) -> None:
    limit_memory(cgroup, "max", 10**9, 0)
    assert machine.available_memory_bytes(proc, cgroup) == 8000 * 1024


def test_memory_of_a_container_is_what_its_limit_leaves(proc: Path, cgroup: Path) -> None:
    limit_memory(cgroup, "5000000", 3_000_000, 1_000_000)
    assert machine.available_memory_bytes(proc, cgroup) == 3_000_000  # page cache is given back


def test_a_container_over_its_limit_has_nothing_left(proc: Path, cgroup: Path) -> None:
    limit_memory(cgroup, "1000", 3_000_000, 0)
    assert machine.available_memory_bytes(proc, cgroup) == 0


def test_a_wide_limit_does_not_make_memory(proc: Path, cgroup: Path) -> None:
    limit_memory(cgroup, str(10**12), 0, 0)
    assert machine.available_memory_bytes(proc, cgroup) == 8000 * 1024


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("250000 100000", 2), ("20000 100000", 1)]
)
def test_processors_are_bounded_by_the_quota(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (cgroup / "cpu.max").write_text(f"{quota}\n")
    assert machine.usable_cpus(cgroup, cgroup / "no-topology") == expected


def test_processors_without_a_quota_are_those_of_the_affinity(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    assert machine.usable_cpus(cgroup, cgroup / "no-topology") == 3


def test_hardware_threads_of_one_core_count_once(
    cgroup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 6})
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 6: "2,6"}.items():
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{siblings}\n")
    assert machine.usable_cpus(cgroup, tmp_path) == 3


@pytest.mark.parametrize(
    ("line", "fast"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 avx2", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("processor\t: 0", False),
    ],
)
def test_bfloat16_is_fast_where_the_kernel_names_it(proc: Path, line: str, fast: bool) -> None:
    (proc / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert machine.fast_bfloat16(proc) is fast


def test_this_machine_can_be_asked() -> None:
    assert machine.available_memory_bytes() > 0
    assert machine.usable_cpus() >= 1
    assert isinstance(machine.fast_bfloat16(), bool)
