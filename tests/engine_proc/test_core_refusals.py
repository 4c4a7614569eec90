"""What cannot be served ends by itself and costs nobody else anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.core_runs import PROMPT, SCRIPT, run
from helpers.faithful_runner import FaithfulRunner
from helpers.requests import Spelling
from helpers.sim_core import sim_core
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.runner import StepResult
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import ProtocolError
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


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
