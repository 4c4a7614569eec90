from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import sampling_rows
from trioengine.engine_proc.runner import StepBatch

if TYPE_CHECKING:
    from trioengine.engine_proc.torch_runner.step_plan import StepPlan

pytestmark = pytest.mark.model

BLOCK = 4
Step = list[tuple[int, int]]  # (tokens already computed, tokens of this step) per sequence


def make_batch(step: Step) -> StepBatch:
    """Lay sequences out over a cache whose blocks are numbered backwards, block 0 last."""
    ends = [before + length for before, length in step]
    widths = [-(-end // BLOCK) for end in ends]
    tables = np.zeros((len(step), max(widths)), np.int32)
    next_block = sum(widths)
    for row, width in enumerate(widths):
        tables[row, :width] = range(next_block, next_block - width, -1)
        next_block -= width
    return StepBatch(
        token_ids=np.zeros(sum(length for _, length in step), np.int32),
        positions=np.concatenate([np.arange(b, b + n, dtype=np.int32) for b, n in step]),
        query_start=np.cumsum([0, *(length for _, length in step)]).astype(np.int32),
        seq_lens=np.array(ends, np.int32),
        block_tables=tables,
        logits_rows=np.empty(0, np.int32),
        sampling=sampling_rows([]),
    )


def make_plan(batch: StepBatch) -> StepPlan:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.step_plan import StepPlan

    return StepPlan(batch, BLOCK, torch.float32, torch.device("cpu"))


def slots_of(blocks: Any) -> list[int]:
    return [int(block) * BLOCK + offset for block in blocks for offset in range(BLOCK)]


def visible_slots(batch: StepBatch, plan: StepPlan, window: int | None) -> dict[int, list[int]]:
    """Return, by flat token, the cache slots that the plan lets it attend to, in order."""
    seen: dict[int, list[int]] = {}
    for group in plan.decodes(window):
        tokens = np.arange(plan.num_tokens)[group.tokens]
        for token, blocks, mask in zip(tokens, group.blocks, group.mask[:, 0, 0], strict=True):
            assert int(token) not in seen
            seen[int(token)] = [
                s for s, m in zip(slots_of(blocks), mask.tolist(), strict=True) if m == 0
            ]
    for chunk in plan.chunks(window):
        own = plan.slots[chunk.tokens].tolist()
        gathered = own if chunk.blocks is None else slots_of(chunk.blocks[0])
        for tile in chunk.tiles:
            keys = gathered[tile.keys]
            for i in range(tile.queries.start, tile.queries.stop):
                token = chunk.tokens.start + i
                assert token not in seen
                if tile.mask is None:
                    seen[token] = keys[: i + 1]
                    continue
                row = tile.mask[i - tile.queries.start].tolist()
                seen[token] = [s for s, m in zip(keys, row, strict=True) if m == 0]
    return seen


STEPS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 3, 9, 17])), min_size=1, max_size=6
)


@given(STEPS, st.sampled_from([None, 1, 2, 5, 16, 1000]))
def test_every_token_sees_its_own_past_within_the_window_and_nothing_else(
    step: Step, window: int | None
) -> None:
    batch = make_batch(step)
    plan = make_plan(batch)
    seen = visible_slots(batch, plan, window)
    assert sorted(seen) == list(range(plan.num_tokens))
    for row, (before, length) in enumerate(step):
        slots = slots_of(batch.block_tables[row])
        for i in range(length):
            position = before + i
            first = 0 if window is None else max(0, position - window + 1)
            token = int(batch.query_start[row]) + i
            assert seen[token] == slots[first : position + 1]
            assert int(plan.slots[token]) == slots[position]


def test_long_chunks_are_tiled_and_still_see_all_of_their_past() -> None:
    step = [(3, 700)]
    batch = make_batch(step)
    plan = make_plan(batch)
    (chunk,) = plan.chunks(None)
    assert [(t.queries.stop - t.queries.start) for t in chunk.tiles] == [256, 256, 188]
    slots = slots_of(batch.block_tables[0])
    seen = visible_slots(batch, plan, None)
    assert all(seen[i] == slots[: 4 + i] for i in range(700))


def test_entries_past_the_end_of_a_sequence_are_not_read() -> None:
    batch = make_batch([(2, 1), (30, 1)])
    batch.block_tables[0, 1:] = 10**9  # whatever stands there
    (group,) = make_plan(batch).decodes(None)
    assert int(group.blocks.max()) < 10**9


def test_neighbouring_decodes_are_a_slice() -> None:
    (group,) = make_plan(make_batch([(2, 1), (30, 1), (7, 1)])).decodes(None)
    assert group.tokens == slice(0, 3)


def test_a_window_reads_only_its_own_blocks() -> None:
    (group,) = make_plan(make_batch([(100, 1)])).decodes(8)
    assert group.blocks.shape[1] == 3
    (chunk,) = make_plan(make_batch([(100, 2)])).chunks(8)
    assert chunk.blocks is not None
    assert chunk.blocks.shape[1] == 3


def test_windows_share_one_plan_and_layers_share_its_parts() -> None:
    plan = make_plan(make_batch([(100, 1), (9, 5)]))
    assert plan.decodes(None) is plan.decodes(None)
    assert plan.chunks(8) is plan.chunks(8)
    assert plan.decodes(None) is not plan.decodes(8)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_buckets_cover_all_and_at_most_double_what_is_read(lengths: list[int]) -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.step_plan import SHORT_BLOCKS, bucket_by_length

    buckets = bucket_by_length(np.array(lengths))
    assert sorted(np.concatenate(buckets).tolist()) == list(range(len(lengths)))
    for bucket in buckets:
        members = [lengths[i] for i in bucket]
        assert max(members) <= SHORT_BLOCKS or max(members) < 2 * min(members)
        assert bucket.tolist() == sorted(bucket.tolist())
    assert len(buckets) <= 8  # 3,000 blocks halve to 32 in seven steps


def test_no_sequences_make_no_buckets() -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.step_plan import bucket_by_length

    assert bucket_by_length(np.array([], np.int64)) == []
