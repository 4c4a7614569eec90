"""What one request gets from the engine, and what it cannot do to the others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.faithful_runner import FaithfulRunner, faithful_answer
from helpers.requests import Spelling
from helpers.sim_core import sim_core
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.runner import StepResult
from trioengine.engine_proc.sim_runner import SimScript, sim_tokens
from trioengine.errors import InternalError, InvalidRequestError, ProtocolError
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trioengine.engine_proc.runner import StepBatch

PROMPT = [300] * 20
SCRIPT = SimScript(num_blocks=64, max_model_len=200)


def own_prompt(request_id: int) -> list[int]:
    """A prompt that shares nothing with another request's."""
    return [400 + request_id] * 20


def run(core: EngineCore, *, max_steps: int = 10_000) -> dict[int, RequestOutput]:
    """Step to the end; return all deltas merged, by request."""
    merged: dict[int, RequestOutput] = {}
    for _ in range(max_steps):
        if not core.has_work():
            core.check_integrity()
            return merged
        for delta in core.step(list):
            if delta.request_id in merged:
                assert merged[delta.request_id].finish_reason is None, "a delta after the terminal"
                merged[delta.request_id].merge(delta)
            else:
                merged[delta.request_id] = delta
    raise AssertionError(f"no end in sight: {core.stats()}")


def alone(params: SamplingParams, script: SimScript = SCRIPT) -> RequestOutput:
    core, _ = sim_core(script)
    assert core.add_request(Add(1, PROMPT, params)) is None
    return run(core)[1]


def foretold(count: int, seed: int = 3) -> list[int]:
    _, runner = sim_core(SCRIPT)
    tokens: list[int] = sim_tokens(seed, 1, range(20, 20 + count), runner.speakable).tolist()
    return tokens


def words(tokens: Sequence[int]) -> str:
    core, _ = sim_core(SCRIPT)
    text = core._intake._make_text(SamplingParams())
    return text.append(list(tokens))[0]


# How a sequence ends -------------------------------------------------------------------------


def test_length() -> None:
    output = alone(SamplingParams(seed=3, max_tokens=5))
    assert output.token_ids == foretold(5)
    assert output.text == words(foretold(5))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_models_length_is_the_end_of_every_answer(max_tokens: int | None) -> None:
    output = alone(SamplingParams(seed=3, max_tokens=max_tokens))
    assert len(output.token_ids) == 180
    assert output.finish_reason is FinishReason.LENGTH


def test_end_of_sequence_is_in_the_tokens_and_not_in_the_text() -> None:
    output = alone(SamplingParams(max_tokens=50), SimScript(eos_probability=1.0))
    assert (output.token_ids, output.text) == ([0], "")
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)


def test_end_of_sequence_ignored() -> None:
    output = alone(SamplingParams(max_tokens=5, ignore_eos=True), SimScript(eos_probability=1.0))
    assert output.token_ids == [0] * 5
    assert output.finish_reason is FinishReason.LENGTH


def test_a_stop_token_names_itself() -> None:
    third = foretold(3)[2]
    output = alone(SamplingParams(seed=3, max_tokens=50, stop_token_ids=(third,)))
    assert output.token_ids == foretold(3)
    assert output.text == words(foretold(2))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, third)


def test_what_stopped_it_may_be_part_of_the_text() -> None:
    tokens = foretold(4)
    shown = alone(
        SamplingParams(seed=3, stop_token_ids=(tokens[3],), include_stop_str_in_output=True)
    )
    assert shown.text == words(tokens)
    assert shown.stop_reason == tokens[3]
    stop = words(tokens[2:3]).strip()
    shown = alone(SamplingParams(seed=3, stop=(stop,), include_stop_str_in_output=True))
    assert shown.text == words(tokens[:3])
    assert shown.stop_reason == stop


@pytest.mark.parametrize("shown", [False, True])
def test_an_end_of_sequence_is_seen_only_by_who_asks_for_it(shown: bool) -> None:
    script = SimScript(num_blocks=64, max_model_len=200, eos_probability=1.0)
    params = SamplingParams(include_stop_str_in_output=shown, skip_special_tokens=False)
    assert alone(params, script).text == ("<|endoftext|>" if shown else "")


def test_an_end_of_sequence_among_the_stop_tokens_has_no_reason() -> None:
    params = SamplingParams(max_tokens=50, stop_token_ids=(0,))
    assert alone(params, SimScript(eos_probability=1.0)).stop_reason is None
    ignoring = SamplingParams(max_tokens=50, stop_token_ids=(0,), ignore_eos=True)
    assert alone(ignoring, SimScript(eos_probability=1.0)).stop_reason == 0


def test_a_stop_string_ends_in_the_step_that_completes_it() -> None:
    text = words(foretold(4))
    stop = text[-6:]
    output = alone(SamplingParams(seed=3, max_tokens=50, stop=(stop,)))
    assert output.token_ids == foretold(4)
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)


