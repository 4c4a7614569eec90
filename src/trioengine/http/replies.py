"""What the ways to write an answer have in common: head, choices, and the contract itself."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.errors import TrioEngineError
    from trioengine.http.details import Piece, Reason
    from trioengine.outputs import Usage

__all__ = ["Choice", "Replies", "ReplyHead", "new_head", "new_id"]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every object of one answer repeats. ``created`` is wall-clock seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclasses.dataclass(slots=True)
class Choice:
    """A finished sequence; ``details`` where the request asks for more than text."""

    text: str
    finish_reason: Reason
    stop_reason: int | str | None
    details: Piece | None = None


def new_id(prefix: str) -> str:
    """Return an id that nothing else has, behind what says the kind of thing it names."""
    return prefix + secrets.token_hex(16)


def new_head(prefix: str, model: str, fingerprint: str) -> ReplyHead:
    """Return the head of an answer that begins now; its id begins with ``prefix``."""
    return ReplyHead(new_id(prefix), int(time.time()), model, fingerprint)


class Replies(Protocol):
    """One endpoint's way to write an answer. The bytes are whole SSE events, or one JSON body."""

    head: ReplyHead
    done: bytes
    """What a stream that went well ends with."""

    def failure(self, error: TrioEngineError) -> bytes:
        """Event that ends a stream which failed."""

    def opening(self, index: int) -> bytes:
        """Events that begin choice ``index``; to be asked for before its first text."""

    def text(self, index: int, text: str) -> bytes:
        """Event with new text, which is not empty."""

    def piece(self, index: int, piece: Piece) -> bytes:
        """Events with new text and what belongs to it, for a request that asks for details."""

    def finish(
        self,
        index: int,
        reason: Reason,
        stop_reason: int | str | None,
        rest: Piece | None = None,
    ) -> bytes:
        """The one event that ends choice ``index``; ``rest`` has what came without text."""

    def usage(self, usage: Usage) -> bytes:
        """Event with the token counts, without choices."""

    def usage_so_far(self, usage: Usage) -> None:
        """Take token counts that every event is to carry, but for those of ``text``."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer in one piece."""
