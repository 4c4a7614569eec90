from __future__ import annotations

import json
import logging

import pytest
import trio.testing

from trioengine.http.access_log import AccessRecord
from trioengine.http.convert import Job
from trioengine.http.narrate import Tally
from trioengine.log import _JsonFormatter
from trioengine.outputs import RequestOutput


def record(rule: str = "/v1/completions", path: str = "/v1/completions") -> AccessRecord:
    return AccessRecord(request_id="r1", method="POST", path=path, rule=rule, client="127.0.0.1")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "trioengine.http.access_log")
    return caplog


async def test_one_line_says_what_and_how_it_ended(
    log: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    entry = record()
    entry.status = 200
    entry.tally = Tally(
        Job(
            sequences=[],
            n=1,
            best_of=1,
            prompt_tokens=5,
            model="m",
            stream=False,
            include_usage=False,
            priority=0,
            timeout_s=None,
        )
    )
    entry.tally.count(0, RequestOutput(1, token_ids=[7] * 10))
    await trio.sleep(0.25)
    entry.close(answered=True)
    (line,) = [record.getMessage() for record in log.records]
    assert line == (
        "method=POST path=/v1/completions status=200 outcome=ok duration_ms=250.0 "
        "client=127.0.0.1 request_id=r1 prompt_tokens=5 completion_tokens=10"
    )
    assert log.records[0].__dict__["fields"]["completion_tokens"] == 10


async def test_a_json_log_has_each_under_its_name(log: pytest.LogCaptureFixture) -> None:
    entry = record()
    entry.status = 200
    entry.close(answered=True)
    line = json.loads(_JsonFormatter().format(log.records[0]))
    assert (line["level"], line["status"], line["outcome"]) == ("info", 200, "ok")
    assert line["path"] == "/v1/completions"


async def test_a_client_that_left_is_499_whatever_the_status_was(
    log: pytest.LogCaptureFixture,
) -> None:
    entry = record()
    entry.status = 200
    entry.close(answered=False, loss="client_disconnect")
    assert "status=499 outcome=client_disconnect" in log.text


async def test_an_answer_that_we_failed_to_finish_is_ours(log: pytest.LogCaptureFixture) -> None:
    entry = record()
    entry.status = 200
    entry.close(answered=False)
    assert "status=500 outcome=internal_error" in log.text


@pytest.mark.parametrize("rule", ["/health", "/health/live", "/health/ready", "/metrics"])
async def test_probes_are_left_out(rule: str, log: pytest.LogCaptureFixture) -> None:
    record(rule=rule, path=rule).close(answered=True)
    assert not log.records


async def test_a_path_cannot_forge_a_line(log: pytest.LogCaptureFixture) -> None:
    record(path="/a\nstatus=200\x1b[2J\u2028é").close(answered=True)
    message = log.records[0].getMessage()
    assert message.isascii()
    assert message.isprintable()
