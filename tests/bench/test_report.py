"""The table, the fractions, and what is said of failures."""

from __future__ import annotations

import re

import msgspec
import pytest

from trioengine.bench.floor import Rates, floor_of
from trioengine.bench.load_probe import MachineLoad
from trioengine.bench.machine import Bandwidth, Gemm, Machine
from trioengine.bench.model_cost import ModelCost
from trioengine.bench.report import Report, rates_of, result_of, table
from trioengine.bench.summary import RunSummary
from trioengine.bench.workloads import WORKLOADS

W1 = WORKLOADS["W1"]
QUIET = MachineLoad(load_1min=0.1, busy_cpus=0.05)
COST = ModelCost(
    weight_bytes=269_030_016,
    body_params=106_203_456,
    head_params=28_311_552,
    kv_bytes_per_token=23_040,
)
MACHINE = Machine(
    cpu="A CPU",
    num_cpus=2,
    cache_bytes=512 << 20,
    weights=Bandwidth(buffer_bytes=1, cached=True, one_thread=40e9, all_threads=47e9),
    memory=Bandwidth(buffer_bytes=1 << 30, cached=False, one_thread=30e9, all_threads=45e9),
    gemm=Gemm(bfloat16=1e12, float32=2e11),
)


def run(tok_s: float, **changes: object) -> RunSummary:
    fields: dict[str, object] = {
        "num_ok": 5,
        "wall_s": 5.0,
        "output_tokens": 640,
        "tok_s": tok_s,
        "req_s": tok_s / 128,
        "ttft_ms": {"p50": 20.0, "p99": 1234.5},
        "itl_ms": {"p50": 7.25, "p99": 9.0},
        "decode_tok_s": tok_s + 1,
    }
    return msgspec.convert({**fields, **changes}, RunSummary)


def report(*runs: RunSummary, load: MachineLoad = QUIET, with_floor: bool = True) -> Report:
    rates = rates_of(MACHINE, is_float32=False) if with_floor else None
    return Report(
        version="0",
        command="serve",
        began_at="now",
        model="m",
        server="http://x (m)",
        machine=MACHINE if with_floor else None,
        cost=COST,
        no_floor="" if with_floor else "--no-floor",
        results=[result_of(W1, load, list(runs), COST, rates)],
    )


def test_the_table_of_a_run() -> None:
    lines = table(report(run(100.0), run(90.0), run(95.0, others_cpus=0.2)))
    assert lines[0] == "serve: m at http://x (m)"
    assert lines[1] == "A CPU, 2 CPUs, last cache 512 MiB"
    assert lines[2] == (
        "reads 47.0 GB/s of 257 MiB of weights (they fit the last cache), "
        "45.0 GB/s of 1,024 MiB; one thread 40.0 GB/s"
    )
    assert lines[3] == "multiplies bfloat16 at 1.00, float32 at 0.20 TFLOP/s"
    assert re.split("  +", lines[6]) == [
        "W1",
        "95.0 (0.55)",
        "90.0 to 100",
        "0.74",
        "96.0 (0.56)",
        "p50 20.0, p99 1,234",
        "p50 7.25, p99 9.00",
        "0.1, then 0.2",
    ]
    assert lines[7:] == ["in brackets: the fraction of the floor, which is 1 at best"]


def test_fractions_are_of_the_floor() -> None:
    floor = floor_of(W1, COST, Rates(bytes_per_s=47e9, flops=1e12))
    same = run(floor.tok_s, decode_tok_s=floor.decode_tok_s, ttft_ms={"p50": floor.ttft_ms})
    (result,) = report(same).results
    assert result.fractions == pytest.approx({"tok_s": 1.0, "decode_tok_s": 1.0, "ttft_ms": 1.0})
    half = run(floor.tok_s / 2, decode_tok_s=None, ttft_ms={"p50": 4 * floor.ttft_ms})
    (result,) = report(half).results
    assert result.fractions == pytest.approx({"tok_s": 0.5, "ttft_ms": 0.25})


def test_without_a_floor_there_are_no_fractions() -> None:
    found = report(run(100.0), with_floor=False)
    assert found.results[0].fractions == {}
    lines = table(found)
    assert lines[1] == "no floor: --no-floor"
    assert not any("(0." in line or "in brackets" in line for line in lines)


def test_rates_are_those_of_the_type_and_the_faster_buffer() -> None:
    assert rates_of(MACHINE, is_float32=True) == Rates(bytes_per_s=47e9, flops=2e11)
    slow = Bandwidth(buffer_bytes=1, cached=True, one_thread=1.0, all_threads=2.0)
    without = msgspec.structs.replace(MACHINE, weights=slow, gemm=None)
    assert rates_of(without, is_float32=False) == Rates(bytes_per_s=45e9, flops=None)


def test_failures_are_told_with_the_first_complaint() -> None:
    found = report(run(1.0), run(1.0, num_ok=3, num_failed=2, complaint="status 503: no"))
    assert found.failures == "2 of 10 requests failed; the first: status 503: no"
    assert "W1: 2 requests failed and are not counted" in table(found)
    assert report(run(1.0)).failures == ""


def test_what_spoils_a_figure_is_said() -> None:
    def warns(found: Report, words: str) -> bool:
        return any(words in line for line in table(found))

    busy = MachineLoad(load_1min=5.0, busy_cpus=1.5)
    assert warns(report(run(1.0, num_odd=2)), "2 requests were not of the workload's size")
    assert warns(report(run(1.0), load=busy), "busy with other things")
    assert warns(report(run(1.0), run(1.0, others_cpus=0.9)), "busy with other things")
    assert not warns(report(run(1.0), run(1.0, others_cpus=0.2)), "busy with other things")


def test_json_holds_all_of_it() -> None:
    found = report(run(100.0), run(90.0, num_failed=1, complaint="x", server_cpu_s=1.5))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found
