"""What must hold of a whole server once its history is over. Each is listed with what kills it in
``tests/mutants/table.py``."""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any

import msgspec

from helpers.memory_server import NUM_BLOCKS, SCRIPT, TOKENIZER, front
from helpers.server_operations import CHAT
from helpers.sim_core import sim_core
from helpers.socket_visitor import read_answer
from helpers.world_request import SEED, WORDS
from trioengine.client.engine_status import EngineState
from trioengine.engine_proc.detokenizer import Detokenizer, simulated_vocab
from trioengine.engine_proc.sim_runner import sim_tokens
from trioengine.errors import EngineDeadError

if TYPE_CHECKING:
    from helpers.server_world import World
    from helpers.socket_visitor import Answer
    from helpers.wired_engine import WiredEngine
    from helpers.world_request import Request

__all__ = ["check_end"]

MOST_TOKENS = 40


def check_end(world: World) -> None:
    """Check everything; raises ``AssertionError``."""
    for request in world.requests:
        check_request(world, request)
    for path, visitor in world.probes:
        check_probe(world, path, read_answer(visitor.received))
    check_exit(world)
    check_nothing_is_left(world)
    check_engine(world)
    check_counts(world)


# Clients -----------------------------------------------------------------------------------------


def check_request(world: World, request: Request) -> None:
    """A client that stayed has exactly one end of its request, and all texts are true."""
    answer = request.answer
    texts, ends = (
        ({}, []) if answer is None or answer.status != 200 else read_choices(request, answer)
    )
    for index, text in texts.items():
        check_text(request, index, text, whole=index in ends)
    if request.left:
        return
    if answer is None or not answer.complete:
        assert may_be_cut(world, request), f"no end for {request.submit}: {answer}"
        return
    error = error_code(request, answer)
    if error is not None:
        check_error(world, request, error, answer.status)
    else:
        assert sorted(ends) == list(range(request.submit.num_choices)), answer.body
    check_rest(request, answer, failed=error is not None)


def check_rest(request: Request, answer: Answer, *, failed: bool) -> None:
    """Nothing follows an answer but the one to the request behind it."""
    second = read_answer(answer.rest) if answer.rest else None
    assert second is None or request.second, answer.rest
    if failed and answer.status == 200:
        assert request.visitor.end == "eof", "a stream that failed leaves its connection open"


def read_choices(request: Request, answer: Answer) -> tuple[dict[int, str], list[int]]:
    """Return the text of each choice, and the choices that have ended, one entry each time."""
    texts: collections.defaultdict[int, str] = collections.defaultdict(str)
    ends: list[int] = []
    if not request.submit.stream:
        choices = answer.json["choices"] if answer.complete else []
    else:
        chunks = [msgspec.json.decode(data) for data in answer.events if data != b"[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    for choice in choices:
        assert choice["index"] not in ends, "news of a choice after its end"
        texts[choice["index"]] += _text_of(choice)
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] == "length"
            ends.append(choice["index"])
    return texts, ends


def _text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or choice
    return part.get("content") or part.get("text") or ""


def check_text(request: Request, index: int, text: str, *, whole: bool) -> None:
    """A text is what was foretold, whatever happened beside it; without its end, a beginning."""
    foretold = foretell(request.submit.path, request.submit.prompt_size, index)
    expected = foretold[request.submit.max_tokens]
    assert text == expected if whole else expected.startswith(text), (text, expected)


@functools.cache
def foretell(path: str, prompt_size: int, index: int) -> list[str]:
    """Return the text of a choice after each number of tokens."""
    text = WORDS[:prompt_size]
    if path == CHAT:
        text = TOKENIZER.render_chat([{"role": "user", "content": text}])
    start = len(TOKENIZER.encode(text, add_special_tokens=path != CHAT))
    positions = range(start, start + MOST_TOKENS)
    tokens = sim_tokens(SEED + index, 0, positions, _speakable()).tolist()
    return [_decode(tokens[:count]) for count in range(MOST_TOKENS + 1)]


def _decode(tokens: list[int]) -> str:
    detokenizer = Detokenizer(_vocab())
    return (detokenizer.append(tokens).text if tokens else "") + detokenizer.flush()


@functools.cache
def _speakable() -> Any:
    return sim_core(SCRIPT)[1].speakable


@functools.cache
def _vocab() -> Any:
    return simulated_vocab(2048)


def error_code(request: Request, answer: Answer) -> str | None:
    """Return the code of a failed request, ``None`` of one that went well."""
    if answer.status != 200:
        return str(answer.json["error"]["code"])
    if not request.submit.stream:
        return None
    *_, last = answer.events
    assert answer.events.count(b"[DONE]") == (last == b"[DONE]"), answer.body
    if last == b"[DONE]":
        return None
    return str(msgspec.json.decode(last)["error"]["code"])


STATUS = {
    "overloaded": 429,
    "deadline_exceeded": 504,
    "queue_timeout": 504,
    "cancelled": 409,
    "request_timeout": 408,
    "engine_dead": 503,
    "restarting": 503,
    "draining": 503,
    "stalled": 503,
    "sleeping": 503,
}


def check_error(world: World, request: Request, code: str, status: int) -> None:
    """An error fits what happened to its request."""
    assert status in (200, STATUS[code]), (status, code)
    match code:
        case "overloaded":
            places = world.memory.config.max_queue_sequences
            assert sum(each.submit.num_choices for each in world.requests) > places
        case "deadline_exceeded":
            assert request.submit.timeout_s is not None
        case "cancelled":
            assert request.cancelled
        case "request_timeout":
            assert request.submit.late_body
        case "engine_dead":
            assert world.died
        case "restarting":
            assert world.died
            assert world.memory.config.engine_restarts
        case "draining":
            dead = world.memory.client.status.state is EngineState.DEAD
            own_end = world.finishing and (world.spoilt or not dead)
            assert world.asked or request.submit.late_body or own_end
        case "stalled":
            assert world.stalled
        case "sleeping":
            assert world.naps
            assert not world.memory.config.wake_on_request


