"""One token per logits row, each row by its own parameters and its own random number.

Theory of operation
-------------------
Greedy rows take the first maximum. Every other row is drawn by inverse CDF with one uniform, a
function of (seed, position), so no generator has a state. What a row may draw from is narrowed in
this order: temperature; ``min_p``; ``top_k``; ``top_p`` over the mass that is left.

Sorting a whole row costs far more than drawing from it. Rows without filters are drawn in order of
token id and need no sort. Rows with filters look at their 64 likeliest tokens first; where these
do not settle what is kept, at the 1,024 likeliest, and only then at all. Which of the three a row
ends in depends on that row alone, and so does every sum: each is along a row, never across rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from trioengine.engine_proc.runner import NO_TOKEN
from trioengine.engine_proc.torch_runner.logit_edits import edit_logits
from trioengine.engine_proc.uniform import uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    from trioengine.engine_proc.runner import SamplingRows

__all__ = ["sample"]

PREFILTERS: Final = (64, 1024)


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Pick one token per row.

    Args:
        logits: ``[num_rows, vocab]`` of any float dtype. May be written to.
        rows: How to pick, one entry per row.

    Returns:
        int64 ``[num_rows]``, on the device of the logits; ``NO_TOKEN`` where no logit is left
        above minus infinity.

    Source: nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751, section 3.1; min-p, Nguyen et
    al. 2024, arXiv:2407.01082, section 3.
    """
    logits = logits.float()
    edit_logits(logits, rows)
    values, tokens = logits.max(dim=-1)  # the first one of equals, and faster than argmax
    if bool(values.isnan().any()):  # a broken model: what is no number does not count
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        values, tokens = logits.max(dim=-1)
    if not rows.all_greedy:
        _draw(logits, rows, tokens)
    return torch.where(values > -torch.inf, tokens, NO_TOKEN)


def _draw(logits: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor) -> None:
    """Put what is drawn in place of the likeliest token, where a row is not greedy."""
    filtered = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    warm = rows.temperature > 0.0
    uniform = uniforms(rows.seeds, rows.positions)
    for wanted, draw in ((warm & ~filtered, _draw_by_id), (warm & filtered, _draw_filtered)):
        chosen = np.flatnonzero(wanted)
        if chosen.size:
            index = torch.from_numpy(chosen).to(logits.device)
            picked = _Rows.select(logits, index, chosen, rows, uniform)
            tokens[index] = draw(picked)


@dataclasses.dataclass(slots=True)
class _Rows:
    """The rows that one way of drawing works on. Columns are ``[n, 1]`` on the device."""

    probs: torch.Tensor  # [n, vocab] float32
    uniform: torch.Tensor  # float64
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def select(
        cls,
        logits: torch.Tensor,
        index: torch.Tensor,
        chosen: npt.NDArray[np.int64],
        rows: SamplingRows,
        uniform: npt.NDArray[np.float64],
    ) -> _Rows:
        def column(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values[chosen]).to(logits.device)[:, None]

        scores = logits[index]
        # The maximum goes first: a tiny temperature must not turn it into infinity.
        scores = (scores - scores.amax(-1, keepdim=True)) / column(rows.temperature)
        return cls(
            probs=torch.softmax(scores, dim=-1),
            uniform=column(uniform),
            top_k=column(rows.top_k),
            top_p=column(rows.top_p),
            min_p=column(rows.min_p),
        )

    def subset(self, index: torch.Tensor) -> _Rows:
        return _Rows(*(getattr(self, f.name)[index] for f in dataclasses.fields(self)))


def _draw_by_id(rows: _Rows) -> torch.Tensor:
    return _invert(rows.probs, rows.uniform)


def _draw_filtered(rows: _Rows) -> torch.Tensor:
    vocab = rows.probs.shape[1]
    tokens = torch.zeros(len(rows.probs), dtype=torch.int64, device=rows.probs.device)
    left = torch.arange(len(tokens), device=tokens.device)
    for width in (*(width for width in PREFILTERS if width < vocab), vocab):
        picked, settled = _draw_among_likeliest(rows, width)
        tokens[left[settled]] = picked[settled]
        if bool(settled.all()):
            break
        left = left[~settled]
        rows = rows.subset(~settled)
    return tokens


def _draw_among_likeliest(rows: _Rows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the ``width`` likeliest tokens, as if all that a row keeps were among them.

    Returns:
        Tokens ``[n]``, and bool ``[n]``: whether all that the row keeps really was.
    """
    probs, ids = rows.probs.topk(width, dim=-1)
    rank = torch.arange(width, device=probs.device)
    limit = torch.where(rows.top_k > 0, rows.top_k, rows.probs.shape[1])
    kept = probs * ((rank < limit) & (probs >= rows.min_p * probs[:, :1]))
    mass = kept.cumsum(-1)
    whole = width == rows.probs.shape[1]
    complete = (limit <= width) | (probs[:, -1:] < rows.min_p * probs[:, :1]) | whole
    # Of a row with no other filter the mass of all tokens is known to be 1 without seeing them.
    total = torch.where(complete, mass[:, -1:], 1.0)
    only_top_p = (rows.top_k <= 0) & (rows.min_p <= 0.0)
    reached = only_top_p & (mass[:, -1:] >= rows.top_p * total)
    nucleus = kept * (mass - kept < rows.top_p * total)
    picked = _invert(nucleus, rows.uniform)
    return ids.gather(1, picked[:, None])[:, 0], (complete | reached)[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw by inverse CDF.

    Args:
        weights: ``[n, m]`` float32 ≥ 0, each row with a positive sum.
        uniform: ``[n, 1]`` float64 in [0, 1).

    Returns:
        int64 ``[n]``: the column drawn, never one of weight 0.
    """
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a rounded product may reach the total
    target = torch.minimum((uniform * total).float(), below)
    column = torch.searchsorted(cdf, target, right=True)[:, 0]
    return column.clamp_(max=weights.shape[1] - 1)  # NaN from a broken model must stay an index
