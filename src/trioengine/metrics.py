"""Every metric of the server, in one place, on a registry of its own.

The data path touches plain numbers only: a counter is an attribute, a histogram one bisection. They
become Prometheus families when somebody scrapes. Nothing here raises into the data path: a negative
or non-finite value is clamped to zero and counted in ``trioengine_metrics_errors_total``, because a
wrong figure is not worth a request. No ``_created`` series.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Literal, get_args

import trio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import NoReturn

    from prometheus_client import Metric

__all__ = ["AbortReason", "Counter", "Histogram", "LabelledCounter", "Metrics", "watch_event_loop"]

AbortReason = Literal[
    "client_disconnect", "cancelled", "deadline", "queue_timeout", "slow_client", "shutdown"
]

PREFIX: Final = "trioengine_"
LAG_EVERY_S: Final = 0.25

# Upper bounds of buckets, seconds.
_FAST: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    5.0,
)
_REQUESTS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

_GAUGES: Final = {
    "requests_running": "Sequences in the engine's running batch.",
    "requests_waiting": "Sequences that wait, in the server's queue or in the engine's.",
    "kv_cache_usage_ratio": "Share of the KV-cache blocks that running sequences hold.",
    "kv_blocks_free": "KV-cache blocks that can be allocated, cached ones included.",
    "kv_blocks_cached": "Free KV-cache blocks that still hold a reusable prefix.",
    "kv_blocks_total": "KV-cache blocks.",
    "open_connections": "Open HTTP connections.",
    "engine_step_age_seconds": "How long the engine's current step has been running.",
}


class Counter:
    """A number that only rises."""

    __slots__ = ("_errors", "value")

    def __init__(self, errors: Counter | None = None) -> None:
        """Begin at zero; ``errors`` counts what is refused (by default, itself)."""
        self.value = 0.0
        self._errors = self if errors is None else errors

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``; what would make it fall or not a number is counted as an error."""
        if 0 <= amount < math.inf:
            self.value += amount
        else:
            self._errors.value += 1


class LabelledCounter:
    """A counter for each combination of label values. The values come from us, not from clients."""

    __slots__ = ("labels", "values")

    def __init__(self, labels: Sequence[str], preset: Iterable[str] = ()) -> None:
        """Begin empty, or, with one label, with a zero for each of ``preset``."""
        self.labels = tuple(labels)
        self.values: dict[tuple[str, ...], float] = {(value,): 0.0 for value in preset}

    def inc(self, *label_values: str) -> None:
        """Add one to the counter of these label values, in the order of ``labels``."""
        self.values[label_values] = self.values.get(label_values, 0.0) + 1

    @property
    def total(self) -> float:
        """All of them together."""
        return sum(self.values.values())


class Histogram:
    """Counts values by bucket; ``bounds`` are inclusive upper bounds in seconds, rising."""

    __slots__ = ("_errors", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], errors: Counter) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._errors = errors

    def observe(self, value: float) -> None:
        """Count one value; it is on the path of every delta, so it does next to nothing."""
        if not 0.0 <= value < math.inf:
            self._errors.value += 1
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


