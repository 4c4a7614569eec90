"""The promise of the native runner: the same bits for a request, whatever happens around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.numpy_llama import TinyShape
from helpers.reference import GREEDY, LogitsTap, MiniScheduler, Sampling, Seq

if TYPE_CHECKING:
    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner
    from trioengine.engine_proc.runner import ModelRunner, StepBatch, StepResult

SHAPES = {
    "gqa3": TinyShape(head_dim=64, heads=9, kv_heads=3, hidden=96, layers=2),
    "window": TinyShape("mistral", window=40, head_dim=32, heads=6, kv_heads=1),
}
OUTPUT = 6
EXAMPLES = {"portable": 10, "avx2": 15, "avx512": 20, "avx512_bf16": 25, "amx": 25}


class Tapped:
    """A runner that keeps the logits of its last step."""

    def __init__(self, runner: NativeModelRunner) -> None:
        self.model, self.tap = runner.model, LogitsTap()
        self.block_size, self.num_blocks = runner.block_size, runner.num_blocks
        self._runner = runner

    def execute(self, batch: StepBatch) -> StepResult:
        result, self.tap.last = self._runner.logits(batch)
        return result

    def call(self, method: str, args: dict[str, object]) -> object:
        return self._runner.call(method, args)

    def close(self) -> None:
        self._runner.close()


def scheduler_over(runner: Tapped, seed: int = 0) -> MiniScheduler:
    plain: ModelRunner = runner
    return MiniScheduler(plain, seed=seed, tap=runner.tap)


def assert_same(sequence: Seq, expected: Seq) -> None:
    assert sequence.output == expected.output
    for ours, theirs in zip(sequence.logits, expected.logits, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


SAMPLINGS = st.one_of(
    st.just(GREEDY),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 5]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 2**63),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_any_history_gives_the_same_bits(open_tiny: OpenTiny, isa: str, name: str) -> None:
    runners = [Tapped(open_tiny(SHAPES[name], isa=isa, threads=n)[0]) for n in (1, 3)]

    @settings(max_examples=EXAMPLES[isa])
    @given(
        lengths=st.lists(st.integers(1, 150), min_size=2, max_size=5),
        samplings=st.lists(SAMPLINGS, min_size=5, max_size=5),
        seed=st.integers(0, 2**32),
    )
    def check(lengths: list[int], samplings: list[Sampling], seed: int) -> None:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, 203, length).tolist() for length in lengths]
        expected = [
            _alone(runners[0], prompt, sampling)
            for prompt, sampling in zip(prompts, samplings, strict=False)
        ]
        together = scheduler_over(runners[1], seed=1)
        sequences = [together.add(e.tokens[: e.prompt_len], e.sampling) for e in expected]
        _run_history(together, sequences, rng)
        for sequence, reference in zip(sequences, expected, strict=True):
            assert_same(sequence, reference)
        _check_prefix_hits(scheduler_over(runners[1], seed=2), expected[0])

    check()


def _alone(runner: Tapped, prompt: list[int], sampling: Sampling) -> Seq:
    scheduler = scheduler_over(runner)
    sequence = scheduler.add(prompt, sampling)
    scheduler.run([sequence], OUTPUT)
    return sequence


def _run_history(scheduler: MiniScheduler, sequences: list[Seq], rng: np.random.Generator) -> None:
    arrivals = rng.integers(0, 6, len(sequences)).tolist()
    for step in range(1000):
        if all(len(s.output) >= OUTPUT for s in sequences):
            return
        _one_step(scheduler, sequences, arrivals, step, rng)
    raise AssertionError("no end in sight")


def _one_step(
    scheduler: MiniScheduler,
    sequences: list[Seq],
    arrivals: list[int],
    step: int,
    rng: np.random.Generator,
) -> None:
    """Step some of the sequences that have come, in random chunks; preempt now and then."""
    ready = [
        s
        for s, arrival in zip(sequences, arrivals, strict=True)
        if arrival <= step and len(s.output) < OUTPUT
    ]
    chosen = [s for s in ready if rng.random() < 0.8]
    if rng.random() < 0.1 and ready:
        scheduler.preempt(ready[int(rng.integers(len(ready)))])
    if chosen:
        rng.shuffle(chosen)
        limits = [[1, 7, 16, 50, None][int(rng.integers(5))] for _ in chosen]
        scheduler.step(chosen, limits)


def _check_prefix_hits(scheduler: MiniScheduler, expected: Seq) -> None:
    prompt = expected.tokens[: expected.prompt_len]
    first = scheduler.add(prompt, expected.sampling)
    scheduler.run([first], OUTPUT)
    full = (len(prompt) - 1) // 16
    hits = [
        scheduler.add(prompt, expected.sampling, share=first, shared_blocks=blocks)
        for blocks in {0, full // 2, full}
    ]
    scheduler.run(hits, OUTPUT, chunk=40)
    for hit in hits:
        assert_same(hit, expected)
