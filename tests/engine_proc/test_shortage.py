"""No memory for a step: it is tried in halves, everybody gets the answer they would have got."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.embedding_engine import LengthEmbedder, vector_of
from helpers.faithful_runner import FaithfulRunner, faithful_answer
from helpers.requests import Spelling
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.embedding_core import EmbeddingCore
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from trioengine.engine_proc.runner import StepBatch, StepResult
    from trioengine.outputs import RequestOutput

VOCAB = 1000
NO_MEMORY = "cannot allocate 1 GiB"


class Crowded(FaithfulRunner):
    """Has no memory for a step that ``refuses`` says it has none for.

    It says so at the end, when the cache has been written already.
    """

    def __init__(self, refuses: Callable[[StepBatch], bool], *, num_blocks: int = 64) -> None:
        super().__init__(vocab_size=VOCAB, block_size=4, num_blocks=num_blocks)
        self.refuses = refuses
        self.sizes: list[int] = []
        self.num_refused = 0

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        self.sizes.append(len(batch.token_ids))
        if self.refuses(batch):
            self.num_refused += 1
            raise MemoryError(NO_MEMORY)
        return result


def more_than(num_tokens: int) -> Callable[[StepBatch], bool]:
    return lambda batch: len(batch.token_ids) > num_tokens


def core_over(runner: Crowded, *, num_steps: int = 1, budget: int = 64) -> EngineCore:
    return EngineCore(
        runner,
        lambda _: Spelling(),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        num_scheduler_steps=num_steps,
    )


def prompt_of(number: int, length: int = 12) -> list[int]:
    return [(number * 37 + position) % VOCAB for position in range(length)]


def add_all(core: EngineCore, num_requests: int, num_tokens: int, *, length: int = 12) -> None:
    for number in range(num_requests):
        params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True)
        assert core.add_request(Add(number, prompt_of(number, length), params)) is None


def run(core: EngineCore, *, max_steps: int = 3000) -> dict[int, RequestOutput]:
    merged: dict[int, RequestOutput] = {}
    for _ in range(max_steps):
        if not core.has_work():
            core.check_integrity()
            return merged
        for delta in core.step(list):
            if (earlier := merged.setdefault(delta.request_id, delta)) is not delta:
                assert earlier.finish_reason is None
                earlier.merge(delta)
        core.check_integrity()
    raise AssertionError(f"no end in sight: {core.stats()}")


def exact(number: int, num_tokens: int, *, length: int = 12) -> list[int]:
    return faithful_answer(
        prompt_of(number, length), seed=number, num_tokens=num_tokens, vocab_size=VOCAB
    )


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("room", [1, 3, 7, 20])
def test_everybody_is_served_by_steps_that_fit(room: int, num_steps: int) -> None:
    runner = Crowded(more_than(room))
    core = core_over(runner, num_steps=num_steps)
    add_all(core, 6, 10)
    outputs = run(core)
    assert runner.num_refused
    for number in range(6):
        assert outputs[number].token_ids == exact(number, 10)
        assert outputs[number].finish_reason is FinishReason.LENGTH
    assert core.stats().preemptions == 0  # the cache is not what is short


def test_a_request_that_fits_in_no_step_ends_alone() -> None:
    """Whatever holds sequence 2 is refused, down to one token of it."""
    guilty = 2

    def refuses(batch: StepBatch) -> bool:
        firsts = batch.token_ids[batch.query_start[:-1]]
        starts = batch.positions[batch.query_start[:-1]] == 0
        return prompt_of(guilty)[0] in firsts[starts]

    runner = Crowded(refuses)
    core = core_over(runner)
    add_all(core, 5, 10)
    outputs = run(core)
    assert outputs[guilty].finish_reason is FinishReason.ERROR
    assert outputs[guilty].error == NO_MEMORY
    for number in {0, 1, 3, 4}:
        assert outputs[number].token_ids == exact(number, 10)


def test_once_there_is_memory_again_steps_grow_back() -> None:
    short = True
    runner = Crowded(lambda batch: short and len(batch.token_ids) > 2, num_blocks=400)
    core = core_over(runner)
    add_all(core, 8, 100)
    for _ in range(30):
        core.step(list)
    assert max(runner.sizes[-5:]) <= 4
    short = False
    for _ in range(60):
        core.step(list)
    assert runner.sizes[-1] == 8
    run(core)
    add_all(core, 1, 1, length=60)
    run(core)
    assert runner.sizes[-1] == 48  # all of a prompt that is not cached, in one step as ever


@pytest.mark.parametrize("num_steps", [1, 4])
@given(
    refusals=st.lists(st.booleans(), max_size=60),
    aborts=st.lists(st.integers(0, 7), max_size=4),
    num_blocks=st.integers(10, 40),
)
def test_any_history_of_shortages_gives_the_same_answers(
    num_steps: int, refusals: list[bool], aborts: list[int], num_blocks: int
) -> None:
    script = iter(refusals)
    runner = Crowded(lambda batch: len(batch.token_ids) > 1 and next(script, False),
                     num_blocks=num_blocks)  # fmt: skip
    core = core_over(runner, num_steps=num_steps)
    add_all(core, 8, 9)
    merged: dict[int, RequestOutput] = {}
    to_abort = iter(aborts)

    def poll() -> Sequence[int]:
        victim = next(to_abort, None)
        return [] if victim is None else [victim]

    while core.has_work():
        for delta in core.step(poll):
            if (earlier := merged.setdefault(delta.request_id, delta)) is not delta:
                assert earlier.finish_reason is None
                earlier.merge(delta)
        core.check_integrity()
    assert merged.keys() == set(range(8))
    for number, output in merged.items():
        answer = exact(number, 9)
        if output.finish_reason is FinishReason.LENGTH:
            assert output.token_ids == answer
        else:
            assert output.finish_reason is FinishReason.ABORT
            assert output.token_ids == answer[: len(output.token_ids)]
    assert core.stats().free_blocks + core.stats().evictable_blocks == num_blocks


class CrowdedEmbedder(LengthEmbedder):
    """Has memory for so many sequences at once."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def embed(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        vectors = super().embed(sequences)
        if len(sequences) > self.room:
            raise MemoryError(NO_MEMORY)
        return vectors


@pytest.mark.parametrize("room", [0, 1, 3])
def test_embeddings_are_made_in_batches_that_fit(room: int) -> None:
    runner = CrowdedEmbedder(room)
    core = EmbeddingCore(runner, max_num_seqs=8, max_num_batched_tokens=256)
    prompts = {number: [number + 1] * (number + 1) for number in range(20)}
    for number, prompt in prompts.items():
        assert core.add_request(Add(number, prompt, SamplingParams())) is None
    order = []
    while core.has_work():
        for output in core.step(list):
            order.append(output.request_id)
            if room == 0:
                assert output.error == NO_MEMORY
            else:
                assert output.embedding is not None
                assert len(output.embedding) == 4 * len(vector_of([1]))
    assert order == list(prompts)
