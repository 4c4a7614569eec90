"""Ten million steps of the real core over the simulated runner: nothing grows, nothing is lost."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Final

import pytest

from helpers.churn import resident_bytes
from helpers.sim_core import sim_core
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.core import EngineCore

pytestmark = pytest.mark.soak

STEPS: Final = int(os.environ.get("TRIOENGINE_SOAK_STEPS", "10_000_000"))
CHECK_EVERY: Final = 10_000  # steps
GROWTH: Final = 1.02
MOST_LIVE: Final = 10
NUM_BLOCKS: Final = 28  # of four tokens: four sequences of 64 do not fit, so some are preempted


class Crowd:
    """Random arrivals and aborts, and the count of what became of them."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core = core
        self.random = random.Random(seed)
        self.added = self.ended = 0

    def arrive(self) -> None:
        """Add one request: a prompt of a few kinds, so that prefixes are shared."""
        draw = self.random.random
        self.added += 1
        prompt = [300 + int(draw() * 9)] * (1 + int(draw() * 40))
        params = SamplingParams(max_tokens=1 + int(draw() * 24), temperature=1.0)
        add = Add(self.added, prompt, params, int(draw() * 3))
        assert self.core.add_request(add) is None

    def victims(self) -> list[int]:
        """Return whom to abort within this step: mostly nobody, at times somebody unknown."""
        if self.random.random() > 0.03:
            return []
        return [self.added - int(self.random.random() * MOST_LIVE)]

    def step(self) -> None:
        """Let somebody come, or not, and run one step."""
        live = self.added - self.ended
        if not live or (live < MOST_LIVE and self.random.random() < 0.25):
            self.arrive()
        for output in self.core.step(self.victims):
            self.ended += output.finish_reason is not None


@pytest.mark.parametrize("num_scheduler_steps", [1, 3])
def test_millions_of_steps_leave_nothing_behind(num_scheduler_steps: int) -> None:
    core, _ = sim_core(
        SimScript(num_blocks=NUM_BLOCKS, max_model_len=64),
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefill_tokens_beside_decodes=16,
        num_scheduler_steps=num_scheduler_steps,
    )
    crowd = Crowd(core, seed=num_scheduler_steps)
    steps, baseline = STEPS // 2, 0
    for number in range(steps):
        crowd.step()
        if number % CHECK_EVERY == 0:
            core.check_integrity()
            if number * 10 <= steps:
                baseline = resident_bytes()
    while core.has_work():
        crowd.ended += sum(output.finish_reason is not None for output in core.step(list))
    core.check_integrity()
    stats = core.stats()
    assert crowd.ended == crowd.added
    assert stats.free_blocks + stats.evictable_blocks == NUM_BLOCKS
    assert stats.preemptions > steps / 10_000
    assert resident_bytes() < baseline * GROWTH
