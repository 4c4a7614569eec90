"""A whole server under a history: its clients, what is done to it, and how it is seen to its end.

Between two operations everything that can run has run, and what must hold at any time is checked.
When the history is over, what was held back arrives, everybody reads, the engine works off what it
has, and the server is asked to stop if it was not.
"""

from __future__ import annotations

import collections
import dataclasses
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from trio.testing import wait_all_tasks_blocked

from helpers.memory_server import CONFIG, MemoryServer, open_server
from helpers.server_operations import (
    Cancel,
    Die,
    Flit,
    Hold,
    Leave,
    Nudge,
    Order,
    Pass,
    Probe,
    Read,
    Release,
    Setup,
    SpoilFrame,
    Stall,
    Step,
    Stop,
    Submit,
)
from helpers.socket_visitor import SocketVisitor, read_answer
from helpers.wired_engine import at_phase
from helpers.world_request import Request
from trioengine.client.engine_status import EngineState
from trioengine.client.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from helpers.server_operations import Operation

__all__ = ["World", "open_world"]

FOREVER_S = 60.0  # far beyond every bound of the server under test


class World:
    """A server and all that its clients have done.

    Attributes:
        memory: The server.
        requests: In the order in which they were made.
        probes: Connections of probes, cancellations and orders, with the path asked for.
        died: The engine was killed or has failed, or its wire was spoilt.
        spoilt: Its wire was.
        asked: The server was asked to stop.
        cut_short: It was told to leave at once.
        stalled: The engine looked stalled at some time.
        naps: How often it was to be put to sleep.
        finishing: The history is over, and everything is to end.
    """

    def __init__(self, memory: MemoryServer) -> None:
        self.memory = memory
        self.requests: list[Request] = []
        self.probes: list[tuple[str, SocketVisitor]] = []
        self.died = self.spoilt = self.asked = self.cut_short = False
        self.stalled = self.finishing = False
        self.naps = 0
        self.tasks = living_tasks()

    async def apply(self, operation: Operation) -> None:
        """Carry out one operation, let everything run that can, and check."""
        match operation:
            case Leave(phase=str()) | Flit():
                await self._leave_within_a_step(operation)
            case Pass():
                await trio.sleep(operation.seconds)
            case Step():
                for _ in range(operation.turns):
                    await wait_all_tasks_blocked()
                    self.memory.engine.wired.turn()
            case _:
                self._act(operation)
        await self.settle()
        self.check_promptness()

    async def _leave_within_a_step(self, operation: Leave | Flit) -> None:
        """Let the server say what it has to, and the engine hear it in the middle of a step."""
        wired = self.memory.engine.wired
        wired.to_engine.held = not wired.dead
        if isinstance(operation, Flit):
            self._submit(operation.submit)
            await self.settle()
            self._leave(self.requests[-1], half=False)
        elif self.requests:
            self._leave(self._pick(operation.victim), half=operation.half)
        await self.settle()
        if operation.phase is not None:
            at_phase(wired, operation.phase, wired.release)
        wired.release()

    async def settle(self) -> None:
        """Let everything run that can, and clients read."""
        await wait_all_tasks_blocked()
        for request in self.requests:
            request.look()
        for _, visitor in self.probes:
            visitor.read()

    def _act(self, operation: Operation) -> None:
        engine = self.memory.engine
        wired = engine.wired
        match operation:
            case Submit():
                self._submit(operation)
            case Leave() if self.requests:
                self._leave(self._pick(operation.victim), half=operation.half)
            case Read() if self.requests:
                self._pick(operation.reader).visitor.read(operation.most)
            case Nudge() if self.requests:
                self._nudge(self._pick(operation.sender))
            case Cancel() if self.requests:
                self._cancel(self._pick(operation.victim))
            case Probe():
                self._probe(operation.path)
            case Order():
                self._order(operation)
            case Hold() if not wired.dead:
                wired.to_engine.held |= operation.to_engine
                wired.to_client.held |= operation.to_client
            case Release():
                if operation.phase is not None:
                    at_phase(wired, operation.phase, wired.release)
                wired.release()
            case Stall():
                engine.looks_stalled = operation.on
                self.stalled |= operation.on
            case Die() if not wired.dead:
                self._die(operation)
            case SpoilFrame() if not wired.dead:
                self.died = self.spoilt = True
                (wired.to_engine if operation.to_engine else wired.to_client).spoil(operation.how)
            case Stop():
                self._stop()

    def _pick(self, index: int) -> Request:
        return self.requests[-1 - index % len(self.requests)]

    def _submit(self, submit: Submit) -> None:
        visitor = self._kept() if submit.keep else None
        reused = visitor is not None
        if visitor is None:
            visitor = SocketVisitor(self.memory.path)
        request = Request(submit, visitor, len(self.requests))
        request.reused = reused
        self.requests.append(request)

    def _kept(self) -> SocketVisitor | None:
        """Return a connection that is free for another request."""
        for request in self.requests:
            free = request.answered and not request.left and not request.gone_on
            if free and not request.second and request.visitor.end is None:
                request.gone_on = True
                return request.visitor
        return None

    def _leave(self, victim: Request, *, half: bool) -> None:
        if victim.left or victim.gone_on:
            return
        victim.left = True
        if half:
            victim.visitor.half_close()
        else:
            victim.visitor.close()

    def _nudge(self, request: Request) -> None:
        if request.rest:
            request.finish_sending()
        elif request.pending and not request.second:
            request.second = True
            request.visitor.send(b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n")

    def _cancel(self, request: Request) -> None:
        response_id = request.visitor.response_id
        if response_id is not None and not request.gone_on:
            request.cancelled = True
            self._ask(f"/v1/requests/{response_id}/cancel", b"POST")

    def _probe(self, path: str) -> None:
        self._ask(path, b"GET")

    def _order(self, order: Order) -> None:
        self.naps += order.sleep
        path = f"/sleep?timeout={order.patience_s}" if order.sleep else "/wake_up"
        self._ask(path, b"POST")

    def _ask(self, path: str, method: bytes) -> None:
        visitor = SocketVisitor(self.memory.path)
        length = b"Content-Length: 0\r\n" if method == b"POST" else b""
        visitor.send(b"%b %b HTTP/1.1\r\nHost: t\r\n%b\r\n" % (method, path.encode(), length))
        self.probes.append((path, visitor))

    def _die(self, die: Die) -> None:
        self.died = True
        engine, wired = self.memory.engine, self.memory.engine.wired
        engine.exit_delay_s = die.exit_delay_s
        if die.phase is not None or die.last_word:
            at_phase(wired, die.phase or "commands", _fail if die.last_word else wired.crash)
        if not wired.dead:  # there was no such phase in an idle turn
            wired.crash()

    def _stop(self) -> None:
        if self.asked:
            self.cut_short = True
            self.memory.scope.cancel(reason="second signal")
        self.asked = True
        self.memory.server.stop()

    # At any time ----------------------------------------------------------------------------

    def check_promptness(self) -> None:
        """Who has left holds nothing, and every abort is on its way at once."""
        self.check_orders()
        client, wired = self.memory.client, self.memory.engine.wired
        if wired.dead or client.status.dead.is_set() or self.memory.ended.is_set():
            return
        table = client._table
        waiting = sum(request.pending for request in self.requests)
        assert len(table.streams) <= waiting, "a client has left, its request has not"
        aborting = {i for i, s in table._live.items() if s.state is SequenceState.ABORTING}
        assert aborting <= set(wired.asked_to_abort), "an abort waits for something"
        full = table.num_sent == client._outlet.room
        assert full or not table._queue or client.status.dismissed, "the engine is left to starve"
        now_s = trio.current_time()
        for stream in table.streams:
            latest_s = stream.opened_s + CONFIG.max_queue_time_s
            assert not stream.num_queued or now_s <= latest_s, "one waits in the queue for too long"
        for request in self.requests:
            assert not request.is_overdue(now_s), "a deadline is not kept"

    def check_orders(self) -> None:
        """Nobody waits for a sleep that has begun, or for an awakening that nobody wants."""
        status, nap = self.memory.client.status, self.memory.client.nap
        settled = status.state is EngineState.READY if nap.wanted else nap.asleep
        if status.state not in (EngineState.READY, EngineState.SLEEPING) or not settled:
            return
        for path, visitor in self.probes:
            answered = visitor.end or read_answer(visitor.received)
            assert answered or not path.startswith(("/sleep", "/wake_up")), f"{path} has no end"

    # The end --------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Let the history come to its end, and the server to its own."""
        self.finishing = True
        with trio.fail_after(FOREVER_S):
            await self._let_everybody_finish()
            self.check_orders()
            ready = self.memory.client.status.state in (EngineState.READY, EngineState.STALLED)
            if ready and not self.asked and not self.spoilt:
                await self._check_quiet()
            self.memory.server.stop()
            while not self.memory.ended.is_set():
                self.memory.engine.wired.turn()
                await trio.sleep(0.05)
                await self.settle()
        await self.settle()

    def close(self) -> None:
        """Everybody leaves. Idempotent."""
        for request in self.requests:
            request.visitor.close()
        for _, visitor in self.probes:
            visitor.close()

    async def _let_everybody_finish(self) -> None:
        self.memory.engine.looks_stalled = False
        for request in self.requests:
            request.lazy = False
            request.finish_sending()
        self.memory.engine.wired.release()
        await self.settle()
        while self._is_between_engines():
            self.memory.engine.wired.turn()
            await trio.sleep(0.1)
            await self.settle()
        while self.memory.engine.wired.has_something_to_do():
            self.memory.engine.wired.turn()
            await self.settle()
            self.check_promptness()

    def _is_between_engines(self) -> bool:
        """Another engine is to come, or the present one falls asleep."""
        status, nap = self.memory.client.status, self.memory.client.nap
        if status.state is EngineState.SLEEPING:
            return nap.wanted or not nap.asleep
        return status.state is EngineState.RESTARTING

    async def _check_quiet(self) -> None:
        """With nobody left to answer, nothing of them is left."""
        client, wired = self.memory.client, self.memory.engine.wired
        self.close()
        await self.settle()
        await trio.sleep(1.0)  # the engine looks well again
        assert client.status.state is EngineState.READY
        assert not wired.has_something_to_do()
        left = living_tasks() - self.tasks
        assert not left, f"tasks are left: {left}"


def living_tasks() -> collections.Counter[str]:
    """Return how many tasks there are of each name."""
    root = trio.lowlevel.current_root_task()
    found: collections.Counter[str] = collections.Counter()
    todo = [root] if root is not None else []
    while todo:
        task = todo.pop()
        found[task.name] += 1
        for nursery in task.child_nurseries:
            todo += nursery.child_tasks
    return found


@asynccontextmanager
async def open_world(setup: Setup) -> AsyncIterator[World]:
    """A server that is ready, without clients."""
    async with open_server(**dataclasses.asdict(setup)) as memory:
        await wait_all_tasks_blocked()
        world = World(memory)
        try:
            yield world
        finally:
            world.close()


def _fail() -> None:
    raise RuntimeError("the step failed")
