"""The one random number of a sampled token: a function of (seed, position) and of nothing else.

A counter-based generator has no state to keep, share or restore, so a sequence draws the same
numbers alone, in company, after a preemption, and whichever runner computes its logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: the generator's increment
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return one uniform in [0, 1) per row, with 53 random bits.

    The seed is mixed before the position is added: with plain addition the streams of two seeds
    would be one stream, shifted.

    Args:
        seeds: uint64 ``[num_rows]``.
        positions: int64 ``[num_rows]``, index of the token to be drawn in its sequence.

    Source: SplitMix64, Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
    figure 17.
    """
    state = _mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN
    return (_mix(state) >> np.uint64(11)) * np.float64(2.0**-53)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
