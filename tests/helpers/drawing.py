"""What the native sampler may draw, in a few lines of numpy."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from trioengine.engine_proc.uniform import uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    Doubles = npt.NDArray[np.float64]

EDGE = 2e-5  # of the mass: there a token or its neighbour may come


def next_uniform(uniform: float, attempt: int) -> float:
    """Return what a draw tries when it has rejected a token."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", uniform))
    return float(uniforms(np.array([bits], np.uint64), np.array([attempt], np.int64))[0])


def possible_draws(
    logits: npt.NDArray[Any], temperature: float, top_p: float, uniform: float
) -> set[int]:
    """Return what may be drawn at a uniform: more than one token where rounding decides.

    From all tokens, then from what ranks before a token that was drawn and is not in the nucleus,
    always by the inverse CDF in the order of ids.
    """
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    order = np.lexsort((np.arange(len(logits)), -scores))
    ranks = np.argsort(order)
    before = np.concatenate([[0.0], np.cumsum(weights[order])])[:-1][ranks]
    enough = top_p * weights.sum()
    found: set[int] = set()
    tries = [(len(logits), uniform, 0)]
    while tries:
        end, chance, attempt = tries.pop()
        left = np.where(ranks < end, weights, 0.0)
        for token in _drawn(left, chance):
            inside = before[token] < enough * (1 - EDGE)
            maybe = before[token] <= enough * (1 + EDGE)
            if inside or maybe or ranks[token] == 0 or top_p >= 1:
                found.add(token)
            if not inside and top_p < 1 and ranks[token] > 0:
                again = next_uniform(chance, attempt)
                tries.append((int(ranks[token]), again, attempt + 1))
    return found


def _drawn(weights: Doubles, uniform: float) -> list[int]:
    ends = np.cumsum(weights) / weights.sum()
    begins = np.concatenate([[0.0], ends])[:-1]
    near = (weights > 0) & (begins <= uniform + EDGE) & (uniform <= ends + EDGE)
    return [int(token) for token in np.flatnonzero(near)]
