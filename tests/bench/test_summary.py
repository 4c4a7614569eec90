"""Percentiles, rates, medians."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.bench.client import LoadReport
from trioengine.bench.stream_record import StreamRecord
from trioengine.bench.summary import RunSummary, Spread, percentile, spread, summarise
from trioengine.bench.workloads import Workload

WORKLOAD = Workload(name="T", concurrency=2, num_requests=3, prompt_tokens=7, output_tokens=3)
FINITE = st.floats(-1e6, 1e6)


def record(*times_s: float, begin_s: float = 0.0, **fields: Any) -> StreamRecord:
    values: dict[str, object] = {
        "status": 200,
        "done": True,
        "finish_reason": "length",
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "text_times_s": list(times_s),
    }
    ended = StreamRecord(begin_s=begin_s, end_s=9.0)
    for name, value in (values | fields).items():
        setattr(ended, name, value)
    return ended


def test_percentiles_by_hand() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 0) == 1.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    assert percentile([float(value) for value in range(101)], 99) == 99.0
    with pytest.raises(ValueError, match="no percentiles"):
        percentile([], 50)


@given(st.lists(FINITE, min_size=2, max_size=40))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    ours = [percentile(values, percent) for percent in range(1, 100)]
    assert ours == pytest.approx(cuts, abs=1e-6)


@given(st.lists(FINITE, min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_grow_within_the_values(values: list[float], one: float, two: float) -> None:
    low, high = sorted((one, two))
    assert percentile(values, low) <= percentile(values, high) + 1e-9
    assert min(values) - 1e-9 <= percentile(values, one) <= max(values) + 1e-9


def test_a_run_by_hand() -> None:
    records = [
        record(1.0, 1.5, 2.0, begin_s=0.5, cached_tokens=4),  # TTFT 0.5, gaps 0.5, 2 tok/s
        record(3.0, 3.1, 3.5, begin_s=2.0),  # TTFT 1.0, gaps 0.1 and 0.4, 4 tok/s
        record(5.0, begin_s=4.0, done=False),  # does not count
    ]
    report = LoadReport(wall_s=2.0, cpu_s=0.25, records=records)
    run = summarise(WORKLOAD, report, (50.0, 100.0))
    assert (run.num_ok, run.num_failed, run.num_odd) == (2, 1, 0)
    assert run.complaint == "the stream ended without [DONE]"
    assert (run.output_tokens, run.tok_s, run.req_s) == (6, 3.0, 1.0)
    assert run.ttft_ms == {"p50": 750.0, "p100": 1000.0}
    assert run.itl_ms == pytest.approx({"p50": 450.0, "p100": 500.0})
    assert run.decode_tok_s == 3.0
    assert (run.cached_tokens, run.client_cpu_s) == (4, 0.25)


def test_several_tokens_in_one_event_are_several_tokens() -> None:
    report = LoadReport(wall_s=1.0, cpu_s=0, records=[record(0.1, 0.6)])
    run = summarise(WORKLOAD, report, (50.0,))
    assert run.output_tokens == 3
    assert run.decode_tok_s == pytest.approx(4.0)
    assert run.itl_ms == pytest.approx({"p50": 500.0})


@pytest.mark.parametrize(
    ("fields", "odd"),
    [
        ({}, 0),
        ({"prompt_tokens": 8}, 1),
        ({"completion_tokens": 2}, 1),
        ({"prompt_tokens": None, "completion_tokens": None}, 0),
    ],
)
def test_another_size_is_told(fields: dict[str, Any], odd: int) -> None:
    report = LoadReport(wall_s=1.0, cpu_s=0, records=[record(0.1, **fields)])
    assert summarise(WORKLOAD, report, ()).num_odd == odd


def test_nothing_that_counts_is_no_error() -> None:
    report = LoadReport(wall_s=1.0, cpu_s=0, records=[record(status=503, error="no")])
    run = summarise(WORKLOAD, report, (50.0,))
    assert (run.tok_s, run.ttft_ms, run.decode_tok_s) == (0.0, {}, None)
    assert spread([run]).tok_s == Spread(0.0, 0.0, 0.0)


def test_median_and_range_of_runs() -> None:
    runs = [
        RunSummary(
            num_ok=1,
            wall_s=1,
            output_tokens=1,
            tok_s=rate,
            req_s=2 * rate,
            decode_tok_s=rate if rate < 3 else None,
            ttft_ms={"p50": -rate} if rate < 3 else {},
        )
        for rate in (3.0, 1.0, 2.0)
    ]
    spreads = spread(runs)
    assert spreads.tok_s == Spread(2.0, 1.0, 3.0)
    assert spreads.req_s == Spread(4.0, 2.0, 6.0)
    assert spreads.decode_tok_s == Spread(1.5, 1.0, 2.0)
    assert spreads.ttft_ms == {"p50": Spread(-1.5, -2.0, -1.0)}
    assert spreads.itl_ms == {}
