"""Faults drawn at random, in a real server with a real engine: each costs what it may, no more.

The grammar of ``docs/fault_plans.md``, as in the histories in memory, but against processes and a
model that computes: the native engine with a tiny model (the simulated one where it is not built),
and with the real one where that is in the cache.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import (
    DrawFn,
    builds,
    composite,
    integers,
    just,
    lists,
    none,
    one_of,
    sampled_from,
)

from helpers.server_process import ServerProcess, process_lives, wait_until
from helpers.tiny_native import save_tiny_native
from trioengine.fault_plan import Fault
from trioengine.models.resolve import prepared_dir, resolve_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

ALLOWED = {"TRIOENGINE_ALLOW_FAULTS": "1"}
PATH = "/v1/completions"
TOKENS = 12  # of each answer, hence at least as many steps and frames of outputs
PROMPTS = ("to be", "or not to be", "that is the question", "whether")
START_S = 60.0
BUDGET_S = 40.0  # of all examples of one subject: then the rest are passed over
ERROR_CODE = re.compile(r'"code": ?"(\w+)"')
NATIVE = "trioengine.engine_proc.native_runner._native"


class Subject(NamedTuple):
    """What is served.

    Attributes:
        flags: For ``trioengine serve``.
        engine: As ``--engine``.
        truth: The answer to each prompt where nothing goes wrong.
    """

    flags: tuple[str, ...]
    engine: str
    truth: tuple[str, ...]


class Plan(NamedTuple):
    """What goes wrong.

    Attributes:
        contained: Each costs one request a 500.
        harmless: Each costs nothing but time.
        fatal: The one that ends the engine, if any does, and a word of its cause.
    """

    contained: list[Fault]
    harmless: list[Fault]
    fatal: tuple[Fault, str] | None


_times, _steps, _requests = integers(1, 8), integers(1, 8), integers(1, len(PROMPTS))
_contained = one_of(
    builds(Fault, at=just("detokenizer"), do=just("raise"), request=_requests, nth=_times),
    builds(Fault, at=just("sampler"), do=just("spoil"), request=_requests, nth=_times),
    builds(Fault, at=just("tokenizer"), do=just("raise"), nth=_requests),
)
_harmless = one_of(
    builds(Fault, at=just("reader"), do=just("pause"), seconds=just(0.3), nth=_times),
    builds(Fault, at=just("clock"), do=just("jump"), seconds=just(50.0), message=just("outputs")),
)


def _fault(**fields: object) -> Fault:
    return msgspec.convert(fields, Fault)


@composite
def _fatal(draw: DrawFn) -> tuple[Fault, str]:
    within_step = (
        *("forward", "sampler", "schedule", "build", "execute"),
        *("poll aborts", "apply", "send", "commands"),
    )
    if draw(integers(0, 2)):
        at, do = draw(sampled_from(within_step)), draw(sampled_from(["raise", "exit", "kill"]))
        cause = {"raise": f"raise at {at}", "exit": "70", "kill": "SIGKILL"}[do]
        return _fault(at=at, do=do, step=draw(_steps)), cause
    do = draw(sampled_from(["drop", "duplicate", "swap", "corrupt"]))
    cause = "undecodable" if do == "corrupt" else "was due"
    if draw(integers(0, 1)):
        return _fault(at="to_server", do=do, message="outputs", nth=draw(_times)), cause
    if do in ("drop", "swap"):
        return _fault(at="to_engine", do=do, message="add", nth=1), cause  # others follow
    return _fault(at="to_engine", do=do, message="add", nth=draw(_requests)), cause


plans = builds(
    Plan, lists(_contained, max_size=2), lists(_harmless, max_size=1), one_of(none(), _fatal())
)


def ask_all(server: ServerProcess) -> list[tuple[str, str]]:
    """Let all clients ask at once, every other for a stream; return outcome and text of each."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda index: ask(server, index), range(len(PROMPTS))))


