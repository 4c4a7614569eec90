from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trio

from helpers.api_world import CHAT, COMPLETION, PATHS, World, body_for, open_world
from helpers.asgi_client import Call
from helpers.raw_http import request, running
from helpers.stepped_engine import SteppedEngine
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import PeerGoneError
from trioengine.protocol import Abort, Add

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trio.testing import MockClock


SEEDED = SimScript(num_blocks=256, max_model_len=1024, tokens_from="seed")
MODES = [True, False]
Result = TypeVar("Result")


def texts(call: Call) -> dict[int, str]:
    """Each choice's text, whole or joined from its chunks."""
    assert call.status == 200, call.body
    if call.headers["content-type"] == "application/json":
        return {c["index"]: c["text"] if "text" in c else c["message"]["content"]
                for c in call.json["choices"]}  # fmt: skip
    joined: dict[int, str] = {}
    for event in call.events[:-1]:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


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


# Waiting ------------------------------------------------------------------------------------------


async def test_a_stream_that_waits_shows_life_and_its_failure_is_an_event(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True, timeout=50))
        await trio.sleep(14.9)
        assert call.status == 0
        await trio.sleep(0.2)
        assert (call.status, call.pings) == (200, 1)
        await trio.sleep(30)
        assert call.pings == 3
        await trio.sleep(10)
        assert call.complete
        (event,) = call.events
        assert event["error"]["code"] == "deadline_exceeded"
        assert event["error"]["type"] == "timeout_error"


async def test_a_silent_stream_shows_life_between_tokens(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True, max_tokens=2))
        await world.turn()
        assert call.pings == 0
        await trio.sleep(31)
        assert call.pings == 2
        await world.run_until_idle()
        assert call.events[-1] == "[DONE]"
        assert call.complete


@pytest.mark.parametrize("stream", MODES)
async def test_before_the_head_a_failure_has_a_status(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=stream, timeout=3))
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (504, "deadline_exceeded")
        assert world.counted("requests_aborted", "deadline") == 1


