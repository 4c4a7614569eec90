"""The wire between server and engine: msgspec structs, msgpack, sequence numbers. Never pickle.

Theory of operation
-------------------
Each direction is one PUSH/PULL pair and one ``Envelope`` a frame. The first frame of either
direction is ``Hello`` (number 0); from then on numbers rise by one, and a gap is fatal: zmq loses
nothing between live peers, so a gap means a bug or a stranger. Request ids are integers made by
the server and never used twice, so an abort can only ever hit the request that it was meant for.

What each message promises:

- every ``Add`` is answered by exactly one terminal delta, ``stop``, ``length``, ``abort`` or
  ``error``; ``Accepted`` comes first, also when no step runs. Only an ``Add`` that cannot be served
  at all gets its ``error`` without one.
- ``Abort`` of a live id is confirmed by its terminal ``abort`` once its blocks are free, also when
  no step runs; of an unknown or finished id it is counted (``EngineStats.aborts_ignored``) and gets
  no answer.
- every ``Call`` gets one ``CallResult``.
- ``Fatal`` is the engine's last word.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

from trioengine.errors import ProtocolError
from trioengine.outputs import RequestOutput
from trioengine.sampling_params import SamplingParams

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "Add",
    "Call",
    "CallResult",
    "ClientMessage",
    "EmbeddingInfo",
    "EngineLimits",
    "EngineMessage",
    "EngineStats",
    "Fatal",
    "FrameDecoder",
    "FrameEncoder",
    "Hello",
    "ModelInfo",
    "Outputs",
    "Progress",
    "Ready",
    "Shutdown",
    "client_frames",
    "engine_frames",
]

PROTOCOL_VERSION: Final = 1


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """First frame of either side: same version, and the token only this incarnation knows."""

    version: int
    token: str


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Start one sequence. ``priority``: lower runs first among requests that wait."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Stop these sequences and free their blocks before the next step is scheduled."""

    request_ids: list[int]


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """Run a control method in the engine (profile, prefix-cache reset, …)."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Leave the loop and exit with code 0."""


class EmbeddingInfo(msgspec.Struct, array_like=True, frozen=True):
    """What an embedding model gives.

    Attributes:
        size: Numbers in an embedding.
        any_dimensions: Any shorter prefix is an embedding, too.
        dimensions: Which shorter prefixes are, where only some are.
    """

    size: int
    any_dimensions: bool = False
    dimensions: tuple[int, ...] = ()


class ModelInfo(msgspec.Struct, array_like=True, frozen=True):
    """What ``/v1/models`` says about the model.

    Attributes:
        name: Served name if the configuration gives none.
        runner: ``native``, ``torch`` or ``sim``, followed by device and dtype, for people.
        simulated: True where no model computes the tokens.
        max_model_len: Prompt plus output tokens that one sequence can hold.
        vocab_size: Token ids are in [0, vocab_size).
        eos_token_ids: Ids that end a sequence unless ``ignore_eos``.
        embedding: What an embedding model gives; ``None`` where the model generates text.
    """

    name: str
    runner: str
    simulated: bool
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    embedding: EmbeddingInfo | None = None


class EngineLimits(msgspec.Struct, array_like=True, frozen=True):
    """How much the engine holds at once. Blocks are KV-cache blocks of ``block_size`` tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine can take requests."""

    model: ModelInfo
    limits: EngineLimits


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """These requests are in the engine's own queue; sent before any step runs on them."""

    request_ids: list[int]


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """Gauges now, counters since the engine started. Rides on every ``Outputs``."""

    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    aborts_ignored: int = 0
    step_seconds: float = 0.0


class Outputs(msgspec.Struct, tag="outputs", array_like=True, gc=False):
    """All deltas of one step (or terminals outside a step, with the last step's number)."""

    step: int
    deltas: list[RequestOutput]
    stats: EngineStats


class CallResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """Answer to a ``Call``: ``result``, or ``error`` as one sentence.

    ``refused``: the caller asked for what cannot be; nothing failed.
    """

    call_id: int
    result: Any = None
    error: str | None = None
    refused: bool = False


class Fatal(msgspec.Struct, tag="fatal", array_like=True, frozen=True):
    """The engine ends. ``cause`` is one sentence for people, ``traceback`` for the log.

    ``refused``: what it was told to be cannot be; nothing is broken.
    """

    cause: str
    traceback: str
    refused: bool = False


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """Where start-up stands. ``fraction`` in [0, 1], of this phase."""

    phase: str
    fraction: float


ClientMessage = Hello | Add | Abort | Call | Shutdown
EngineMessage = Hello | Ready | Accepted | Outputs | CallResult | Fatal | Progress


class _ClientEnvelope(msgspec.Struct, array_like=True, gc=False):
    number: int
    message: ClientMessage


class _EngineEnvelope(msgspec.Struct, array_like=True, gc=False):
    number: int
    message: EngineMessage


class FrameEncoder:
    """Number and encode the messages of one direction of one incarnation."""

    def __init__(self) -> None:
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, message: ClientMessage | EngineMessage) -> bytes:
        """Return the next frame. Each frame encoded must be sent: the peer counts."""
        frame = self._encode((self._number, message))
        self._number += 1
        return frame


Message = TypeVar("Message")


class FrameDecoder(Generic[Message]):
    """Decode the frames of one direction and insist that none is missing."""

    def __init__(self, envelope: type[Any]) -> None:
        self._decode = msgspec.msgpack.Decoder(envelope).decode
        self._expected = 0

    def decode(self, frame: bytes) -> Message:
        """Return the frame's message.

        Raises:
            ProtocolError: Not a frame of this protocol, or one is missing or doubled before it.
        """
        try:
            envelope = self._decode(frame)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"undecodable frame of {len(frame)} bytes: {error}") from error
        if envelope.number != self._expected:
            raise ProtocolError(f"frame {envelope.number} where {self._expected} was due")
        self._expected += 1
        message: Message = envelope.message
        return message


def client_frames() -> FrameDecoder[ClientMessage]:
    """Return a decoder for the direction server → engine."""
    return FrameDecoder(_ClientEnvelope)


def engine_frames() -> FrameDecoder[EngineMessage]:
    """Return a decoder for the direction engine → server."""
    return FrameDecoder(_EngineEnvelope)
