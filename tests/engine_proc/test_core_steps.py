"""Several steps to a schedule change no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.core_runs import PROMPT, SCRIPT, foretold, own_prompt, run, words
from helpers.faithful_runner import FaithfulRunner, faithful_answer
from helpers.requests import Spelling
from helpers.sim_core import sim_core
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.runner import StepBatch, StepResult


def in_steps(num_steps: int, script: SimScript = SCRIPT) -> tuple[EngineCore, int]:
    """A core with one request of each kind, and how many."""
    core, _ = sim_core(script, num_scheduler_steps=num_steps)
    text = words(foretold(6))
    kinds = [
        SamplingParams(seed=3, max_tokens=11),
        SamplingParams(seed=3, max_tokens=30, stop=(text[-4:],)),
        SamplingParams(seed=3, max_tokens=30, stop=(text[-4:] + "never",)),
        SamplingParams(seed=3, max_tokens=30, stop_token_ids=(foretold(3)[2],)),
        SamplingParams(seed=3, max_tokens=9, min_tokens=7, stop_token_ids=tuple(foretold(6))),
        SamplingParams(seed=4, max_tokens=None, temperature=0.5),
        SamplingParams(seed=5, max_tokens=10, logprobs=2, prompt_logprobs=1),
    ]
    for request_id, params in enumerate(kinds, 1):
        assert core.add_request(Add(request_id, PROMPT, params)) is None
    return core, len(kinds)


@pytest.mark.parametrize("num_steps", [2, 3, 8, 64])
@pytest.mark.parametrize("eos_probability", [0.0, 0.2])
def test_the_number_of_steps_changes_no_answer(num_steps: int, eos_probability: float) -> None:
    script = SimScript(
        num_blocks=96, max_model_len=200, tokens_from="seed", eos_probability=eos_probability
    )
    core, count = in_steps(1, script)
    expected = run(core)
    core, count = in_steps(num_steps, script)
    assert run(core) == expected
    assert len(expected) == count
    assert core.stats().generation_tokens == sum(len(o.token_ids) for o in expected.values())
    assert core.stats().free_blocks + core.stats().evictable_blocks == 96


def test_what_the_prefix_cache_keeps_of_an_answer_that_ended_early_is_right() -> None:
    """Keys and values of dropped tokens must not be taken for those of anybody's tokens."""
    runner = FaithfulRunner(vocab_size=50, block_size=2, num_blocks=50)
    core = EngineCore(runner, lambda params: Spelling(), num_scheduler_steps=8)
    answer = faithful_answer([5, 6, 7], seed=1, num_tokens=30, vocab_size=50)
    stop = SamplingParams(seed=1, max_tokens=30, stop_token_ids=(answer[3],), ignore_eos=True)
    core.add_request(Add(1, [5, 6, 7], stop))
    assert run(core)[1].token_ids == answer[:4]
    told = [5, 6, 7, *answer[:4]]
    for request_id, prompt in ((2, [*told, 1, 2, 3, 4, 5]), (3, [*told, *answer[4:9]])):
        params = SamplingParams(seed=9, max_tokens=3, ignore_eos=True)
        core.add_request(Add(request_id, prompt, params))
        got = run(core)[request_id]
        assert got.token_ids == faithful_answer(prompt, seed=9, num_tokens=3, vocab_size=50)
        assert got.num_cached_tokens >= 6


def test_several_steps_give_one_delta_a_request() -> None:
    core, _ = sim_core(SCRIPT, num_scheduler_steps=4)
    for request_id in (1, 2):
        core.add_request(Add(request_id, PROMPT, SamplingParams(seed=3, max_tokens=10)))
    sizes = [[len(output.token_ids) for output in core.step(list)] for _ in range(4)]
    assert sizes == [[1], [1, 1], [4, 4], [4, 4]]  # the second waits for the prefix of the first
    assert [len(output.token_ids) for output in core.step(list)] == [1]


def test_an_abort_between_several_steps_drops_all_they_sampled() -> None:
    core, _ = sim_core(SCRIPT, num_scheduler_steps=4)
    for request_id in (1, 2):
        core.add_request(Add(request_id, own_prompt(request_id), SamplingParams(max_tokens=10)))
    core.step(list)
    aborted, other = core.step(lambda: [2])
    assert (aborted.request_id, aborted.token_ids) == (2, [])
    assert aborted.finish_reason is FinishReason.ABORT
    assert (other.request_id, len(other.token_ids)) == (1, 4)
    core.check_integrity()
    assert core.stats().generation_tokens == 6


def test_an_impossible_token_amid_several_steps_ends_only_its_request() -> None:
    core, runner = sim_core(
        SimScript(num_blocks=64, max_model_len=200, bad_token_at_step=3), num_scheduler_steps=4
    )
    execute, seen = runner.execute, list[int]()

    def watch(batch: StepBatch) -> StepResult:
        seen.extend(batch.token_ids.tolist())
        return execute(batch)

    runner.execute = watch  # type: ignore[method-assign]
    for request_id in (1, 2):
        params = SamplingParams(seed=3, max_tokens=9)
        core.add_request(Add(request_id, own_prompt(request_id), params))
    outputs = run(core)
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert len(outputs[1].token_ids) == 2  # what was good before it still counts
    assert len(outputs[2].token_ids) == 9
    assert min(seen) >= 0  # a kernel would refuse the whole step
