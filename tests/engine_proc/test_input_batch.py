"""The batch of a step is the same whether it is viewed, gathered, or built from nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.faithful_runner import check_batch
from helpers.requests import make_request
from trioengine.engine_proc.input_batch import InputBatch
from trioengine.engine_proc.scheduler import PrefillChunk, SchedulerOutput
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.request import Request

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0)


def batch_of(*requests: Request) -> InputBatch:
    batch = InputBatch(max_rows=8, max_blocks=8, block_size=BLOCK_SIZE)
    for request in requests:
        batch.add(request)
    return batch


def decoding(request_id: int, num_tokens: int, params: SamplingParams = GREEDY) -> Request:
    """A request with all but its last token in the cache, in blocks 10·id, 10·id + 1, …"""
    first = request_id * 100
    request = make_request(
        range(first, first + num_tokens),
        request_id=request_id,
        num_output_tokens=1,
        params=params,
        seed=request_id + 2**63,
    )
    request.num_computed, request.decoding = num_tokens - 1, True
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    request.block_ids = list(range(request_id * 10, request_id * 10 + num_blocks))
    return request


def fresh(request_id: int, num_tokens: int, params: SamplingParams = GREEDY) -> Request:
    request = decoding(request_id, num_tokens, params)
    request.num_computed, request.decoding = 0, False
    return request


def test_decodes_are_views_of_rows() -> None:
    one, two = decoding(1, 5), decoding(2, 9)
    batch, sampled, _ = batch_of(one, two).build(SchedulerOutput(decodes=[one, two]))
    check_batch(batch, BLOCK_SIZE, 100)
    assert batch.token_ids.tolist() == [104, 208]
    assert batch.positions.tolist() == [4, 8]
    assert batch.seq_lens.tolist() == [5, 9]
    assert batch.block_tables.tolist() == [[10, 11, 0], [20, 21, 22]]
    assert batch.logits_rows.tolist() == [0, 1]
    assert batch.sampling.positions.tolist() == [5, 9]
    assert batch.sampling.seeds.tolist() == [2**63 + 1, 2**63 + 2]
    assert batch.sampling.request_ids.tolist() == [1, 2]
    assert sampled == [one, two]


def test_decodes_in_any_order_of_rank_sample_in_the_order_of_rows() -> None:
    one, two = decoding(1, 5), decoding(2, 9)
    _, sampled, _ = batch_of(one, two).build(SchedulerOutput(decodes=[two, one]))
    assert sampled == [one, two]


def test_chunks_follow_decodes_and_only_a_last_chunk_samples() -> None:
    one, two, three = decoding(1, 5), fresh(2, 9), fresh(3, 6)
    rows = batch_of(two, one, three)
    plan = SchedulerOutput([one], [PrefillChunk(two, 4), PrefillChunk(three, 6)])
    batch, sampled, _ = rows.build(plan)
    check_batch(batch, BLOCK_SIZE, 100)
    assert batch.token_ids.tolist() == [104, 200, 201, 202, 203, *range(300, 306)]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, *range(6)]
    assert batch.query_start.tolist() == [0, 1, 5, 11]
    assert batch.seq_lens.tolist() == [5, 4, 6]
    assert batch.logits_rows.tolist() == [0, 10]
    assert batch.sampling.positions.tolist() == [5, 6]
    assert sampled == [one, three]


def test_a_middle_chunk_alone_samples_nothing() -> None:
    two = fresh(2, 9)
    batch, sampled, _ = batch_of(two).build(SchedulerOutput(prefills=[PrefillChunk(two, 4)]))
    assert (len(batch.logits_rows), sampled, batch.sampling.positions.tolist()) == (0, [], [])


def test_a_chunk_goes_on_where_the_one_before_it_ended() -> None:
    two = fresh(2, 9)
    rows = batch_of(two)
    plan = SchedulerOutput(prefills=[PrefillChunk(two, 4)])
    rows.build(plan)
    rows.advance(plan, [], np.array([], np.int32))
    two.num_computed = 4
    batch, sampled, _ = rows.build(SchedulerOutput(prefills=[PrefillChunk(two, 5)]))
    assert batch.positions.tolist() == [4, 5, 6, 7, 8]
    assert sampled == [two]


@pytest.mark.parametrize("gathered", [False, True])
def test_what_was_sampled_is_computed_next(gathered: bool) -> None:
    one, two = decoding(1, 5), decoding(2, 8)
    idle = [fresh(3, 6)] if gathered else []
    rows = batch_of(one, two, *idle)
    plan = SchedulerOutput(decodes=[one, two])
    _, sampled, _ = rows.build(plan)
    rows.advance(plan, sampled, np.array([7, 8], np.int32))
    two.block_ids.append(22)
    rows.note_growth(two)
    batch, _, _ = rows.build(plan)
    assert batch.token_ids.tolist() == [7, 8]
    assert batch.positions.tolist() == [5, 8]
    assert batch.block_tables.tolist() == [[10, 11, 0], [20, 21, 22]]


def test_a_batch_that_is_used_again_is_that_of_the_rows_as_they_are() -> None:
    one, two, three = decoding(1, 5), decoding(2, 5), decoding(3, 6)
    rows = batch_of(one, two)

    def decode(*requests: Request) -> tuple[list[list[int]], list[Request]]:
        plan = SchedulerOutput(decodes=list(requests))
        batch, sampled, _ = rows.build(plan)
        check_batch(batch, BLOCK_SIZE, 400)
        got = [batch.positions.tolist(), batch.seq_lens.tolist(), batch.sampling.positions.tolist()]
        rows.advance(plan, sampled, np.array([9] * len(requests), np.int32))
        return [batch.sampling.request_ids.tolist(), *got], sampled

    assert decode(one, two) == ([[1, 2], [4, 4], [5, 5], [5, 5]], [one, two])
    assert decode(one, two) == ([[1, 2], [5, 5], [6, 6], [6, 6]], [one, two])
    rows.add(three)
    assert decode(one, two, three) == (
        [[1, 2, 3], [6, 6, 5], [7, 7, 6], [7, 7, 6]],
        [one, two, three],
    )
    rows.remove(one)
    assert decode(three, two) == ([[3, 2], [6, 7], [7, 8], [7, 8]], [three, two])


def test_the_last_row_fills_a_gap() -> None:
    requests = [decoding(index, 4 + index) for index in range(1, 5)]
    rows = batch_of(*requests)
    rows.remove(requests[1])
    rows.remove(requests[3])
    left = [requests[0], requests[2]]
    assert rows.requests == left
    assert [request.row for request in left] == [0, 1]
    assert requests[1].row == -1
    batch, _, _ = rows.build(SchedulerOutput(decodes=left))
    assert batch.token_ids.tolist() == [104, 306]
    assert batch.sampling.seeds.tolist() == [2**63 + 1, 2**63 + 3]
    assert batch.block_tables.tolist() == [[10, 11], [30, 31]]


def test_greedy_until_somebody_draws() -> None:
    one, two = decoding(1, 5), decoding(2, 5, SamplingParams(temperature=0.5, top_k=-1))
    rows = batch_of(one, two)
    batch, _, _ = rows.build(SchedulerOutput(decodes=[one, two]))
    assert not batch.sampling.all_greedy
    assert batch.sampling.top_k.tolist() == [0, 0]
    rows.remove(two)
    assert rows.build(SchedulerOutput(decodes=[one]))[0].sampling.all_greedy


def test_ending_ids_are_masked_until_min_tokens_exist() -> None:
    request = make_request(
        [1, 2, 3],
        num_output_tokens=1,
        params=SamplingParams(min_tokens=2),
        ending_ids=frozenset({9, 5}),
    )
    request.num_computed, request.decoding, request.block_ids = 2, True, [0]
    other = decoding(4, 4)
    rows = batch_of(other, request)
    plan = SchedulerOutput(decodes=[request, other])
    assert rows.build(plan)[0].sampling.masked_token_ids == [(1, [5, 9])]
    request.tokens.append(4)
    assert rows.build(plan)[0].sampling.masked_token_ids == []
