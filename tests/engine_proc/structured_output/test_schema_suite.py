"""A public test collection of schemas: what is not refused is followed to the letter."""

from __future__ import annotations

import collections
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers.native_fixtures import extension
from helpers.schema_suite import Case, suite, validator
from helpers.sim_core import compilations_of
from helpers.tiny_native import save_tiny_native
from trioengine.config import EngineConfig, EngineOptions
from trioengine.engine_proc.backend import LATER
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.registry import build_backend
from trioengine.errors import InvalidRequestError
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams
from trioengine.structured import StructuredOutput
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.grammars import Judge
    from trioengine.outputs import RequestOutput

__all__ = ["extension"]

MAX_TOKENS = 400
SEEDS = range(3)
AT_LEAST = 300  # different schemas with a complete answer
# ECMAScript has it among white space, Python and Rust have not.
DISPUTED = "\ufeff"

_BIAS = {'"': 4.0, "]": 2.0, "}": 2.0, "<|endoftext|>": 3.0}


def asked(case: Case) -> StructuredOutput:
    return StructuredOutput("json", json.dumps(case.schema), param="response_format")


# Generating ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_native(tmp_path_factory.mktemp("tiny"), max_positions=MAX_TOKENS + 1)


@pytest.fixture(scope="module")
def core(extension: Any, model_dir: Path) -> Iterator[EngineCore]:
    """Return an engine over a tiny random model, whose sampler is the real one."""
    options = EngineOptions(backend="native", kv_cache_memory_gib=0.05, max_num_seqs=64)
    backend = build_backend(_config(options, model_dir), lambda phase, fraction: None)
    assert isinstance(backend, EngineCore)
    compilations_of(backend)._start = lambda work: work()
    yield backend
    backend.shutdown()


def _config(options: EngineOptions, model_dir: Path) -> EngineConfig:
    unused = dict.fromkeys(
        ("commands_address", "outputs_address", "token", "heartbeat_path", "runtime_dir"), ""
    )
    return EngineConfig(options=options, model_dir=str(model_dir), model_name="tiny", **unused)


def closers(model_dir: Path) -> dict[int, float]:
    """Return a bias to what ends things: a model that knows no JSON hardly ever comes to it."""
    tokenizer = Tokenizer.from_dir(model_dir)
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in _BIAS}
    return {token_id: _BIAS[text] for text, (token_id,) in ids.items()}


def answers(core: EngineCore, adds: list[Add]) -> dict[int, RequestOutput]:
    """Return what came of each, its deltas merged."""
    outputs: dict[int, RequestOutput] = {}
    for add in adds:
        assert core.add_request(add) in (LATER, None)
    while core.has_news() or core.has_work():
        deltas = core.settle()[1] if core.has_news() else core.step(list)
        for delta in deltas:
            if (earlier := outputs.setdefault(delta.request_id, delta)) is not delta:
                earlier.merge(delta)
    core.check_integrity()
    return outputs


@pytest.mark.slow
def test_every_completed_answer_is_valid(core: EngineCore, model_dir: Path) -> None:
    # Python's `re`, by which `jsonschema` judges patterns, knows no classes of Unicode.
    cases = {n: case for n, case in enumerate(suite()) if "\\\\p{" not in json.dumps(case.schema)}
    bias = closers(model_dir)
    adds = [
        Add(
            number * len(SEEDS) + seed,
            [300],
            SamplingParams(
                temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, logit_bias=bias,
                structured=asked(case),
            ),
        )
        for (number, case), seed in itertools.product(cases.items(), SEEDS)
    ]  # fmt: skip
    outputs = answers(core, adds)
    reasons = collections.Counter(output.finish_reason for output in outputs.values())
    completed: set[int] = set()
    for request_id, output in outputs.items():
        case = cases[request_id // len(SEEDS)]
        if output.finish_reason is FinishReason.STOP:
            validator(case).validate(json.loads(output.text))
            completed.add(request_id // len(SEEDS))
        elif output.finish_reason is FinishReason.ERROR:
            assert output.refused, (str(case), output.error)
    assert len(completed) >= AT_LEAST, reasons


# Refusing --------------------------------------------------------------------------------------


def test_no_value_that_is_invalid_can_be_an_answer(judge: Judge) -> None:
    followed, wrong = 0, []
    for case in suite():
        try:
            grammar = judge.compile(asked(case))
        except InvalidRequestError:
            continue
        followed += 1
        wrong += [
            (str(case), value)
            for value, valid in case.values
            if not valid and judge.allows(grammar, value)
        ]
    assert [title for title, value in wrong if value != DISPUTED] == []
    assert followed >= AT_LEAST
