"""The promise as a client meets it: through the engine, the same bits alone and in company.

Each request runs alone first: one thread, no prefix cache, its prompt in one step. Then all of them
run through another engine with everything that may happen to them: arrivals at random steps, some
aborted, prompts that begin like another's, a random token budget and chunk, several steps a plan,
and a cache so small that the youngest are preempted. What must be equal is every token, every
float32 logit that a token was sampled from, and every logprob that was asked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.numpy_llama import TinyShape
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.detokenizer import Detokenizer, simulated_vocab
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner
    from trioengine.engine_proc.runner import StepBatch, StepResult

    Float32Array = npt.NDArray[np.float32]

SHAPES = {
    "gqa3": TinyShape(head_dim=64, heads=9, kv_heads=3, hidden=96, layers=2),
    "window": TinyShape("mistral", window=40, head_dim=32, heads=6, kv_heads=1),
}
VOCAB = 203
LONGEST = 160  # prompt and output: ten blocks
EXAMPLES = {"portable": 10, "avx2": 15, "avx512": 20, "avx512_bf16": 25, "amx": 25}


class Tapped:
    """The native runner with fewer blocks, keeping what each token was sampled from."""

    def __init__(self, runner: NativeModelRunner, num_blocks: int) -> None:
        self.model, self.block_size, self.num_blocks = runner.model, runner.block_size, num_blocks
        self.logits: dict[tuple[int, int], list[Float32Array]] = {}
        self._runner = runner

    def execute(self, batch: StepBatch) -> StepResult:
        # The same step twice: the second finds in the cache what it writes itself, so both must
        # give the same, and the first is the call that serves.
        result = self._runner.execute(batch)
        again, logits = self._runner.logits(batch)
        np.testing.assert_array_equal(result.tokens, again.tokens)
        rows = batch.sampling
        for row, key in enumerate(zip(rows.request_ids, rows.positions, strict=True)):
            values = [logits[row].copy()]
            if rows.logprobs_k is not None and (width := int(rows.logprobs_k[row])) >= 0:
                logprobs = result.logprobs
                assert logprobs is not None
                values += [logprobs.chosen[row : row + 1], logprobs.top[row, :width]]
            self.logits[int(key[0]), int(key[1])] = values
        return result

    def call(self, method: str, args: dict[str, object]) -> object:
        return self._runner.call(method, args)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Story:
    """One request and what becomes of it."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort: int | None


@dataclasses.dataclass
class Outcome:
    """Tokens, and by position the logits before each, and its logprobs."""

    tokens: list[int]
    logits: dict[int, list[Float32Array]]


class Engine:
    """An engine over a tapped runner; nothing is printed, so any text will do."""

    def __init__(self, runner: NativeModelRunner, num_blocks: int, **options: Any) -> None:
        self.tap = Tapped(runner, num_blocks)
        vocab = simulated_vocab(300)  # the fewest it can have are 257
        self.core = EngineCore(self.tap, lambda params: Detokenizer(vocab), **options)

    def play(self, stories: list[Story]) -> list[Outcome]:
        """Run all of them to their ends; request ``i`` is story ``i``."""
        outcomes = [Outcome([], {}) for _ in stories]
        step = 0
        while self.core.has_work() or any(story.arrival >= step for story in stories):
            for index, story in enumerate(stories):
                if story.arrival == step:
                    assert self.core.add_request(Add(index, story.prompt, story.params)) is None
            aborts = [i for i, story in enumerate(stories) if story.abort == step]
            # Between sampling and applying on odd steps, before the step on even ones.
            if step % 2 == 0:
                self.core.abort(aborts)
            if self.core.has_work():
                late = aborts if step % 2 else []
                for output in self.core.step(lambda late=late: late):  # type: ignore[misc]
                    outcomes[output.request_id].tokens += output.token_ids
            self.core.check_integrity()
            step += 1
        for (request_id, position), logits in self.tap.logits.items():
            outcomes[request_id].logits[position] = logits
        return outcomes