class Metrics(Collector):
    """The metric objects. Attributes have the public names without prefix, unit and ``_total``.

    ``requests_aborted`` counts HTTP requests that were closed while the engine owed them tokens;
    ``abort_latency`` has one value for each of them, once the engine has confirmed, and
    ``aborts_unconfirmed`` counts those whose engine ended first. What is missing then is still to
    be confirmed.
    """

    def __init__(self) -> None:
        self._families: list[tuple[str, str, Counter | LabelledCounter | Histogram]] = []
        self._gauges: dict[str, Callable[[], float]] = {}
        self._state: Callable[[], str] | None = None
        self._states: tuple[str, ...] = ()
        self.errors = Counter()
        self._add("metrics_errors", "Values that made no sense and were clamped.", self.errors)
        self._make_counters()
        self._make_labelled_counters()
        self._make_histograms()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.content_type = CONTENT_TYPE_LATEST

    def _make_counters(self) -> None:
        counter = self._counter
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens taken by the engine.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.prefix_cache_queried_tokens = counter(
            "prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_cache_hit_tokens = counter(
            "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self.aborts_ignored = counter(
            "aborts_ignored", "Aborts of sequences that the engine no longer held."
        )
        self.aborts_unconfirmed = counter(
            "aborts_unconfirmed", "Aborted HTTP requests whose engine ended before it confirmed."
        )
        self.preemptions = counter(
            "preemptions", "Sequences whose blocks were taken back for others."
        )
        self.engine_restarts = counter("engine_restarts", "Engines started after the first.")
        self.deltas_merged = counter(
            "deltas_merged", "Deltas appended to one that its consumer had not taken yet."
        )

    def _make_labelled_counters(self) -> None:
        self.requests = self._labelled(
            "requests", "HTTP requests by how they ended.", ("endpoint", "outcome")
        )
        self.requests_aborted = self._labelled(
            "requests_aborted",
            "HTTP requests that ended before their tokens did, by why.",
            ("reason",),
            get_args(AbortReason),
        )
        self.requests_rejected = self._labelled(
            "requests_rejected", "HTTP requests refused before the engine heard of them.", ("code",)
        )
        self.deltas_dropped = self._labelled(
            "deltas_dropped",
            "Deltas nobody wanted: late ones of an aborted sequence, or of no known one.",
            ("reason",),
            ("aborted", "unknown"),
        )

    def _make_histograms(self) -> None:
        histogram = self._histogram
        self.abort_latency = histogram(
            "abort_latency_seconds", "From the close of a request to the engine's word.", _FAST
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token, by request.", _REQUESTS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two deltas of a sequence.", _TOKENS
        )
        self.request_latency = histogram(
            "request_latency_seconds", "From arrival to the last token of a request.", _REQUESTS
        )
        self.queue_time = histogram(
            "queue_time_seconds", "Of a sequence in the server's queue.", _REQUESTS
        )
        self.engine_step = histogram("engine_step_seconds", "Of one engine step.", _FAST)
        self.event_loop_lag = histogram(
            "event_loop_lag_seconds", "How much too late the server's event loop woke up.", _FAST
        )

    def watch(self, gauge: str, read: Callable[[], float]) -> None:
        """Export a gauge, read on each scrape.

        Args:
            gauge: Name without prefix.
            read: Cheap, synchronous. Where it raises, the gauge is left out of that scrape and the
                error counted.

        Raises:
            KeyError: There is no such gauge.
        """
        if gauge not in _GAUGES:
            raise KeyError(gauge)
        self._gauges[gauge] = read

    def watch_state(self, read: Callable[[], str], states: Iterable[str]) -> None:
        """Export ``engine_state{state}``, 1 for what ``read`` returns and 0 for the others."""
        self._state, self._states = read, tuple(states)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format, of type ``content_type``."""
        return generate_latest(self.registry)

    # Scraping -------------------------------------------------------------------------------

    def describe(self) -> Iterator[Metric]:
        """Say nothing: the registry is ours alone, names can't clash."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its values of now."""
        yield from self._collect_gauges()
        if self._state is not None:
            yield self._collect_state(self._state())
        for name, text, metric in self._families:
            if isinstance(metric, Histogram):
                yield _histogram_family(name, text, metric)
            elif isinstance(metric, LabelledCounter):
                labelled = CounterMetricFamily(name, text, labels=metric.labels)
                for values, count in metric.values.items():
                    labelled.add_metric(values, count)
                yield labelled
            else:
                yield CounterMetricFamily(name, text, value=metric.value)

    def _collect_gauges(self) -> Iterator[Metric]:
        for gauge, read in self._gauges.items():
            try:
                value = float(read())
            except Exception:  # a scrape must not fail for one source
                self.errors.inc()
                continue
            yield GaugeMetricFamily(PREFIX + gauge, _GAUGES[gauge], value=value)

    def _collect_state(self, now: str) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + "engine_state", "State of the engine.", labels=["state"]
        )
        for state in self._states:
            family.add_metric([state], float(state == now))
        return family

    # Building -------------------------------------------------------------------------------

    def _add(self, name: str, text: str, metric: Counter | LabelledCounter | Histogram) -> None:
        self._families.append((PREFIX + name, text, metric))

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(self.errors)
        self._add(name, text, counter)
        return counter

    def _labelled(
        self, name: str, text: str, labels: Sequence[str], preset: Iterable[str] = ()
    ) -> LabelledCounter:
        counter = LabelledCounter(labels, preset)
        self._add(name, text, counter)
        return counter

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(bounds, self.errors)
        self._add(name, text, histogram)
        return histogram


def _histogram_family(name: str, text: str, histogram: Histogram) -> Metric:
    buckets, so_far = [], 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        so_far += count
        buckets.append(("+Inf" if bound == math.inf else repr(bound), so_far))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets, histogram.sum)
    return family


async def watch_event_loop(metrics: Metrics) -> NoReturn:
    """Observe, four times a second, how much too late the event loop wakes a task."""
    while True:
        due_s = trio.current_time() + LAG_EVERY_S
        await trio.sleep_until(due_s)
        metrics.event_loop_lag.observe(trio.current_time() - due_s)
