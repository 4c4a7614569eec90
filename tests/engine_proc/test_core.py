"""What the engine counts, keeps, takes orders for, and what a step costs it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from helpers.core_runs import PROMPT, SCRIPT, foretold, own_prompt, run
from helpers.sim_core import sim_core
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import InternalError, InvalidRequestError
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trioengine.engine_proc.core import EngineCore


# Cached tokens, counters --------------------------------------------------------------------------


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


# Invariants and control ---------------------------------------------------------------------------


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


# Cost ---------------------------------------------------------------------------------------------


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
