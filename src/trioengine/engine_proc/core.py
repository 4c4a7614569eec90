"""The engine proper: schedule, execute, poll aborts, apply, detokenise; one list of deltas a step.

Theory of operation
-------------------
A request is live from ``add_request`` to its terminal, and there is exactly one place where it
leaves: ``_end``. Aborts arrive before ``schedule`` and once more between sampling and applying;
there they win: what was sampled for an aborted request is dropped, and its terminal is ``abort``
even where that token would have finished it.

A plan that is for several steps is executed that often before anybody looks at the tokens: they go
from one step to the next through the rows of the batch. What was sampled for a request after the
token that ended it is dropped, so an answer does not depend on how many steps a plan stands for.

What one request contains can only hurt that request: it ends with ``error``. What breaks the shared
state (a failing step, a block freed twice) raises, and the loop makes it fatal. A step for which
there is no memory has changed nothing yet: it is planned anew with half as many tokens, and only a
request whose single token does not fit ends with ``error``.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from trioengine.engine_proc.awaited_grammars import AwaitedGrammars
from trioengine.engine_proc.backend import LATER
from trioengine.engine_proc.deltas import error_output, extend, merged
from trioengine.engine_proc.executor import Executor
from trioengine.engine_proc.input_batch import InputBatch
from trioengine.engine_proc.intake import Intake
from trioengine.engine_proc.integrity import check_agreement
from trioengine.engine_proc.kv_cache.block_pool import BlockPool
from trioengine.engine_proc.kv_cache.manager import KVCacheManager
from trioengine.engine_proc.logprobs import note_scores, told_samples
from trioengine.engine_proc.profiling import Profiler, StepTimeline
from trioengine.engine_proc.request import Request, RequestEvent, RequestStatus, TextBuilder
from trioengine.engine_proc.scheduler import PREFILL_TOKENS_BESIDE_DECODES, Scheduler
from trioengine.errors import InternalError, InvalidRequestError, ProtocolError
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import EngineLimits, EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trioengine.engine_proc.backend import Later
    from trioengine.engine_proc.input_batch import BuiltStep
    from trioengine.engine_proc.runner import ModelRunner, StepResult
    from trioengine.engine_proc.scheduler import SchedulerOutput
    from trioengine.engine_proc.structured_output.compilations import Compilations
    from trioengine.protocol import Add
    from trioengine.sampling_params import SamplingParams

__all__ = ["EngineCore"]

log = logging.getLogger(__name__)


class EngineCore:
    """Fulfils ``EngineBackend`` over any ``ModelRunner``.

    Attributes:
        model: The runner's, its length limited to what the cache can hold.
        limits: How much it holds at once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        make_text: Callable[[SamplingParams], TextBuilder],
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        prefill_tokens_beside_decodes: int = PREFILL_TOKENS_BESIDE_DECODES,
        num_scheduler_steps: int = 1,
        seed: int = 0,
        grammars: Compilations | None = None,
        profile_dir: Path | None = None,
        timeline: StepTimeline | None = None,
    ) -> None:
        """Take over a loaded runner.

        Args:
            runner: Computes the steps; closed by ``shutdown``.
            make_text: Builds the detokenizer of one sequence.
            max_num_seqs: Most sequences that run at once.
            max_num_batched_tokens: Most tokens a step.
            enable_prefix_caching: Keep and match full blocks.
            prefill_tokens_beside_decodes: Most prompt tokens of a step in which anything decodes.
            num_scheduler_steps: Most decode steps between two looks at what was sampled.
            seed: Where the seeds of requests without one come from.
            grammars: Compiles what answers are to look like; ``None`` refuses such requests.
            profile_dir: Where profiles go; ``None`` refuses them.
            timeline: Told of every phase boundary; shared with the loop.

        Raises:
            ConfigError: The token budget is below ``max_num_seqs``.
        """
        block_size, num_blocks = runner.block_size, runner.num_blocks
        # One sequence never needs more blocks than there are: that would be a wait without end.
        max_model_len = min(runner.model.max_model_len, num_blocks * block_size)
        self.model = msgspec.structs.replace(runner.model, max_model_len=max_model_len)
        self.limits = EngineLimits(max_num_seqs, max_num_batched_tokens, block_size, num_blocks)
        self._timeline = StepTimeline() if timeline is None else timeline
        self._runner = runner
        self._profiler = Profiler(self._timeline, runner, profile_dir)
        self._intake = Intake(self.model, make_text, seed=seed)
        self._pool = BlockPool(num_blocks)
        self._caching = enable_prefix_caching
        kv_cache = KVCacheManager(
            self._pool, block_size, enable_prefix_caching=enable_prefix_caching
        )
        self._kv_cache = kv_cache
        self._scheduler = Scheduler(
            kv_cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_tokens_beside_decodes=prefill_tokens_beside_decodes,
            max_num_steps=num_scheduler_steps,
        )
        self._batch = InputBatch(max_num_seqs, kv_cache.num_blocks_for(max_model_len), block_size)
        self._grammars = AwaitedGrammars(grammars)
        self._executor = Executor(runner, self._batch, self._timeline)
        self._live: dict[int, Request] = {}
        self._generation_tokens = self._aborts_ignored = 0
        self._step_seconds = 0.0

    # Requests -------------------------------------------------------------------------------

    def add_request(self, add: Add) -> RequestOutput | Later | None:
        """Take a sequence into WAITING, or return its terminal error, or let its grammar compile.

        Raises:
            ProtocolError: The id is live already: the server has lost count.
        """
        if add.request_id in self._live:
            raise ProtocolError(f"request id {add.request_id} was added twice")
        try:
            request = self._intake.make_request(add)
            ready = self._grammars.give(request)
        except Exception as error:  # contained: nothing shared has been touched yet
            return error_output(add.request_id, error)
        self._live[add.request_id] = request
        if ready:
            self._scheduler.add(request)
            return None
        request.advance(RequestEvent.COMPILE)
        return LATER

    def settle(self) -> tuple[list[int], list[RequestOutput]]:
        """Take those whose grammar is there into WAITING; return them, and the errors of others."""
        accepted: list[int] = []
        refused: list[RequestOutput] = []
        for request, error in self._grammars.settle():
            if error is None:
                request.advance(RequestEvent.COMPILED)
                self._scheduler.add(request)
                accepted.append(request.request_id)
            else:
                self._end(request, FinishReason.ERROR)
                refused.append(error_output(request.request_id, error))
        return accepted, refused

    def has_news(self) -> bool:
        """True where a grammar has come, or will not."""
        return self._grammars.has_settled()

    def when_settled(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when there is news."""
        self._grammars.when_settled(wake)

    def abort(self, request_ids: Sequence[int]) -> list[RequestOutput]:
        """Free the blocks of these sequences now; return one terminal per live id."""
        outputs = []
        for request_id in request_ids:
            request = self._live.get(request_id)
            if request is None:
                self._aborts_ignored += 1
            else:
                self._end(request, FinishReason.ABORT)
                outputs.append(RequestOutput(request_id, finish_reason=FinishReason.ABORT))
        return outputs

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of everything, once."""
        if request.status is RequestStatus.COMPILING:
            self._grammars.withdraw(request)
        else:
            self._scheduler.forget(request)
        if request.row >= 0:
            self._batch.remove(request)
        request.finish(reason)
        del self._live[request.request_id]
        if not self._live:
            self._kv_cache.check_idle()

    @property
    def live_ids(self) -> frozenset[int]:
        """Ids of the requests that have not had their terminal."""
        return frozenset(self._live)

    # The step -------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """True while a sequence waits or runs; not for one whose grammar is being compiled."""
        return self._scheduler.has_requests()

    def step(self, poll_aborts: Callable[[], Sequence[int]]) -> list[RequestOutput]:
        """Schedule, execute, poll aborts, apply; return the deltas: at most one a request.

        Raises:
            InternalError: Nothing could be scheduled, although there is work.
            Exception: Whatever the runner raises; the engine's state is not to be trusted then.
        """
        begin_s = time.perf_counter()
        plan = self._schedule()
        parts = [plan, *map(plan.after, range(1, plan.num_steps))]
        executed, shortage = self._executor.run(parts)
        outputs = self.abort(poll_aborts())
        self._timeline.lap("poll aborts")
        if shortage is None:
            self._scheduler.relax()
        else:
            outputs += self._relieve(plan, shortage)
        for part, (built, result) in zip(parts, executed, strict=False):  # fewer in a shortage
            self._apply_computed(part)
            note_scores(built, result)
            self._apply_sampled(built, result, outputs)
        self._timeline.lap("apply")
        self._step_seconds = time.perf_counter() - begin_s
        return outputs if plan.num_steps == 1 else merged(outputs)

    def _schedule(self) -> SchedulerOutput:
        plan = self._scheduler.schedule()
        if not plan.decodes and not plan.prefills:
            raise InternalError(f"nothing to schedule, with {len(self._live)} requests live")
        for request in plan.preempted:
            self._batch.remove(request)
        for request in plan.grown:
            self._batch.note_growth(request)
        for request in plan.admitted:
            self._batch.add(request)
        self._timeline.lap("schedule")
        return plan

    def _relieve(self, plan: SchedulerOutput, shortage: MemoryError) -> list[RequestOutput]:
        """Plan smaller steps from now on; where none is smaller, end the one request that is in it.

        Nobody is preempted: the cache is not what is short of memory.
        """
        if not self._scheduler.retrench():
            log.warning("no memory for a step of %d tokens: %s", plan.num_tokens, shortage)
        if plan.num_tokens > 1:
            return []
        (request,) = [*plan.decodes, *(chunk.request for chunk in plan.prefills)]
        if request.status is not RequestStatus.RUNNING:
            return []  # aborted in the meantime
        self._end(request, FinishReason.ERROR)
        return [error_output(request.request_id, shortage)]

    def _apply_computed(self, plan: SchedulerOutput) -> None:
        """Note what is in the cache now (for a request aborted since, nobody looks)."""
        for request in plan.decodes:
            request.num_computed += 1
        for chunk in plan.prefills:
            request = chunk.request
            if request.status is RequestStatus.RUNNING:
                request.decoding = chunk.is_last
                request.num_computed += chunk.num_tokens
                self._kv_cache.seal(request)

    def _apply_sampled(
        self, built: BuiltStep, result: StepResult, outputs: list[RequestOutput]
    ) -> None:
        """Add to ``outputs`` one delta for each request that is still there, ending some."""
        tokens = result.tokens[: len(built.sampled)].tolist()
        told = told_samples(built, result)
        before, tokenless = len(outputs), 0
        for request, token, logprob in zip(built.sampled, tokens, told, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted since, or ended by an earlier token
            try:
                output = extend(request, token, logprob)
            except Exception as error:  # contained: only this request's own text was touched
                output = error_output(request.request_id, error)
            if output.finish_reason is not None:
                self._end(request, output.finish_reason)
                tokenless += not output.token_ids
            outputs.append(output)
        self._generation_tokens += len(outputs) - before - tokenless

    # Control --------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(self._live) - len(scheduler.running),
            free_blocks=self._pool.num_blank,
            evictable_blocks=self._pool.num_evictable,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_queried_tokens=scheduler.prompt_tokens if self._caching else 0,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.num_preemptions,
            aborts_ignored=self._aborts_ignored,
            step_seconds=self._step_seconds,
        )

    def call(self, method: str, args: dict[str, object]) -> object:
        """Run a control method: ours, or one of the runner's.

        Raises:
            InvalidRequestError: Neither knows it, or it cannot be done now.
        """
        if method == "start_profile":
            self._profiler.start()
            return None
        if method == "stop_profile":
            return self._profiler.stop()
        if method == "reset_prefix_cache":
            return self._pool.reset_cache()
        if method == "check_integrity":
            self.check_integrity()
            return None
        try:
            return self._runner.call(method, args)
        except KeyError as error:
            raise InvalidRequestError(f"unknown method {method!r}") from error

    def check_integrity(self) -> None:
        """Check that blocks, queues and rows agree.

        Raises:
            InternalError: They do not; the message says how.
        """
        self._pool.check_integrity()
        check_agreement(self._scheduler, self._batch, self._pool, self._live.values())

    def shutdown(self) -> None:
        """Free the runner's weights and cache, and let compilers and threads go."""
        self._executor.close()
        self._grammars.close()
        self._runner.close()
