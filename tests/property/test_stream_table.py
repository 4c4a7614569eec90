"""The stream table against an engine of ten lines: nothing is lost, doubled or forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import DataObject, booleans, data, integers, sampled_from

from helpers.scripted_engine import ask, delta
from trioengine.client.request_stream import RequestStream
from trioengine.client.sequence import Sequence, SequenceState
from trioengine.client.stream_table import StreamTable
from trioengine.errors import EngineDeadError
from trioengine.metrics import Metrics
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from trioengine.metrics import AbortReason

TERMINALS = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR]
IN_ENGINE = {SequenceState.OPEN, SequenceState.ABORTING}
LIVE = IN_ENGINE | {SequenceState.QUEUED}


class StreamTableMachine(RuleBasedStateMachine):
    """``engine`` maps the ids that an engine holds to whether it has read an abort for them."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = Metrics()
        self.table = StreamTable(self.metrics)
        self.streams: list[RequestStream] = []
        self.closed: set[RequestStream] = set()
        self.engine: dict[int, bool] = {}
        self.said: dict[int, str] = {}  # to consumers that wanted it
        self.taken: dict[int, str] = {}
        self.next_id = 1
        self.now_s = 0.0
        self.aborted = self.confirmed = self.merged = self.unknown = 0

    # StreamOwner

    def close_stream(self, stream: RequestStream, reason: AbortReason) -> None:
        self.abort(self.table.close(stream, reason, self.now_s))

    def forget_stream(self, stream: RequestStream) -> None:
        self.table.forget(stream)

    def abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            assert self.engine.get(request_id) in (None, False)  # never asked for twice
            if request_id in self.engine:
                self.engine[request_id] = True

    # What may happen

    @rule(num=integers(1, 3))
    def open(self, num: int) -> None:
        stream = RequestStream(
            self, ask(num), first_id=self.next_id, key="", priority=0, arrived_s=0.0, opened_s=0.0
        )
        self.next_id += num
        self.table.register(stream)
        self.streams.append(stream)
        for sequence in stream.sequences:
            self.said[sequence.request_id] = self.taken[sequence.request_id] = ""

    @rule()
    def send_next(self) -> None:
        first = min((s.request_id for s in self.sequences(SequenceState.QUEUED)), default=None)
        sequence = self.table.take_next(self.now_s)
        assert (None if sequence is None else sequence.request_id) == first
        if sequence is not None:
            self.engine[sequence.request_id] = False

    @precondition(lambda self: self.engine)
    @rule(data=data(), text=sampled_from("abc"))
    def engine_says(self, data: DataObject, text: str) -> None:
        sequence = self.draw_in_engine(data)
        self.note_said(sequence, text)
        assert self.table.deliver([delta(sequence.request_id, text)], self.now_s) == []

    @precondition(lambda self: self.engine)
    @rule(data=data(), finish=sampled_from(TERMINALS))
    def engine_ends(self, data: DataObject, finish: FinishReason) -> None:
        """By itself; it may not have read an abort that is on its way."""
        sequence = self.draw_in_engine(data)
        if finish is not FinishReason.ERROR:
            self.note_said(sequence, ".")
        del self.engine[sequence.request_id]
        last = delta(sequence.request_id, ".", finish)
        self.abort(self.table.deliver([last], self.now_s))

    @precondition(lambda self: any(self.engine.values()))
    @rule()
    def engine_confirms(self) -> None:
        ids = [request_id for request_id, asked in self.engine.items() if asked]
        for request_id in ids:
            del self.engine[request_id]
        deltas = [delta(request_id, finish=FinishReason.ABORT) for request_id in ids]
        assert self.table.deliver(deltas, self.now_s) == []

    @rule()
    def engine_speaks_of_nobody(self) -> None:
        self.unknown += 1
        self.table.accept([0])
        self.table.deliver([delta(0, "?", FinishReason.STOP)], self.now_s)

    @precondition(lambda self: self.streams)
    @rule(data=data())
    def consume(self, data: DataObject) -> None:
        stream = data.draw(sampled_from(self.streams))
        for index, output in stream._take():
            self.taken[stream.sequences[index].request_id] += output.text

    @precondition(lambda self: self.streams)
    @rule(data=data())
    def close(self, data: DataObject) -> None:
        stream = data.draw(sampled_from(self.streams))
        live = [s for s in stream.sequences if s.state in LIVE]
        self.aborted += bool(live) and stream.error is None
        self.closed.add(stream)
        stream.close("cancelled")

    @rule(seconds=integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.engine)
    @rule(restart=booleans())
    def engine_dies(self, restart: bool) -> None:
        self.engine.clear()
        self.table.fail_all(EngineDeadError("killed by SIGKILL"))
        assert len(self.table) == 0
        if restart:
            self.open(2)

    # What must hold

    @invariant()
    def the_engine_holds_what_we_think_it_holds(self) -> None:
        assert {s.request_id for s in self.sequences(*IN_ENGINE)} == set(self.engine)
        assert self.table.num_sent == len(self.engine)
        assert len(self.table) == len(self.sequences(*LIVE))

    @invariant()
    def streams_know_their_own(self) -> None:
        for stream in self.streams:
            live = [s for s in stream.sequences if s.state in LIVE]
            assert stream.num_live == len(live)
            assert stream.num_queued == sum(s.state is SequenceState.QUEUED for s in live)
            assert stream.ended.is_set() == (not live)
            if stream.error is None:
                assert stream in self.table.streams or stream.finished

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        for stream in self.streams:
            for sequence in stream.sequences:
                waiting = sequence.cell.text if sequence.cell is not None else ""
                got = self.taken[sequence.request_id] + waiting
                if stream in self.closed:
                    assert self.said[sequence.request_id].startswith(got)
                else:
                    assert self.said[sequence.request_id] == got

    @invariant()
    def the_counts_add_up(self) -> None:
        aborted = [s for s in self.streams if s.aborted_s is not None]
        assert self.metrics.requests_aborted.total == self.aborted == len(aborted)
        assert self.metrics.abort_latency.count <= sum(s.ended.is_set() for s in aborted)
        assert self.metrics.deltas_dropped.values[("unknown",)] == self.unknown
        assert self.metrics.errors.value == 0

    # In between

    def sequences(self, *states: SequenceState) -> list[Sequence]:
        return [s for stream in self.streams for s in stream.sequences if s.state in states]

    def draw_in_engine(self, data: DataObject) -> Sequence:
        return data.draw(sampled_from(self.sequences(*IN_ENGINE)))

    def note_said(self, sequence: Sequence, text: str) -> None:
        if sequence.state is SequenceState.OPEN:
            self.said[sequence.request_id] += text


TestStreamTable = StreamTableMachine.TestCase
TestStreamTable.settings = settings(stateful_step_count=100)