def ask(server: ServerProcess, index: int, *, stream: bool | None = None) -> tuple[str, str]:
    """Return how a request ended, ``200`` or status and code, and the text of one that went well.

    A stream that was cut, and one that failed after its head, have the status that it is about.
    """
    body = {"prompt": PROMPTS[index], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    streams = index % 2 == 1 if stream is None else stream
    status, data = server.request("POST", PATH, body | {"stream": streams, "seed": 1})
    answer = data.decode()
    if codes := ERROR_CODE.findall(answer):
        return codes[-1], ""
    assert status == 200
    if not streams:
        return "ok", json.loads(answer)["choices"][0]["text"]
    *events, last, rest = answer.split("\n\n")
    assert (last, rest) == ("data: [DONE]", ""), "a stream without an end"
    choices = [
        json.loads(event.removeprefix("data: "))["choices"] for event in events if event != ": ping"
    ]
    return "ok", "".join(choice["text"] for chunk in choices for choice in chunk)


def serve(subject: Subject, plan: Plan, directory: Path) -> ServerProcess:
    faults = [*plan.contained, *plan.harmless, *([plan.fatal[0]] if plan.fatal else [])]
    path = directory / "plan.json"
    path.write_text(json.dumps({"fault": [_stated(fault) for fault in faults]}))
    return ServerProcess(
        *subject.flags, "--fault-plan", str(path), engine=subject.engine, env=ALLOWED
    )


def _stated(fault: Fault) -> dict[str, Any]:
    fields = {name: getattr(fault, name) for name in fault.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not None}


def run_plan(subject: Subject, plan: Plan, directory: Path) -> None:
    """Ask under a plan, and check what everybody sees and how it ends."""
    with serve(subject, plan, directory) as server:
        server.wait_line("ready after", timeout_s=START_S)
        engine_pid = server.engine_pid
        answers = ask_all(server)
        for (outcome, text), truth in zip(answers, subject.truth, strict=True):
            assert outcome != "ok" or text == truth, "a wrong answer"
        outcomes = [outcome for outcome, _ in answers]
        assert outcomes.count("internal_error") <= len(plan.contained), outcomes
        if plan.fatal is None:
            check_served_on(server, subject, plan, outcomes)
        else:
            # Where time jumps, the 50 ms in which the best cause is looked for are none.
            jumps = any(fault.at == "clock" for fault in plan.harmless)
            check_death(server, "" if jumps else plan.fatal[1], outcomes)
        wait_until(lambda: not process_lives(engine_pid), what="the engine is gone")


def check_served_on(
    server: ServerProcess, subject: Subject, plan: Plan, outcomes: list[str]
) -> None:
    """What was contained hurt one request each, and nothing of them is left."""
    assert set(outcomes) <= {"ok", "internal_error"}
    assert ("internal_error" in outcomes) == bool(plan.contained), outcomes
    while (again := ask(server, 0))[0] == "internal_error":
        outcomes.append(again[0])  # the second fault at the same place was still to come
        assert outcomes.count("internal_error") <= len(plan.contained)
    assert again == ("ok", subject.truth[0])
    assert server.get("/health")[0] == 200
    now = server.metrics()
    assert now["trioengine_requests_running"] == now["trioengine_requests_waiting"] == 0
    assert now["trioengine_kv_blocks_free"] == now["trioengine_kv_blocks_total"]
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def check_death(server: ServerProcess, cause: str, outcomes: list[str]) -> None:
    """Everybody was told who had no whole answer yet, and the server says why it ends."""
    assert set(outcomes) <= {"ok", "internal_error", "engine_dead"}
    assert "engine_dead" in outcomes
    assert server.wait() == 3
    assert cause in server.last_line


def examine(subject: Subject, directory: Path, max_examples: int) -> None:
    """Draw plans and run each."""
    until_s = time.monotonic() + BUDGET_S

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a smaller plan would take minutes to find
        suppress_health_check=list(HealthCheck),
    )
    @given(plans)
    def every_plan_costs_what_it_may(plan: Plan) -> None:
        if time.monotonic() < until_s:
            run_plan(subject, plan, directory)

    every_plan_costs_what_it_may()


def subject_of(flags: tuple[str, ...], engine: str) -> Subject:
    """Return what is served, with the answers that are true."""
    with ServerProcess(*flags, engine=engine) as server:
        server.wait_line("ready after", timeout_s=START_S)
        answers = [ask(server, index) for index in range(len(PROMPTS))]
    assert all(outcome == "ok" for outcome, _ in answers)
    return Subject(flags, engine, tuple(text for _, text in answers))


def test_any_faults_cost_what_they_may(tmp_path: Path) -> None:
    if importlib.util.find_spec(NATIVE) is None:
        args = json.dumps({"step_time_ms": 2, "tokens_from": "seed"})
        subject = subject_of(("--engine-args", args), "sim")
    else:
        flags = (str(save_tiny_native(tmp_path / "tiny")), "--dtype", "bfloat16")
        subject = subject_of(flags, "native")
    examine(subject, tmp_path, max_examples=10)


@pytest.mark.model
def test_any_faults_cost_the_real_model_what_they_may(tmp_path: Path) -> None:
    directory = prepared_dir(resolve_model("smollm2-135m-instruct"))
    if directory is None or importlib.util.find_spec(NATIVE) is None:
        pytest.skip("needs the native runner, and `trioengine models fetch smollm2-135m-instruct`")
    flags = (str(directory), "--kv-cache-memory", "0.25", "--max-model-len", "1024")
    examine(subject_of(flags, "native"), tmp_path, max_examples=5)
