"""What an executor leaves behind when a step fails."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from helpers.sim_core import sim_core
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    import pytest

    from trioengine.engine_proc.runner import StepBatch


def test_nobody_fills_a_mask_any_more_when_its_step_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, runner = sim_core()
    shape = StructuredOutput("regex", "[ab]{9}")
    core.add_request(Add(0, [300], SamplingParams(structured=shape)))
    core.settle()
    state = core._live[0].grammar
    assert state is not None
    filled = []

    class Slow:
        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            hashlib.sha256(bytes(20_000_000))  # without the GIL: whoever does not wait is sooner
            filled.append(size)

    def execute(batch: StepBatch) -> None:
        raise MemoryError("none")

    monkeypatch.setattr(state, "matcher", Slow())
    monkeypatch.setattr(runner, "execute", execute)
    [output] = core.step(list)
    assert output.finish_reason is FinishReason.ERROR
    assert filled == [256]
    core.shutdown()
