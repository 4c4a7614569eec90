"""Run workloads against a server: prompts, the client process, and who used the processors."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.bench.client import LoadPlan, LoadReport
from trioengine.bench.http_requests import build_requests
from trioengine.bench.load_probe import CpuMark, process_cpu_s
from trioengine.bench.prompts import make_prompts
from trioengine.bench.summary import summarise
from trioengine.bench.workloads import WARM_UP_REP
from trioengine.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.bench.http_requests import Target
    from trioengine.bench.prompts import SizingTokenizer
    from trioengine.bench.summary import RunSummary
    from trioengine.bench.workloads import Workload

__all__ = ["OnlineBench"]

CLIENT: Final = (sys.executable, "-P", "-m", "trioengine.bench.client")


class OnlineBench:
    """Drives one server."""

    def __init__(
        self,
        target: Target,
        tokenizer: SizingTokenizer,
        *,
        percents: Sequence[float],
        silence_s: float,
        server_pid: int | None,
    ) -> None:
        """Prepare to drive ``target``.

        Args:
            target: The server.
            tokenizer: Of its model.
            percents: Percentiles wanted of each run.
            silence_s: Longest silence of the server before a run counts as lost.
            server_pid: Process of the server, where it is ours.
        """
        self._target = target
        self._tokenizer = tokenizer
        self._percents = percents
        self._silence_s = silence_s
        self._server_pid = server_pid

    def warm_up(self, workload: Workload) -> None:
        """Send one request from each client, with prompts that are never measured."""
        few = min(workload.concurrency, workload.num_requests)
        self._send(msgspec.structs.replace(workload, num_requests=few), WARM_UP_REP)

    def run(self, workload: Workload, rep: int) -> RunSummary:
        """Run the workload once, with the prompts of repeat ``rep``.

        Raises:
            InternalError: The client process failed.
        """
        used = _Usage(self._server_pid)
        report = self._send(workload, rep)
        summary = summarise(workload, report, self._percents)
        if self._server_pid is not None:
            summary.server_cpu_s, summary.others_cpus = used.since()
        return summary

    def _send(self, workload: Workload, rep: int) -> LoadReport:
        prompts = make_prompts(workload, rep, self._tokenizer)
        plan = LoadPlan(
            host=self._target.host,
            port=self._target.port,
            requests=build_requests(self._target, prompts, workload.output_tokens),
            concurrency=workload.concurrency,
            silence_s=self._silence_s,
        )
        done = subprocess.run(
            CLIENT, input=msgspec.json.encode(plan), capture_output=True, check=False
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
            raise InternalError(f"the load client ended with {done.returncode}: {said[-1]}")
        return msgspec.json.decode(done.stdout, type=LoadReport)


class _Usage:
    """CPU time from now on, of a server and of those who are neither server, client nor we."""

    def __init__(self, server_pid: int | None) -> None:
        self._pid = server_pid
        self._begin_s = time.monotonic()
        self._all = CpuMark()
        self._ours_s = _own_cpu_s()
        self._server_s = self._now_s()

    def since(self) -> tuple[float, float]:
        """Return the server's CPU seconds, and the number of CPUs that others kept busy."""
        server_s = self._now_s() - self._server_s
        others_s = self._all.busy_s() - server_s - (_own_cpu_s() - self._ours_s)
        return server_s, max(0.0, others_s / (time.monotonic() - self._begin_s))

    def _now_s(self) -> float:
        return 0.0 if self._pid is None else process_cpu_s(self._pid)


def _own_cpu_s() -> float:
    """Return the CPU time of this process and of those children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
