"""Log-softmax of the model's own logits, at the places that rows ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from trioengine.engine_proc.runner import RowLogprobs
from trioengine.outputs import LEAST_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

__all__ = ["ROWS_AT_ONCE", "read_logprobs"]

ROWS_AT_ONCE: Final = 256
"""Rows that are held in float32 at once: a prompt may have thousands."""


def read_logprobs(
    chunks: Iterable[torch.Tensor],
    tokens: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
) -> RowLogprobs:
    """Return logprobs of the rows that want them.

    Args:
        chunks: ``[some rows, vocab]`` of any float dtype, as the model gave them; all, in order.
        tokens: int32 ``[num_rows]``; negative ones are not looked at.
        counts: int32 ``[num_rows]``, likeliest tokens wanted; -1: nothing at all.
    """
    num_rows, width = len(tokens), max(int(counts.max(initial=0)), 0)
    found = RowLogprobs(
        chosen=np.full(num_rows, LEAST_LOGPROB, np.float32),
        ranks=np.zeros(num_rows, np.int32),
        top_ids=np.full((num_rows, width), -1, np.int32),
        top=np.full((num_rows, width), LEAST_LOGPROB, np.float32),
    )
    wanted = (counts >= 0) & (tokens >= 0)
    begin = 0
    for logits in chunks:
        rows = begin + np.flatnonzero(wanted[begin : begin + len(logits)])
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            index = torch.from_numpy(some - begin).to(logits.device)
            column = torch.from_numpy(tokens[some].astype(np.int64)).to(logits.device)[:, None]
            _read(logits[index].float(), column, some, found)
        begin += len(logits)
    return found


def _read(
    logits: torch.Tensor, column: torch.Tensor, rows: npt.NDArray[np.intp], found: RowLogprobs
) -> None:
    normaliser = logits.logsumexp(-1, keepdim=True)
    if bool(normaliser.isnan().any()):  # a broken model: what is no number has no share
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        normaliser = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, column)
    found.chosen[rows] = _clamped(chosen - normaliser)[:, 0]
    found.ranks[rows] = ((logits > chosen).sum(-1) + 1).cpu().numpy()
    width = min(found.top.shape[1], logits.shape[1])
    if width:
        top, ids = logits.topk(width, dim=-1)
        found.top[rows, :width] = _clamped(top - normaliser)
        found.top_ids[rows, :width] = ids.cpu().numpy()


def _clamped(logprobs: torch.Tensor) -> npt.NDArray[np.float32]:
    finite = logprobs.nan_to_num(nan=LEAST_LOGPROB, posinf=0.0, neginf=LEAST_LOGPROB)
    clamped: npt.NDArray[np.float32] = finite.clamp(LEAST_LOGPROB, 0.0).cpu().numpy()
    return clamped
