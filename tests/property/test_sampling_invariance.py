"""A seeded request is told the same, to the bit, whatever it asks for and whatever is around it.

The engine itself, over the simulated and the native runner: alone in one piece without a cache, and
then in company, in chunks, with prefixes shared, and on so few blocks that it is preempted.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from helpers.native_fixtures import extension, open_tiny
from helpers.numpy_llama import TinyShape
from helpers.requests import Spelling
from helpers.sampling_reference import run_core
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.runner import ModelRunner
    from trioengine.outputs import RequestOutput

__all__ = ["extension", "open_tiny"]

VOCAB: Final = 203
TEXT: Final = random.Random(1).choices(range(1, VOCAB), k=70)
MANY_BLOCKS: Final = 64
SUBJECT: Final = 100

ids = st.integers(0, VOCAB - 1)
penalty = st.sampled_from([0.0, 0.0, -1.0, 0.5, 2.0])
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    min_tokens=st.integers(0, 1),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 0, 1, 30]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(-5, 5),
    ignore_eos=st.booleans(),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.8]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, 1.5, 3.0]), max_size=4),
    allowed_token_ids=st.none() | st.sets(ids, min_size=1, max_size=60).map(tuple),
    bad_words_token_ids=st.lists(st.lists(ids, min_size=1, max_size=2).map(tuple), max_size=5).map(
        tuple
    ),
    logprobs=st.none() | st.integers(0, 6),
    prompt_logprobs=st.none() | st.integers(0, 4),
)
prompts = st.builds(
    lambda start, length: TEXT[start : start + length],
    st.sampled_from([0, 0, 0, 5]),
    st.integers(1, 60),
)
scored = params.map(
    lambda asked: msgspec.structs.replace(asked, max_tokens=0, min_tokens=0, prompt_logprobs=2)
)
requests = st.tuples(prompts, params | params | params | scored)


def told(
    runner: ModelRunner, asked: dict[int, tuple[list[int], SamplingParams]], **options: Any
) -> tuple[RequestOutput, int]:
    """Return all that the subject is told, and how often anybody was preempted."""
    outputs, core = run_core(runner, asked, lambda params: Spelling(), **options)
    output = outputs[SUBJECT]
    output.num_cached_tokens = 0
    return output, core.stats().preemptions


@pytest.fixture(params=["sim", "native"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    if request.param == "sim":
        return SimModelRunner(SimScript(), vocab_size=VOCAB, eos_token_ids=(0,))
    tiny: OpenTiny = request.getfixturevalue("open_tiny")
    return tiny(TinyShape(vocab=VOCAB))[0]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    subject=requests,
    before=st.lists(requests, max_size=3),
    after=st.lists(requests, max_size=3),
    num_blocks=st.sampled_from([7, 7, 9, MANY_BLOCKS]),
    chunk=st.integers(1, 40),
    num_steps=st.sampled_from([1, 1, 4]),
)
def test_nothing_around_a_request_changes_what_it_is_told(
    runner: ModelRunner,
    subject: tuple[list[int], SamplingParams],
    before: list[tuple[list[int], SamplingParams]],
    after: list[tuple[list[int], SamplingParams]],
    num_blocks: int,
    chunk: int,
    num_steps: int,
) -> None:
    runner.num_blocks = MANY_BLOCKS
    expected, _ = told(runner, {SUBJECT: subject}, enable_prefix_caching=False)
    runner.num_blocks = num_blocks
    company = {**dict(enumerate(before)), SUBJECT: subject}
    company |= {SUBJECT + 1 + i: request for i, request in enumerate(after)}
    got, preemptions = told(
        runner,
        company,
        max_num_seqs=5,
        max_num_batched_tokens=max(chunk, 5),
        prefill_tokens_beside_decodes=chunk,
        num_scheduler_steps=num_steps,
    )
    event("preempted" if preemptions else "undisturbed")
    assert got == expected
