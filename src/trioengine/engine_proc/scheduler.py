"""What to compute in the next step: a pure function of who waits, who runs and what is free.

Theory of operation
-------------------
Both queues are kept in order of rank (priority, then arrival). One step is made up in three passes:

1. *Decodes.* Every decoding request computes its one token. One that needs a block while none is
   free preempts the running request of the worst rank, itself at the last; the victim keeps its
   tokens, loses its blocks, and waits again at its old rank.
2. *Prefill chunks* of those admitted earlier, in order.
3. *Admissions*, in order and without overtaking, while there is a seat, token budget, and room for
   every token of the newcomer beside a block for each request that runs; and unless it begins with
   a prefix that a running request is just computing.

While anything decodes, all prefill chunks of a step together are kept modest, so that a long prompt
does not stretch the time between other people's tokens.

Where nothing but decodes is left to do, the plan may stand for several steps, each feeding the next
its tokens: with room in the cache for all of them, taken from free blocks only and without
preempting anybody for it. A request whose length ends it earlier takes part in that many steps.

Where a step found no memory (``retrench``), the next has half its tokens, the worst ranks sitting
it out with all that they hold, and those after it grow back little by little (``relax``).

Why it never stalls: the running request of the best rank is nobody's victim, a request fits the
pool on its own (``EngineCore`` refuses others), and with nobody running no prefix is coming and the
head of the queue is always admitted. So every non-empty state schedules at least one token.
"""

from __future__ import annotations

import bisect
import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from trioengine.engine_proc.request import Request, RequestEvent, RequestStatus
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioengine.engine_proc.kv_cache.manager import KVCacheManager

__all__ = [
    "PREFILL_TOKENS_BESIDE_DECODES",
    "PrefillChunk",
    "RankedQueue",
    "Scheduler",
    "SchedulerOutput",
]

PREFILL_TOKENS_BESIDE_DECODES: Final = 256

_rank = attrgetter("rank")


class RankedQueue:
    """Requests in order of rank. Ranks are unique, since the arrival number is part of them."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        bisect.insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be there."""
        del self._requests[bisect.bisect_left(self._requests, request.rank, key=_rank)]


@dataclasses.dataclass(slots=True)
class PrefillChunk:
    """Compute ``num_tokens`` tokens of ``request`` from its ``num_computed`` on."""

    request: Request
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """True where the chunk reaches the newest token, so that one is sampled after it."""
        return self.request.num_computed + self.num_tokens == len(self.request.tokens)


