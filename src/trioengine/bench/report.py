"""What a benchmark found, as JSON and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.bench.floor import Floor, Rates, floor_of
from trioengine.bench.load_probe import MachineLoad
from trioengine.bench.machine import Machine
from trioengine.bench.model_cost import ModelCost
from trioengine.bench.summary import RunSummary, Spread, Spreads, spread
from trioengine.bench.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Report", "WorkloadResult", "rates_of", "result_of", "table"]

NOTHING: Final = "-"
BUSY_CPUS: Final = 0.5  # of other processes, from which on a figure is not to be trusted


class WorkloadResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All runs of one workload.

    Attributes:
        workload: What was run.
        load: Of the machine before the first run.
        runs: Each measured one.
        spreads: Median and range of their figures.
        floor: The best these could be, where it is known.
        fractions: By how much of the floor each median came to: 1 is the floor itself.
    """

    workload: Workload
    load: MachineLoad
    runs: list[RunSummary]
    spreads: Spreads
    floor: Floor | None = None
    fractions: dict[str, float] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of ``trioengine bench``.

    Attributes:
        version: Of trioengine.
        command: ``serve``, ``offline`` or ``latency``.
        began_at: Date and time with zone, ISO 8601.
        model: What it was asked to measure.
        options: Of the engine, as given.
        server: Address, and what it is where it is ours; empty offline.
        machine: What the hardware gives, where it was measured.
        cost: What a token costs, where it is known.
        no_floor: Why there is none, where there is none.
        results: One for each workload.
    """

    version: str
    command: str
    began_at: str
    model: str
    options: dict[str, object] = {}
    server: str = ""
    machine: Machine | None = None
    cost: ModelCost | None = None
    no_floor: str = ""
    results: list[WorkloadResult] = []

    @property
    def failures(self) -> str:
        """The requests that failed, in a sentence; empty where none did."""
        runs = [run for result in self.results for run in result.runs]
        failed = sum(run.num_failed for run in runs)
        if not failed:
            return ""
        complaint = next(run.complaint for run in runs if run.complaint)
        total = failed + sum(run.num_ok for run in runs)
        return f"{failed} of {total} requests failed; the first: {complaint}"


def rates_of(machine: Machine, *, is_float32: bool) -> Rates:
    """Return the rates that the floor is reckoned with.

    The weights' bandwidth is the larger of both that were measured, since noise can only lower
    either, and a cache can only raise the first.
    """
    gemm = machine.gemm
    flops = None if gemm is None else (gemm.float32 if is_float32 else gemm.bfloat16)
    return Rates(bytes_per_s=max(machine.weights.best, machine.memory.best), flops=flops)


def result_of(
    workload: Workload,
    load: MachineLoad,
    runs: list[RunSummary],
    cost: ModelCost | None,
    rates: Rates | None,
) -> WorkloadResult:
    """Return the runs with their spread and, where cost and rates are known, the floor."""
    spreads = spread(runs)
    floor = None if cost is None or rates is None else floor_of(workload, cost, rates)
    return WorkloadResult(
        workload=workload,
        load=load,
        runs=runs,
        spreads=spreads,
        floor=floor,
        fractions={} if floor is None else _fractions(spreads, floor),
    )


def _fractions(spreads: Spreads, floor: Floor) -> dict[str, float]:
    fractions = {"tok_s": spreads.tok_s.median / floor.tok_s}
    if spreads.decode_tok_s is not None:
        fractions["decode_tok_s"] = spreads.decode_tok_s.median / floor.decode_tok_s
    if "p50" in spreads.ttft_ms:
        fractions["ttft_ms"] = floor.ttft_ms / spreads.ttft_ms["p50"].median
    return fractions


# The table ---------------------------------------------------------------------------------------


def table(report: Report) -> list[str]:
    """Return the report as lines for people: medians, with their range where it matters."""
    lines = [f"{report.command}: {report.model}" + (f" at {report.server}" * bool(report.server))]
    lines += _machine_lines(report)
    rows = [_HEAD, *(_row(result) for result in report.results)]
    lines += ["", *_aligned(rows)]
    if any(result.fractions for result in report.results):
        lines.append("in brackets: the fraction of the floor, which is 1 at best")
    lines += [warning for result in report.results for warning in _warnings(result)]
    return lines


_HEAD: Final = ("", "tok/s", "range", "req/s", "tok/s a stream", "TTFT ms", "ITL ms", "load, CPUs")


def _row(result: WorkloadResult) -> tuple[str, ...]:
    spreads, fractions = result.spreads, result.fractions
    return (
        result.workload.name,
        _figure(spreads.tok_s, fractions.get("tok_s")),
        f"{_short(spreads.tok_s.low)} to {_short(spreads.tok_s.high)}",
        _figure(spreads.req_s),
        _figure(spreads.decode_tok_s, fractions.get("decode_tok_s")),
        _times(spreads.ttft_ms),
        _times(spreads.itl_ms),
        _load(result),
    )


def _load(result: WorkloadResult) -> str:
    """Say how many CPUs others kept busy: before, and the most of all runs."""
    others = _others_cpus(result)
    return f"{result.load.busy_cpus:.1f}" + (f", then {max(others):.1f}" if others else "")


def _others_cpus(result: WorkloadResult) -> list[float]:
    return [run.others_cpus for run in result.runs if run.others_cpus is not None]


def _figure(spread: Spread | None, fraction: float | None = None) -> str:
    if spread is None:
        return NOTHING
    share = "" if fraction is None else f" ({fraction:.2f})"
    return _short(spread.median) + share


def _times(spreads: dict[str, Spread]) -> str:
    parts = (f"{name} {_short(each.median)}" for name, each in spreads.items())
    return ", ".join(parts) or NOTHING


def _short(value: float) -> str:
    """Write a figure with three digits that count, or all before the point."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _machine_lines(report: Report) -> list[str]:
    if report.machine is None or report.cost is None:
        return [f"no floor: {report.no_floor}"] if report.no_floor else []
    machine, cost = report.machine, report.cost
    cached = " (they fit the last cache)" if machine.weights.cached else ""
    weights, memory = machine.weights, machine.memory
    lines = [
        f"{machine.cpu}, {machine.num_cpus} CPUs, last cache {_mib(machine.cache_bytes)}",
        (
            f"reads {_gb_s(weights.best)} of {_mib(cost.weight_bytes)} of weights{cached}, "
            f"{_gb_s(memory.best)} of {_mib(memory.buffer_bytes)}; "
            f"one thread {_gb_s(weights.one_thread)}"
        ),
    ]
    if machine.memory.cached:
        lines.append("no buffer larger than the last cache fits into memory")
    if machine.gemm is None:
        return [*lines, "no torch to multiply with: the floor counts only what is read"]
    bfloat16, float32 = machine.gemm.bfloat16 / 1e12, machine.gemm.float32 / 1e12
    return [*lines, f"multiplies bfloat16 at {bfloat16:.2f}, float32 at {float32:.2f} TFLOP/s"]


def _gb_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _warnings(result: WorkloadResult) -> Iterable[str]:
    name = result.workload.name
    if odd := sum(run.num_odd for run in result.runs):
        yield f"{name}: {odd} requests were not of the workload's size, so it is another workload"
    if failed := sum(run.num_failed for run in result.runs):
        yield f"{name}: {failed} requests failed and are not counted"
    if max([result.load.busy_cpus, *_others_cpus(result)]) > BUSY_CPUS:
        yield f"{name}: the machine was busy with other things, so neither figure nor floor is true"
