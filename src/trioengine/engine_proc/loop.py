"""The engine loop: drain commands, step, send exactly one ``Outputs`` frame a step.

Theory of operation
-------------------
One *turn* drains the wire and handles what came, then runs one step if there is work. What cannot
wait for the step goes out before it: ``Accepted``, results of calls, and the terminals of requests
that were aborted or refused. During the step the wire is drained once more, between sampling and
applying; aborts that came take effect there, everything else keeps its order and waits for the next
turn. An abort whose own ``Add`` waits so waits behind it.

With nothing to do the loop sleeps in the wire's ``wait``. It waits for nobody else: sending never
blocks. Whatever the backend raises (outside a control call) is fatal, and ``Fatal`` is the last
word.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Protocol

from trioengine.engine_proc.backend import LATER
from trioengine.engine_proc.profiling import StepTimeline
from trioengine.errors import (
    ConfigError,
    InvalidRequestError,
    ProtocolError,
    TrioEngineError,
)
from trioengine.protocol import (
    Abort,
    Accepted,
    Add,
    Call,
    CallResult,
    Fatal,
    Outputs,
    Shutdown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioengine.engine_proc.backend import EngineBackend
    from trioengine.outputs import RequestOutput
    from trioengine.protocol import ClientMessage, EngineMessage

__all__ = ["Channel", "EngineLoop", "Pulse", "fatal_from"]


class Channel(Protocol):
    """The engine's side of the wire, after the handshake."""

    def drain(self) -> list[ClientMessage]:
        """Return what has arrived, in order, without waiting."""

    def wait(self) -> None:
        """Wait until something has arrived; may return early."""

    def wake(self) -> None:
        """End ``wait``, from any thread."""

    def send(self, message: EngineMessage) -> None:
        """Send without ever waiting for the peer."""


class Pulse(Protocol):
    """What the loop writes on the heartbeat page."""

    def begin_step(self, number: int) -> None:
        """Say that step ``number`` begins now."""

    def idle(self) -> None:
        """Say that there is no work."""


class EngineLoop:
    """Drives one backend over one channel until ``Shutdown``.

    Attributes:
        stopped: ``Shutdown`` has been read.
        step: Number of the last step begun.
    """

    def __init__(
        self,
        backend: EngineBackend,
        channel: Channel,
        pulse: Pulse,
        timeline: StepTimeline | None = None,
    ) -> None:
        self.stopped = False
        self.step = 0
        self._backend = backend
        self._channel = channel
        self._pulse = pulse
        self._timeline = StepTimeline() if timeline is None else timeline
        self._deferred: list[ClientMessage] = []
        self._accepted: list[int] = []
        self._terminals: list[RequestOutput] = []
        backend.when_settled(channel.wake)

    def run(self) -> None:
        """Turn until ``Shutdown``.

        Raises:
            Exception: What a turn raises. It is fatal: the caller sends ``fatal_from`` it.
        """
        while not self.stopped:
            if not self.has_something_to_do():
                self._pulse.idle()
                self._channel.wait()
            self.turn()

    def has_something_to_do(self) -> bool:
        """True where a turn has work even if no message comes."""
        return bool(self._deferred) or self._backend.has_work() or self._backend.has_news()

    def turn(self) -> None:
        """Handle what has arrived and run one step if there is work. Never waits.

        Raises:
            ProtocolError: The server broke the protocol.
            Exception: Whatever the backend raises.
        """
        self._timeline.begin_step(self.step + 1)
        deferred, self._deferred = self._deferred, []
        self._handle(deferred + self._channel.drain())
        self._timeline.lap("commands")
        if self._backend.has_work() and not self.stopped:
            self._step()

    def _step(self) -> None:
        self.step += 1
        self._pulse.begin_step(self.step)
        deltas = self._backend.step(self._poll_aborts)
        self._channel.send(Outputs(self.step, deltas, self._backend.stats()))
        self._timeline.lap("send")

    # Commands -------------------------------------------------------------------------------

    def _handle(self, messages: Iterable[ClientMessage]) -> None:
        for message in messages:
            if isinstance(message, Add):
                self._add(message)
            elif isinstance(message, Abort):
                self._terminals += self._backend.abort(message.request_ids)
            elif isinstance(message, Call):
                self._flush()
                self._channel.send(self._call(message))
            elif isinstance(message, Shutdown):
                self.stopped = True
                break
            else:
                raise ProtocolError(f"{type(message).__name__} after the handshake")
        self._settle()
        self._flush()

    def _add(self, add: Add) -> None:
        answer = self._backend.add_request(add)
        if answer is None:
            self._accepted.append(add.request_id)
        elif answer is not LATER:
            self._terminals.append(answer)

    def _settle(self) -> None:
        accepted, refused = self._backend.settle()
        self._accepted += accepted
        self._terminals += refused

    def _call(self, call: Call) -> CallResult:
        try:
            return CallResult(call.call_id, self._backend.call(call.method, call.args))
        except Exception as error:  # contained: the caller is told
            refused = isinstance(error, InvalidRequestError)
            return CallResult(call.call_id, error=_sentence(error), refused=refused)

    def _flush(self) -> None:
        """Send what must not wait for a step."""
        if self._accepted:
            self._channel.send(Accepted(self._accepted))
            self._accepted = []
        if self._terminals:
            self._channel.send(Outputs(self.step, self._terminals, self._backend.stats()))
            self._terminals = []

    def _poll_aborts(self) -> list[int]:
        """Drain the wire within a step; return whom to abort now, keep the rest in order."""
        aborted: list[int] = []
        for message in self._channel.drain():
            if not isinstance(message, Abort):
                self._deferred.append(message)
                continue
            unborn = {add.request_id for add in self._deferred if isinstance(add, Add)}
            late = [request_id for request_id in message.request_ids if request_id in unborn]
            aborted += [
                request_id for request_id in message.request_ids if request_id not in unborn
            ]
            if late:
                self._deferred.append(Abort(late))
        return aborted


def fatal_from(error: BaseException) -> Fatal:
    """Return the last word about an error: one sentence, and the traceback for the log."""
    trace = "".join(traceback.format_exception(error))
    return Fatal(_sentence(error), trace, refused=isinstance(error, ConfigError))


def _sentence(error: BaseException) -> str:
    if isinstance(error, TrioEngineError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
