"""Histories of a client and a stepped engine: the interpreter of operations.

A history is a list of operations, drawn by Hypothesis and carried out one after the other in a
Trio run of its own under a mock clock; between two of them everything that can run has run. What
each answer must be is foretold, because a simulated token is a function of (seed, id, position).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import trio
from trio.testing import wait_all_tasks_blocked

from helpers.client_operations import (
    Drain,
    HangUp,
    HangUpWithin,
    Operation,
    Pass,
    Read,
    Step,
    Submit,
)
from helpers.sim_core import VOCAB_SIZE
from helpers.stepped_engine import SteppedEngine
from trioengine.client.engine_client import EngineClient, SequenceRequest
from trioengine.client.engine_status import EngineState
from trioengine.client.sequence import SequenceState
from trioengine.engine_proc.detokenizer import simulated_vocab
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import OverloadedError, PeerGoneError, TrioEngineError, UnavailableError
from trioengine.protocol import Add, EngineStats, Outputs
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trioengine.client.request_stream import RequestStream
    from trioengine.outputs import FinishReason
    from trioengine.protocol import ClientMessage

__all__ = ["NUM_BLOCKS", "SEED", "VOCAB", "Client", "World", "open_world"]

SEED = 3
MAX_QUEUE = 12
MAX_QUEUE_TIME_S = 2.0
NUM_BLOCKS = 6
VOCAB = simulated_vocab(VOCAB_SIZE)


class RecordingEngine(SteppedEngine):
    """Counts what was added and ended, and checks that an abort frees before the next schedule.

    ``unwanted`` are the ids that the client wants aborted when a turn begins.
    """

    def __init__(self, unwanted: Callable[[], set[int]]) -> None:
        self.added: list[int] = []
        self.terminals: collections.Counter[int] = collections.Counter()
        self.said: collections.defaultdict[int, str] = collections.defaultdict(str)
        self.last_stats = EngineStats()
        self._unwanted = unwanted
        self._looked_at = 0
        super().__init__(
            SimScript(num_blocks=NUM_BLOCKS, max_model_len=NUM_BLOCKS * 16),
            send_error=partial(PeerGoneError, "gone"),
            max_num_seqs=2,
            max_num_batched_tokens=64,
        )

    def send(self, message: ClientMessage) -> None:
        super().send(message)
        if isinstance(message, Add):
            self.added.append(message.request_id)

    def turn(self) -> None:
        unwanted = self._unwanted()
        self.at("commands", lambda: self._check_freed(unwanted))
        super().turn()
        self._look_at_news()

    def _look_at_news(self) -> None:
        # At once: a consumer that is behind merges later deltas into the objects it was given.
        news, self._looked_at = self.history[self._looked_at :], len(self.history)
        for message in news:
            if isinstance(message, Outputs):
                self.last_stats = message.stats
                for delta in message.deltas:
                    self.said[delta.request_id] += delta.text
                    self.terminals[delta.request_id] += delta.finish_reason is not None

    def _check_freed(self, unwanted: set[int]) -> None:
        if not unwanted.isdisjoint(self.live):
            raise AssertionError(f"{unwanted & self.live} hold blocks when a step is scheduled")


class Client:
    """One HTTP client's request: reads until it ends, and keeps what it got."""

    def __init__(self, submit: Submit, stream: RequestStream, now_s: float) -> None:
        self.submit = submit
        self.stream = stream
        self.texts = [""] * submit.num_sequences
        self.finishes: list[FinishReason | None] = [None] * submit.num_sequences
        self.error: TrioEngineError | None = None
        self.hung_up = False
        self.submit_was_lazy = submit.lazy
        self.over = trio.Event()
        self.over_s = math.inf
        self.scope = trio.CancelScope()
        self.may_read = trio.Event()
        self.deadline_s = None if submit.timeout_s is None else now_s + submit.timeout_s

    async def run(self) -> None:
        try:
            with self.scope, self.stream:
                await self._read_all()
        except TrioEngineError as error:
            self.error = error
        finally:
            self.over_s = trio.current_time()
            self.over.set()

    async def _read_all(self) -> None:
        while not self.stream.finished:
            if self.submit.lazy:
                await self.may_read.wait()
                self.may_read = trio.Event()
            for index, output in await self.stream.receive():
                assert self.finishes[index] is None, "news after the terminal"
                self.texts[index] += output.text
                self.finishes[index] = output.finish_reason

    def hurry(self) -> None:
        self.submit = dataclasses.replace(self.submit, lazy=False)
        self.may_read.set()


