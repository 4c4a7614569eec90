"""What a simulated model thinks of tokens: a made-up distribution, the same wherever it is asked.

The words that can be said stand on a ring. The one that is said is the likeliest, with probability
one half, and each further along the ring is half as likely as the one before it. A token that
cannot be said has no probability.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from trioengine.engine_proc.runner import RowLogprobs
from trioengine.outputs import LEAST_LOGPROB

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]

__all__ = ["sim_logprobs"]


def sim_logprobs(
    tokens: Int32Array, first: npt.NDArray[np.int64], speakable: Int32Array, width: int
) -> RowLogprobs:
    """Return the logprobs of ``tokens``.

    Args:
        tokens: ``[num_rows]``.
        first: ``[num_rows]``, where on the ring the likeliest word of each row stands.
        speakable: The ring, rising.
        width: How many of the likeliest words to report.
    """
    size = len(speakable)
    places = np.searchsorted(speakable, tokens)
    known = speakable[np.minimum(places, size - 1)] == tokens
    steps = np.where(known, (places - first) % size, size)
    ring = (first[:, None] + np.arange(width)) % size
    return RowLogprobs(
        chosen=np.where(known, _logprob(steps), np.float32(LEAST_LOGPROB)),
        ranks=(steps + 1).astype(np.int32),
        top_ids=speakable[ring],
        top=np.broadcast_to(_logprob(np.arange(width)), ring.shape),
    )


def _logprob(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    halvings = (steps + 1) * -math.log(2)
    logprobs: npt.NDArray[np.float32] = np.maximum(halvings, LEAST_LOGPROB).astype(np.float32)
    return logprobs