@dataclasses.dataclass(slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        decodes: Requests that compute their last token, in order of rank.
        prefills: Chunks, at most one a request.
        admitted: Requests that have begun to run (they hold blocks and need a row).
        preempted: Requests that have ceased to run.
        grown: Requests that got more blocks.
        num_steps: How often to decode before the next plan; 1 with any prefill.
    """

    decodes: list[Request] = dataclasses.field(default_factory=list)
    prefills: list[PrefillChunk] = dataclasses.field(default_factory=list)
    admitted: list[Request] = dataclasses.field(default_factory=list)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    grown: list[Request] = dataclasses.field(default_factory=list)
    num_steps: int = 1

    def after(self, steps: int) -> SchedulerOutput:
        """Return what is left of the plan after so many of its steps."""
        decodes = [request for request in self.decodes if request.tokens_left > steps]
        return SchedulerOutput(decodes)

    @property
    def num_tokens(self) -> int:
        """Tokens that its first step computes."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.prefills)


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Does no I/O.

    Attributes:
        waiting: Not yet admitted, or preempted.
        running: Holding blocks.
        num_preemptions: Since the start.
        prompt_tokens: Prompt tokens of all requests admitted since the start.
        prefix_hit_tokens: How many of them the prefix cache had.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_tokens_beside_decodes: int = PREFILL_TOKENS_BESIDE_DECODES,
        max_num_steps: int = 1,
    ) -> None:
        """Begin with nothing.

        Raises:
            ConfigError: The token budget would not cover one token of every running request.
        """
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({max_num_seqs}), and that at least 1"
            )
        if prefill_tokens_beside_decodes < 1:
            raise ConfigError("prefill_tokens_beside_decodes must be at least 1")
        if max_num_steps < 1:
            raise ConfigError("max_num_steps must be at least 1")
        self.kv_cache = kv_cache
        self.waiting = RankedQueue()
        self.running = RankedQueue()
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefill_tokens_beside_decodes = prefill_tokens_beside_decodes
        self._max_num_steps = max_num_steps
        self._last_num_tokens = 0
        self._token_cap = max_num_batched_tokens  # lower for some time after a shortage

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self.waiting.add(request)

    def has_requests(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.running) or bool(self.waiting)

    def forget(self, request: Request) -> None:
        """Take a request that is about to finish out of its queue, and its blocks from it."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv_cache.free(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step; admissions and preemptions have happened when it returns."""
        plan = SchedulerOutput()
        self._plan_decodes(plan)
        budget = self._token_cap - len(plan.decodes)
        if plan.decodes:
            budget = min(budget, self._prefill_tokens_beside_decodes)
        budget = self._plan_prefills(plan, budget)
        if not plan.preempted:
            self._plan_admissions(plan, budget)
        if self._max_num_steps > 1 and not plan.prefills:
            self._plan_ahead(plan)
        self._last_num_tokens = plan.num_tokens
        return plan

    def retrench(self) -> bool:
        """There was no memory for the step last planned: plan half as much at once.

        Returns:
            True where that was so already.
        """
        before = self._token_cap < self._max_num_batched_tokens
        self._token_cap = max(1, self._last_num_tokens // 2)
        return before

    def relax(self) -> None:
        """There was memory: dare an eighth more, up to the budget."""
        if self._token_cap < self._max_num_batched_tokens:
            grown = self._token_cap + self._token_cap // 8 + 1
            self._token_cap = min(grown, self._max_num_batched_tokens)

    def _plan_decodes(self, plan: SchedulerOutput) -> None:
        # Victims come off the end of the queue that is being walked, never from behind it.
        for request in self.running:
            if len(plan.decodes) == self._token_cap:
                break
            if request.decoding and (
                len(request.tokens) <= request.capacity or self._grow(request, plan)
            ):
                plan.decodes.append(request)

    def _plan_ahead(self, plan: SchedulerOutput) -> None:
        """Let the plan stand for as many steps as it may and as there are free blocks for."""
        if any(request.single_steps for request in plan.decodes):
            return
        longest = max((request.tokens_left for request in plan.decodes), default=1)
        num_steps = min(self._max_num_steps, longest)
        while num_steps > 1:
            wanted = [self._blocks_wanted(request, num_steps) for request in plan.decodes]
            if sum(wanted) <= self.kv_cache.pool.num_free:
                self._grow_ahead(plan, wanted)
                break
            num_steps //= 2
        plan.num_steps = max(1, num_steps)

    def _blocks_wanted(self, request: Request, num_steps: int) -> int:
        num_tokens = len(request.tokens) - 1 + min(num_steps, request.tokens_left)
        return self.kv_cache.num_blocks_for(max(0, num_tokens - request.capacity))

    def _grow_ahead(self, plan: SchedulerOutput, wanted: list[int]) -> None:
        for request, count in zip(plan.decodes, wanted, strict=True):
            if count:
                self.kv_cache.grow(request, count)
                plan.grown.append(request)

    def _grow(self, request: Request, plan: SchedulerOutput) -> bool:
        """Get a block, preempting from the worst rank up; False where that reached itself."""
        while not self.kv_cache.grow(request):
            victim = self.running[-1]
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        plan.grown.append(request)
        return True

    def _preempt(self, victim: Request) -> None:
        victim.advance(RequestEvent.PREEMPT)
        victim.decoding = False
        self.running.remove(victim)
        self.kv_cache.free(victim)
        self.waiting.add(victim)
        self.num_preemptions += 1

    def _plan_prefills(self, plan: SchedulerOutput, budget: int) -> int:
        if len(plan.decodes) == len(self.running):
            return budget
        for request in self.running:
            if budget == 0:
                break
            if not request.decoding:
                budget -= self._plan_chunk(request, plan, budget)
        return budget

    def _plan_chunk(self, request: Request, plan: SchedulerOutput, budget: int) -> int:
        num_tokens = min(budget, len(request.tokens) - request.num_computed)
        plan.prefills.append(PrefillChunk(request, num_tokens))
        return num_tokens

    def _plan_admissions(self, plan: SchedulerOutput, budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if not self.kv_cache.admit(request, headroom=len(self.running)):
                break
            self._count(request)
            self.waiting.remove(request)
            request.advance(RequestEvent.ADMIT)
            self.running.add(request)
            plan.admitted.append(request)
            budget -= self._plan_chunk(request, plan, budget)

    def _count(self, request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            return  # counted when it came first; a hit on its own blocks is not worth a word
        request.num_cached_tokens = request.num_computed
        self.prompt_tokens += request.num_prompt_tokens
        self.prefix_hit_tokens += request.num_computed
