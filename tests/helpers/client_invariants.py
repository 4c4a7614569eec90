"""What must hold of a world once its history is over."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import trio

from helpers.client_history import NUM_BLOCKS, SEED, VOCAB
from trioengine.client.sequence import SequenceState
from trioengine.engine_proc.detokenizer import Detokenizer
from trioengine.engine_proc.sim_runner import sim_tokens
from trioengine.errors import (
    CancelledByUserError,
    DeadlineExceededError,
    EngineDeadError,
    OverloadedError,
    QueueTimeoutError,
    UnavailableError,
)
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from helpers.client_history import Client, World
    from helpers.client_operations import Submit

__all__ = [
    "check_counts",
    "check_ends",
    "check_engine",
    "check_nothing_is_left",
    "check_refusals",
    "check_texts",
    "foretell",
]


def foretell(world: World, request_id: int, submit: Submit) -> str:
    """Return the whole text of a sequence."""
    start = submit.prompt_tokens
    tokens = sim_tokens(
        SEED, request_id, range(start, start + submit.max_tokens), world.engine.runner.speakable
    )
    detokenizer = Detokenizer(VOCAB)
    return detokenizer.append(tokens.tolist()).text + detokenizer.flush()


def check_texts(world: World) -> None:
    """Every answer is what was foretold; of one that did not end, a beginning."""
    for request in world.requests:
        for sequence, text, finish in zip(
            request.stream.sequences, request.texts, request.finishes, strict=True
        ):
            foretold = foretell(world, sequence.request_id, request.submit)
            if finish is None:
                assert foretold.startswith(text)
            else:
                assert (text, finish) == (foretold, FinishReason.LENGTH)


def check_ends(world: World, *, death: bool = False) -> None:
    """Every client got all of its answer, or an error that fits what happened to it."""
    for request in world.requests:
        if request.error is None:
            assert request.hung_up or None not in request.finishes
            continue
        match request.error:
            case DeadlineExceededError():
                assert request.deadline_s is not None
                assert request.deadline_s <= trio.current_time()
            case QueueTimeoutError():
                # What the engine had of it may have died before it could confirm the abort.
                assert SequenceState.WITHDRAWN in _states(request)
                assert death or SequenceState.FAILED not in _states(request)
            case CancelledByUserError():
                assert request.hung_up
            case EngineDeadError():
                assert death
                assert request.error.message == world.client.status.reason
            case UnavailableError(code="draining"):
                assert world.shut_down
            case _:
                raise AssertionError(f"{request.error!r} is nobody's fault")


def check_nothing_is_left(world: World) -> None:
    """Nothing in the table, the timers, the admission, the gauges."""
    client = world.client
    assert len(client._table) == client._table.num_sent == len(client._timers) == 0
    assert not client._table.streams
    assert client.admission.in_use == 0
    assert all(request.stream.ended.is_set() for request in world.requests)
    samples = client.metrics.render().decode()
    assert "trioengine_requests_running 0.0\n" in samples
    assert "trioengine_requests_waiting 0.0\n" in samples
    assert client.metrics.errors.value == 0


def check_engine(world: World) -> None:
    """One terminal for each Add, none without; every block free again."""
    engine = world.engine
    assert not world.client.status.dead.is_set()
    assert engine.terminals == collections.Counter(engine.added)
    assert engine.live == frozenset()
    assert engine.free_blocks == NUM_BLOCKS
    engine.core.check_integrity()


def check_counts(world: World, *, death: bool = False) -> None:
    """The metrics tell the same story."""
    metrics = world.client.metrics
    aborted = [r for r in world.requests if r.stream.aborted_s is not None]
    reasons = collections.Counter(map(_reason, aborted))
    assert metrics.requests_aborted.values == {
        labels: reasons[labels[0]] for labels in metrics.requests_aborted.values
    }
    assert metrics.time_to_first_token.count <= len(world.requests)
    if death:
        assert metrics.abort_latency.count <= len(aborted)
        assert metrics.request_latency.count <= len(world.requests) - len(aborted)
    else:
        assert metrics.abort_latency.count == len(aborted)
        assert metrics.request_latency.count == len(world.requests) - len(aborted)
        stats = world.engine.last_stats
        assert metrics.generation_tokens.value == stats.generation_tokens
        assert metrics.aborts_ignored.value == stats.aborts_ignored


def check_refusals(world: World) -> None:
    """Who came after the death was told of it, and nobody else was."""
    for error, dead in world.refusals:
        if not isinstance(error, OverloadedError):
            assert isinstance(error, EngineDeadError) == dead


def _reason(request: Client) -> str:
    """Return why a request was aborted, as its client sees it."""
    match request.stream.error:
        case DeadlineExceededError():
            return "deadline"
        case QueueTimeoutError():
            return "queue_timeout"
        case UnavailableError():
            return "shutdown"
        case error:
            return "slow_client" if "slow_client" in str(error) else "client_disconnect"


def _states(request: Client) -> set[SequenceState]:
    return {sequence.state for sequence in request.stream.sequences}