class World:
    """A client over a recording engine, and the requests that a history has made."""

    def __init__(self, client: EngineClient, nursery: trio.Nursery) -> None:
        self.client = client
        self.engine = RecordingEngine(self.unwanted)
        self.requests: list[Client] = []
        self.refusals: list[tuple[TrioEngineError, bool]] = []  # and whether it was dead
        self.shut_down = False
        self.nursery = nursery

    def unwanted(self) -> set[int]:
        return {
            sequence.request_id
            for request in self.requests
            for sequence in request.stream.sequences
            if sequence.state is SequenceState.ABORTING
        }

    async def apply(self, operation: Operation) -> None:
        """Carry out one operation and let everything run that can."""
        match operation:
            case Submit():
                self.submit(operation)
            case HangUp() if self.requests:
                self.hang_up(self.pick(operation.victim), operation.how)
            case HangUpWithin() if self.requests:
                victim = self.pick(operation.victim)
                self.engine.at(operation.phase, lambda: self.hang_up(victim, "client_disconnect"))
                self.engine.turn()
            case Read() if self.requests:
                self.pick(operation.reader).may_read.set()
            case Pass():
                await trio.sleep(operation.seconds)
            case Step():
                for _ in range(operation.turns):
                    self.engine.turn()
            case Drain():
                self.drain()
        await wait_all_tasks_blocked()
        self.check_promptness()

    def check_promptness(self) -> None:
        """Nobody waits who could be with the engine, and nobody waits too long."""
        client, now_s = self.client, trio.current_time()
        if client.status.dead.is_set():
            return
        assert not client._table._queue or client._table.num_sent == client._outlet.room
        for request in self.requests:
            stream = request.stream
            if stream.num_live and stream.aborted_s is None:
                assert request.deadline_s is None or now_s <= request.deadline_s
            if stream.num_queued:
                assert now_s <= stream.opened_s + MAX_QUEUE_TIME_S

    def pick(self, index: int) -> Client:
        return self.requests[index % len(self.requests)]

    def submit(self, submit: Submit) -> None:
        params = SamplingParams(
            max_tokens=submit.max_tokens, seed=SEED, ignore_eos=True, temperature=1.0
        )
        request = SequenceRequest(list(range(300, 300 + submit.prompt_tokens)), params)
        now_s = trio.current_time()
        slot = None
        try:
            slot = self.client.admission.reserve()
            stream = self.client.open_stream(
                [request] * submit.num_sequences,
                slot=slot,
                priority=submit.priority,
                deadline_s=None if submit.timeout_s is None else now_s + submit.timeout_s,
            )
        except (OverloadedError, UnavailableError) as error:
            self.refusals.append((error, self.client.status.dead.is_set()))
            if slot is not None:
                slot.release()
            return
        client = Client(submit, stream, now_s)
        self.requests.append(client)
        self.nursery.start_soon(self._own, client, slot)

    async def _own(self, client: Client, slot: Any) -> None:
        with slot:
            await client.run()

    def hang_up(
        self, victim: Client, how: Literal["client_disconnect", "slow_client", "cancel"]
    ) -> None:
        if victim.over.is_set():
            return
        victim.hung_up = True
        if how != "cancel":
            victim.stream.close(how)
        victim.scope.cancel()

    def drain(self) -> None:
        if self.client.status.state is EngineState.READY:
            self.client.status.mark_draining()
        elif self.client.status.state is EngineState.DRAINING:
            self.shut_down = True
            self.client.abort_all("shutdown")

    async def finish(self) -> None:
        """Let the history end by itself: every client reads, the engine runs until it is idle."""
        while True:
            for request in self.requests:
                request.hurry()
            await wait_all_tasks_blocked()
            if not self.engine.has_something_to_do():
                break
            self.engine.turn()
        with trio.fail_after(MAX_QUEUE_TIME_S + 10):
            for request in self.requests:
                await request.over.wait()
            await self.client.wait_idle()


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """A client attached to an engine that is ready."""
    client = EngineClient(max_queue_sequences=MAX_QUEUE, max_queue_time_s=MAX_QUEUE_TIME_S)
    async with trio.open_nursery() as nursery, trio.open_nursery() as clients:
        world = World(client, clients)
        await nursery.start(client.run_incarnation, world.engine)
        client.status.mark_ready()
        yield world
        nursery.cancel_scope.cancel(reason="the history is over")
