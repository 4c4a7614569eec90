"""What the engine says about a sequence: deltas, and the one terminal that ends them."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

__all__ = ["LEAST_LOGPROB", "FinishReason", "RequestOutput", "TokenLogprob", "Usage"]

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, and for whatever is no number: JSON has neither."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended, as the engine sees it (``tool_calls`` is derived in http)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """What the model itself thought of one token, before temperature, penalties and masks.

    Attributes:
        token_id: The token that came.
        logprob: Natural logarithm of its probability, at least ``LEAST_LOGPROB``.
        rank: 1 for the likeliest token of the vocabulary; equals share the better rank.
        top: (token id, logprob) of the likeliest tokens, as many as asked for, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """A delta of one sequence: what is new since the delta before it.

    Deltas are additive: ``text`` and ``token_ids`` append. Chunk boundaries carry no meaning, so a
    consumer that is behind may be handed several deltas merged into one.

    Attributes:
        request_id: The server-made integer of the ``Add`` (one per sequence).
        text: New text; may be empty while bytes or a possible stop string are held back.
        token_ids: New output tokens. A stop token or end-of-sequence token is included.
        finish_reason: Set on the terminal delta only; nothing follows it.
        stop_reason: The stop string or stop token id that ended it; ``None`` for end-of-sequence.
        num_cached_tokens: Prompt tokens served from the prefix cache (said on the first delta).
        error: What went wrong, with ``finish_reason == "error"`` only.
        logprobs: One per entry of ``token_ids`` where they were asked for, else ``None``.
        prompt_logprobs: One per token of the prompt, ``None`` for the first, which nothing
            foretells; on the delta of the first token only.
        embedding: Of an embedding model, instead of text: little-endian float32, on the terminal.
        refused: With ``error``: the request asked for what cannot be, nothing failed.
        param: With ``refused``: which parameter did.
    """

    request_id: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: bytes | None = None
    refused: bool = False
    param: str | None = None

    def merge(self, later: RequestOutput) -> None:
        """Append ``later``, the next delta of the same sequence, to this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.error = later.error
        self.refused, self.param = later.refused, later.param
        if self.logprobs is None:
            self.logprobs = None if later.logprobs is None else list(later.logprobs)
        elif later.logprobs is not None:
            self.logprobs += later.logprobs  # in place: a copy for each token would be quadratic
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.embedding = later.embedding


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request, all of its sequences together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Read and written together."""
        return self.prompt_tokens + self.completion_tokens