def may_be_cut(world: World, request: Request) -> bool:
    """Say whether this client may be left without an end to its answer."""
    if request.gone_on:
        return False
    if request.visitor.end == "refused":
        return world.asked or world.died
    if world.cut_short:
        return True
    if request.reused and request.answer is None and (world.asked or world.died):
        return True  # it asked over an idle connection just when that was being closed
    # Its own doing: too slow with its body or its reading for a server that has to end.
    return request.was_lazy or request.submit.late_body


def check_probe(world: World, path: str, answer: Answer | None) -> None:
    """Whoever asks how it is gets an answer as long as the server listens."""
    if answer is None:
        assert world.asked or world.died, path
        return
    assert answer.complete
    if path == "/metrics":
        assert answer.status == 200
    elif path.startswith("/health"):
        well = not (world.asked or world.died or world.stalled or world.naps)
        assert answer.status in (200, 503)
        assert answer.status == 200 or not well or path == "/health/ready", answer.body
    elif path.startswith(("/sleep", "/wake_up")):
        check_order(world, path, answer)
    elif answer.status != 200:
        ends = ("engine_dead", "restarting", "draining") if world.asked or world.died else ()
        assert answer.json["error"]["code"] in ("request_not_found", "stalled", *ends)


def check_order(world: World, path: str, answer: Answer) -> None:
    """An order is carried out, or refused for a reason that there is."""
    if answer.status == 200:
        assert answer.json == {"is_sleeping": path != "/wake_up"}
        return
    code = answer.json["error"]["code"]
    assert (answer.status, code) in {(409, "busy"), (409, "called_off")} or STATUS[code] == 503
    match code:
        case "engine_dead":
            assert world.died
        case "restarting":
            assert world.died
            assert world.memory.config.engine_restarts
        case "draining":
            assert world.asked or world.finishing
        case "stalled":
            assert world.stalled


# The server --------------------------------------------------------------------------------------


def check_exit(world: World) -> None:
    """It ended as it was to: in peace, or because the engine died, and says so."""
    error, status = world.memory.error, world.memory.client.status
    if status.state is EngineState.DEAD and not world.cut_short:
        assert error is not None, "a death is passed off as a peaceful end"
    if error is not None:
        assert world.died
        assert type(error) is EngineDeadError
        assert error.message == status.reason
    if not world.died:
        assert status.state is not EngineState.DEAD
    assert all(engine.closed for engine in world.memory.engines)
    restarts = int(world.memory.client.metrics.engine_restarts.value)
    assert restarts <= world.memory.config.engine_restarts
    assert world.died or not restarts
    assert 0 <= len(world.memory.engines) - 1 - restarts <= world.naps


def check_nothing_is_left(world: World) -> None:
    """Nothing in any table, no timer, no place in the queue, no connection."""
    client = world.memory.client
    assert len(client._table) == client._table.num_sent == len(client._timers) == 0
    assert not client._table.streams
    assert not client._table._queue
    assert not len(client._calls)
    assert client.admission.in_use == 0
    assert not front().open_requests._streams
    for gauge in ("requests_running", "requests_waiting", "open_connections"):
        assert client.metrics._gauges[gauge]() == 0, gauge
    assert client.metrics.errors.value == 0


def check_engine(world: World) -> None:
    """One terminal for each Add, every block free again, every abort heard."""
    for engine in world.memory.engines:
        if engine.wired.loop.stopped and not world.spoilt:  # it lived to its own end
            check_peaceful_end(engine.wired)


def check_peaceful_end(wired: WiredEngine) -> None:
    """It has said all that it owed, and holds nothing."""
    assert wired.terminals == collections.Counter(wired.added)
    assert wired.live == frozenset()
    assert wired.free_blocks == NUM_BLOCKS
    wired.core.check_integrity()
    aborts = len(wired.asked_to_abort)
    assert len(set(wired.asked_to_abort)) == aborts, "an abort was sent twice"
    assert aborts == wired.aborted + wired.core.stats().aborts_ignored


def check_counts(world: World) -> None:
    """The metrics tell what the clients tell."""
    metrics = world.memory.client.metrics
    seen = collections.Counter(
        error_code(r, r.answer) or "ok" for r in world.requests if r.answer and r.answered
    )
    counted = collections.Counter[str]()
    for (rule, outcome), count in metrics.requests.values.items():
        if rule in ("/v1/completions", "/v1/chat/completions"):
            counted[outcome] += int(count)
    counted["draining"] += counted.pop("shutdown", 0)  # so it is told to who was cut off by that
    seen.pop("request_timeout", None)  # the app knows it as a client that was lost
    unseen = sum(not r.answered for r in world.requests) + sum(
        r.submit.late_body for r in world.requests
    )
    assert counted.total() <= len(world.requests)
    if world.cut_short:
        return  # whoever was told so was being cut off at the same time
    for outcome in seen.keys() | counted.keys():
        assert counted[outcome] <= seen[outcome] + unseen, (outcome, seen, counted)
        assert counted[outcome] >= seen[outcome] or outcome == "ok", (outcome, seen, counted)
    aborted = sum(metrics.requests_aborted.values.values())
    lost = metrics.aborts_unconfirmed.value
    assert metrics.abort_latency.count + lost == aborted
    if not world.died:
        told = [engine.wired.last_stats for engine in world.memory.engines]
        assert metrics.generation_tokens.value == sum(stats.generation_tokens for stats in told)
        assert metrics.aborts_ignored.value == sum(stats.aborts_ignored for stats in told)
