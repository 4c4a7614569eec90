"""What ``trioengine bench serve|offline|latency`` does."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.bench.arguments import ENGINE_OPTIONS
from trioengine.bench.http_requests import find_target
from trioengine.bench.load_probe import machine_load
from trioengine.bench.machine import Machine
from trioengine.bench.online import OnlineBench
from trioengine.bench.own_server import own_server
from trioengine.bench.report import Report, rates_of, result_of, table
from trioengine.bench.subject import find_subject
from trioengine.bench.workloads import WORKLOADS, Workload
from trioengine.errors import ConfigError, InternalError
from trioengine.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from trioengine.bench.http_requests import Target
    from trioengine.bench.report import WorkloadResult
    from trioengine.bench.subject import Subject
    from trioengine.bench.summary import RunSummary

    Say = Callable[[str], object]

__all__ = ["run_bench"]

SERVE_PERCENTS: Final = (50.0, 99.0)
LATENCY_PERCENTS: Final = (50.0, 90.0, 99.0, 100.0)
MACHINE: Final = (sys.executable, "-P", "-m", "trioengine.bench.machine")


def run_bench(options: argparse.Namespace, say: Say) -> Report:
    """Run what the command line asks for.

    Args:
        options: As ``arguments.add_bench`` has them parsed.
        say: Takes the lines of the table, when all is done.

    Raises:
        ConfigError: An option, the model or the URL cannot be used.
        EngineStartError: The server or the model could not be started.
        InternalError: A child process of the benchmark failed.
    """
    if options.json is not None:
        _check_writable(Path(options.json))
    report = _Bench(options).run()
    for line in table(report):
        say(line)
    if options.json is not None:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
        Path(options.json).write_bytes(encoded + b"\n")
    return report


def _check_writable(path: Path) -> None:
    """Find out now, not when minutes of measuring are over."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error


class _Bench:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._engine = _given(options)
        self._url: str | None = getattr(options, "url", None)
        if self._url is not None and self._engine:
            name = next(iter(self._engine)).replace("_", "-")
            raise ConfigError(f"--{name} is for a server of our own, and --url names another")
        self._subject: Subject = find_subject(options.model, self._engine)
        self._machine: Machine | None = None
        self._no_floor = ""

    def run(self) -> Report:
        began_at = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        server = ""
        if self._options.kind == "offline":
            self._look_at_machine()
            results = [self._run_offline(workload) for workload in self._workloads()]
        else:
            with self._target() as (target, server, pid):
                bench = OnlineBench(
                    target,
                    self._subject.tokenizer,
                    percents=self._percents,
                    silence_s=self._options.silence,
                    server_pid=pid,
                )
                results = [self._run_online(bench, workload) for workload in self._workloads()]
        return Report(
            version=__version__,
            command=self._options.kind,
            began_at=began_at,
            model=self._subject.model,
            options=self._engine,
            server=server,
            machine=self._machine,
            cost=self._subject.cost,
            no_floor=self._no_floor,
            results=results,
        )

    # What is run ----------------------------------------------------------------------------

    @property
    def _percents(self) -> tuple[float, ...]:
        return LATENCY_PERCENTS if self._options.kind == "latency" else SERVE_PERCENTS

    def _workloads(self) -> list[Workload]:
        options = self._options
        if options.kind == "latency":
            return [
                Workload(
                    name="latency",
                    concurrency=1,
                    num_requests=options.requests,
                    prompt_tokens=options.prompt_tokens,
                    output_tokens=options.output_tokens,
                )
            ]
        chosen = [WORKLOADS[name] for name in dict.fromkeys(options.workloads)]
        if options.requests is None:
            return chosen
        return [msgspec.structs.replace(each, num_requests=options.requests) for each in chosen]

    def _run_online(self, bench: OnlineBench, workload: Workload) -> WorkloadResult:
        bench.warm_up(workload)
        return self._run(workload, lambda rep: bench.run(workload, rep))

    def _run_offline(self, workload: Workload) -> WorkloadResult:
        from trioengine.bench.offline import OfflineBench

        tokenizer = self._subject.tokenizer
        with OfflineBench(self._options.model, self._engine, workload, tokenizer) as bench:
            bench.warm_up()
            return self._run(workload, bench.run)

    def _run(self, workload: Workload, run: Callable[[int], RunSummary]) -> WorkloadResult:
        load = machine_load()
        runs = [run(rep) for rep in range(1, self._options.repeat + 1)]  # 0 has warmed up
        rates = None
        if self._machine is not None:
            rates = rates_of(self._machine, is_float32=self._subject.is_float32)
        return result_of(workload, load, runs, self._subject.cost, rates)

    # What it is run against -----------------------------------------------------------------

    @contextlib.contextmanager
    def _target(self) -> Iterator[tuple[Target, str, int | None]]:
        """Yield the server, what to call it, and its process where it is ours."""
        if self._url is not None:
            key = self._options.api_key or _first_key()
            target = find_target(self._url, key)
            self._look_at_machine(is_local=target.is_local)
            yield target, f"{self._url} ({target.model})", None
            return
        self._look_at_machine()
        with own_server(self._options.model, _flags(self._engine)) as server:
            yield find_target(server.url), f"{server.url} ({server.engine})", server.pid

    def _look_at_machine(self, *, is_local: bool = True) -> None:
        """Measure the machine, while nothing of ours runs on it, if that leads to a floor."""
        cost = self._subject.cost
        if self._options.no_floor:
            self._no_floor = "--no-floor"
        elif cost is None:
            self._no_floor = self._subject.cost_unknown
        elif not is_local:
            self._no_floor = "the server is on another machine"
        else:
            self._machine = _measure_machine(cost.weight_bytes)


def _given(options: argparse.Namespace) -> dict[str, object]:
    """Return the engine's options that were given, by name with underscores."""
    names = (option.name.replace("-", "_") for option in ENGINE_OPTIONS)
    values = ((name, getattr(options, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def _flags(engine: dict[str, object]) -> list[str]:
    """Return the same as a command line."""
    flags = []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def _first_key() -> str | None:
    return os.environ.get("TRIOENGINE_API_KEY", "").split(",")[0] or None


def _measure_machine(weight_bytes: int) -> Machine:
    # One thread for each of its calls: it is we who spread the reading over threads.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [*MACHINE, str(weight_bytes)], capture_output=True, check=False, env=environment
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise InternalError(f"measuring the machine ended with {done.returncode}: {said[-1]}")
    return msgspec.json.decode(done.stdout, type=Machine)
