"""What holds for any answer, and for the server once all of them are given."""

from __future__ import annotations

import collections
import json
from typing import TYPE_CHECKING, Any, Self

from helpers.churn import descriptors, have_compiler
from helpers.server_process import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from helpers.server_process import ServerProcess

__all__ = ["ERROR_TYPES", "Toll", "check_answer", "check_error"]

# Status -> types of error that go with it. No 500 among them.
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error",
    405: "invalid_request_error", 408: "invalid_request_error", 409: "cancelled_error",
    413: "invalid_request_error", 429: "overloaded_error", 431: "invalid_request_error",
    503: "unavailable_error", 504: "timeout_error",
}  # fmt: skip
IDLE_WITHIN_S = 10.0


def check_error(status: int, body: bytes) -> dict[str, Any]:
    """Return the error of an answer that is one, having checked its shape."""
    assert status in ERROR_TYPES, (status, body[:500])
    answer = json.loads(body)
    assert set(answer) == {"error"}, answer
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["type"] == ERROR_TYPES[status], (status, error)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    return error


def check_answer(status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Check that an answer is whole and of its one shape, whatever was asked."""
    kind = {name.lower(): value for name, value in headers.items()}.get("content-type", "")
    if status != 200:
        assert kind == "application/json", (status, kind)
        check_error(status, body)
    elif kind.startswith("text/event-stream"):
        last = body.decode().rstrip("\n").rpartition("\n\n")[2]
        ended = last == "data: [DONE]" or "response.completed" in last
        assert ended or "response.incomplete" in last or '"error"' in last, last
    elif kind == "application/json":
        json.loads(body)


class Toll:
    """What many requests have cost: counts of their answers, and what they left behind."""

    def __init__(self, server_descriptors: int, engine_descriptors: int) -> None:
        self._descriptors = server_descriptors, engine_descriptors
        self.latest: dict[str, Any] = {}
        self.counted: dict[str, dict[int, int]] = collections.defaultdict(collections.Counter)

    @classmethod
    def of(cls, server: ServerProcess) -> Self:
        """Begin to count with a server that is idle, and has what its first grammar starts."""
        have_compiler(server)
        return cls(len(descriptors(server.process.pid)), len(descriptors(server.engine_pid)))

    def count(self, operation: str, status: int) -> None:
        """Count one answer."""
        self.counted[operation][status] += 1

    @property
    def total(self) -> int:
        """How many answers there were."""
        return sum(sum(by_status.values()) for by_status in self.counted.values())

    def share_of(self, status: int) -> float:
        """Return which share of the answers to requests with a body had this status."""
        return (
            sum(c[status] for op, c in self.counted.items() if op.startswith("post")) / self.total
        )

    def check_paid(self, server: ServerProcess) -> None:
        """Check that the server is as it was: healthy, idle, with nothing held."""

        def idle() -> dict[str, float] | None:
            metrics = server.metrics()
            busy = metrics["trioengine_requests_running"] + metrics["trioengine_requests_waiting"]
            return None if busy else metrics

        metrics = wait_until(idle, timeout_s=IDLE_WITHIN_S, what="nothing runs or waits")
        assert metrics["trioengine_kv_blocks_free"] == metrics["trioengine_kv_blocks_total"]
        server_before, engine_before = self._descriptors
        pid, engine_pid = server.process.pid, server.engine_pid
        wait_until(lambda: len(descriptors(pid)) <= server_before, what="descriptors are as before")
        wait_until(
            lambda: len(descriptors(engine_pid)) <= engine_before,
            what=f"the engine's are: {engine_before} before, now {descriptors(engine_pid)}",
        )
        assert server.get("/health/ready")[0] == 200
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
