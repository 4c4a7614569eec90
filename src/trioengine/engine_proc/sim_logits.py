"""Pretended logits, for the rows of the simulated engine that ask for more than a token.

They are those of ``sim_logprobs``, with the token that the engine would say on top: so a bias, a
penalty or a mask does to a simulated answer what it would do to a real one, and who asks for none
of it gets the same tokens as ever.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from trioengine.engine_proc.runner import NO_TOKEN

if TYPE_CHECKING:
    import numpy.typing as npt

    from trioengine.engine_proc.runner import AllowMasks, LogitBias, Penalties, SamplingRows

    Float32Array = npt.NDArray[np.float32]
    Int32Array = npt.NDArray[np.int32]

__all__ = ["edit_row", "edited_rows", "sim_logits"]

FLOOR: Final = -50.0  # of a word far along the ring: within reach of a bias
SILENCE: Final = -60.0  # of a token that it never says: so too, but last


def sim_logits(said: int, first: int, speakable: Int32Array, vocab_size: int) -> Float32Array:
    """Return the logits ``[vocab]`` of a row that says ``said``; see ``sim_logprobs``.

    Args:
        said: The token, on the ring or not (an end of the sequence).
        first: Where on the ring the row's likeliest word stands.
        speakable: The ring, rising.
        vocab_size: Entries of a row.
    """
    logits = np.full(vocab_size, SILENCE, np.float32)
    halvings = (np.arange(len(speakable)) - first) % len(speakable) + 1
    logits[speakable] = np.maximum(halvings * -math.log(2), FLOOR)
    logits[said] = 0.0
    return logits


def edited_rows(rows: SamplingRows) -> list[int]:
    """Return the rows that a mask, a bias or a penalty touches (``masked_token_ids`` aside)."""
    touched = np.zeros(len(rows.temperature), np.bool_)
    if rows.allow is not None:
        touched |= rows.allow.row_masks >= 0
    if rows.bias is not None:
        touched |= np.diff(rows.bias.starts) > 0
    if rows.penalties is not None:
        touched |= np.diff(rows.penalties.starts) > 0
    edited: list[int] = np.flatnonzero(touched).tolist()
    return edited


def edit_row(logits: Float32Array, rows: SamplingRows, row: int) -> int:
    """Apply everything that ``rows`` has for ``row``, in place; return the likeliest token left."""
    if rows.allow is not None:
        _allow_only(logits, rows.allow, row)
    for masked_row, ids in rows.masked_token_ids:
        if masked_row == row:
            logits[ids] = -np.inf
    if rows.bias is not None:
        _add_bias(logits, rows.bias, row)
    if rows.penalties is not None:
        _penalise(logits, rows.penalties, row)
    best = int(logits.argmax())
    return best if logits[best] > -np.inf else NO_TOKEN


def _allow_only(logits: Float32Array, allow: AllowMasks, row: int) -> None:
    mask = int(allow.row_masks[row])
    if mask >= 0:
        words = np.ascontiguousarray(allow.words[mask])
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf


def _add_bias(logits: Float32Array, bias: LogitBias, row: int) -> None:
    entries = slice(bias.starts[row], bias.starts[row + 1])
    logits[bias.token_ids[entries]] += bias.values[entries]


def _penalise(logits: Float32Array, penalties: Penalties, row: int) -> None:
    entries = slice(penalties.starts[row], penalties.starts[row + 1])
    ids, counts = penalties.token_ids[entries], penalties.counts[entries]
    values, repetition = logits[ids], penalties.repetition[row]
    values = np.where(values > 0, values / repetition, values * repetition)
    logits[ids] = (
        values - penalties.frequency[row] * counts - penalties.presence[row] * (counts > 0)
    )
