"""A runner that really reads its cache, so that a wrong block shows up as a wrong token.

Each slot holds a hash of all tokens up to its position, made from the slot before it. The sampled
token is a hash of (last slot, seed, position). What a slot held at the start of the step is all
that other sequences may see of it. ``faithful_answer`` says what a request must get, computed
alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from trioengine.engine_proc.runner import StepResult
from trioengine.protocol import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.engine_proc.runner import StepBatch

__all__ = ["FaithfulRunner", "faithful_answer"]

_MASK = 2**64 - 1


def _mix(*values: int) -> int:
    state = 0x243F6A8885A308D3
    for value in values:
        state = ((state ^ value) * 0x9E3779B97F4A7C15 + 1) & _MASK
        state ^= state >> 29
    return state


def _sample(context: int, seed: int, position: int, vocab_size: int, masked: Sequence[int]) -> int:
    token = _mix(context, seed, position) % vocab_size
    while token in masked:
        token = (token + 1) % vocab_size
    return token


def faithful_answer(
    prompt: Sequence[int],
    *,
    seed: int,
    num_tokens: int,
    vocab_size: int,
    masked: Sequence[int] = (),
    num_masked: int = 0,
) -> list[int]:
    """Return the first ``num_tokens`` tokens after ``prompt``, with nobody else around.

    ``masked`` ids are not sampled for the first ``num_masked`` of them.
    """
    context = 0
    for token in prompt:
        context = _mix(context, token)
    answer: list[int] = []
    for index in range(num_tokens):
        position = len(prompt) + index
        now = masked if index < num_masked else ()
        answer.append(_sample(context, seed, position, vocab_size, now))
        context = _mix(context, answer[-1])
    return answer


class FaithfulRunner:
    """Fulfils ``ModelRunner``, slowly and suspiciously.

    Attributes:
        last_batch: What it was last given. Some arrays are views: sizes stay, contents move on.
    """

    def __init__(
        self, *, vocab_size: int, block_size: int, num_blocks: int, max_model_len: int = 1 << 20
    ) -> None:
        self.model = ModelInfo(
            name="faithful",
            runner="test",
            simulated=True,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=(0,),
        )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.last_batch: StepBatch | None = None
        # Garbage, so that reading a slot that nobody has written is noticed.
        self._slots = [_mix(0xBAD, slot) for slot in range(num_blocks * block_size)]

    def execute(self, batch: StepBatch) -> StepResult:
        check_batch(batch, self.block_size, self.num_blocks)
        self.last_batch = batch
        before = self._slots.copy()
        contexts: dict[int, int] = {}
        for index in range(len(batch.seq_lens)):
            table = batch.block_tables[index].tolist()
            start, stop = batch.query_start[index : index + 2].tolist()
            context = 0
            if (first := int(batch.positions[start])) > 0:
                context = before[self._slot(table, first - 1)]
            for flat in range(start, stop):
                context = _mix(context, int(batch.token_ids[flat]))
                self._slots[self._slot(table, int(batch.positions[flat]))] = context
                contexts[flat] = context
        tokens = [self._sample(batch, row, contexts) for row in range(len(batch.logits_rows))]
        return StepResult(np.array(tokens, np.int32))

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _sample(self, batch: StepBatch, row: int, contexts: dict[int, int]) -> int:
        rows = batch.sampling
        masked = [i for masked_row, ids in rows.masked_token_ids if masked_row == row for i in ids]
        context = contexts[int(batch.logits_rows[row])]
        vocab_size = self.model.vocab_size
        return _sample(context, int(rows.seeds[row]), int(rows.positions[row]), vocab_size, masked)

    def call(self, method: str, args: dict[str, object]) -> object:
        raise KeyError(method)

    def close(self) -> None:
        pass


def check_batch(batch: StepBatch, block_size: int, num_blocks: int) -> None:
    """Check everything that ``StepBatch`` promises; ``AssertionError`` where it is broken."""
    num_seqs, num_tokens = len(batch.seq_lens), len(batch.token_ids)
    starts = batch.query_start.tolist()
    assert starts[0] == 0
    assert starts[-1] == num_tokens
    assert len(starts) == num_seqs + 1
    assert len(batch.positions) == num_tokens
    for array in (
        batch.token_ids,
        batch.positions,
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        batch.logits_rows,
    ):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    written: set[int] = set()
    for index, (start, stop) in enumerate(itertools.pairwise(starts)):
        assert start < stop
        positions = batch.positions[start:stop].tolist()
        seq_len = int(batch.seq_lens[index])
        assert positions == list(range(seq_len - (stop - start), seq_len))
        table = batch.block_tables[index].tolist()[: -(-seq_len // block_size)]
        assert len(set(table)) == len(table) == -(-seq_len // block_size)
        assert all(0 <= block < num_blocks for block in table)
        slots = {table[p // block_size] * block_size + p % block_size for p in positions}
        assert not slots & written, "two sequences write one slot"
        written |= slots
    rows = batch.sampling
    ends = {stop - 1: index for index, stop in enumerate(starts[1:])}
    for row, flat in enumerate(batch.logits_rows.tolist()):
        assert rows.positions[row] == batch.seq_lens[ends[flat]]
    for column in (rows.temperature, rows.top_p, rows.top_k, rows.min_p, rows.seeds):
        assert len(column) == len(batch.logits_rows)
    assert rows.seeds.dtype == np.uint64
    assert not rows.all_greedy or not rows.temperature.any()
