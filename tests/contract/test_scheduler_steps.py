"""Several steps to a schedule change no answer, whatever computes them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from helpers.requests import Spelling
from helpers.tiny_models import VOCAB
from trioengine.engine_proc.core import EngineCore
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.runner import ModelRunner

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}


def answers(
    runner: ModelRunner, requests: list[SamplingParams], num_steps: int
) -> tuple[dict[int, RequestOutput], int]:
    """Run requests side by side; return what each got, and how many steps the core took."""
    core = EngineCore(runner, lambda params: Spelling(), num_scheduler_steps=num_steps)
    for request_id, params in enumerate(requests):
        prompt = random.Random(request_id).choices(range(1, VOCAB), k=5 + 4 * request_id)
        assert core.add_request(Add(request_id, prompt, params)) is None
    merged: dict[int, RequestOutput] = {}
    steps = 0
    while core.has_work():
        steps += 1
        for delta in core.step(list):
            if (earlier := merged.setdefault(delta.request_id, delta)) is not delta:
                earlier.merge(delta)
    core.check_integrity()
    return merged, steps


@pytest.mark.parametrize("num_steps", [2, 3, 8])
def test_the_number_of_steps_changes_no_answer(runner: ModelRunner, num_steps: int) -> None:
    plain, _ = answers(runner, [SamplingParams(max_tokens=12, **GREEDY)], 1)
    fifth = plain[0].token_ids[4]
    requests = [
        SamplingParams(max_tokens=12, **GREEDY),
        SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=5),
        SamplingParams(max_tokens=7, temperature=1.0, seed=6, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(fifth,)),
        SamplingParams(max_tokens=12, min_tokens=9, temperature=0.0, stop_token_ids=(fifth,)),
        SamplingParams(max_tokens=1, **GREEDY),
    ]
    expected, many = answers(runner, requests, 1)
    got, few = answers(runner, requests, num_steps)
    assert got == expected
    assert few < many


@pytest.mark.parametrize("num_steps", [2, 4])
def test_a_stop_in_the_middle_drops_what_came_after_it(runner: ModelRunner, num_steps: int) -> None:
    plain, _ = answers(runner, [SamplingParams(max_tokens=12, **GREEDY)], 1)
    tokens = plain[0].token_ids
    at = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
    params = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(tokens[at],))
    got, _ = answers(runner, [params], num_steps)
    assert got[0].token_ids == tokens[: at + 1]
    assert got[0].finish_reason is FinishReason.STOP


def test_every_token_keeps_its_own_logprob(runner: ModelRunner) -> None:
    """Also where others have left the batch between two steps of one plan."""
    requests = [
        SamplingParams(max_tokens=11, logprobs=2, **GREEDY),
        SamplingParams(max_tokens=2, logprobs=1, **GREEDY),
        SamplingParams(max_tokens=5, **GREEDY),
    ]
    expected, _ = answers(runner, requests, 1)
    got, _ = answers(runner, requests, 4)
    for request_id in (0, 1):
        told = got[request_id].logprobs or []
        assert [entry.token_id for entry in told] == got[request_id].token_ids
        scores = [entry.logprob for entry in expected[request_id].logprobs or []]
        assert [entry.logprob for entry in told] == pytest.approx(scores, abs=1e-4)
    assert got[2].logprobs is None
