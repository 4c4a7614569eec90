"""The seam between scheduling and arithmetic: one flat batch in, one token per logits row out.

Everything above this line is Python over integers and knows no tensor; everything below it is one
call per step. A runner sees arrays only: it never learns what a request is.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from trioengine.protocol import ModelInfo

__all__ = [
    "NO_TOKEN",
    "AllowMasks",
    "LogitBias",
    "ModelRunner",
    "Penalties",
    "RowLogprobs",
    "SamplingRows",
    "StepBatch",
    "StepResult",
]

NO_TOKEN: Final = -1
"""What a row gets where nothing is left that it may sample."""


@dataclasses.dataclass(slots=True)
class Penalties:
    """Tokens seen before, and what having been seen costs them.

    Row ``r`` owns entries ``starts[r]:starts[r + 1]``, one for each distinct token. First the
    repetition penalty divides a positive logit and multiplies another; then ``frequency`` times the
    count is taken off, and ``presence`` where the count is not 0.

    Attributes:
        presence: float32 ``[num_rows]``.
        frequency: float32 ``[num_rows]``.
        repetition: float32 ``[num_rows]``, > 0.
        starts: int32 ``[num_rows + 1]``, from 0, never falling.
        token_ids: int32 ``[num_entries]``.
        counts: int32 ``[num_entries]``, how often the token is in the output; 0 for one that is in
            the prompt only.
    """

    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    repetition: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class LogitBias:
    """What is added to some logits, before the penalties.

    Row ``r`` owns entries ``starts[r]:starts[r + 1]``.

    Attributes:
        starts: int32 ``[num_rows + 1]``, from 0, never falling.
        token_ids: int32 ``[num_entries]``, distinct within a row.
        values: float32 ``[num_entries]``, finite.
    """

    starts: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


@dataclasses.dataclass(slots=True)
class AllowMasks:
    """Which tokens of some rows may come: grammars and ``allowed_token_ids``.

    Attributes:
        words: uint32 ``[num_masks, ceil(vocab_size / 32)]``; token ``t`` may come where bit
            ``t % 32`` of word ``t // 32`` is set. Bits past the vocabulary are not read.
            Each row is contiguous; they may lie apart.
        row_masks: int32 ``[num_rows]``, the mask of each row, -1 for none.
        filling: Who still writes ``words``, in other threads: they mean nothing before ``wait``
            returns. None of them raises.
    """

    words: npt.NDArray[np.uint32]
    row_masks: npt.NDArray[np.int32]
    filling: Sequence[Future[None]] = ()

    def wait(self) -> None:
        """Wait until ``words`` are all there."""
        for part in self.filling:
            part.result()


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
        all_greedy: True where every temperature is 0.
        masked_token_ids: (row, token ids) pairs whose logits count as -inf (``min_tokens``,
            ``bad_words``). A row may have several.
        allow: Masks of the rows that may not sample every token; ``None``: no row has one.
        bias: ``None``: no row has any.
        penalties: ``None``: no row has any.
        logprobs_k: int32, how many of the likeliest tokens are reported beside the row's own, -1
            where nothing is. ``None``: no row wants any.
        targets: int32, the token that comes in any case, whose logprob is wanted (a token of the
            prompt); -1 where one is sampled. Rows with a target come behind all that sample, and
            ask for nothing but logprobs. ``None``: every row samples.

    What is ``None`` costs nothing. Logits pass through, in this order: ``allow`` and
    ``masked_token_ids``, ``bias``, ``penalties``, then temperature, ``min_p``, ``top_k``,
    ``top_p``. Logprobs are those of the logits before all of that.
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
    allow: AllowMasks | None = None
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    logprobs_k: npt.NDArray[np.int32] | None = None
    targets: npt.NDArray[np.int32] | None = None


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


@dataclasses.dataclass(slots=True)
class RowLogprobs:
    """Log-softmax of the model's own logits. What a row did not ask for holds anything.

    Attributes:
        chosen: float32 ``[num_rows]``, of the row's token. Never NaN, never below
            ``LEAST_LOGPROB``.
        ranks: int32 ``[num_rows]``, 1 + how many tokens are likelier than it.
        top_ids: int32 ``[num_rows, width]``, the likeliest first, -1 behind the last token that
            has a place; ``width`` is the largest ``logprobs_k``, at least 0.
        top: float32 ``[num_rows, width]``, of ``top_ids``.
    """

    chosen: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]


@dataclasses.dataclass(slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        tokens: int32 ``[num_rows]``: sampled, or the row's target. ``NO_TOKEN`` where no logit is
            left above minus infinity.
        logprobs: Where ``logprobs_k`` was given, else ``None``.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: RowLogprobs | None = None


class ModelRunner(Protocol):
    """Owns weights and paged KV cache; fulfils the same contract tests whatever computes."""

    model: ModelInfo
    block_size: int
    num_blocks: int

    def execute(self, batch: StepBatch) -> StepResult:
        """Compute one step and return a token per row, and logprobs where they are wanted.

        Raises:
            MemoryError: There is none for a step of this size. A smaller one may be tried; what
                this one has written into the cache will be written there again.
        """

    def call(self, method: str, args: dict[str, object]) -> object:
        """Run a control method that concerns the arithmetic (``start_profile``, …).

        Raises:
            KeyError: The runner knows no such method.
        """

    def close(self) -> None:
        """Free weights and cache."""
