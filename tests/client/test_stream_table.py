"""Single decisions of the table: who is told, who is aborted, what is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from helpers.scripted_engine import ask, delta
from trioengine.client.request_stream import MAX_PENDING, RequestStream
from trioengine.client.sequence import SequenceState
from trioengine.client.stream_table import StreamTable
from trioengine.errors import EngineDeadError, InternalError, ProtocolError
from trioengine.metrics import Metrics
from trioengine.outputs import FinishReason, RequestOutput, TokenLogprob

if TYPE_CHECKING:
    from trioengine.metrics import AbortReason

STOP, ABORT, ERROR = FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR


class World:
    """A table with two streams: sequences 1 and 2, and sequence 3."""

    def __init__(self, num_sent: int = 3) -> None:
        self.metrics = Metrics()
        self.table = StreamTable(self.metrics)
        self.pair, self.single = self.open(1, 2), self.open(3, 1)
        for _ in range(num_sent):
            self.table.take_next(now_s=1.0)

    def open(self, first_id: int, num_sequences: int) -> RequestStream:
        stream = RequestStream(
            self,
            ask(num_sequences),
            first_id=first_id,
            key="",
            priority=0,
            arrived_s=0.0,
            opened_s=0.5,
        )
        self.table.register(stream)
        return stream

    def close_stream(self, stream: RequestStream, reason: AbortReason) -> None:
        self.table.close(stream, reason, now_s=5.0)

    def forget_stream(self, stream: RequestStream) -> None:
        self.table.forget(stream)

    def states(self, stream: RequestStream) -> list[SequenceState]:
        return [sequence.state for sequence in stream.sequences]


def text_of(stream: RequestStream) -> str:
    return "".join(d.text for _, d in stream._take())


def aborted(world: World) -> dict[str, float]:
    return {reason: n for (reason,), n in world.metrics.requests_aborted.values.items() if n}


def test_a_request_from_queue_to_end() -> None:
    world = World()
    table, metrics = world.table, world.metrics
    assert (len(table), table.num_sent, table.take_next(1.0)) == (3, 3, None)
    table.accept([1, 2, 3, 99])
    assert table.deliver([delta(1, "a"), delta(3, "b")], 2.0) == []
    table.deliver([delta(3, "c", STOP)], 2.25)
    assert world.states(world.single) == [SequenceState.FINISHED]
    assert world.single.ended.is_set()
    assert text_of(world.single) == "bc"
    assert (len(table), table.num_sent) == (2, 2)
    assert metrics.queue_time.sum == 1.5
    assert metrics.time_to_first_token.sum == 4.0  # of two requests
    assert metrics.inter_token_latency.sum == 0.25
    assert metrics.request_latency.sum == 2.25
    assert metrics.deltas_merged.value == 1


def test_first_token_is_the_requests_not_each_sequences() -> None:
    world = World()
    world.table.deliver([delta(1), delta(1, "a"), delta(2, "b")], 2.0)
    assert world.metrics.time_to_first_token.count == 1
    assert world.metrics.inter_token_latency.count == 0


def test_aborted_sequence_stays_until_the_engine_has_confirmed() -> None:
    world = World()
    table, metrics = world.table, world.metrics
    assert table.close(world.pair, "deadline", 4.0) == [1, 2]
    assert table.close(world.pair, "cancelled", 4.1) == []
    table.deliver([delta(1, "late")], 4.2)
    assert (len(table), table.num_sent) == (3, 3)
    table.deliver([delta(1, finish=ABORT)], 4.5)
    assert not world.pair.ended.is_set()
    table.deliver([delta(2, "it had finished before", STOP)], 4.75)
    assert world.pair.ended.is_set()
    assert text_of(world.pair) == ""
    assert metrics.deltas_dropped.values == {("aborted",): 1, ("unknown",): 0}
    assert metrics.requests_aborted.values[("deadline",)] == metrics.requests_aborted.total == 1
    assert (metrics.abort_latency.count, metrics.abort_latency.sum) == (1, 0.75)
    assert metrics.request_latency.count == 0


def test_what_is_queued_costs_the_engine_nothing() -> None:
    world = World(num_sent=1)
    assert world.table.close(world.pair, "client_disconnect", 4.0) == [1]  # 2 was not sent
    assert world.table.close(world.single, "client_disconnect", 4.0) == []
    assert world.states(world.single) == [SequenceState.WITHDRAWN]
    assert world.single.ended.is_set()
    assert (len(world.table), world.table.num_sent) == (1, 1)
    assert world.table.take_next(5.0) is None
    assert world.metrics.abort_latency.count == 1  # nothing to confirm is confirmed at once


def test_news_of_unknown_sequences_are_counted() -> None:
    world = World()
    world.table.deliver([delta(3, "a", STOP), delta(3, "b"), delta(99, "c", STOP)], 2.0)
    assert world.metrics.deltas_dropped.values[("unknown",)] == 2
    assert text_of(world.single) == "a"


def test_news_of_a_sequence_that_was_never_sent_are_a_broken_protocol() -> None:
    world = World(num_sent=0)
    with pytest.raises(ProtocolError, match="QUEUED"):
        world.table.deliver([delta(1, "a")], 2.0)


def test_error_of_one_sequence_ends_its_request_and_nobody_elses() -> None:
    world = World(num_sent=2)
    waiting = world.open(4, 1)
    world.table.deliver([delta(2, "lost")], 1.5)
    to_abort = world.table.deliver([delta(1, "x", ERROR, error="bad token")], 2.0)
    assert to_abort == [2]
    assert isinstance(world.pair.error, InternalError)
    assert world.pair.error.message == "bad token"
    assert world.states(world.pair) == [SequenceState.FINISHED, SequenceState.ABORTING]
    assert world.single.error is None
    assert waiting.error is None
    assert world.table.deliver([delta(2, "", ERROR, error="bad luck too")], 2.1) == []
    assert world.pair.ended.is_set()
    world.pair.close()
    assert world.metrics.requests_aborted.total == 0  # it failed; nobody aborted it
    assert world.metrics.abort_latency.count == world.metrics.request_latency.count == 0


def test_error_withdraws_what_is_queued() -> None:
    world = World(num_sent=1)
    assert world.table.deliver([delta(1, "", ERROR, error="bad")], 2.0) == []
    assert world.states(world.pair) == [SequenceState.FINISHED, SequenceState.WITHDRAWN]
    assert world.pair.ended.is_set()


def test_both_sequences_may_fail_in_one_frame() -> None:
    world = World()
    deltas = [delta(1, "", ERROR, error="first"), delta(2, "", ERROR, error="second")]
    assert world.table.deliver(deltas, 2.0) == [2]  # the engine ignores it
    assert world.pair.error is not None
    assert world.pair.error.message == "first"
    assert world.pair.ended.is_set()


def test_abort_that_nobody_asked_for_is_an_error() -> None:
    world = World()
    world.table.deliver([delta(3, finish=ABORT)], 2.0)
    assert isinstance(world.single.error, InternalError)


def test_death_fails_what_is_not_finished() -> None:
    world = World()
    table = world.table
    table.deliver([delta(3, "whole", STOP), delta(1, "half", STOP)], 2.0)
    aborted = world.open(4, 1)
    table.close(aborted, "cancelled", 2.5)
    table.fail_all(EngineDeadError("killed by SIGKILL"))
    assert (len(table), table.num_sent) == (0, 0)
    assert world.single.error is None
    assert text_of(world.single) == "whole"
    assert isinstance(world.pair.error, EngineDeadError)
    assert world.states(world.pair) == [SequenceState.FINISHED, SequenceState.FAILED]
    assert world.pair.ended.is_set()
    assert table.idle
    world.pair.close()
    assert world.metrics.requests_aborted.total == 1  # the one before


@pytest.mark.parametrize("another_follows", [False, True])
def test_an_abort_that_dies_with_its_engine_is_counted_once(another_follows: bool) -> None:
    world = World()
    table, metrics = world.table, world.metrics
    table.close(world.pair, "client_disconnect", 2.0)
    if another_follows:
        table.lose_engine(EngineDeadError("killed by SIGKILL"))
    else:
        table.fail_all(EngineDeadError("killed by SIGKILL"))
    table.fail_all(EngineDeadError("killed by SIGKILL"))
    assert metrics.aborts_unconfirmed.value == 1  # the other stream was open
    assert metrics.abort_latency.count == 0
    assert world.pair.ended.is_set()


def test_a_consumer_that_is_too_far_behind_is_given_up_as_slow() -> None:
    world = World()
    many = [TokenLogprob(5, -1.0, 1, [(5, -1.0)] * 20)]
    behind = RequestOutput(1, "x", [5], logprobs=many)
    for told in range(MAX_PENDING // 21 + 1):  # the first one is not merged, only held
        frame = [msgspec.structs.replace(behind, token_ids=[5], logprobs=list(many))]
        assert world.table.deliver(frame, now_s=2.0) == [], told
    beside = delta(2, "y")
    assert world.table.deliver([behind, beside, delta(3, "z")], now_s=3.0) == [1, 2]
    assert aborted(world) == {"slow_client": 1}
    assert text_of(world.pair) == ""  # let go of
    assert text_of(world.single) == "z"
    world.pair.close("client_disconnect")  # its owner, later: not counted again
    assert aborted(world) == {"slow_client": 1}
    world.table.deliver([delta(1, "", ABORT), delta(2, "", ABORT)], now_s=4.0)
    assert world.pair.ended.is_set()


def test_a_consumer_that_keeps_up_may_have_as_much_as_it_likes() -> None:
    world = World()
    for _ in range(MAX_PENDING // 1000 * 2):
        world.table.deliver([RequestOutput(3, "x", [5] * 1000) for _ in range(2)], now_s=2.0)
        text_of(world.single)
    assert aborted(world) == {}


def test_idle_means_that_nobody_is_owed_anything() -> None:
    world = World()
    table = world.table
    table.deliver([delta(3, "a", STOP)], 2.0)
    table.close(world.pair, "cancelled", 2.0)
    table.deliver([delta(1, finish=ABORT), delta(2, finish=ABORT)], 2.0)
    assert not table.idle  # what 3 said was not handed out
    text_of(world.single)
    assert table.idle
