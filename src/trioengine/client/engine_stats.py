"""Turn what an engine says about itself into the server's gauges and counters.

An engine counts from its own start; the server's counters outlive it, so what is added is the rise
since the last word of the same incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.protocol import EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.metrics import Metrics
    from trioengine.protocol import EngineLimits

__all__ = ["StatsLedger"]


class StatsLedger:
    """Keeps the last word of the engine.

    Attributes:
        last: The last statistics; all zero before the first and after a death.
    """

    def __init__(self, metrics: Metrics, num_live: Callable[[], int]) -> None:
        """Export the engine's gauges.

        Args:
            metrics: Where everything is counted.
            num_live: Sequences whose end is not known, wherever they are. What does not run waits,
                also where the engine's own figures are a step old.
        """
        self.last = EngineStats()
        self._metrics = metrics
        self._num_live = num_live
        self._step = 0
        self._num_blocks = 0
        metrics.watch("requests_running", self._running)
        metrics.watch("requests_waiting", lambda: num_live() - self._running())
        metrics.watch("kv_blocks_total", lambda: self._num_blocks)
        metrics.watch("kv_blocks_free", self._free)
        metrics.watch("kv_blocks_cached", lambda: self.last.evictable_blocks)
        metrics.watch("kv_cache_usage_ratio", self._usage)

    def begin(self, limits: EngineLimits) -> None:
        """Take note of a new incarnation: empty, and counting from zero."""
        self._step = 0
        self._num_blocks = limits.num_blocks
        self.last = EngineStats(free_blocks=limits.num_blocks)

    def end(self) -> None:
        """Take note that there is no engine, hence no blocks and nothing running."""
        self._num_blocks = 0
        self.last = EngineStats()

    def note(self, step: int, stats: EngineStats) -> None:
        """Take in what came with the outputs of ``step`` (or outside one, with the last number)."""
        metrics, last = self._metrics, self.last
        metrics.prompt_tokens.inc(stats.prompt_tokens - last.prompt_tokens)
        metrics.generation_tokens.inc(stats.generation_tokens - last.generation_tokens)
        metrics.prefix_cache_queried_tokens.inc(
            stats.prefix_queried_tokens - last.prefix_queried_tokens
        )
        metrics.prefix_cache_hit_tokens.inc(stats.prefix_hit_tokens - last.prefix_hit_tokens)
        metrics.preemptions.inc(stats.preemptions - last.preemptions)
        metrics.aborts_ignored.inc(stats.aborts_ignored - last.aborts_ignored)
        if step != self._step:
            metrics.engine_step.observe(stats.step_seconds)
        self.last, self._step = stats, step

    def _running(self) -> int:
        return min(self.last.num_running, self._num_live())

    def _free(self) -> int:
        return self.last.free_blocks + self.last.evictable_blocks

    def _usage(self) -> float:
        return 1.0 - self._free() / self._num_blocks if self._num_blocks else 0.0
