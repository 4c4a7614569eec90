"""Numpy rows that live as long as their request runs, and the step batch made from them.

Theory of operation
-------------------
Rows ``0 .. num_rows`` are dense: the last row moves into a gap. In the usual step every row decodes
one token, and Python touches a row when its request comes, goes or gets a block: until then the
batch of the step before is used again, with its lengths one higher. A step with prefill chunks, or
with rows left out, is gathered by index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from trioengine.engine_proc.prompt_scores import ScoredSpan, add_scored_rows, scored_spans
from trioengine.engine_proc.runner import SamplingRows, StepBatch
from trioengine.engine_proc.sampling_extras import add_extras

if TYPE_CHECKING:
    import numpy.typing as npt

    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.scheduler import PrefillChunk, SchedulerOutput

    Int32Array = npt.NDArray[np.int32]

__all__ = ["BuiltStep", "InputBatch"]

_LEAST: Final = float(np.finfo(np.float32).tiny)
_MOST: Final = float(np.finfo(np.float32).max)


class BuiltStep(NamedTuple):
    """One step for the runner, and whose its rows are.

    Attributes:
        batch: Valid until the rows are next changed: some arrays are views.
        sampled: The requests that sample, one for each of the first rows.
        scored: Whose tokens the rows after those are given, in order.
    """

    batch: StepBatch
    sampled: list[Request]
    scored: list[ScoredSpan]


class InputBatch:
    """State of the running requests as the runner wants to see it."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int) -> None:
        """Make room for ``max_rows`` requests of up to ``max_blocks`` blocks."""
        self.requests: list[Request] = []
        self._block_size = block_size
        self._last_token = np.zeros(max_rows, np.int32)
        self._num_computed = np.zeros(max_rows, np.int32)
        self._blocks = np.zeros((max_rows, max_blocks), np.int32)
        self._num_blocks = np.zeros(max_rows, np.int32)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_p = np.ones(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._request_ids = np.zeros(max_rows, np.int64)
        self._rows = np.arange(max_rows + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_rows, np.int32)  # of the steady batch
        self._positions = np.zeros(max_rows, np.int64)  # that its rows sample, the same numbers
        self._steady: BuiltStep | None = None
        self._columns = (
            self._last_token,
            self._num_computed,
            self._blocks,
            self._num_blocks,
            self._temperature,
            self._top_p,
            self._top_k,
            self._min_p,
            self._seeds,
            self._request_ids,
        )
        self._num_drawn = 0  # rows that need more than an argmax
        self._num_with_extras = 0
        self._may_not_end: set[Request] = set()

    def add(self, request: Request) -> None:
        """Give an admitted request a row."""
        self._steady = None
        row = request.row = len(self.requests)
        self.requests.append(request)
        params = request.params
        self._last_token[row] = request.tokens[-1]
        self._num_computed[row] = request.num_computed
        self._blocks[row, : len(request.block_ids)] = request.block_ids
        self._num_blocks[row] = len(request.block_ids)
        # A float of the client's that is out of float32's reach must not become 0 or infinity.
        self._temperature[row] = min(params.temperature, _MOST)
        self._top_p[row] = max(params.top_p, _LEAST)
        self._top_k[row] = max(params.top_k, 0)
        self._min_p[row] = params.min_p
        self._seeds[row] = request.seed
        self._request_ids[row] = request.request_id
        self._num_drawn += not params.greedy
        self._num_with_extras += request.extras is not None
        if request.must_not_end() and request.ending_ids:
            self._may_not_end.add(request)

    def remove(self, request: Request) -> None:
        """Take the row of a request that has ceased to run; the last row fills the gap."""
        self._steady = None
        row, request.row = request.row, -1
        last = self.requests.pop()
        if last is not request:
            for column in self._columns:
                column[row] = column[last.row]
            self.requests[row] = last
            last.row = row
        self._num_drawn -= not request.params.greedy
        self._num_with_extras -= request.extras is not None
        self._may_not_end.discard(request)

    def note_growth(self, request: Request) -> None:
        """Copy the newest blocks of a request into its row."""
        self._steady = None
        row, known, count = request.row, self._num_blocks[request.row], len(request.block_ids)
        self._blocks[row, known:count] = request.block_ids[known:]
        self._num_blocks[row] = count

    def build(self, plan: SchedulerOutput, ahead: int = 0) -> BuiltStep:
        """Return the step's batch and whose its rows are. All arrays are C-contiguous.

        Args:
            plan: What to compute.
            ahead: Steps since those requests were last told of their tokens.
        """
        if plan.prefills or len(plan.decodes) != len(self.requests):
            return self._gather(plan, ahead)
        num_rows = len(self.requests)
        np.add(self._num_computed[:num_rows], 1, out=self._seq_lens[:num_rows])
        self._positions[:num_rows] = self._seq_lens[:num_rows]
        if self._steady is not None:
            return self._steady
        built = BuiltStep(self._decodes(num_rows, ahead), self.requests.copy(), [])
        if not self._may_not_end and all(map(_stays_as_it_is, self.requests)):
            self._steady = built
        return built

    def _decodes(self, num_rows: int, ahead: int) -> StepBatch:
        """Return a batch in which every row decodes one token: views, but for the block tables."""
        rows = slice(num_rows)
        width = int(self._num_blocks[rows].max())
        return StepBatch(
            token_ids=self._last_token[rows],
            positions=self._num_computed[rows],
            query_start=self._rows[: num_rows + 1],
            seq_lens=self._seq_lens[rows],
            block_tables=np.ascontiguousarray(self._blocks[rows, :width]),
            logits_rows=self._rows[rows],
            sampling=self._sampling(rows, self.requests, self._positions[rows], ahead),
        )

    def _gather(self, plan: SchedulerOutput, ahead: int) -> BuiltStep:
        """Build a batch of decodes first, then chunks."""
        chunks, num_decodes = plan.prefills, len(plan.decodes)
        requests = plan.decodes + [chunk.request for chunk in chunks]
        rows = np.array([request.row for request in requests], np.int32)
        counts = np.ones(len(requests), np.int32)
        counts[num_decodes:] = [chunk.num_tokens for chunk in chunks]
        query_start = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        starts = self._num_computed[rows]
        sampled = np.ones(len(requests), np.bool_)
        sampled[num_decodes:] = [chunk.is_last for chunk in chunks]
        sampling_requests = [requests[index] for index in np.flatnonzero(sampled).tolist()]
        seq_lens = starts + counts
        width = -(-int(seq_lens.max()) // self._block_size)
        batch = StepBatch(
            token_ids=np.concatenate(
                [self._last_token[rows[:num_decodes]], *map(_chunk_tokens, chunks)]
            ),
            positions=_positions(starts, counts, query_start),
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=np.ascontiguousarray(self._blocks[rows, :width]),
            logits_rows=query_start[1:][sampled] - np.int32(1),
            sampling=self._sampling(
                rows[sampled], sampling_requests, seq_lens[sampled].astype(np.int64), ahead
            ),
        )
        scored = scored_spans(chunks, query_start[num_decodes:-1].tolist())
        if scored:
            add_scored_rows(batch, scored)
        return BuiltStep(batch, sampling_requests, scored)

    def _sampling(
        self,
        rows: slice | Int32Array,
        requests: list[Request],
        positions: npt.NDArray[np.int64],
        ahead: int,
    ) -> SamplingRows:
        sampling = SamplingRows(
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            positions=positions,
            request_ids=self._request_ids[rows],
            all_greedy=self._num_drawn == 0,
            masked_token_ids=self._masks(requests, ahead),
        )
        if self._num_with_extras:
            add_extras(sampling, requests)
        return sampling

    def _masks(self, requests: list[Request], ahead: int) -> list[tuple[int, list[int]]]:
        if not self._may_not_end:
            return []
        self._may_not_end = {r for r in self._may_not_end if r.must_not_end(ahead)}
        return [
            (index, sorted(request.ending_ids))
            for index, request in enumerate(requests)
            if request in self._may_not_end
        ]

    def advance(self, plan: SchedulerOutput, sampled: list[Request], tokens: Int32Array) -> None:
        """Note that the step was computed and what it sampled; call before rows change.

        An impossible token ends its request as soon as somebody looks. Until then its row goes on
        with another one, so that what ``build`` returns is always sound.
        """
        num_rows = len(self.requests)
        if not plan.prefills and len(plan.decodes) == num_rows:
            self._num_computed[:num_rows] += np.int32(1)
            np.maximum(tokens, 0, out=self._last_token[:num_rows])
            return
        tokens = np.maximum(tokens, 0)
        self._num_computed[[request.row for request in plan.decodes]] += np.int32(1)
        for chunk in plan.prefills:
            self._num_computed[chunk.request.row] += np.int32(chunk.num_tokens)
        self._last_token[[request.row for request in sampled]] = tokens


def _stays_as_it_is(request: Request) -> bool:
    """True where nothing but its length changes how a request samples from step to step."""
    return request.extras is None and request.grammar is None


def _chunk_tokens(chunk: PrefillChunk) -> Int32Array:
    start = chunk.request.num_computed
    tokens: Int32Array = np.array(
        chunk.request.tokens[start : start + chunk.num_tokens], dtype=np.int32
    )
    return tokens


def _positions(starts: Int32Array, counts: Int32Array, query_start: Int32Array) -> Int32Array:
    """Return ``start, start + 1, …`` of every sequence, one after the other."""
    within = np.arange(query_start[-1], dtype=np.int32) - np.repeat(query_start[:-1], counts)
    positions: Int32Array = np.repeat(starts, counts) + within
    return positions
