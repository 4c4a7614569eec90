"""An engine's counts become the server's, across incarnations and whatever it says."""

from __future__ import annotations

from trioengine.client.engine_stats import StatsLedger
from trioengine.metrics import Metrics
from trioengine.protocol import EngineLimits, EngineStats

LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, block_size=16, num_blocks=100)


def gauge(metrics: Metrics, name: str) -> float:
    for line in metrics.render().decode().splitlines():
        if line.startswith(f"trioengine_{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no gauge {name}")


def test_counters_rise_by_what_is_new_and_survive_the_incarnation() -> None:
    metrics = Metrics()
    ledger = StatsLedger(metrics, lambda: 0)
    ledger.begin(LIMITS)
    ledger.note(1, EngineStats(prompt_tokens=10, generation_tokens=1, preemptions=1))
    ledger.note(2, EngineStats(prompt_tokens=15, generation_tokens=4, aborts_ignored=2))
    ledger.end()
    ledger.begin(LIMITS)
    ledger.note(1, EngineStats(prompt_tokens=3, prefix_queried_tokens=3, prefix_hit_tokens=2))
    assert metrics.prompt_tokens.value == 18
    assert metrics.generation_tokens.value == 4
    assert metrics.prefix_cache_queried_tokens.value == 3
    assert metrics.prefix_cache_hit_tokens.value == 2
    assert metrics.aborts_ignored.value == 2


def test_engine_that_counts_backwards_hurts_nobody() -> None:
    metrics = Metrics()
    ledger = StatsLedger(metrics, lambda: 0)
    ledger.begin(LIMITS)
    ledger.note(1, EngineStats(preemptions=3))
    ledger.note(2, EngineStats(preemptions=1))
    ledger.note(3, EngineStats(preemptions=2))
    assert metrics.preemptions.value == 4
    assert metrics.errors.value == 1


def test_each_step_is_observed_once() -> None:
    metrics = Metrics()
    ledger = StatsLedger(metrics, lambda: 0)
    ledger.begin(LIMITS)
    for step in (1, 2, 2, 3):  # an abort was confirmed between steps 2 and 3
        ledger.note(step, EngineStats(step_seconds=0.02))
    assert metrics.engine_step.count == 3


def test_gauges_tell_where_blocks_and_sequences_are() -> None:
    metrics, live = Metrics(), [5]
    ledger = StatsLedger(metrics, lambda: live[0])
    assert gauge(metrics, "kv_cache_usage_ratio") == 0  # no engine yet
    ledger.begin(LIMITS)
    assert gauge(metrics, "kv_blocks_free") == gauge(metrics, "kv_blocks_total") == 100
    ledger.note(1, EngineStats(num_running=3, free_blocks=60, evictable_blocks=15))
    assert gauge(metrics, "requests_running") == 3
    assert gauge(metrics, "requests_waiting") == 2
    assert gauge(metrics, "kv_blocks_free") == 75
    assert gauge(metrics, "kv_blocks_cached") == 15
    assert gauge(metrics, "kv_cache_usage_ratio") == 0.25
    live[0] = 0  # nobody is owed anything, whatever the engine said last
    assert gauge(metrics, "requests_running") == gauge(metrics, "requests_waiting") == 0
    ledger.end()
    assert gauge(metrics, "kv_blocks_total") == gauge(metrics, "kv_blocks_free") == 0
