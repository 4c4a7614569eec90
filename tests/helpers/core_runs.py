"""Runs of the engine core over the simulated runner, to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.sim_core import sim_core
from trioengine.engine_proc.sim_runner import SimScript, sim_tokens
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.engine_proc.core import EngineCore
    from trioengine.outputs import RequestOutput


__all__ = ["PROMPT", "SCRIPT", "foretold", "own_prompt", "run", "words"]


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


def foretold(count: int, seed: int = 3) -> list[int]:
    _, runner = sim_core(SCRIPT)
    tokens: list[int] = sim_tokens(seed, 1, range(20, 20 + count), runner.speakable).tolist()
    return tokens


def words(tokens: Sequence[int]) -> str:
    core, _ = sim_core(SCRIPT)
    text = core._intake._make_text(SamplingParams())
    return text.append(list(tokens))[0]
