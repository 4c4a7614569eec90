"""Requests without an engine, for the tests of the engine's parts."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from trioengine.engine_proc.request import Request, RequestStatus
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Spelling", "make_request"]


class Spelling:
    """A detokenizer of the simplest kind: a token reads as its number. Fulfils ``TextBuilder``."""

    def append(self, token_ids: Sequence[int], /) -> tuple[str, str | None, int]:
        return "".join(map(str, token_ids)), None, len(token_ids)

    def flush(self) -> str:
        return ""


def make_request(
    tokens: Iterable[int],
    *,
    request_id: int = 0,
    num_output_tokens: int = 0,
    params: SamplingParams | None = None,
    rank: tuple[int, int] = (0, 0),
    seed: int = 0,
    ending_ids: frozenset[int] = frozenset(),
    status: RequestStatus = RequestStatus.WAITING,
) -> Request:
    """Return a request whose last ``num_output_tokens`` tokens are output."""
    ids = array("i", tokens)
    return Request(
        request_id=request_id,
        tokens=ids,
        num_prompt_tokens=len(ids) - num_output_tokens,
        params=params or SamplingParams(),
        seed=seed,
        rank=rank,
        max_len=1000,
        eos_ids=frozenset(),
        ending_ids=ending_ids,
        text=Spelling(),
        status=status,
    )
