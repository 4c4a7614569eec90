"""Puts the faults of a plan around the server's parts: wire, reader, clock, tokenizer."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, cast

import trio

from trioengine.fault_plan import FrameSpoiler
from trioengine.zmq_channel import ZmqTransport

if TYPE_CHECKING:
    from trioengine.fault_plan import FaultPlan, Trigger
    from trioengine.protocol import EngineMessage
    from trioengine.text.tokenizer import Tokenizer

__all__ = ["FaultyTransport", "JumpingClock", "faulty_clock", "faulty_tokenizer"]


class JumpingClock(trio.abc.Clock):
    """Real time, which can be made to jump forward, as on a machine that was suspended."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def start_clock(self) -> None:
        """It runs already."""

    def current_time(self) -> float:
        return time.perf_counter() + self._ahead_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time() if deadline < math.inf else math.inf

    def jump(self, seconds: float) -> None:
        """Let so much time have passed."""
        self._ahead_s += seconds


def faulty_clock(plan: FaultPlan | None) -> trio.abc.Clock | None:
    """Return the clock for ``trio.run``; ``None``, its own, where the plan leaves time alone."""
    return JumpingClock() if plan is not None and plan.triggers("clock") else None


class FaultyTransport(ZmqTransport):
    """A transport that spoils frames to the engine, reads late, or finds that time has jumped."""

    def __init__(self, plan: FaultPlan, **options: str) -> None:
        super().__init__(**options)
        self._spoiler = FrameSpoiler(plan.triggers("to_engine"))
        self._pauses = plan.triggers("reader")
        self._jumps = plan.triggers("clock")

    def _try_send(self, frame: bytes) -> bool:
        taken = True
        for each in self._spoiler(frame):
            taken &= super()._try_send(each)
        return taken

    async def receive(self) -> list[EngineMessage]:
        for trigger in self._pauses:
            if trigger.is_due():
                await trio.sleep(trigger.fault.seconds)
        messages = await super().receive()
        for trigger in self._jumps:
            if any(trigger.is_due(message=_tag(message)) for message in messages):
                cast("JumpingClock", trio.lowlevel.current_clock()).jump(trigger.fault.seconds)
        return messages


def _tag(message: EngineMessage) -> bytes:
    return str(message.__struct_config__.tag).encode()


class _FaultyTokenizer:
    def __init__(self, tokenizer: Tokenizer, triggers: tuple[Trigger, ...]) -> None:
        self._tokenizer, self._triggers = tokenizer, triggers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, *args: Any, **options: Any) -> list[int]:
        for trigger in self._triggers:
            if trigger.is_due():
                raise trigger.error()
        return self._tokenizer.encode(*args, **options)


def faulty_tokenizer(tokenizer: Tokenizer, plan: FaultPlan | None) -> Tokenizer:
    """Return a tokenizer that fails as the plan says."""
    triggers = () if plan is None else plan.triggers("tokenizer")
    return cast("Tokenizer", _FaultyTokenizer(tokenizer, triggers)) if triggers else tokenizer