def test_a_stop_beats_the_length_that_ends_with_the_same_token() -> None:
    stop = words(foretold(4))[-3:]
    output = alone(SamplingParams(seed=3, max_tokens=4, stop=(stop,)))
    assert output.finish_reason is FinishReason.STOP
    output = alone(SamplingParams(seed=3, max_tokens=3, stop_token_ids=(foretold(3)[2],)))
    assert output.finish_reason is FinishReason.STOP


def test_held_back_text_comes_with_the_end() -> None:
    stop = words(foretold(2))[-3:] + "never"
    output = alone(SamplingParams(seed=3, max_tokens=2, stop=(stop,)))
    assert output.text == words(foretold(2))


def test_min_tokens_puts_off_every_kind_of_stop() -> None:
    text = words(foretold(8))
    first_two = words(foretold(2))
    output = alone(SamplingParams(seed=3, max_tokens=8, min_tokens=6, stop=(first_two,)))
    assert output.text == text
    script = SimScript(eos_probability=1.0)
    assert len(alone(SamplingParams(max_tokens=50, min_tokens=6), script).token_ids) == 7


# Cached tokens, counters ---------------------------------------------------------------------


def test_the_first_delta_says_what_was_cached() -> None:
    core, _ = sim_core(SCRIPT)
    core.add_request(Add(1, PROMPT, SamplingParams(max_tokens=3)))
    assert run(core)[1].num_cached_tokens == 0
    core.add_request(Add(2, PROMPT, SamplingParams(max_tokens=3)))
    first, second, third = (core.step(list)[0].num_cached_tokens for _ in range(3))
    assert (first, second, third) == (16, 0, 0)


def test_counters_and_gauges() -> None:
    core, _ = sim_core(SCRIPT, max_num_seqs=1)
    core.add_request(Add(1, PROMPT, SamplingParams(max_tokens=3)))
    core.add_request(Add(2, PROMPT, SamplingParams(max_tokens=3)))
    core.step(list)
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.free_blocks + stats.evictable_blocks == 62
    assert stats.step_seconds > 0
    run(core)
    stats = core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (40, 6)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (40, 16)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.free_blocks + stats.evictable_blocks == 64


def test_without_caching_nothing_is_looked_up() -> None:
    core, _ = sim_core(SCRIPT, enable_prefix_caching=False)
    for request_id in (1, 2):
        core.add_request(Add(request_id, PROMPT, SamplingParams(max_tokens=3)))
    run(core)
    assert core.stats().prefix_queried_tokens == 0
    assert core.stats().evictable_blocks == 0


# What cannot be served -----------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[], [1] * 200, [2048], [-1], [2**63]])
def test_an_unservable_request_ends_at_once_and_leaves_nothing(prompt: list[int]) -> None:
    core, _ = sim_core(SCRIPT)
    terminal = core.add_request(Add(1, prompt, SamplingParams()))
    assert isinstance(terminal, RequestOutput)
    assert terminal.finish_reason is FinishReason.ERROR
    assert terminal.error
    assert not core.has_work()
    assert core.add_request(Add(2, PROMPT, SamplingParams(max_tokens=1))) is None
    assert run(core)[2].finish_reason is FinishReason.LENGTH


def test_no_request_can_need_more_blocks_than_there_are() -> None:
    core, _ = sim_core(SimScript(num_blocks=4, max_model_len=1000))
    assert core.model.max_model_len == 64
    refused = core.add_request(Add(1, [300] * 64, SamplingParams()))
    assert refused is not None
    core.add_request(Add(2, PROMPT, SamplingParams(max_tokens=None)))
    assert len(run(core)[2].token_ids) == 44


def test_an_id_that_is_live_is_not_taken_twice() -> None:
    core, _ = sim_core(SCRIPT)
    core.add_request(Add(1, PROMPT, SamplingParams()))
    with pytest.raises(ProtocolError, match="1 was added twice"):
        core.add_request(Add(1, PROMPT, SamplingParams()))


class Explosive(Spelling):
    def append(self, token_ids: Sequence[int], /) -> tuple[str, str | None, int]:
        raise OverflowError("cannot spell that")


def test_a_failing_detokenizer_ends_only_its_request() -> None:
    runner = FaithfulRunner(vocab_size=50, block_size=4, num_blocks=50)
    core = EngineCore(runner, lambda params: Explosive() if params.seed == 666 else Spelling())
    for request_id, seed in ((1, 1), (2, 666), (3, 3)):
        params = SamplingParams(seed=seed, max_tokens=4, ignore_eos=True)
        core.add_request(Add(request_id, [5, 6, 7], params))
    outputs = run(core)
    assert outputs[2].error == "cannot spell that"
    assert outputs[2].finish_reason is FinishReason.ERROR
    assert len(outputs[1].token_ids) == len(outputs[3].token_ids) == 4


