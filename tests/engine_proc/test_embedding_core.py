"""The engine of embedding models: batches within bounds, one terminal each, aborts win."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.embedding_engine import MAX_LEN, LengthEmbedder, vector_of
from trioengine.engine_proc.embedding_core import EmbeddingCore
from trioengine.errors import InvalidRequestError, ProtocolError
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

PARAMS = SamplingParams()


def core_over(runner: LengthEmbedder, *, seqs: int = 4, tokens: int = 16) -> EmbeddingCore:
    return EmbeddingCore(runner, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def nobody() -> list[int]:
    return []


@given(
    lengths=st.lists(st.integers(1, MAX_LEN), min_size=1, max_size=30),
    priorities=st.lists(st.integers(-2, 2), min_size=30, max_size=30),
)
def test_everybody_gets_their_own_vector_once(lengths: list[int], priorities: list[int]) -> None:
    runner = LengthEmbedder()
    core = core_over(runner)
    prompts = {number: [number % 7 + 1] * length for number, length in enumerate(lengths)}
    for number, prompt in prompts.items():
        assert core.add_request(Add(number, prompt, PARAMS, priorities[number])) is None
    order: list[int] = []
    while core.has_work():
        for output in core.step(nobody):
            assert output.finish_reason is FinishReason.STOP
            assert output.embedding is not None
            vector = np.frombuffer(output.embedding, "<f4").tolist()
            assert vector == vector_of(prompts[output.request_id])
            order.append(output.request_id)
    assert order == sorted(prompts, key=lambda number: (priorities[number], number))
    assert core.stats().prompt_tokens == sum(lengths)
    assert core.live_ids == frozenset()


@given(lengths=st.lists(st.integers(1, MAX_LEN), min_size=1, max_size=30))
def test_a_batch_stays_within_its_budget(lengths: list[int]) -> None:
    runner = LengthEmbedder()
    core = core_over(runner)
    for number, length in enumerate(lengths):
        core.add_request(Add(number, [1] * length, PARAMS))
    begin = 0
    while core.has_work():
        core.step(nobody)
        batch = lengths[begin : begin + runner.batches[-1]]
        begin += len(batch)
        assert len(batch) <= 4
        assert len(batch) == 1 or len(batch) * max(batch) <= 16


def test_an_abort_wins_whether_it_waits_or_is_being_computed() -> None:
    core = core_over(LengthEmbedder(), seqs=1)
    for number in (1, 2, 3):
        core.add_request(Add(number, [1], PARAMS))
    outputs = core.step(lambda: [1, 2, 9])
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        (1, FinishReason.ABORT),
        (2, FinishReason.ABORT),
    ]
    assert core.live_ids == {3}
    assert core.stats().aborts_ignored == 1
    assert [output.request_id for output in core.step(nobody)] == [3]
    assert core.abort([3]) == []


@pytest.mark.parametrize("ids", [[], [1] * (MAX_LEN + 1), [-1], [2048]])
def test_what_cannot_be_read_costs_only_itself(ids: list[int]) -> None:
    core = core_over(LengthEmbedder())
    core.add_request(Add(1, [1], PARAMS))
    refused = core.add_request(Add(2, ids, PARAMS))
    assert refused is not None
    assert refused.finish_reason is FinishReason.ERROR
    assert core.live_ids == {1}


def test_an_id_that_is_live_cannot_be_added_again() -> None:
    core = core_over(LengthEmbedder())
    core.add_request(Add(1, [1], PARAMS))
    with pytest.raises(ProtocolError):
        core.add_request(Add(1, [1], PARAMS))


def test_calls_and_the_end() -> None:
    runner = LengthEmbedder()
    core = core_over(runner)
    assert core.call("check_integrity", {}) is None
    with pytest.raises(InvalidRequestError, match="'sing'"):
        core.call("sing", {})
    core.shutdown()
    assert runner.closed
