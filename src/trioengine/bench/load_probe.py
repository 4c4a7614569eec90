"""How busy the machine is, and with what: the kernel's counters, read at two moments."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["CpuMark", "MachineLoad", "machine_load", "process_cpu_s"]

PROC: Final = Path("/proc")
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_IDLE: Final = (3, 4)  # idle, iowait


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Before a run.

    Attributes:
        load_1min: The kernel's load average.
        busy_cpus: CPUs kept busy in the moment before.
    """

    load_1min: float
    busy_cpus: float


class CpuMark:
    """A moment from which the time that all CPUs together are busy is counted."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._busy_s = _busy_s(proc)
        self._time_s = time.monotonic()

    def busy_s(self) -> float:
        """CPU time spent since, whatever on; time stolen by a hypervisor's other guests counts."""
        return _busy_s(self._proc) - self._busy_s

    def busy_cpus(self) -> float:
        """The same as a number of CPUs."""
        return self.busy_s() / max(time.monotonic() - self._time_s, TICK_S)


def machine_load(watch_s: float = 0.5) -> MachineLoad:
    """Watch the machine for ``watch_s``, in which the caller does nothing."""
    mark = CpuMark()
    time.sleep(watch_s)
    return MachineLoad(load_1min=os.getloadavg()[0], busy_cpus=round(mark.busy_cpus(), 2))


def process_cpu_s(pid: int, proc: Path = PROC) -> float:
    """Return the CPU time of a process and its living descendants; 0 if it is gone."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
        lists = [path.read_text() for path in (proc / str(pid) / "task").glob("*/children")]
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    own_s = (int(fields[11]) + int(fields[12])) * TICK_S
    return own_s + sum(process_cpu_s(int(child), proc) for text in lists for child in text.split())


def _busy_s(proc: Path) -> float:
    """Return the busy time of all CPUs since the start. Source: proc(5), ``/proc/stat``."""
    fields = (proc / "stat").read_text().splitlines()[0].split()[1:9]  # guest time is in user's
    return sum(int(value) for i, value in enumerate(fields) if i not in _IDLE) * TICK_S
