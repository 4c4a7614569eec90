"""The command against real servers, on the simulated engine and in small."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from helpers.server_process import ServerProcess
from trioengine import cli
from trioengine.bench import command
from trioengine.bench.arguments import (
    DEFAULT_WORKLOADS,
    ENGINE_OPTIONS,
    WORKLOAD_NAMES,
    add_bench,
)
from trioengine.bench.machine import Bandwidth, Machine
from trioengine.bench.model_cost import ModelCost
from trioengine.bench.report import Report
from trioengine.bench.subject import find_subject
from trioengine.bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

SIM = ["--engine", "sim"]


def bench(*arguments: str, code: int = 0) -> Report:
    """Run the command in this process; return what it wrote as JSON."""
    path = Path(arguments[arguments.index("--json") + 1])
    assert cli.main(["bench", *arguments]) == code
    return msgspec.json.decode(path.read_bytes(), type=Report)


@pytest.fixture
def json_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("trioengine.bench.load_probe.machine_load.__defaults__", (0.0,))
    before = signal.getsignal(signal.SIGTERM)
    yield str(tmp_path / "report.json")
    signal.signal(signal.SIGTERM, before)


# Arguments ---------------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(), lambda options: 0)
    return parser.parse_args(["bench", *arguments])


def test_the_names_of_workloads_are_those_that_there_are() -> None:
    assert tuple(WORKLOADS) == WORKLOAD_NAMES
    assert set(DEFAULT_WORKLOADS) < set(WORKLOAD_NAMES)


def test_defaults() -> None:
    options = parse("serve")
    assert tuple(options.workloads) == ("W1", "W2", "W3", "W4")
    assert (options.repeat, options.requests, options.url, options.json) == (3, None, None, None)
    options = parse("latency")
    assert (options.prompt_tokens, options.output_tokens, options.requests) == (64, 128, 10)


def test_options_of_the_engine_are_all_there() -> None:
    names = {option.name for option in ENGINE_OPTIONS}
    assert {"engine", "dtype", "threads", "max-num-seqs", "start-timeout"} <= names
    assert names.isdisjoint({"port", "host", "api-key", "max-queue", "profile-dir"})
    options = parse("offline", "--no-enable-prefix-caching", "--threads", "2", "--engine", "sim")
    given = command._given(options)
    assert given == {"enable_prefix_caching": False, "threads": "2", "engine": "sim"}
    assert sorted(command._flags(given)) == [
        "--engine=sim",
        "--no-enable-prefix-caching",
        "--threads=2",
    ]
    assert command._flags({"enable_prefix_caching": True}) == ["--enable-prefix-caching"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--workloads", "W9"],
        ["serve", "--repeat", "0"],
        ["serve", "--requests", "x"],
        ["serve", "--silence", "0"],
        ["latency", "--prompt-tokens", "-1"],
        ["offline", "--url", "http://x"],
        [],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*arguments)
    assert left.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.process
def test_the_command_line_does_not_import_the_benchmark() -> None:
    script = (
        "import sys\nfrom trioengine import cli\ncli._parser()\n"
        "print(sorted(m for m in sys.modules if m.startswith('trioengine.bench')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.stdout == b"['trioengine.bench', 'trioengine.bench.arguments']\n"


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("json_file")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--url", "http://127.0.0.1:1", *SIM], "--engine is for a server of our own"),
        (["serve", "--url", "ftp://x"], "must begin with http://"),
        (["offline", "--model", "/nowhere/at/all"], "not found"),
        (["serve", *SIM, "--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The tokenizer of the default model may have to be fetched first: not for a test.
    if "--url" in arguments and "sim" not in arguments:
        subject = find_subject(None, {"engine": "sim"})
        monkeypatch.setattr(command, "find_subject", lambda model, engine: subject)
    assert cli.main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.process
@pytest.mark.usefixtures("json_file")
def test_a_server_that_does_not_start_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    failing = ["--engine-args", '{"fail_on_load": "no such weights"}']
    assert cli.main(["bench", "serve", *SIM, *failing]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such weights" in line


# From end to end ---------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.slow
def test_serve_with_a_server_of_our_own(json_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(
        *("serve", *SIM, "--workloads", "W1", "W4", "--requests", "20"),
        *("--repeat", "2", "--json", json_file),
    )
    assert (report.command, report.model, report.failures) == ("serve", "sim", "")
    assert report.no_floor == "the simulated engine computes nothing"
    assert [result.workload.name for result in report.results] == ["W1", "W4"]
    for result in report.results:
        assert len(result.runs) == 2
        for run in result.runs:
            assert (run.num_ok, run.num_failed, run.num_odd) == (20, 0, 0)
            assert run.output_tokens == 20 * result.workload.output_tokens
            assert 0 < run.ttft_ms["p50"] <= run.ttft_ms["p99"] < 1e3 * run.wall_s
            assert 0 <= run.itl_ms["p50"] <= run.itl_ms["p99"]
            assert run.client_cpu_s is not None
            assert run.server_cpu_s is not None
            assert run.client_cpu_s < run.server_cpu_s / 2
    w1, w4 = report.results
    assert {run.cached_tokens for run in w1.runs} == {0}  # no repeat profits from another
    assert all(run.cached_tokens > 0 for run in w4.runs)
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("serve: sim at http://127.0.0.1:")
    assert [line.split()[0] for line in table if line.startswith("W") and ":" not in line] == [
        "W1",
        "W4",
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # Slow enough that each token is an event of its own: deltas merge where a client is behind.
    with ServerProcess("--api-key", "secret", "--engine-args", '{"step_time_ms": 5}') as server:
        yield server.wait_ready()


@pytest.fixture
def of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the subject be the simulated one, as the server is, whatever --model would mean."""
    subject = find_subject(None, {"engine": "sim"})
    monkeypatch.setattr(command, "find_subject", lambda model, engine: subject)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("of_the_server")
