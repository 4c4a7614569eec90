"""How a sequence ends, and what its last delta says."""

from __future__ import annotations

import pytest

from helpers.core_runs import PROMPT, SCRIPT, foretold, run, words
from helpers.sim_core import sim_core
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams


def alone(params: SamplingParams, script: SimScript = SCRIPT) -> RequestOutput:
    core, _ = sim_core(script)
    assert core.add_request(Add(1, PROMPT, params)) is None
    return run(core)[1]


# How a sequence ends ------------------------------------------------------------------------------


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
