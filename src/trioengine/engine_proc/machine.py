"""What this process may use of the machine: memory, processors, instruction sets."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

__all__ = ["available_memory_bytes", "cpu_flags", "fast_bfloat16", "usable_cpus"]

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")
_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
_FAST_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one is arm64's


def available_memory_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return what this process may still take: the machine's free memory or the container's.

    Page cache counts as free in both, since the kernel gives it back. Control groups of version 2.
    """
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _read(cgroup / "memory.max")
    if limit in {None, "max"}:
        return available
    stat = dict(line.split() for line in (_read(cgroup / "memory.stat") or "").splitlines())
    used = int(_read(cgroup / "memory.current") or 0) - int(stat.get("inactive_file", 0))
    return max(0, min(available, int(limit or 0) - used))


def usable_cpus(cgroup: Path = _CGROUP, topology: Path = _TOPOLOGY) -> int:
    """Return how many cores this process may keep busy with arithmetic.

    Those of its affinity, within the container's quota. Hardware threads of one core share its
    arithmetic units and its memory port, so they count once.
    """
    siblings = "cpu{}/topology/thread_siblings_list"
    cores = {_read(topology / siblings.format(cpu)) or cpu for cpu in os.sched_getaffinity(0)}
    quota, _, period = (_read(cgroup / "cpu.max") or "max").partition(" ")
    if quota == "max":
        return len(cores)
    return max(1, min(len(cores), round(int(quota) / int(period))))


def cpu_flags(proc: Path = _PROC) -> frozenset[str]:
    """Return the first processor's instruction-set flags, with the kernel's names."""
    for line in (_read(proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()


def fast_bfloat16(proc: Path = _PROC) -> bool:
    """Say whether this CPU multiplies bfloat16 faster than float32."""
    return platform.system() == "Linux" and not _FAST_BFLOAT16.isdisjoint(cpu_flags(proc))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # no control group of version 2 here, or no limit on this one
        return None
