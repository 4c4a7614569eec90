"""An abort wins, frees at once, and moves nobody else's tokens."""

from __future__ import annotations

import pytest

from helpers.core_runs import PROMPT, SCRIPT, own_prompt, run
from helpers.sim_core import sim_core
from trioengine.engine_proc.sim_runner import SimScript, sim_tokens
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams


def test_an_abort_frees_before_the_next_step() -> None:
    core, _ = sim_core(SCRIPT)
    core.add_request(Add(1, PROMPT, SamplingParams(max_tokens=50)))
    core.step(list)
    (terminal,) = core.abort([1])
    assert terminal == RequestOutput(1, finish_reason=FinishReason.ABORT)
    stats = core.stats()
    assert stats.free_blocks + stats.evictable_blocks == 64
    assert not core.has_work()


def test_a_waiting_request_can_be_aborted() -> None:
    core, _ = sim_core(SCRIPT, max_num_seqs=1)
    for request_id in (1, 2):
        core.add_request(Add(request_id, PROMPT, SamplingParams(max_tokens=3)))
    core.step(list)
    assert [output.request_id for output in core.abort([2])] == [2]
    assert list(run(core)) == [1]


def test_unknown_finished_and_doubled_aborts_are_counted_and_harmless() -> None:
    core, _ = sim_core(SCRIPT)
    core.add_request(Add(1, PROMPT, SamplingParams(max_tokens=1)))
    run(core)
    core.add_request(Add(2, PROMPT, SamplingParams(max_tokens=9)))
    core.step(list)
    assert [output.request_id for output in core.abort([1, 2, 2, 77, -5])] == [2]
    assert core.stats().aborts_ignored == 4
    core.add_request(Add(3, PROMPT, SamplingParams(max_tokens=2)))
    assert run(core)[3].finish_reason is FinishReason.LENGTH


def test_an_abort_within_the_step_beats_the_token_that_would_have_finished() -> None:
    core, _ = sim_core(SCRIPT)
    for request_id in (1, 2):
        core.add_request(Add(request_id, own_prompt(request_id), SamplingParams(max_tokens=2)))
    core.step(list)
    outputs = core.step(lambda: [1])
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        (1, FinishReason.ABORT),
        (2, FinishReason.LENGTH),
    ]
    assert outputs[0].token_ids == []
    core.check_integrity()


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_an_abort_within_the_step_moves_rows_and_nobodys_tokens(victim: int) -> None:
    core, runner = sim_core(SCRIPT)
    for request_id in (1, 2, 3):
        params = SamplingParams(seed=3, max_tokens=9)
        core.add_request(Add(request_id, own_prompt(request_id), params))
    got: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for victims in [[], [], [], [], [victim], [], [], [], []]:
        for output in core.step(victims.copy):
            got[output.request_id] += output.token_ids
    for request_id in {1, 2, 3} - {victim}:
        tokens = sim_tokens(3, request_id, range(20, 29), runner.speakable)
        assert got[request_id] == tokens.tolist()
    assert len(got[victim]) == 4


def test_an_abort_between_chunks_of_a_long_prompt() -> None:
    core, _ = sim_core(SimScript(num_blocks=64), max_num_batched_tokens=32)
    core.add_request(Add(1, list(range(300, 500)), SamplingParams()))
    assert core.step(list) == []
    assert core.step(lambda: [1])[0].finish_reason is FinishReason.ABORT
    core.check_integrity()
    core.add_request(Add(2, list(range(300, 500)), SamplingParams(max_tokens=1)))
    # Only the chunk that was applied counts as computed.
    assert run(core)[2].num_cached_tokens == 32