def test_latency_of_a_server_that_runs(json_file: str, server: ServerProcess) -> None:
    url = f"http://127.0.0.1:{server.port}"
    report = bench(
        *("latency", "--url", url, "--api-key", "secret", "--requests", "3"),
        *("--prompt-tokens", "40", "--output-tokens", "9", "--repeat", "1", "--json", json_file),
    )
    (result,) = report.results
    (run,) = result.runs
    assert report.server == f"{url} (sim)"
    assert (result.workload.concurrency, result.workload.prompt_tokens) == (1, 40)
    assert (run.num_ok, run.num_odd, run.output_tokens) == (3, 0, 27)
    assert list(run.ttft_ms) == list(run.itl_ms) == ["p50", "p90", "p99", "p100"]
    assert (run.server_cpu_s, run.others_cpus) == (None, None)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("of_the_server")
def test_requests_that_fail_are_not_counted_and_end_in_an_error(
    json_file: str,
    server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRIOENGINE_API_KEY", "secret,other")
    report = bench(
        *("latency", "--url", f"http://127.0.0.1:{server.port}", "--requests", "2"),
        *("--output-tokens", "90000", "--repeat", "1", "--json", json_file),
        code=1,
    )
    (run,) = report.results[0].runs
    assert (run.num_ok, run.num_failed, run.tok_s) == (0, 2, 0.0)
    assert "context_length_exceeded" in run.complaint
    assert "trioengine: 2 of 2 requests failed" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.slow
def test_offline(json_file: str) -> None:
    report = bench(
        *("offline", *SIM, "--workloads", "W4", "--requests", "20"),
        *("--repeat", "2", "--json", json_file),
    )
    (result,) = report.results
    assert [(run.num_ok, run.num_odd, run.output_tokens) for run in result.runs] == [
        (20, 0, 640)
    ] * 2
    assert (result.runs[0].ttft_ms, report.server) == ({}, "")


def test_the_machine_is_measured_where_it_makes_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Bandwidth(buffer_bytes=1, cached=False, one_thread=1, all_threads=1)
    machine = Machine(cpu="", num_cpus=1, cache_bytes=0, weights=rate, memory=rate, gemm=None)
    asked: list[int] = []

    def measure(weight_bytes: int) -> Machine:
        asked.append(weight_bytes)
        return machine

    monkeypatch.setattr(command, "_measure_machine", measure)

    def reason(cost_bytes: int | None, *flags: str, is_local: bool = True) -> str:
        run = command._Bench(parse("serve", *SIM, *flags))
        if cost_bytes is not None:
            cost = ModelCost(
                weight_bytes=cost_bytes, body_params=1, head_params=1, kv_bytes_per_token=1
            )
            run._subject = msgspec.structs.replace(run._subject, cost=cost)
        run._look_at_machine(is_local=is_local)
        assert (run._machine is None) == bool(run._no_floor)
        return run._no_floor

    assert reason(None) == "the simulated engine computes nothing"
    assert reason(7, "--no-floor") == "--no-floor"
    assert reason(7, is_local=False) == "the server is on another machine"
    assert reason(7) == ""
    assert asked == [7]