def test_a_detokenizer_that_cannot_be_built_ends_only_its_request() -> None:
    def make_text(params: SamplingParams) -> Spelling:
        raise ValueError("no such language")

    core = EngineCore(FaithfulRunner(vocab_size=50, block_size=4, num_blocks=50), make_text)
    terminal = core.add_request(Add(1, [5], SamplingParams()))
    assert isinstance(terminal, RequestOutput)
    assert terminal.error == "no such language"


@pytest.mark.parametrize("token", [-1, 2048, 2**31 - 1])
def test_a_token_out_of_the_vocabulary_ends_only_its_request(token: int) -> None:
    core, runner = sim_core(SCRIPT)
    for request_id in (1, 2):
        core.add_request(Add(request_id, PROMPT, SamplingParams(seed=3, max_tokens=9)))
    core.step(list)
    core.step(list)
    tokens = np.array([token, 700], np.int32)
    runner.execute = lambda batch: StepResult(tokens)  # type: ignore[method-assign]
    outputs = {output.request_id: output for output in core.step(list)}
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert "vocabulary" in str(outputs[1].error)
    assert outputs[1].token_ids == []
    assert outputs[2].finish_reason is None
    core.check_integrity()


# Aborts --------------------------------------------------------------------------------------


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


# Several steps to a schedule ------------------------------------------------------------------


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


# Invariants and control ----------------------------------------------------------------------


def test_what_breaks_shared_state_is_fatal() -> None:
    core, _ = sim_core(SCRIPT)
    core.add_request(Add(1, PROMPT, SamplingParams(max_tokens=1)))
    core._pool.allocate(1)  # a leak
    with pytest.raises(InternalError, match="no request is left"):
        core.step(list)


def test_a_schedule_without_progress_is_fatal() -> None:
    core, _ = sim_core(SCRIPT)
    core.add_request(Add(1, PROMPT, SamplingParams()))
    core._pool.allocate(63)
    with pytest.raises(InternalError, match="nothing to schedule"):
        core.step(list)


def test_integrity_check_sees_a_lost_row() -> None:
    core, _ = sim_core(SCRIPT)
    core.add_request(Add(1, PROMPT, SamplingParams()))
    core.step(list)
    core._batch.remove(next(iter(core._batch.requests)))
    with pytest.raises(InternalError, match="rows"):
        core.call("check_integrity", {})


def test_reset_prefix_cache_under_load() -> None:
    core, _ = sim_core(SCRIPT)
    for request_id in (1, 2):
        params = SamplingParams(seed=3, max_tokens=30)
        core.add_request(Add(request_id, own_prompt(request_id), params))
    core.step(list)
    assert core.call("reset_prefix_cache", {}) == 2
    core.add_request(Add(3, own_prompt(1), SamplingParams(seed=3, max_tokens=30)))
    outputs = run(core)
    assert outputs[3].num_cached_tokens == 0
    assert outputs[1].token_ids == foretold(30)[1:]


def test_an_unknown_method_is_the_callers_fault() -> None:
    core, _ = sim_core(SCRIPT)
    with pytest.raises(InvalidRequestError, match="unknown method 'sleep'"):
        core.call("sleep", {})


def test_profile_under_load(tmp_path: Path) -> None:
    core, _ = sim_core(SCRIPT, profile_dir=tmp_path)
    core.add_request(Add(1, PROMPT, SamplingParams(max_tokens=20)))
    core.step(list)
    core.call("start_profile", {})
    core.step(list)
    result = core.call("stop_profile", {})
    assert isinstance(result, dict)
    assert (tmp_path / result["timeline"]).exists()
    assert len(run(core)[1].token_ids) == 18


# Cost ----------------------------------------------------------------------------------------


def python_calls(action: Callable[[], object]) -> int:
    """Return how many Python functions ``action`` calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def decoding_core(num_seqs: int) -> EngineCore:
    core, _ = sim_core(SimScript(num_blocks=512, max_model_len=200), max_num_seqs=num_seqs)
    for request_id in range(num_seqs):
        params = SamplingParams(max_tokens=100)
        core.add_request(Add(request_id, [500 + request_id] * 4, params))
    core.step(list)
    core.step(list)
    return core


def test_rows_that_only_decode_cost_no_python_before_the_runner() -> None:
    def calls(num_seqs: int) -> int:
        core = decoding_core(num_seqs)
        return python_calls(lambda: core._batch.build(core._schedule()))

    assert calls(8) == calls(64)


def test_a_token_costs_few_python_calls() -> None:
    def calls(num_seqs: int) -> int:
        core = decoding_core(num_seqs)
        return python_calls(lambda: core.step(list))

    assert (calls(64) - calls(8)) / (64 - 8) <= 5


def test_shutdown_closes_the_runner() -> None:
    core, runner = sim_core(SCRIPT)
    closed: list[bool] = []
    runner.close = lambda: closed.append(True)  # type: ignore[method-assign]
    core.shutdown()
    assert closed == [True]
