"""A stepped engine on a wire of frames: frames can be late in either direction, or be spoilt.

Each direction keeps its order, as zmq does; what is free is how the two directions stand to each
other and to the steps. ``link.held`` keeps all frames of a direction on their way until it is
cleared; ``link.spoil`` breaks the order or the bytes of the next frame, which nothing but the
sequence numbers can notice.
"""

from __future__ import annotations

import collections
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import trio

from helpers.stepped_engine import SteppedEngine
from trioengine.errors import PeerGoneError
from trioengine.heartbeat import Heartbeat
from trioengine.protocol import (
    Abort,
    Add,
    EngineStats,
    FrameEncoder,
    Hello,
    Outputs,
    client_frames,
    engine_frames,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.client.engine_client import Transport
    from trioengine.engine_proc.sim_runner import SimScript
    from trioengine.outputs import RequestOutput
    from trioengine.protocol import ClientMessage, EngineMessage, FrameDecoder

__all__ = ["KILLED", "MemoryEngine", "Spoil", "WiredEngine"]

KILLED = "the engine process was killed by SIGKILL"
Spoil = Literal["drop", "duplicate", "swap", "corrupt"]
Message = TypeVar("Message")


class Link(Generic[Message]):
    """One direction of the wire.

    Attributes:
        held: Nothing arrives while this is set.
    """

    def __init__(self, decoder: FrameDecoder[Message]) -> None:
        self.held = False
        self._frames: collections.deque[bytes] = collections.deque()
        self._encoder, self._decoder = FrameEncoder(), decoder
        self._spoil: Spoil | None = None
        self._overtaken: bytes | None = None

    def __len__(self) -> int:
        """Frames that can be taken now."""
        return 0 if self.held else len(self._frames)

    def spoil(self, how: Spoil) -> None:
        """Spoil the next frame."""
        self._spoil = how

    def put(self, message: Any) -> None:
        frame = self._encoder.encode(message)
        spoil, self._spoil = self._spoil, None
        if spoil == "swap":
            self._overtaken = frame
            return
        if spoil == "corrupt":
            frame = frame[:1] + b"\xc1" + frame[2:]  # a byte that msgpack never uses
        self._frames += [] if spoil == "drop" else [frame] * (2 if spoil == "duplicate" else 1)
        if self._overtaken is not None:
            self._frames.append(self._overtaken)
            self._overtaken = None

    def take(self) -> list[Message]:
        """Take and decode what has arrived. Raises ``ProtocolError`` where it was spoilt."""
        if self.held:
            return []
        frames = list(self._frames)
        self._frames.clear()
        return [self._decoder.decode(frame) for frame in frames]


class WiredEngine(SteppedEngine):
    """A stepped engine behind two links, that keeps count of what it was told and what it said.

    Attributes:
        to_engine: What the client sends.
        to_client: What the engine sends.
        added: Ids of every ``Add`` that it has read.
        asked_to_abort: Ids of every ``Abort`` that was sent, one entry each time.
        terminals: How many terminals it has said for each id.
        aborted: Terminals that confirmed an abort.
        last_stats: As it said them last.
    """

    def __init__(self, script: SimScript, **options: Any) -> None:
        self.to_engine: Link[ClientMessage] = Link(client_frames())
        self.to_client: Link[EngineMessage] = Link(engine_frames())
        self.added: list[int] = []
        self.asked_to_abort: list[int] = []
        self.terminals: collections.Counter[int] = collections.Counter()
        self.aborted = 0
        self.last_stats = EngineStats()
        self.ended = trio.Event()
        super().__init__(script, send_error=partial(PeerGoneError, "gone"), **options)

    # The client's side ----------------------------------------------------------------------

    def send(self, message: ClientMessage) -> None:
        if self.dead:
            raise self._send_error()
        if isinstance(message, Abort):
            self.asked_to_abort += message.request_ids
        self.to_engine.put(message)
        self._wake()

    async def receive(self) -> list[EngineMessage]:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.to_client:
            if self.dead:
                raise PeerGoneError("the engine has closed its end of the wire")
            await self._changed.wait()
        return self.to_client.take()

    # The engine's side ----------------------------------------------------------------------

    def take_sent(self) -> list[ClientMessage]:
        messages: list[ClientMessage] = []
        messages += [m for m in self.to_engine.take() if not isinstance(m, Hello)]
        aborts = {i for m in messages if isinstance(m, Abort) for i in m.request_ids}
        if aborts:
            self.at("commands", lambda: self._check_freed(aborts))
        self.added += [m.request_id for m in messages if isinstance(m, Add)]
        return messages

    def _check_freed(self, aborted: set[int]) -> None:
        if not aborted.isdisjoint(self.live):
            raise AssertionError(f"{aborted & self.live} hold blocks when a step is scheduled")

    def has_something_to_do(self) -> bool:
        pending = bool(self.to_engine) or self.loop.has_something_to_do()
        return not self.dead and self._ready and pending

    def release(self) -> None:
        """Let everything arrive."""
        self.to_engine.held = self.to_client.held = False
        self._wake()

    def _say(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs):
            self.last_stats = message.stats
            for delta in message.deltas:
                self._note(delta)
        self.to_client.put(message)
        self._wake()

    def _note(self, delta: RequestOutput) -> None:
        if self.terminals[delta.request_id]:
            raise AssertionError(f"news of {delta.request_id} after its terminal")
        if delta.finish_reason is not None:
            self.terminals[delta.request_id] += 1
            self.aborted += delta.finish_reason == "abort"

    def _end(self) -> None:
        self.to_client.held = False  # what it had sent is in the kernel, and arrives
        super()._end()
        self.ended.set()


class MemoryEngine:
    """What the supervisor takes for an engine process: fulfils ``process.incarnation.Engine``.

    Attributes:
        wired: The engine.
        looks_stalled: Its heartbeat page shows a step that began an eternity ago.
        exit_delay_s: From its end to the report of its process's.
        start_s: How long it takes to be ready, where it is not so from the beginning.
        leave_s: How long it takes to hear of its ``Shutdown``.
        closed: ``close`` was called.
    """

    name = "engine in memory"

    def __init__(self, wired: WiredEngine, *, start_s: float = 0.0, leave_s: float = 0.0) -> None:
        self.wired = wired
        self.start_s, self.leave_s = start_s, leave_s
        self.transport: Transport = wired
        self.looks_stalled = False
        self.exit_delay_s = 0.0
        self.closed = False

    async def watch(self) -> str:
        if self.start_s:
            await trio.sleep(self.start_s)
            if not self.wired.dead:
                self.wired.become_ready()
        await self.wired.ended.wait()
        await trio.sleep(self.exit_delay_s)
        return KILLED

    def heartbeat(self) -> Heartbeat:
        started_s = -1e12 if self.looks_stalled else 1e12
        return Heartbeat("step", 1, started_s, 1e12)

    async def stop(self, grace_s: float) -> None:
        """Let it read its ``Shutdown``; kill it where that does not come."""
        if self.leave_s and not self.wired.dead:
            await trio.sleep(self.leave_s)
        self.wired.release()
        self.wired.turn()
        if not self.wired.dead:
            await trio.sleep(grace_s)
            self.wired.crash()
        await trio.lowlevel.checkpoint()

    def kill(self) -> None:
        self.wired.crash()

    def close(self) -> None:
        self.closed = True


def at_phase(engine: WiredEngine, phase: str, action: Callable[[], None]) -> None:
    """Do ``action`` at the end of ``phase`` of a turn that is run now."""
    engine.at(phase, action)
    engine.turn()
