"""Faults of a plan in a real server: every client gets an end, and the server ends as it is to.

The same grammar of faults as in the histories, against processes: what a plan can do to the engine
that nothing in memory can (a signal, an exit, a lack of memory), to the real wire, to a real clock.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import pytest

from helpers.server_process import ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

ALLOWED = {"TRIOENGINE_ALLOW_FAULTS": "1"}
ENGINE_ARGS = json.dumps({"step_time_ms": 2})
ASK = {"prompt": "to be", "max_tokens": 12, "ignore_eos": True, "seed": 1}
CLIENTS = 3
PATH = "/v1/completions"

FATAL: dict[str, tuple[dict[str, Any], str]] = {
    "raise in forward": ({"at": "forward", "do": "raise", "step": 3}, "raise at forward"),
    "raise in the sampler": ({"at": "sampler", "do": "raise", "step": 3}, "raise at sampler"),
    "raise while applying": ({"at": "apply", "do": "raise", "step": 3}, "raise at apply"),
    "exit": ({"at": "forward", "do": "exit", "step": 3, "code": 9}, "9"),
    "kill": ({"at": "build", "do": "kill", "step": 3}, "SIGKILL"),
    "drop": ({"at": "to_server", "do": "drop", "message": "outputs", "nth": 3}, "was due"),
    "duplicate": ({"at": "to_server", "do": "duplicate", "message": "outputs"}, "was due"),
    "swap": ({"at": "to_server", "do": "swap", "message": "outputs"}, "was due"),
    "corrupt": ({"at": "to_server", "do": "corrupt", "message": "outputs"}, "undecodable"),
    "doubled add": ({"at": "to_engine", "do": "duplicate", "message": "add"}, "was due"),
    "corrupt add": ({"at": "to_engine", "do": "corrupt", "message": "add"}, "undecodable"),
}


def serve(tmp_path: Path, *faults: dict[str, Any], flags: tuple[str, ...] = ()) -> ServerProcess:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"fault": faults}))
    paced = ("--engine-args", ENGINE_ARGS, "--fault-plan", str(path))
    return ServerProcess(*paced, "--death-grace", "0.5", *flags, env=ALLOWED)


def ask_all(server: ServerProcess, count: int = CLIENTS) -> list[tuple[int, Any]]:
    """Let clients ask at once; each returns, with a status and a JSON body."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: server.post(PATH, ASK), range(count)))


@pytest.mark.parametrize(("fault", "cause"), FATAL.values(), ids=FATAL.keys())
def test_a_fatal_fault_is_told_to_everybody_and_ends_the_server_with_3(
    tmp_path: Path, fault: dict[str, Any], cause: str
) -> None:
    with serve(tmp_path, fault) as server:
        server.wait_ready()
        answers = ask_all(server)
        assert server.wait() == 3
        assert cause in server.last_line
    # One may have had its answer before it happened; a wrong answer is none.
    whole = [answer["choices"][0]["text"] for status, answer in answers if status == 200]
    told = [answer["error"]["code"] for status, answer in answers if status == 503]
    assert len(whole) + len(told) == CLIENTS
    assert told
    assert set(told) == {"engine_dead"}


@pytest.mark.parametrize(
    "fault",
    [
        {"at": "detokenizer", "do": "raise", "nth": 4},
        {"at": "sampler", "do": "spoil", "request": 2, "nth": 2},
        {"at": "tokenizer", "do": "raise", "nth": 2},
    ],
    ids=["detokenizer", "sampler", "tokenizer"],
)
def test_a_contained_fault_costs_one_request_a_500_and_nobody_else_anything(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    with serve(tmp_path, fault) as server:
        server.wait_ready()
        statuses = sorted(status for status, _ in ask_all(server))
        assert statuses == [200, 200, 500]
        assert server.get("/health")[0] == 200
        assert server.post(PATH, ASK)[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_write_that_is_refused_costs_its_client_only(tmp_path: Path) -> None:
    with serve(tmp_path, {"at": "client", "do": "refuse", "nth": 20}) as server:
        server.wait_line("ready after")  # probes are written to as well
        for _ in range(30):
            try:
                assert server.post(PATH, ASK | {"max_tokens": 1})[0] == 200
            except (ConnectionError, HTTPException):
                break
        else:
            pytest.fail("no write was refused")
        assert server.post(PATH, ASK)[0] == 200


def test_a_reader_that_pauses_loses_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, {"at": "reader", "do": "pause", "seconds": 0.5, "nth": 4}) as server:
        server.wait_ready()
        assert {status for status, _ in ask_all(server)} == {200}


def test_a_clock_that_jumps_ends_what_is_overdue_and_nothing_else(tmp_path: Path) -> None:
    jump = {"at": "clock", "do": "jump", "seconds": 1000.0, "message": "outputs", "nth": 3}
    with serve(tmp_path, jump) as server:
        server.wait_ready()
        long = ASK | {"max_tokens": 400}
        with ThreadPoolExecutor(2) as pool:
            bounded = pool.submit(server.post, PATH, long | {"timeout": 60})
            unbounded = pool.submit(server.post, PATH, long)
            assert bounded.result()[0] == 504
            assert unbounded.result()[0] == 200
        assert server.post(PATH, ASK)[0] == 200


def test_an_engine_that_hangs_or_is_stopped_is_stalled_and_not_dead(tmp_path: Path) -> None:
    hang = {"at": "forward", "do": "hang", "step": 2}
    with serve(
        tmp_path, hang, flags=("--stall-timeout", "0.3", "--drain-timeout", "0.2")
    ) as server:
        server.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.post, PATH, ASK)
            server.wait_status("stalled")
            assert server.post(PATH, ASK)[1]["error"]["code"] == "stalled"
            server.process.send_signal(signal.SIGTERM)
            assert waiting.result()[1]["error"]["code"] == "draining"
        assert server.wait() == 0


def test_a_lack_of_memory_in_a_step_does_not_end_the_server(tmp_path: Path) -> None:
    with serve(tmp_path, {"at": "forward", "do": "allocate", "step": 3}) as server:
        server.wait_ready()
        statuses = sorted(status for status, _ in ask_all(server))
        assert statuses in ([200, 200, 200], [200, 200, 500])
        assert server.post(PATH, ASK)[0] == 200


def test_an_engine_that_fails_to_load_is_a_start_that_failed(tmp_path: Path) -> None:
    with serve(tmp_path, {"at": "load", "do": "raise"}) as server:
        assert server.wait() == 4
        assert "raise at load" in server.last_line


def test_without_leave_the_option_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    env = {name: "" for name in os.environ if name == "TRIOENGINE_ALLOW_FAULTS"}
    with ServerProcess("--fault-plan", str(path), env=env) as server:
        assert server.wait() == 2
        assert "not allowed" in server.last_line
