"""One sequence inside the engine: its tokens, its blocks, and where it stands.

Theory of operation
-------------------
A request waits, runs, may be preempted (its blocks are taken, its tokens stay, it waits again) and
ends once. The legal moves are the table below; any other raises and changes nothing.

``tokens`` holds prompt and output alike. ``num_computed`` of them have their keys and values in the
cache. While the request *decodes*, exactly one token, the last, is not computed yet; before that
(also after a preemption) the tokens are computed in chunks, and only the chunk that reaches the end
samples a new one.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Final, Protocol

from trioengine.errors import ProtocolError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from trioengine.engine_proc.sampling_extras import SamplingExtras
    from trioengine.engine_proc.structured_output.grammar import GrammarState
    from trioengine.outputs import FinishReason, TokenLogprob
    from trioengine.sampling_params import SamplingParams

__all__ = [
    "TRANSITIONS",
    "Request",
    "RequestEvent",
    "RequestStatus",
    "TextBuilder",
]


class RequestStatus(enum.Enum):
    """Where a request stands. Why it ended is ``Request.finish_reason``."""

    COMPILING = "compiling"  # its grammar; the scheduler has not heard of it
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestEvent(enum.Enum):
    """What can happen to a request."""

    COMPILE = "compile"
    COMPILED = "compiled"
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"


TRANSITIONS: Final[dict[tuple[RequestStatus, RequestEvent], RequestStatus]] = {
    (RequestStatus.WAITING, RequestEvent.COMPILE): RequestStatus.COMPILING,
    (RequestStatus.COMPILING, RequestEvent.COMPILED): RequestStatus.WAITING,
    (RequestStatus.COMPILING, RequestEvent.FINISH): RequestStatus.FINISHED,
    (RequestStatus.WAITING, RequestEvent.ADMIT): RequestStatus.RUNNING,
    (RequestStatus.PREEMPTED, RequestEvent.ADMIT): RequestStatus.RUNNING,
    (RequestStatus.RUNNING, RequestEvent.PREEMPT): RequestStatus.PREEMPTED,
    (RequestStatus.WAITING, RequestEvent.FINISH): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.FINISH): RequestStatus.FINISHED,
    (RequestStatus.PREEMPTED, RequestEvent.FINISH): RequestStatus.FINISHED,
}


class TextBuilder(Protocol):
    """Turns the output tokens of one sequence into text, bit by bit."""

    def append(self, token_ids: Sequence[int], /) -> tuple[str, str | None, int]:
        """Return the new text, the stop string that has just ended it, and how many ids it took."""

    def flush(self) -> str:
        """Return the text still held back; the sequence has ended without a stop string."""


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A sequence, from ``Add`` to its terminal.

    Attributes:
        request_id: The server's integer.
        tokens: int32, prompt then output.
        num_prompt_tokens: Length of the prompt.
        params: How to sample.
        seed: Unsigned 64-bit, fixed for life.
        rank: (priority, arrival): lower runs first among those that wait, and is preempted last.
        max_len: The sequence ends when ``tokens`` has this length.
        eos_ids: Ids that end it with ``stop`` and no reason (empty with ``ignore_eos``).
        ending_ids: ``eos_ids`` and ``params.stop_token_ids`` together.
        text: Its detokenizer.
        status: See ``TRANSITIONS``.
        finish_reason: Set once, with ``FINISHED``.
        decoding: All tokens but the last are computed.
        num_computed: Tokens whose keys and values are in the cache.
        num_cached_tokens: Prompt tokens that its first admission found in the prefix cache.
        block_ids: Its blocks, in the order of its tokens.
        capacity: Tokens that those blocks hold.
        block_hashes: Hash of each full block of ``tokens`` as far as they were needed.
        num_sealed: Leading blocks that the prefix cache has been told about.
        row: Its row of the input batch while it runs, else -1.
        single_steps: The host has to look at each token before the next one can be sampled.
        extras: What it asks of the sampler beyond the ordinary, if anything.
        grammar: Where it stands in the shape its text must have, if it must have one.
        prompt_logprobs: What has been found so far of its prompt's tokens, where that is wanted:
            one entry per token from the first, which has none.
    """

    request_id: int
    tokens: array[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    rank: tuple[int, int]
    max_len: int
    eos_ids: frozenset[int]
    ending_ids: frozenset[int]
    text: TextBuilder
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    decoding: bool = False
    num_computed: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    capacity: int = 0
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    num_sealed: int = 0
    row: int = -1
    single_steps: bool = False
    extras: SamplingExtras | None = None
    grammar: GrammarState | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.value} "
            f"{self.num_computed}/{len(self.tokens)} computed, {len(self.block_ids)} blocks>"
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be sampled before its length ends it."""
        return self.max_len - len(self.tokens)

    @property
    def needs_all_logits(self) -> bool:
        """True while logits of the prompt are wanted that a prefix hit would pass over."""
        told = self.prompt_logprobs
        return told is not None and len(told) < self.num_prompt_tokens

    def must_not_end(self, ahead: int = 0) -> bool:
        """True while ``min_tokens`` forbids the token ``ahead`` after the next to end it."""
        return self.num_output_tokens + ahead < self.params.min_tokens

    def advance(self, event: RequestEvent) -> None:
        """Make one move of the table.

        Raises:
            ProtocolError: The table has no such move; nothing has changed.
        """
        to_status = TRANSITIONS.get((self.status, event))
        if to_status is None:
            raise ProtocolError(f"{self!r} cannot {event.value}")
        self.status = to_status

    def finish(self, reason: FinishReason) -> None:
        """End, once.

        Raises:
            ProtocolError: It has ended before.
        """
        self.advance(RequestEvent.FINISH)
        self.finish_reason = reason
