"""Answers, streamed and whole: the same text, and the engine is told what the client asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers.answers import MODES, texts
from helpers.api_world import CHAT, COMPLETION, PATHS, body_for, open_world
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.protocol import Add

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.asgi_client import Call


SEEDED = SimScript(num_blocks=256, max_model_len=1024, tokens_from="seed")


def ends(call: Call) -> dict[int, tuple[str, Any]]:
    """Each choice's one finish and stop reason."""
    whole = call.headers["content-type"] == "application/json"
    events = [call.json] if whole else call.events[:-1]
    found = [c for event in events for c in event["choices"] if c["finish_reason"] is not None]
    by_index = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in found}
    assert len(by_index) == len(found)
    return by_index


PROMPTS: list[Any] = [None, "hello", ["hello", "world"], [1, 2, 3], [[1, 2, 3], [4]]]
GRID = [(COMPLETION, prompt) for prompt in PROMPTS[1:]] + [(CHAT, None)]


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "prompt"), GRID)
async def test_joined_deltas_equal_the_whole(
    path: str, prompt: Any, n: int, stop: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True, script=SEEDED, max_num_seqs=3) as world:
        body = body_for(path, seed=5, n=n, max_tokens=20)
        if prompt is not None:
            body["prompt"] = prompt
        whole = await world.api.post(path, body)
        if stop:
            body["stop"] = texts(whole)[0][10:14]
            whole = await world.api.post(path, body)
        streamed = await world.api.post(path, body | {"stream": True})
        num_prompts = len(prompt) if isinstance(prompt, list) and prompt != [1, 2, 3] else 1
        assert set(texts(whole)) == set(range(num_prompts * n))
        assert texts(streamed) == texts(whole)
        assert ends(streamed) == ends(whole)
        assert streamed.events[-1] == "[DONE]"
        assert ends(whole)[0] == (("stop", body["stop"]) if stop else ("length", None))


