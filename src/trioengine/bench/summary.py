"""From the records of a run to rates and percentiles, and from several runs to a median and range.

A token's latency is counted where a client sees it: at the event that carries it. Where a server
puts several tokens into one event, fewer and longer gaps are seen, as its users see them.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.bench.client import LoadReport
    from trioengine.bench.stream_record import StreamRecord
    from trioengine.bench.workloads import Workload

__all__ = ["RunSummary", "Spread", "Spreads", "percentile", "spread", "summarise"]

MS: Final = 1e3


class RunSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run of one workload. What cannot be known is ``None``.

    Attributes:
        num_ok: Requests that count: they ended with a finish reason and ``[DONE]``.
        num_failed: The others.
        complaint: What the first of those was about.
        num_odd: Requests that count, but whose prompt or answer is not of the workload's size by
            the server's own count. Where there are any, this was another workload.
        wall_s: Of the whole run.
        output_tokens: Of the requests that count.
        tok_s: Output tokens per second of the whole run, prefill included.
        req_s: Requests that count, per second.
        ttft_ms: Percentiles of the time from a request's begin to its first text, by name.
        itl_ms: Percentiles of the gaps between successive events with text.
        decode_tok_s: Tokens after the first per second after the first: median of the streams.
        cached_tokens: Prompt tokens that a prefix cache held.
        client_cpu_s: CPU time of the load client.
        server_cpu_s: CPU time of the server and its engine, where they are ours.
        others_cpus: CPUs that other processes kept busy meanwhile, where that can be told.
    """

    num_ok: int
    num_failed: int = 0
    complaint: str = ""
    num_odd: int = 0
    wall_s: float
    output_tokens: int
    tok_s: float
    req_s: float
    ttft_ms: dict[str, float] = {}
    itl_ms: dict[str, float] = {}
    decode_tok_s: float | None = None
    cached_tokens: int = 0
    client_cpu_s: float | None = None
    server_cpu_s: float | None = None
    others_cpus: float | None = None


class Spread(msgspec.Struct, frozen=True):
    """Several measurements of one thing."""

    median: float
    low: float
    high: float


class Spreads(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every figure of several runs; the fields are those of ``RunSummary``."""

    tok_s: Spread
    req_s: Spread
    decode_tok_s: Spread | None = None
    ttft_ms: dict[str, Spread] = {}
    itl_ms: dict[str, Spread] = {}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile, interpolated between the two values beside it.

    Args:
        values: At least one, in any order.
        percent: In [0, 100].

    Raises:
        ValueError: There are no values.

    Source: Hyndman and Fan 1996, The American Statistician 50(4), definition 7; numpy's default.
    """
    if not values:
        raise ValueError("nothing has no percentiles")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(workload: Workload, report: LoadReport, percents: Sequence[float]) -> RunSummary:
    """Return the figures of one run.

    Args:
        workload: What was run.
        report: What the client brought back.
        percents: Percentiles wanted, such as 50 and 99.
    """
    good = [record for record in report.records if record.ok]
    bad = [record for record in report.records if not record.ok]
    output_tokens = sum(record.output_tokens for record in good)
    decode = [rate for record in good if (rate := _decode_rate(record)) is not None]
    ttfts = [r.text_times_s[0] - r.begin_s for r in good if r.text_times_s]
    return RunSummary(
        num_ok=len(good),
        num_failed=len(bad),
        complaint=bad[0].complaint if bad else "",
        num_odd=sum(_is_odd(record, workload) for record in good),
        wall_s=report.wall_s,
        output_tokens=output_tokens,
        tok_s=output_tokens / report.wall_s,
        req_s=len(good) / report.wall_s,
        ttft_ms=_percentiles(ttfts, percents),
        itl_ms=_percentiles([gap for record in good for gap in _gaps(record)], percents),
        decode_tok_s=statistics.median(decode) if decode else None,
        cached_tokens=sum(record.cached_tokens for record in good),
        client_cpu_s=report.cpu_s,
    )


def spread(runs: Sequence[RunSummary]) -> Spreads:
    """Return median and range of every figure over ``runs``, of which there must be one."""
    decode = [run.decode_tok_s for run in runs if run.decode_tok_s is not None]
    return Spreads(
        tok_s=_spread([run.tok_s for run in runs]),
        req_s=_spread([run.req_s for run in runs]),
        decode_tok_s=_spread(decode) if decode else None,
        ttft_ms=_spreads([run.ttft_ms for run in runs]),
        itl_ms=_spreads([run.itl_ms for run in runs]),
    )


def _percentiles(times_s: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    if not times_s:
        return {}
    return {f"p{percent:g}": percentile(times_s, percent) * MS for percent in percents}


def _gaps(record: StreamRecord) -> list[float]:
    times = record.text_times_s
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _decode_rate(record: StreamRecord) -> float | None:
    times = record.text_times_s
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return (record.output_tokens - 1) / (times[-1] - times[0])


def _is_odd(record: StreamRecord, workload: Workload) -> bool:
    prompt = record.prompt_tokens in {None, workload.total_prompt_tokens}
    return not (prompt and record.completion_tokens in {None, workload.output_tokens})


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _spreads(runs: Sequence[dict[str, float]]) -> dict[str, Spread]:
    return {
        name: _spread([run[name] for run in runs if name in run])
        for name in dict.fromkeys(name for run in runs for name in run)
    }
