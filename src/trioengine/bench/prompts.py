"""Prompts of a workload: made from a seed, sized to the token with the tokenizer of the model.

Each text opens with a label that names its repeat, workload and number, so that no two prompts, of
whatever repeat, share more than the first few characters: a prefix cache can carry nothing over.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, Protocol

from trioengine.bench.sentences import sentences
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioengine.bench.workloads import Workload

__all__ = ["SizingTokenizer", "make_prompts"]

MAX_SENTENCES: Final = 64  # beyond what is needed, in search of a text that can be cut right
MAX_DROPPED: Final = 8  # tokens
_PADDING: Final = ("", ".", " a", " of", " and", ",", "!", " the")


class SizingTokenizer(Protocol):
    """What sizing needs of a tokenizer; ``trioengine.text.tokenizer.Tokenizer`` has it."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens that a server makes of ``text``, special ones included."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens left out."""


def make_prompts(workload: Workload, rep: int, tokenizer: SizingTokenizer) -> list[str]:
    """Return ``workload.num_requests`` prompts, the same ones each time.

    Every one has exactly ``workload.total_prompt_tokens`` tokens, the first ``shared_tokens`` of
    which are those of all others of this repeat, and of no other repeat.

    Args:
        workload: What is to be run.
        rep: Number of the repeat, from 0.
        tokenizer: The model's.

    Raises:
        ConfigError: With this tokenizer no such text was found.
    """
    label = f"{workload.name}.{rep}"
    head, head_ids = "", list[int]()
    if workload.shared_tokens:
        head, head_ids = _make_head(f"Book {label}:", workload.shared_tokens, tokenizer)

    def make(index: int) -> str:
        note = f"Note {label}.{index}:"
        cuts = _cuts(head + note, note, workload.total_prompt_tokens, tokenizer)
        return next(text for text, ids in cuts if ids[: len(head_ids)] == head_ids)

    return [make(index) for index in range(workload.num_requests)]


def _make_head(opening: str, num_tokens: int, tokenizer: SizingTokenizer) -> tuple[str, list[int]]:
    """Return a text that others can be appended to, and its tokens, which stay as they are then."""
    return next(
        (f"{text} ", ids)
        for text, ids in _cuts(opening, opening, num_tokens, tokenizer)
        if tokenizer.encode(f"{text} Note")[:num_tokens] == ids
    )


def _cuts(
    opening: str, seed: str, num_tokens: int, tokenizer: SizingTokenizer
) -> Iterator[tuple[str, list[int]]]:
    """Yield texts of exactly ``num_tokens`` tokens that start with ``opening``, and their tokens.

    Raises:
        ConfigError: There are no more; it never just ends.
    """
    text, surplus = opening, 0
    fits = len(tokenizer.encode(opening)) <= num_tokens
    for sentence in sentences(seed):
        if surplus == MAX_SENTENCES or not fits:
            break
        text += " " + sentence
        ids = tokenizer.encode(text)
        if len(ids) < num_tokens:
            continue
        surplus += 1
        for candidate in _candidates(ids, num_tokens, tokenizer):
            found = tokenizer.encode(candidate)
            if len(found) == num_tokens and candidate.startswith(opening):
                yield candidate, found
    raise ConfigError(f"found no text that this tokenizer makes exactly {num_tokens} tokens of")


def _candidates(ids: list[int], num_tokens: int, tokenizer: SizingTokenizer) -> Iterator[str]:
    """Yield texts of about ``num_tokens`` tokens: a cut need not re-encode to what was cut off."""
    for dropped, padding in itertools.product(range(MAX_DROPPED), _PADDING):
        yield tokenizer.decode(ids[: num_tokens - dropped]) + padding
