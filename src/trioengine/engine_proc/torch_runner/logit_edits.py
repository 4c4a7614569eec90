"""Masks, biases and penalties on rows of logits, in place, by sparse scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from trioengine.engine_proc.runner import AllowMasks, LogitBias, Penalties, SamplingRows

__all__ = ["edit_logits", "has_edits"]


def has_edits(rows: SamplingRows) -> bool:
    """Say whether ``edit_logits`` would change anything."""
    return bool(rows.masked_token_ids) or not (
        rows.allow is None and rows.bias is None and rows.penalties is None
    )


def edit_logits(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Apply what the rows ask for, in the order that ``SamplingRows`` gives.

    Args:
        logits: float32 ``[num_rows, vocab]``; changed in place.
        rows: What to apply; it may describe more rows behind these that have no edits.
    """
    if rows.allow is not None:
        _allow_only(logits, rows.allow)
    _mask(logits, rows.masked_token_ids)
    if rows.bias is not None:
        _add_bias(logits, rows.bias)
    if rows.penalties is not None:
        _penalise(logits, rows.penalties)


def _allow_only(logits: torch.Tensor, allow: AllowMasks) -> None:
    chosen = np.flatnonzero(allow.row_masks >= 0)
    if not chosen.size:
        return
    allow.wait()
    words = np.ascontiguousarray(allow.words[allow.row_masks[chosen]])
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    index = torch.from_numpy(chosen).to(logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)


def _mask(logits: torch.Tensor, masked: list[tuple[int, list[int]]]) -> None:
    if not masked:
        return
    row = np.repeat([row for row, _ in masked], [len(ids) for _, ids in masked])
    ids = np.concatenate([np.asarray(ids, np.int64) for _, ids in masked])
    logits[_upload(row.astype(np.int64), logits), _upload(ids, logits)] = -torch.inf


def _add_bias(logits: torch.Tensor, bias: LogitBias) -> None:
    row, column = _places(bias.starts, bias.token_ids, logits)
    logits[row, column] += _upload(bias.values, logits)


def _penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    row, column = _places(penalties.starts, penalties.token_ids, logits)
    values, counts = logits[row, column], _upload(penalties.counts, logits)
    repetition = _upload(penalties.repetition, logits)[row]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= _upload(penalties.frequency, logits)[row] * counts
    values -= _upload(penalties.presence, logits)[row] * (counts > 0)
    logits[row, column] = values


def _places(
    starts: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of every entry."""
    row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return _upload(row, logits), _upload(token_ids.astype(np.int64), logits)


def _upload(values: npt.NDArray[Any], logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)
