"""One sequence, as the server knows it: a state along a table, and what its consumer has not taken.

The table is written out so that it can be read, walked by a test, and refused: a pair that is not
in it raises and changes nothing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.errors import ProtocolError
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.client.request_stream import RequestStream
    from trioengine.outputs import RequestOutput

__all__ = ["TRANSITIONS", "Sequence", "SequenceEvent", "SequenceRequest", "SequenceState"]


class SequenceRequest(msgspec.Struct, frozen=True):
    """What is asked of one sequence."""

    prompt_token_ids: list[int]
    params: SamplingParams


class SequenceState(enum.IntEnum):
    """Where a sequence stands, as the server knows it."""

    QUEUED = enum.auto()  # in the server's queue: the engine has not heard of it
    OPEN = enum.auto()  # sent to the engine
    ABORTING = enum.auto()  # an abort is on its way; the engine has not confirmed
    FINISHED = enum.auto()  # the engine has sent its terminal
    WITHDRAWN = enum.auto()  # left the queue before the engine heard of it
    FAILED = enum.auto()  # the engine died with it


class SequenceEvent(enum.IntEnum):
    """What moves it."""

    SEND = enum.auto()
    DELTA = enum.auto()
    TERMINAL = enum.auto()
    CLOSE = enum.auto()
    RETURN = enum.auto()  # the engine died; the next one gets it
    ENGINE_DEAD = enum.auto()


_S, _E = SequenceState, SequenceEvent

TRANSITIONS: Final[dict[tuple[SequenceState, SequenceEvent], SequenceState]] = {
    (_S.QUEUED, _E.SEND): _S.OPEN,
    (_S.QUEUED, _E.CLOSE): _S.WITHDRAWN,
    (_S.OPEN, _E.DELTA): _S.OPEN,
    (_S.OPEN, _E.TERMINAL): _S.FINISHED,
    (_S.OPEN, _E.CLOSE): _S.ABORTING,  # the one edge that sends an abort
    (_S.OPEN, _E.RETURN): _S.QUEUED,
    (_S.ABORTING, _E.DELTA): _S.ABORTING,  # late: dropped, not an error
    (_S.ABORTING, _E.TERMINAL): _S.FINISHED,  # confirmed, or it had finished before
    **{(state, _E.ENGINE_DEAD): _S.FAILED for state in (_S.QUEUED, _S.OPEN, _S.ABORTING)},
    **{(state, _E.CLOSE): state for state in (_S.ABORTING, _S.FINISHED, _S.WITHDRAWN, _S.FAILED)},
}


class Sequence:
    """One sequence in the server.

    Attributes:
        request_id: Its id on the wire, never used twice.
        index: Its place in the stream.
        priority: Lower goes first among those of the same key.
        key: Whose share of the queue it takes.
        state: See ``TRANSITIONS``.
        request: What is asked; dropped once it will not be sent (again), prompts are long.
        accepted: The engine has it in its own queue.
        last_token_s: When its last token arrived.
        cell: What its consumer has not taken yet.
    """

    __slots__ = (
        "accepted", "cell", "index", "key", "last_token_s", "priority", "request", "request_id",
        "state", "stream",
    )  # fmt: skip

    def __init__(
        self,
        stream: RequestStream,
        index: int,
        request_id: int,
        request: SequenceRequest,
        priority: int,
        key: str = "",
    ) -> None:
        self.stream = stream
        self.index = index
        self.request_id = request_id
        self.request: SequenceRequest | None = request
        self.priority = priority
        self.key = key
        self.state = SequenceState.QUEUED
        self.accepted = False
        self.last_token_s: float | None = None
        self.cell: RequestOutput | None = None

    def take_add(self, *, again: bool = False) -> Add:
        """Return the message that starts it; let go of the prompt unless it may be sent ``again``.

        The engine knows no keys: among several, it must not let one's priority pass the others.

        Raises:
            ProtocolError: It has let go of it before.
        """
        if (request := self.request) is None:
            raise ProtocolError(f"sequence {self.request_id} was sent already")
        if not again:
            self.request = None
        priority = 0 if self.key else self.priority
        return Add(self.request_id, request.prompt_token_ids, request.params, priority)

    def __repr__(self) -> str:
        return f"<Sequence {self.request_id} {self.state.name}>"

    def advance(self, event: SequenceEvent) -> SequenceState:
        """Move along the table; return the state that was left.

        Raises:
            ProtocolError: The table has no such edge. Nothing has changed then.
        """
        left = self.state
        try:
            self.state = TRANSITIONS[left, event]
        except KeyError:
            raise ProtocolError(
                f"sequence {self.request_id} is {left.name}: no {event.name} is due"
            ) from None
        return left
