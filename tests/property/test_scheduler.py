"""Whatever comes, goes and is preempted: every request gets its own answer, once, and ends.

The real core runs over a runner that reads its cache (``FaithfulRunner``) on a pool so small that
sharing, eviction and preemption happen all the time. The model of a request is what it must get
when it is alone in the world.
"""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.faithful_runner import FaithfulRunner, faithful_answer
from helpers.requests import Spelling
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.request import Request, RequestStatus
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

VOCAB_SIZE = 12
EOS = 0
TEXTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 6, 6, 6, 1, 1, 1, 1, 1]
PROMPTS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 14))


@dataclasses.dataclass
class Expected:
    """What a request must get, and what it got."""

    tokens: list[int]
    reason: FinishReason
    got: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finished: FinishReason | None = None
    num_deltas: int = 0


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[int, Expected] = {}
        self.next_id = 1

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_slots=st.sampled_from([16, 16, 24, 40]),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 6),
        chunk=st.integers(1, 4),
        caching=st.booleans(),
        num_steps=st.sampled_from([1, 1, 2, 3, 8]),
    )
    def start(
        self,
        block_size: int,
        num_slots: int,
        max_num_seqs: int,
        extra_budget: int,
        chunk: int,
        caching: bool,
        num_steps: int,
    ) -> None:
        self.budget, self.chunk, self.max_num_seqs = (
            max_num_seqs + extra_budget,
            chunk,
            max_num_seqs,
        )
        self.runner = FaithfulRunner(
            vocab_size=VOCAB_SIZE, block_size=block_size, num_blocks=num_slots // block_size
        )
        self.core = EngineCore(
            self.runner,
            lambda params: Spelling(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            prefill_tokens_beside_decodes=chunk,
            enable_prefix_caching=caching,
            num_scheduler_steps=num_steps,
        )

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        seed=st.integers(-3, 3),
        priority=st.integers(-1, 1),
        copies=st.integers(1, 3),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        seed: int,
        priority: int,
        copies: int,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            seed=seed,
        )
        for _ in range(copies):
            request_id, self.next_id = self.next_id, self.next_id + 1
            self.expected[request_id] = self.foretell(prompt, params)
            assert self.core.add_request(Add(request_id, prompt, params, priority)) is None

    def foretell(self, prompt: list[int], params: SamplingParams) -> Expected:
        assert params.seed is not None
        max_len = self.core.model.max_model_len
        tokens = faithful_answer(
            prompt,
            seed=params.seed & (2**64 - 1),
            num_tokens=min(params.max_tokens or max_len, max_len - len(prompt)),
            vocab_size=VOCAB_SIZE,
            masked=() if params.ignore_eos else (EOS,),
            num_masked=params.min_tokens,
        )
        if EOS in tokens and not params.ignore_eos:
            return Expected(tokens[: tokens.index(EOS) + 1], FinishReason.STOP)
        return Expected(tokens, FinishReason.LENGTH)

    @precondition(lambda self: self.core.has_work())
    @rule(victims=st.lists(st.integers(0, 60), max_size=2), count=st.integers(1, 6))
    def step(self, victims: list[int], count: int) -> None:
        for _ in range(count - 1):
            if self.core.has_work():
                self.one_step([])
        if self.core.has_work():
            self.one_step(victims)

    def one_step(self, victims: list[int]) -> None:
        """One step, in which ``victims`` are aborted between sampling and applying."""
        live = self.core.live_ids
        decoding = [request for request in self.core._scheduler.running if request.decoding]
        outputs = self.core.step(lambda: victims)
        self.take(outputs)
        self.check_nobody_waits(decoding, outputs)
        for request_id in set(victims) & live:
            assert self.expected[request_id].finished is FinishReason.ABORT
        self.check_batch()

    def check_nobody_waits(self, decoding: list[Request], outputs: list[RequestOutput]) -> None:
        """Whoever decodes gets a token in every step, beside one chunk's worth of prefill."""
        told = {output.request_id for output in outputs}
        kept = [request for request in decoding if request.status is not RequestStatus.PREEMPTED]
        assert {request.request_id for request in kept} <= told
        batch = self.runner.last_batch
        assert batch is not None
        if kept:
            assert len(batch.token_ids) - len(kept) <= self.chunk

    def check_batch(self) -> None:
        batch = self.runner.last_batch
        assert batch is not None
        counts = (batch.query_start[1:] - batch.query_start[:-1]).tolist()
        assert 0 < sum(counts) <= self.budget
        assert len(counts) <= self.max_num_seqs

    @rule(victims=st.lists(st.integers(0, 30), min_size=1, max_size=3))
    def abort(self, victims: list[int]) -> None:
        live = self.core.live_ids & set(victims)
        ignored = self.core.stats().aborts_ignored
        outputs = self.core.abort(victims)
        assert {output.request_id for output in outputs} == live
        assert self.core.stats().aborts_ignored == ignored + len(victims) - len(live)
        assert not self.core.live_ids & set(victims)
        self.core.check_integrity()  # its blocks are free now, not in the next step
        self.take(outputs)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.core.call("reset_prefix_cache", {})
        assert self.core.stats().evictable_blocks == 0

    def take(self, outputs: list[RequestOutput]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            entry = self.expected[output.request_id]
            assert entry.finished is None, "an output after the terminal"
            entry.got += output.token_ids
            entry.text += output.text
            entry.finished = output.finish_reason
            entry.num_deltas += 1
            assert output.error is None
            assert entry.num_deltas == 1 or output.num_cached_tokens == 0

    @invariant()
    def everybody_gets_their_own(self) -> None:
        for request_id, entry in self.expected.items():
            assert entry.got == entry.tokens[: len(entry.got)], f"request {request_id}"
            if entry.finished not in (None, FinishReason.ABORT):
                assert (entry.got, entry.finished) == (entry.tokens, entry.reason)
            assert (entry.finished is None) == (request_id in self.core.live_ids)
            shown = entry.got[:-1] if entry.finished is FinishReason.STOP else entry.got
            assert entry.text == "".join(map(str, shown))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(2_000):
            if not self.core.has_work():
                break
            self.one_step([])
        self.everybody_gets_their_own()
        assert not self.core.has_work(), "no progress"
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.free_blocks + stats.evictable_blocks == self.runner.num_blocks
        event("preemption" if stats.preemptions else "no preemption")
        event("prefix hit" if stats.prefix_hit_tokens else "no prefix hit")


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(suppress_health_check=[HealthCheck.too_slow])
