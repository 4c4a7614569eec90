"""An engine that says what a test tells it to, and a client attached to an engine in memory.

``ScriptedEngine`` is a ``Transport`` without any engine behind it: it keeps what the client sends
and delivers what the test says, when it says it. What the real loop and core would answer is
``SteppedEngine``'s business.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trioengine.client.engine_client import EngineClient, SequenceRequest
from trioengine.errors import PeerGoneError
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import (
    Abort,
    Add,
    EngineLimits,
    EngineStats,
    ModelInfo,
    Outputs,
    Ready,
)
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioengine.client.engine_client import Transport
    from trioengine.client.request_stream import RequestStream
    from trioengine.protocol import ClientMessage, EngineMessage

__all__ = ["ScriptedEngine", "ask", "delta", "open_client", "open_stream"]

MODEL = ModelInfo("scripted", "none", True, 1024, 2048, (0,))


def delta(
    request_id: int, text: str = "", finish: FinishReason | None = None, error: str | None = None
) -> RequestOutput:
    """Return a delta with one token for each character of ``text``."""
    return RequestOutput(request_id, text, [ord(c) for c in text], finish, error=error)


def ask(num_sequences: int = 1, max_tokens: int = 5) -> list[SequenceRequest]:
    """Return a small request."""
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
    return [SequenceRequest([11, 12, 13], params)] * num_sequences


class ScriptedEngine:
    """Fulfils ``Transport``.

    Attributes:
        sent: What the client has sent.
        gone: Sending finds nobody.
        is_ready: It has said so.
    """

    def __init__(self, *, max_num_seqs: int = 4, ready: bool = True) -> None:
        self.sent: list[ClientMessage] = []
        self.gone = self.is_ready = False
        self._limits = EngineLimits(max_num_seqs, 2048, 16, 256)
        self._said: list[EngineMessage] = []
        self._left = False
        self._news = trio.Event()
        if ready:
            self.say_ready()

    def send(self, message: ClientMessage) -> None:
        if self.gone:
            raise PeerGoneError("the scripted engine is gone")
        self.sent.append(message)

    async def receive(self) -> list[EngineMessage]:
        while not self._said:
            if self._left:
                raise PeerGoneError("the scripted engine has left")
            await self._news.wait()
        said, self._said = self._said, []
        return said

    def say(self, *messages: EngineMessage) -> None:
        """Deliver these."""
        self._said += messages
        self._wake()

    def say_ready(self) -> None:
        """Deliver ``Ready``."""
        self.is_ready = True
        self.say(Ready(MODEL, self._limits))

    def say_outputs(self, *deltas: RequestOutput, step: int = 1, **stats: int) -> None:
        """Deliver one frame of deltas."""
        self.say(Outputs(step, list(deltas), EngineStats(**stats)))

    def leave(self) -> None:
        """End: what was said is delivered, then nothing ever."""
        self._left = self.gone = True
        self._wake()

    @property
    def added(self) -> list[int]:
        """Ids of all sequences that were sent, in order."""
        return [message.request_id for message in self.sent if isinstance(message, Add)]

    @property
    def aborts(self) -> list[list[int]]:
        """Ids of each abort frame, in order."""
        return [message.request_ids for message in self.sent if isinstance(message, Abort)]

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()


@asynccontextmanager
async def open_client(
    engine: Transport, *, max_queue_sequences: int = 1024, max_queue_time_s: float = 120.0
) -> AsyncIterator[EngineClient]:
    """Attach a client to an engine that is ready, for the life of the block."""
    client = EngineClient(
        max_queue_sequences=max_queue_sequences, max_queue_time_s=max_queue_time_s
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run_incarnation, engine)
        client.status.mark_ready()
        yield client
        nursery.cancel_scope.cancel(reason="the test is over")


def open_stream(
    client: EngineClient,
    sequences: list[SequenceRequest] | None = None,
    *,
    priority: int = 0,
    deadline_s: float | None = None,
) -> RequestStream:
    """Open a stream whose slot nobody gives back."""
    return client.open_stream(
        ask() if sequences is None else sequences,
        slot=client.admission.reserve(),
        priority=priority,
        deadline_s=deadline_s,
    )