@pytest.mark.parametrize("header", ["0", "-1", "1_0", "nan", "inf", "soon", ""])
async def test_a_timeout_header_that_is_no_time_is_refused(
    header: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = await world.api.post(CHAT, body_for(CHAT), headers={"X-Request-Timeout": header})
        assert (call.status, call.error["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize(
    ("header", "body", "config", "seconds"),
    [("2", None, None, 2), ("5", 3, None, 3), (None, 9, 4, 4), (None, None, 6, 6)],
)
async def test_the_shortest_time_limit_counts(
    header: str | None,
    body: float | None,
    config: float | None,
    seconds: float,
    autojump_clock: MockClock,
) -> None:
    async with open_world(request_timeout_s=config) as world:
        began_s = trio.current_time()
        headers = {} if header is None else {"X-Request-Timeout": header}
        call = world.start("POST", CHAT, body_for(CHAT, timeout=body), headers=headers)
        await call.finished.wait()
        assert call.status == 504
        assert trio.current_time() - began_s == pytest.approx(seconds)


@pytest.mark.parametrize("stream", MODES)
async def test_a_place_in_the_engine_that_never_comes_is_a_queue_timeout(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(max_num_seqs=1, max_queue_time_s=5) as world:
        for _ in range(2):
            world.start("POST", COMPLETION, body_for(COMPLETION))
        await world.settle()
        call = world.start("POST", COMPLETION, body_for(COMPLETION, stream=stream))
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (504, "queue_timeout")


async def test_a_client_that_stops_reading_gets_all_of_it_once_it_reads_again(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """Over a socket: what waits for the client is never cut by a ping that is due."""
    script = SimScript(num_blocks=2048, max_model_len=8192, tokens_from="seed")
    async with (
        open_world(script=script) as world,
        running(world.app, uds=tmp_path / "s", slow_client_timeout_s=1e6) as server,
        await server.connect(receive_buffer=4096) as reader,
        trio.open_nursery() as nursery,
    ):
        body = {"prompt": [[i] for i in range(1, 9)], "seed": 1, "max_tokens": 400}
        whole = world.start("POST", COMPLETION, body)
        await world.run_until_idle()
        data = json.dumps(body | {"stream": True}).encode()
        await reader.send(request("POST", COMPLETION, body=data))
        await nursery.start(world.engine.run_freely, 1.0)
        await trio.sleep(1000)
        assert not world.engine.live
        answer = await reader.read_response(method="POST")
        call = Call(None, {})
        call.status, call.headers, call.chunks = answer.status, answer.headers, [answer.body]
        assert texts(call) == texts(whole)
        nursery.cancel_scope.cancel()


# The engine fails ---------------------------------------------------------------------------------


def kill(world: World) -> None:
    world.engine.crash()
    world.client.status.report_exit("the engine was killed by SIGKILL")


@pytest.mark.parametrize("stream", MODES)
@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_dies_before_the_head_is_a_503(
    path: str, stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = world.start("POST", path, body_for(path, stream=stream))
        await world.settle()
        kill(world)
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (503, "engine_dead")
        assert "SIGKILL" in call.error["message"]


@pytest.mark.parametrize("turns", [1, 5])
@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_dies_in_a_stream_is_one_event_without_done(
    path: str, turns: int, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = world.start("POST", path, body_for(path, stream=True, n=2, max_tokens=50))
        await world.turn(turns)
        assert call.status == 200
        kill(world)
        await call.finished.wait()
        assert call.complete
        assert call.events[-1]["error"]["code"] == "engine_dead"
        assert [event for event in call.events if "error" in event or event == "[DONE]"] == (
            call.events[-1:]
        )
        assert world.counted("requests", path, "engine_dead") == 1


async def test_an_engine_that_dies_while_the_whole_is_gathered_is_a_503(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, max_tokens=50))
        await world.turn(5)
        kill(world)
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("stream", MODES)
async def test_an_error_of_one_sequence_is_a_500_and_hurts_nobody_else(
    stream: bool, autojump_clock: MockClock
) -> None:
    script = SimScript(num_blocks=256, max_model_len=1024, bad_token_at_step=1)
    async with open_world(script=script) as world:
        bad = world.start("POST", COMPLETION, body_for(COMPLETION, stream=stream, n=2))
        await world.settle()
        good = world.start("POST", COMPLETION, body_for(COMPLETION))
        await world.run_until_idle()
        assert good.status == 200
        if bad.status == 200:
            assert bad.events[-1]["error"]["type"] == "internal_error"
        else:
            assert (bad.status, bad.error["code"]) == (500, "internal_error")


async def test_a_step_that_fails_ends_everything_with_its_cause(autojump_clock: MockClock) -> None:
    engine = SteppedEngine(
        SimScript(num_blocks=64, max_model_len=256, fail_at_step=3),
        send_error=lambda: PeerGoneError("gone"),
    )
    async with open_world(engine=engine) as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True))
        await world.turn(5)
        await call.finished.wait()
        assert call.events[-1]["error"]["code"] == "engine_dead"
        later = await world.api.post(CHAT, body_for(CHAT))
        assert (later.status, later.error["code"]) == (503, "engine_dead")


async def test_a_shutdown_ends_streams_with_draining(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = world.start("POST", CHAT, body_for(CHAT, stream=True))
        whole = world.start("POST", CHAT, body_for(CHAT))
        await world.turn(2)
        world.client.abort_all("shutdown")
        await world.settle()
        assert call.events[-1]["error"]["code"] == "draining"
        assert (whole.status, whole.error["code"]) == (503, "draining")


async def test_a_bug_in_a_stream_is_an_event_too(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    def boom(*_: object) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("trioengine.http.narrate.Narration.closing", boom)
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT, stream=True, max_tokens=2))
        assert call.complete
        assert call.events[-1]["error"]["code"] == "internal_error"
        assert b"secret" not in call.body


# Clients leave ------------------------------------------------------------------------------------

PHASES = ["wire", "queued", "prefill", "decode"]
SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "n": {"n": 3},
    "batch": {"prompt": ["hello", "world"]},
    "both": {"prompt": [[1] * 40, [2] * 40], "n": 2},
}
LEAVERS = [
    (path, phase, shape)
    for path, phase, shape in itertools.product(PATHS, PHASES, SHAPES)
    if path == COMPLETION or "prompt" not in SHAPES[shape]
]


@pytest.mark.parametrize("stream", MODES)
@pytest.mark.parametrize(("path", "phase", "shape"), LEAVERS)
async def test_a_client_that_leaves_is_aborted_at_once(
    path: str,
    phase: str,
    shape: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    caplog.set_level("INFO", "trioengine.http.access_log")
    engine = SteppedEngine(
        max_num_seqs=2 if phase == "queued" else 8,
        max_num_batched_tokens=16,
        send_error=lambda: PeerGoneError("gone"),
    )
    async with open_world(engine=engine) as world:
        # Two run and two wait in the engine: as many as it holds.
        others = [
            world.start("POST", path, body_for(path, max_tokens=900))
            for _ in range(4 if phase == "queued" else 0)
        ]
        await world.settle()
        body = body_for(path, "hello " * 10, stream=stream, max_tokens=500) | SHAPES[shape]
        call = world.start("POST", path, body)
        await world.settle()
        await world.turn({"wire": 0, "queued": 1, "prefill": 1, "decode": 30}[phase])
        call.disconnect()
        await world.settle()
        assert call.finished.is_set()
        assert not call.complete
        aborts = [message for message in world.engine.sent if isinstance(message, Abort)]
        assert len(aborts) == (0 if phase == "queued" else 1)  # one frame, or never sent at all
        assert world.client.admission.in_use == len(others)
        await world.turn()
        assert len(world.engine.live) == len(others)
        assert world.counted("requests", path, "client_disconnect") == 1
        assert world.counted("requests_aborted", "client_disconnect") == 1
        assert "status=499 outcome=client_disconnect" in caplog.text
        for other in others:
            other.disconnect()


@pytest.mark.parametrize("stream", MODES)
async def test_a_client_that_leaves_after_its_answer_has_not_left(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT, max_tokens=2, stream=stream))
        assert call.complete
        assert world.counted("requests", CHAT, "ok") == 1
        assert world.counted("requests_aborted", "client_disconnect") == 0


async def test_a_client_that_leaves_while_it_sends_its_body_gives_its_place_back(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        call = world.api.open_call("POST", CHAT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.run)
            call.send_body(b'{"messages": [', more=True)
            await world.settle()
            assert world.client.admission.in_use == 1
            call.disconnect()
        assert world.client.admission.in_use == 0
        assert not world.engine.sent


class SlowOffload:
    """Work on text that cannot be interrupted, until the test says so."""

    def __init__(self) -> None:
        self.release = trio.Event()

    async def __call__(self, work: Callable[[], Result], *, num_chars: int) -> Result:
        with trio.CancelScope(shield=True):
            await self.release.wait()
        return work()


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_while_its_text_is_tokenised_costs_the_engine_nothing(
    path: str, autojump_clock: MockClock
) -> None:
    offload = SlowOffload()
    async with open_world(offload=offload) as world:
        call = world.start("POST", path, body_for(path))
        await world.settle()
        call.disconnect()
        await world.settle()
        assert world.client.admission.in_use == 0
        offload.release.set()
        await call.finished.wait()
        assert not world.engine.sent
        assert world.counted("requests", path, "client_disconnect") == 1


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
