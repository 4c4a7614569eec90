"""Counting never raises, scraping speaks Prometheus, and observing costs next to nothing."""

from __future__ import annotations

import math
import timeit
from typing import TYPE_CHECKING, get_args

import pytest
import trio
from hypothesis import given
from hypothesis.strategies import floats, lists
from prometheus_client.parser import text_string_to_metric_families

from trioengine.metrics import AbortReason, Counter, Histogram, Metrics, watch_event_loop

if TYPE_CHECKING:
    from trio.testing import MockClock

CONTRACT = [
    "requests_running",
    "requests_waiting",
    "kv_cache_usage_ratio",
    "kv_blocks_free",
    "kv_blocks_total",
    "open_connections",
    "engine_state",
    "engine_step_age_seconds",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queried_tokens_total",
    "prefix_cache_hit_tokens_total",
    "requests_total",
    "requests_aborted_total",
    "aborts_ignored_total",
    "aborts_unconfirmed_total",
    "requests_rejected_total",
    "preemptions_total",
    "engine_restarts_total",
    "deltas_merged_total",
    "abort_latency_seconds_count",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_latency_seconds_count",
    "queue_time_seconds_count",
    "engine_step_seconds_count",
    "event_loop_lag_seconds_count",
]

GAUGES = [
    "requests_running",
    "requests_waiting",
    "kv_cache_usage_ratio",
    "kv_blocks_free",
    "kv_blocks_total",
    "open_connections",
    "engine_step_age_seconds",
]


def scrape(metrics: Metrics) -> dict[str, float]:
    """Return every sample by its full name, labels included, as a scraper parses it."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_every_name_of_the_contract_is_exported() -> None:
    metrics = Metrics()
    for gauge in GAUGES:
        metrics.watch(gauge, lambda: 1.0)
    metrics.watch_state(lambda: "ready", ["starting", "ready"])
    metrics.requests.inc("completions", "ok")
    metrics.requests_rejected.inc("overloaded")
    exported = {name.split("{")[0] for name in scrape(metrics)}
    assert {f"trioengine_{name}" for name in CONTRACT} <= exported
    assert metrics.content_type.startswith("text/plain")


def test_no_created_series() -> None:
    assert b"_created" not in Metrics().render()


def test_counters_and_labels() -> None:
    metrics = Metrics()
    metrics.prompt_tokens.inc(7)
    metrics.prompt_tokens.inc()
    metrics.requests.inc("chat", "ok")
    metrics.requests.inc("chat", "ok")
    metrics.requests.inc("chat", 'a "quoted"\nvalue')
    metrics.requests_aborted.inc("deadline")
    samples = scrape(metrics)
    assert samples["trioengine_prompt_tokens_total"] == 8
    assert samples["trioengine_requests_total{endpoint=chat,outcome=ok}"] == 2
    assert metrics.requests.total == 3
    aborted = {
        reason: samples[f"trioengine_requests_aborted_total{{reason={reason}}}"]
        for reason in get_args(AbortReason)
    }
    assert aborted == dict.fromkeys(get_args(AbortReason), 0.0) | {"deadline": 1.0}


@pytest.mark.parametrize("amount", [-1, math.nan, math.inf, -math.inf])
def test_counter_that_would_fall_is_clamped_and_counted(amount: float) -> None:
    metrics = Metrics()
    metrics.generation_tokens.inc(3)
    metrics.generation_tokens.inc(amount)
    samples = scrape(metrics)
    assert samples["trioengine_generation_tokens_total"] == 3
    assert samples["trioengine_metrics_errors_total"] == 1


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf])
def test_histogram_clamps_nonsense_and_counts_it(value: float) -> None:
    metrics = Metrics()
    metrics.abort_latency.observe(value)
    samples = scrape(metrics)
    assert samples["trioengine_abort_latency_seconds_count"] == 1
    assert samples["trioengine_abort_latency_seconds_sum"] == 0
    assert samples["trioengine_metrics_errors_total"] == 1


@given(lists(floats(0, 100), max_size=30))
def test_histogram_counts_each_value_in_the_bucket_that_bounds_it(values: list[float]) -> None:
    bounds = (0.01, 0.1, 1.0, 10.0)
    histogram = Histogram(bounds, Counter())
    for value in values:
        histogram.observe(value)
    for i, bound in enumerate(bounds):
        assert sum(histogram.counts[: i + 1]) == sum(value <= bound for value in values)
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_bounds_are_inclusive_and_the_last_bucket_has_everything() -> None:
    metrics = Metrics()
    for value in (0.001, 0.0011, 1000.0):
        metrics.inter_token_latency.observe(value)
    samples = scrape(metrics)
    name = "trioengine_inter_token_latency_seconds_bucket"
    assert samples[f"{name}{{le=0.001}}"] == 1
    assert samples[f"{name}{{le=0.0025}}"] == 2
    assert samples[f"{name}{{le=+Inf}}"] == 3


def test_gauges_are_read_on_each_scrape() -> None:
    metrics, connections = Metrics(), [1]
    assert "trioengine_open_connections" not in scrape(metrics)
    metrics.watch("open_connections", lambda: len(connections))
    assert scrape(metrics)["trioengine_open_connections"] == 1
    connections.append(2)
    assert scrape(metrics)["trioengine_open_connections"] == 2


def test_gauge_that_raises_spoils_nothing_else() -> None:
    metrics = Metrics()

    def broken() -> float:
        raise RuntimeError("no heartbeat page")

    metrics.watch("engine_step_age_seconds", broken)
    metrics.watch("open_connections", lambda: 3)
    samples = scrape(metrics)
    assert "trioengine_engine_step_age_seconds" not in samples
    assert samples["trioengine_open_connections"] == 3
    assert metrics.errors.value == 1


def test_unknown_gauge_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match="open_conections"):
        Metrics().watch("open_conections", lambda: 0)


def test_state_is_one_hot() -> None:
    metrics, state = Metrics(), "starting"
    metrics.watch_state(lambda: state, ["starting", "ready", "dead"])
    state = "dead"
    samples = scrape(metrics)
    states = [
        samples[f"trioengine_engine_state{{state={s}}}"] for s in ("starting", "ready", "dead")
    ]
    assert states == [0, 0, 1]


async def test_event_loop_lag(autojump_clock: MockClock) -> None:
    metrics = Metrics()
    with trio.move_on_after(1.1):
        await watch_event_loop(metrics)
    assert metrics.event_loop_lag.count == 4
    assert metrics.event_loop_lag.sum == pytest.approx(0)


@pytest.mark.slow
def test_observing_costs_a_microsecond_at_most() -> None:
    """The best of many: what the code costs, not what else the machine does."""
    observe = Metrics().inter_token_latency.observe
    best_s = min(timeit.repeat(lambda: observe(0.02), number=2000, repeat=25)) / 2000
    assert best_s < 2e-6  # 0.25 µs on the machine it was written on