def params() -> st.SearchStrategy[SamplingParams]:
    greedy = st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        max_tokens=st.integers(1, 40),
        logprobs=st.sampled_from([None, 0, 3]),
    )
    seeded = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 5]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 2**62),
        max_tokens=st.integers(1, 40),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, None, 5]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    )
    return st.one_of(greedy, seeded)


@st.composite
def stories(draw: st.DrawFn) -> list[Story]:
    """Up to six requests; each prompt goes on from a cut of the longest one, or begins anew."""
    trunk = np.random.default_rng(draw(st.integers(0, 2**32))).integers(2, VOCAB, 112).tolist()
    told = []
    for number in range(draw(st.integers(2, 6))):
        kept = draw(st.sampled_from([0, 0, 16, 33, 64, 96]))
        own = np.random.default_rng(draw(st.integers(0, 2**32))).integers(
            2, VOCAB, draw(st.integers(1, 120 - kept))
        )
        abort = draw(st.one_of(st.none(), st.none(), st.integers(0, 30))) if number else None
        arrival = draw(st.sampled_from([0, 0, 1, 5, 12]))
        abort = None if abort is None or abort < arrival else abort
        told.append(Story(trunk[:kept] + own.tolist(), draw(params()), arrival, abort))
    return told


def crowd() -> list[Story]:
    """More than the smallest cache holds, so that some of it is preempted for certain."""
    trunk = np.random.default_rng(1).integers(2, VOCAB, 100).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    warm = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
    lengths = (90, 70, 20, 33, 17, 10)
    return [
        Story(trunk[:n], warm if n % 2 else greedy, arrival, 25 if n == 20 else None)
        for arrival, n in enumerate(lengths)
    ]


@dataclasses.dataclass
class Seen:
    """What has happened to requests, over all examples."""

    preemptions: int = 0
    hits: int = 0
    aborted: int = 0
    chunked: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter(dataclasses.astuple(self))


def assert_same_bits(ours: Outcome, alone: Outcome, *, aborted: bool) -> None:
    """Compare what both computed.

    An aborted request got a part of its answer; what there is of it must be right. One that ended
    within a plan of several steps was computed a little beyond its end, for nobody.
    """
    if aborted:
        assert ours.tokens == alone.tokens[: len(ours.tokens)]
    else:
        assert ours.tokens == alone.tokens
        assert ours.logits.keys() >= alone.logits.keys()
    for position in ours.logits.keys() & alone.logits.keys():
        for found, expected in zip(ours.logits[position], alone.logits[position], strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_request_gets_the_same_bits_alone_and_in_company(
    open_tiny: OpenTiny, isa: str, name: str
) -> None:
    lonely, busy = (open_tiny(SHAPES[name], isa=isa, threads=threads)[0] for threads in (1, 3))
    seen = Seen()

    @settings(max_examples=EXAMPLES[isa])
    @given(
        told=stories(),
        budget=st.sampled_from([8, 17, 40, 100, 2048]),
        chunk=st.sampled_from([1, 7, 16, 50, 128]),
        num_blocks=st.sampled_from([LONGEST // 16, 11, 13, 30]),
        cached=st.booleans(),
        steps=st.sampled_from([1, 1, 3]),
    )
    @example(told=crowd(), budget=40, chunk=16, num_blocks=10, cached=True, steps=1)
    def check(told: list[Story], num_blocks: int, **options: Any) -> None:
        company = Engine(
            busy,
            num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=options["budget"],
            prefill_tokens_beside_decodes=options["chunk"],
            enable_prefix_caching=options["cached"],
            num_scheduler_steps=options["steps"],
        )
        outcomes = company.play(told)
        for index, story in enumerate(told):
            quiet = dataclasses.replace(story, arrival=0, abort=None)
            alone = Engine(lonely, 64, enable_prefix_caching=False).play([quiet])[0]
            assert_same_bits(outcomes[index], alone, aborted=story.abort is not None)
            seen.chunked += len(story.prompt) > min(options["budget"], options["chunk"])
            seen.aborted += story.abort is not None
        stats = company.core.stats()
        seen.preemptions += stats.preemptions
        seen.hits += stats.prefix_hit_tokens

    check()
    assert all(seen), f"the histories were too tame: {seen}"
