"""The seam between scheduling and arithmetic: one flat batch in, one token per logits row out.

Everything above this line is Python over integers and knows no tensor; everything below it is one
call per step. A runner sees arrays only: it never learns what a request is.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trioengine.protocol import ModelInfo

__all__ = ["ModelRunner", "SamplingRows", "StepBatch"]


@dataclasses.dataclass(slots=True)
class SamplingRows:
    """How to pick one token per logits row. All arrays ``[num_rows]``.

    Attributes:
        temperature: float32; 0 is greedy.
        top_p: float32 in (0, 1].
        top_k: int32; 0 keeps all.
        min_p: float32 in [0, 1].
        seeds: uint64, fixed for the life of a sequence.
        positions: int64, index of the token to be sampled in its sequence (prompt included). The
            one uniform of a row is a function of (seed, position) alone.
        request_ids: int64, for the simulated runner.
        all_greedy: True where no row needs more than an argmax.
        masked_token_ids: (row, token ids) pairs whose logits count as -inf (``min_tokens``).
    """

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    request_ids: npt.NDArray[np.int64]
    all_greedy: bool
    masked_token_ids: list[tuple[int, list[int]]]


@dataclasses.dataclass(slots=True)
class StepBatch:
    """One step over ``num_seqs`` sequences and ``num_tokens`` tokens, flat.

    Sequence ``i`` owns tokens ``query_start[i]:query_start[i + 1]``: a prefill chunk or one decode
    token. Token ``t`` at position ``p`` of sequence ``i`` lives in slot
    ``block_tables[i, p // block_size] * block_size + p % block_size`` of the cache, is written
    there in this step, and attends to positions ``0..p`` of its sequence.

    Attributes:
        token_ids: int32 ``[num_tokens]``.
        positions: int32 ``[num_tokens]``.
        query_start: int32 ``[num_seqs + 1]``, rising from 0 to ``num_tokens``.
        seq_lens: int32 ``[num_seqs]``, tokens in the cache after this step.
        block_tables: int32 ``[num_seqs, max_blocks]``; entries past a sequence's end are 0 and not
            to be read.
        logits_rows: int32 ``[num_rows]``, indices into the flat tokens whose logits are wanted.
        sampling: One row per entry of ``logits_rows``.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logits_rows: npt.NDArray[np.int32]
    sampling: SamplingRows


class ModelRunner(Protocol):
    """Owns weights and paged KV cache; fulfils the same contract tests whatever computes."""

    model: ModelInfo
    block_size: int
    num_blocks: int

    def execute(self, batch: StepBatch) -> npt.NDArray[np.int32]:
        """Compute one step and return the sampled token ids, int32 ``[num_rows]``."""

    def call(self, method: str, args: dict[str, object]) -> object:
        """Run a control method that concerns the arithmetic (``start_profile``, …).

        Raises:
            KeyError: The runner knows no such method.
        """

    def close(self) -> None:
        """Free weights and cache."""
