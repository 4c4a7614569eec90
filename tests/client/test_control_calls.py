"""Each result finds its caller, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.client.control_calls import ControlCalls
from trioengine.errors import EngineDeadError, InternalError, InvalidRequestError
from trioengine.protocol import Call, CallResult, ClientMessage


async def test_results_come_back_in_any_order() -> None:
    sent: list[ClientMessage] = []
    calls = ControlCalls(sent.append)
    results: dict[str, Any] = {}

    async def call(method: str) -> None:
        results[method] = await calls.call(method, {"of": method})

    async with trio.open_nursery() as nursery:
        for method in ("start_profile", "stop_profile"):
            nursery.start_soon(call, method)
            await wait_all_tasks_blocked()
        assert sent == [
            Call(1, "start_profile", {"of": "start_profile"}),
            Call(2, "stop_profile", {"of": "stop_profile"}),
        ]
        calls.answer(CallResult(2, "two"))
        calls.answer(CallResult(1, "one"))
        calls.answer(CallResult(99, "of nobody"))
    assert results == {"start_profile": "one", "stop_profile": "two"}
    assert len(calls) == 0


async def test_error_of_the_engine_is_the_callers() -> None:
    calls = ControlCalls(lambda _: calls.answer(CallResult(1, error="unknown method 'x'")))
    with pytest.raises(InternalError, match="unknown method"):
        await calls.call("x", {})
    refusal = CallResult(1, error="a profile is running already", refused=True)
    calls = ControlCalls(lambda _: calls.answer(refusal))
    with pytest.raises(InvalidRequestError, match="running already"):
        await calls.call("start_profile", {})


async def test_caller_that_leaves_is_forgotten() -> None:
    calls = ControlCalls(lambda _: None)
    with trio.move_on_after(0):
        await calls.call("stop_profile", {})
    assert len(calls) == 0
    calls.answer(CallResult(1, "late"))


async def test_death_ends_every_call() -> None:
    calls, ended = ControlCalls(lambda _: None), 0

    async def call() -> None:
        nonlocal ended
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await calls.call("stop_profile", {})
        ended += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        calls.fail_all(EngineDeadError("killed by SIGKILL"))
    assert ended == 2