@pytest.mark.parametrize("path", PATHS)
async def test_usage(path: str, autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = body_for(path, n=2, max_tokens=5)
        first = await world.api.post(path, body)
        assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        whole = await world.api.post(path, body)  # from now on the cache is warm
        usage = whole.json["usage"]
        assert usage["completion_tokens"] == 10
        assert usage["total_tokens"] == usage["prompt_tokens"] + 10
        for options, expected in [(None, 0), ({}, 0), ({"include_usage": False}, 0),
                                  ({"include_usage": True}, 1)]:  # fmt: skip
            streamed = await world.api.post(
                path, body | {"stream": True, "stream_options": options}
            )
            events = streamed.events[:-1]
            assert [event.get("usage") for event in events if event.get("usage")] == (
                [usage] if expected else []
            )
            assert all(("usage" in event) is bool(expected) for event in events)
            if expected:
                assert events[-1]["choices"] == []


async def test_cached_tokens_are_said(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": list(range(1, 65)), "max_tokens": 1}
        await world.api.post(COMPLETION, body)
        again = await world.api.post(COMPLETION, body)
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.parametrize("path", PATHS)
async def test_the_head_goes_out_when_the_engine_has_accepted(
    path: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = world.start("POST", path, body_for(path, stream=True, max_tokens=2))
        await world.settle()
        assert call.status == 0
        await world.turn()
        assert call.status == 200
        assert call.headers["content-type"].startswith("text/event-stream")
        await world.run_until_idle()
        assert call.events[-1] == "[DONE]"


async def test_choices_that_have_a_place_do_not_wait_for_those_that_have_none(
    autojump_clock: MockClock,
) -> None:
    async with open_world(max_num_seqs=2) as world:
        body = {"prompt": [[i] for i in range(1, 9)], "stream": True, "max_tokens": 50}
        call = world.start("POST", COMPLETION, body)
        await world.turn()
        assert (call.status, len(call.events)) == (200, 2)
        call.disconnect()


async def test_one_write_a_wake_whatever_has_gathered(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        body = {"prompt": [[1], [2], [3]], "stream": True, "max_tokens": 4}
        call = world.start("POST", COMPLETION, body)
        await world.turn()
        assert len(call.chunks) == 1
        assert len(call.events) == 3
        await world.run_until_idle()
        assert len(call.chunks) == 4  # the last: three texts, three finishes, the end
        assert call.chunks[-1].count(b"data: ") == 7


# What the engine is told --------------------------------------------------------------------------


async def test_values_reach_the_engine(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        body = body_for(
            CHAT, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=7, stop=["a", "b"],
            stop_token_ids=[3], ignore_eos=True, min_tokens=2, priority=5, max_completion_tokens=9,
            max_tokens=3,
        )  # fmt: skip
        world.start("POST", CHAT, body)
        await world.settle()
        (add,) = world.engine.sent
        assert isinstance(add, Add)
        params = add.params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 4, 0.1)
        assert (params.seed, params.stop, params.stop_token_ids) == (7, ("a", "b"), (3,))
        assert (params.ignore_eos, params.min_tokens, params.max_tokens) == (True, 2, 9)
        assert add.priority == 5


async def test_a_chat_without_a_limit_fills_the_context(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT))
        usage = call.json["usage"]
        assert usage["total_tokens"] == 1024
        assert call.json["choices"][0]["finish_reason"] == "length"


# Order of the checks ------------------------------------------------------------------------------


async def test_a_full_queue_is_refused_before_the_body_is_read(autojump_clock: MockClock) -> None:
    async with open_world(max_queue_sequences=1) as world:
        first = world.start("POST", CHAT, body_for(CHAT))
        await world.settle()
        call = world.api.open_call("POST", CHAT)  # and no body comes
        await call.run()
        assert (call.status, call.error["code"]) == (429, "overloaded")
        assert call.error["type"] == "overloaded_error"
        assert int(call.headers["retry-after"]) >= 1
        assert world.counted("requests_rejected", "overloaded") == 1
        first.disconnect()


async def test_sequences_are_charged_all_or_none(autojump_clock: MockClock) -> None:
    async with open_world(max_queue_sequences=4) as world:
        first = world.start("POST", CHAT, body_for(CHAT, n=2))
        await world.settle()
        refused = await world.api.post(CHAT, body_for(CHAT, n=3))
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert world.client.admission.in_use == 2
        never = await world.api.post(CHAT, body_for(CHAT, n=5))
        assert (never.status, never.error["param"]) == (400, "n")
        second = world.start("POST", CHAT, body_for(CHAT, n=2))
        await world.settle()
        assert world.client.admission.in_use == 4
        first.disconnect()
        second.disconnect()


async def test_checks_come_in_the_order_of_the_contract(autojump_clock: MockClock) -> None:
    """Each request has every fault that is left; each time the first in order is told."""
    async with open_world(ready=False, api_keys=("k",), max_queue_sequences=1) as world:
        key = {"Authorization": "Bearer k"}
        assert (await world.api.post(CHAT, b"{")).status == 401
        call = await world.api.post(CHAT, b"{", headers=key)
        assert (call.status, call.error["code"]) == (503, "starting")
        assert "retry-after" in call.headers
        world.engine.become_ready()
        await world.settle()
        world.client.status.mark_ready()
        first = world.start("POST", CHAT, body_for(CHAT), headers=key)
        await world.settle()
        assert (await world.api.post(CHAT, b"{", headers=key)).status == 429
        first.disconnect()
        await world.run_until_idle()
        assert (await world.api.post(CHAT, b"{", headers=key)).status == 400


# States -------------------------------------------------------------------------------------------


async def test_draining_refuses_new_work_and_finishes_what_it_has(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True, max_tokens=3))
        await world.turn()
        world.client.status.mark_draining()
        refused = await world.api.post(CHAT, body_for(CHAT))
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        await world.run_until_idle()
        assert call.events[-1] == "[DONE]"


async def test_a_stalled_engine_is_a_503_that_may_pass(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.client.status.mark_stalled("no beat for 5 s")
        refused = await world.api.post(CHAT, body_for(CHAT))
        assert (refused.status, refused.error["code"]) == (503, "stalled")
        assert "retry-after" in refused.headers
        world.client.status.mark_recovered()
        call = world.start("POST", CHAT, body_for(CHAT, max_tokens=1))
        await world.run_until_idle()
        assert call.status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_too_long_has_one_status_in_both_modes(
    path: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        for stream in MODES:
            call = await world.api.post(path, body_for(path, "x" * 2000, stream=stream))
            assert (call.status, call.error["code"]) == (400, "context_length_exceeded")
            assert "1024 tokens" in call.error["message"]
            prompt_tokens = 2000 + (17 if path == CHAT else 0)
            assert f" {prompt_tokens} tokens" in call.error["message"]
        assert not world.engine.sent
