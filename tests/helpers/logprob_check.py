"""Logprobs of a request against transformers' own log-softmax in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.reference import reference_logits
from helpers.requests import Spelling
from helpers.sampling_reference import log_softmax, run_core
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from trioengine.engine_proc.runner import ModelRunner
    from trioengine.outputs import TokenLogprob

__all__ = ["check_logprobs"]


def _check(
    told: Sequence[TokenLogprob | None], logits: np.ndarray[Any, Any], tolerance: float
) -> None:
    """Compare what was told of tokens with the rows that foretell them."""
    assert len(told) == len(logits)
    for each, row in zip(told, logits, strict=True):
        assert each is not None
        logprobs = log_softmax(row)
        assert each.logprob == pytest.approx(logprobs[each.token_id], abs=tolerance)
        ids = [token for token, _ in each.top]
        np.testing.assert_allclose([value for _, value in each.top], logprobs[ids], atol=tolerance)
        best = np.sort(logprobs)[::-1][: len(ids)]
        np.testing.assert_allclose(logprobs[ids], best, atol=tolerance)
        likelier = (logprobs > each.logprob + tolerance).sum()
        assert likelier < each.rank <= 1 + (logprobs > each.logprob - tolerance).sum()


def check_logprobs(
    runner: ModelRunner, reference: Any, prompt: list[int], *, tolerance: float = 1e-3
) -> None:
    """Score a prompt and an answer to it, and compare every number.

    Args:
        runner: What is checked.
        reference: transformers' network, in float32.
        prompt: Its tokens.
        tolerance: How far a logprob may be off.
    """
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=8,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=4,
        presence_penalty=1.0,
        logit_bias={5: 2.0},
    )
    told, _ = run_core(
        runner, {1: (prompt, params)}, lambda params: Spelling(), max_num_batched_tokens=64
    )
    output = told[1]
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    tokens = prompt + output.token_ids
    logits = reference_logits(reference, tokens[:-1], len(tokens) - 1)
    assert output.prompt_logprobs[0] is None
    _check(output.prompt_logprobs[1:], logits[: len(prompt) - 1], tolerance)
    _check(output.logprobs, logits[len(prompt) - 1 :], tolerance)
